"""The server process of a soak."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.soak.calls import KEYS
from serve.errors import MergestepError

_URL = re.compile(r"http://[0-9.]+:\d+")
_STOP_S = 60.0
_LOG_CHARS = 4000
TRACEBACK = "Traceback"
# Small caches are full after minutes; their sizes make no difference to a leak.
_OPTIONS = ("--kv-cache-bytes", "64MiB", "--max-responses", "256", "--log-level", "warning")


@dataclass(slots=True)
class ServerProcess:
    """A running server. log: a file of its warnings."""

    pid: int
    url: str
    log: Path

    def log_text(self) -> str:
        """Returns the end of the log; of one with a traceback, what begins with the first."""
        text = self.log.read_text(errors="replace")
        first = text.find(TRACEBACK)
        return text[-_LOG_CHARS:] if first < 0 else text[first:][:_LOG_CHARS]


@contextmanager
def server_process(model: str | None, options: Sequence[str]) -> Iterator[ServerProcess]:
    """Starts `serve run` with small caches and the keys of the calls; stops it at the end. options:
    more options of `serve run`. Raises MergestepError if it does not start."""
    with tempfile.TemporaryDirectory() as folder:
        keys, log = Path(folder) / "keys", Path(folder) / "log"
        keys.write_text("\n".join(KEYS))
        keys.chmod(0o600)
        command = [sys.executable, "-m", "serve", "run", *([model] if model else [])]
        command += ["--port", "0", "--api-key-file", str(keys), *_OPTIONS, *options]
        with log.open("wb") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if url := _URL.search(line):
                    yield ServerProcess(process.pid, url[0], log)
                    break
            else:
                tail = log.read_text(errors="replace")[-_LOG_CHARS:]
                raise MergestepError(f"the server did not start:\n{tail}")
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
