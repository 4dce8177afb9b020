"""Other engines beside ours: processes that answer tasks, one line of JSON each (bench/peers).

A peer is a command. It gets the options --sequences, --tokens and --threads, loads its model and
prints {"peer": name, "modes": [...]}. Each line on its stdin is a task {"mode", "kind", "prompts",
"answers"}; it answers {"seconds": [...]}, {"skip": reason} for what a mode does not do, or
{"error": text}. Everything else that it prints is ignored. It ends when its stdin does.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shlex
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any

from bench.offline.tasks import Shape, Task
from serve.errors import ConfigError, MergestepError

LIMIT_S = 1800.0  # for a start or a task; a peer may compile its model in it
_END_S = 10.0
_ERROR_CHARS = 300


class PeerError(MergestepError):
    """A peer has ended, does not answer or reports an error."""


class TaskError(PeerError):
    """A peer reports that a task has failed; it takes others."""


class Skipped(Exception):
    """A mode of a peer does not do this kind of task."""


def parse_peers(items: Sequence[str]) -> dict[str, str]:
    """Returns the commands of NAME=COMMAND items by name. Raises ConfigError for another form."""
    peers = {}
    for item in items:
        name, equals, command = item.partition("=")
        if not (name and equals and command.strip()):
            raise ConfigError(f"peer must be NAME=COMMAND, not {item!r}")
        if name == "ours" or name in peers:
            raise ConfigError(f"peer: the name {name!r} is taken")
        peers[name] = command
    return peers


@dataclass(slots=True)
class PeerProcess:
    """A running peer; use it in a `with` block, whose begin waits until it is loaded. The block
    raises PeerError, as every method does."""

    command: str
    shape: Shape
    threads: int
    limit_s: float = LIMIT_S
    title: str = ""
    modes: list[str] = field(default_factory=list)
    _process: subprocess.Popen[bytes] | None = None
    _errors: IO[bytes] | None = None
    _received: bytes = b""

    def __enter__(self) -> PeerProcess:
        self._errors = tempfile.TemporaryFile()
        options = {
            "--sequences": self.shape.most_sequences,
            "--tokens": self.shape.most_tokens,
            "--threads": self.threads,
        }
        words = [*shlex.split(self.command), *(str(w) for pair in options.items() for w in pair)]
        try:
            self._process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
            )
        except OSError as error:
            self._errors.close()
            raise PeerError(f"cannot be started: {error}") from error
        try:
            hello = self._receive()
            self.title, self.modes = str(hello["peer"]), [str(mode) for mode in hello["modes"]]
        except BaseException as error:
            self.__exit__(None, None, None)
            if isinstance(error, KeyError | TypeError):
                raise PeerError("it does not name itself and its modes first") from error
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        process, errors = self._process, self._errors
        assert process is not None and errors is not None
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):  # it has ended
            process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
        errors.close()

    def seconds(self, mode: str, task: Task) -> list[float]:
        """Returns the seconds of each prefill, of all steps or of all requests. Raises Skipped."""
        assert self._process is not None and self._process.stdin is not None
        document = {
            "mode": mode,
            "kind": task.kind,
            "prompts": task.prompts,
            "answers": task.answers,
        }
        try:
            self._process.stdin.write(json.dumps(document).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._ended() from error
        answer = self._receive()
        if "skip" in answer:
            raise Skipped(str(answer["skip"]))
        if "error" in answer:
            raise TaskError(str(answer["error"])[:_ERROR_CHARS])
        return [float(each) for each in answer["seconds"]]

    def _receive(self) -> dict[str, Any]:
        """Returns the next JSON object that the peer prints."""
        assert self._process is not None and self._process.stdout is not None
        due_s = time.monotonic() + self.limit_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                line, newline, rest = self._received.partition(b"\n")
                if newline:
                    self._received = rest
                    if (found := _json_object(line)) is not None:
                        return found
                    continue
                if not selector.select(max(0.0, due_s - time.monotonic())):
                    raise PeerError(f"no answer within {self.limit_s:g} s")
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                if not data:
                    raise self._ended()
                self._received += data

    def _ended(self) -> PeerError:
        """Returns an error with the last line of what the process wrote to stderr."""
        assert self._process is not None and self._errors is not None
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            code = None
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        last = f": {lines[-1][:_ERROR_CHARS]}" if lines else ""
        return PeerError(f"its process has ended (exit code {code}){last}")


def _json_object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
