"""Runs other engines, as commands that print a last line of JSON (bench/peers has some)."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.load.workload.work import Work
from serve.errors import ConfigError, MergestepError


def parse_peers(items: Sequence[str]) -> dict[str, str]:
    """Returns the commands of NAME=COMMAND items by name. Raises ConfigError for another form."""
    peers = {}
    for item in items:
        name, equals, command = item.partition("=")
        if not (name and equals and command.strip()):
            raise ConfigError(f"peer must be NAME=COMMAND, not {item!r}")
        peers[name] = command
    return peers


def run_peer(command: str, columns: Sequence[str], works: Sequence[Work]) -> dict[str, Any]:
    """Runs a peer and returns its JSON. The command gets the options --columns NAMES and --requests
    FILE, where FILE holds the mixed requests as [[token ids, max_tokens], ...]. Raises
    MergestepError if the command fails."""
    with TemporaryDirectory() as folder:
        requests = Path(folder) / "requests.json"
        requests.write_text(json.dumps([[work.token_ids, work.max_tokens] for work in works]))
        options = ["--columns", ",".join(columns), "--requests", str(requests)]
        done = subprocess.run([*shlex.split(command), *options], capture_output=True, text=True)
    if done.returncode:
        raise MergestepError(f"{command} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result
