"""`serve run` in a process of its own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from serve.machine import free_port

ROOT = Path(__file__).parents[3]


@contextlib.contextmanager
def serve_run(*options: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """Runs `serve run` with the embedded model in a process; yields the process and its address."""
    port = free_port()
    # Its log goes to a file: a pipe that nobody reads would fill and hold up the server.
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "serve", "run", "--port", str(port), "--quiet", *options],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=log,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        try:
            yield process, f"http://127.0.0.1:{port}"
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
