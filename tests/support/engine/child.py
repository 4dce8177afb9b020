"""Runs Python in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any


def output_of(*arguments: object, **environment: str) -> str:
    """Returns the stdout of `python arguments`, which must succeed within five minutes."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def last_json(text: str) -> Any:
    """Returns the last line as JSON, which measuring scripts print."""
    return json.loads(text.splitlines()[-1])
