"""A child process that answers calls under limits on memory and time, for untrusted work.

Work that loops, grows or crashes fails its call and not the server. The child process runs
serve/sandbox/worker_main.py with a script; calls and answers are JSON documents, one per line.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from serve.errors import EngineStoppedError
from serve.machine import process_bytes

MAIN = Path(__file__).with_name("worker_main.py")
STARTUP_TIMEOUT_S = 20.0
READ_SIZE = 1 << 16
_END_S = 1.0  # a process may close its pipes shortly before it has ended


class WorkerError(Exception):
    """There is no answer; the message is for the client."""


class WorkerLostError(WorkerError):
    """There is no answer, and the call is not known to be the reason: the process did not start, or
    the system has ended it."""


class BoundedWorker:
    """Starts its child process at the first call, and again after it ended or was stopped.

    It answers one call at a time. Thread-safe.
    """

    def __init__(
        self,
        script: Path,
        make_setup: Callable[[], dict[str, Any]],
        *,
        name: str,
        timeout_s: float,
        memory_bytes: int,
        fds: tuple[int, ...] = (),
    ) -> None:
        """script: a file whose start(setup) returns a function from call to answer. name: names the
        work in messages. memory_bytes: the memory beyond that of prepare(). fds: descriptors that
        the child has, too, by the same numbers."""
        self._script = script
        self._make_setup = make_setup
        self._name = name
        self._timeout_s = timeout_s
        self._fds = fds
        self._limits = {"memory_bytes": memory_bytes, "cpu_s": int(timeout_s) + 1}
        self._lock = threading.Lock()
        self._is_closed = False
        self._child: _Child | None = None

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        """Returns the answer; raises WorkerError without one, EngineStoppedError after close()."""
        line = _line(question)
        error: WorkerError
        with self._lock:
            child = None
            try:
                # close() does not wait for a call: it sees the child, or is seen after the start
                child = None if self._is_closed else self._start()
                if child is not None and not self._is_closed:
                    return child.ask(line, self._timeout_s)
            except TimeoutError:
                if child is None or child.is_ready:
                    error = WorkerError(f"{self._name} took longer than {self._timeout_s:g} s")
                else:
                    error = WorkerLostError(
                        f"{self._name} did not start within {STARTUP_TIMEOUT_S:g} s"
                    )
            except (OSError, ValueError):
                is_lost = child is None or not child.is_ready or child.was_killed()
                kind = WorkerLostError if is_lost else WorkerError
                error = kind(f"{self._name} process ended")
            except BaseException:  # or the next call would read this one's answer
                self._stop()
                raise
            self._stop()
        if self._is_closed:
            raise EngineStoppedError(f"{self._name} has been closed")
        raise error

    def start(self) -> None:
        """Starts the child process ahead of the first call, since that takes a while."""
        with self._lock:
            if not self._is_closed:
                self._start()

    def resident_bytes(self) -> int:
        """Returns the resident memory of the child process; 0 if there is none."""
        child = self._child
        return 0 if child is None else process_bytes(child.process.pid)

    def rest(self) -> None:
        """Ends the child process unless it is answering. The next call starts another one."""
        if self._lock.acquire(blocking=False):
            try:
                self._stop()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Ends the child process, whose call fails, and waits for it. Idempotent."""
        self._is_closed = True
        if (child := self._child) is not None:
            child.process.kill()
        with self._lock:
            self._stop()

    def __del__(self) -> None:
        child = getattr(self, "_child", None)
        if child is not None:
            child.stop()

    def _start(self) -> _Child:
        if self._child is not None and not self._child.is_alive:
            self._stop()
        if self._child is None:
            self._child = _Child(self._script, self._setup, self._fds)
        return self._child

    def _setup(self) -> dict[str, Any]:
        return {**self._limits, "job": self._make_setup()}

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.stop()


class _Child:
    """A child process and its two pipes."""

    def __init__(
        self, script: Path, make_setup: Callable[[], dict[str, Any]], fds: tuple[int, ...]
    ) -> None:
        """make_setup: is called before the first call, while the process already starts."""
        # Started by path with -P: importing `serve` would be slow, and its folders must not shadow
        # modules. A process group of its own keeps Ctrl-C in a terminal away from it. A session of
        # its own would as well, but Linux schedules each session as a group, and a busy server has
        # been seen to keep such a child from a shared core for 20 s.
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(MAIN), str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # a traceback would contain a client's text
            bufsize=0,
            process_group=0,
            pass_fds=fds,
        )
        assert self.process.stdin is not None, "stdin is a pipe"
        assert self.process.stdout is not None, "stdout is a pipe"
        self._stdin, self._stdout = self.process.stdin, self.process.stdout
        os.set_blocking(self._stdin.fileno(), False)
        os.set_blocking(self._stdout.fileno(), False)
        self._make_setup: Callable[[], dict[str, Any]] | None = make_setup

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    @property
    def is_ready(self) -> bool:
        """Whether it has begun to take calls."""
        return self._make_setup is None

    def was_killed(self) -> bool:
        """Returns whether SIGKILL ended the process, as the system does where memory is short. A
        limit of its own ends it in another way."""
        try:
            return self.process.wait(_END_S) == -signal.SIGKILL
        except subprocess.TimeoutExpired:
            return False

    def ask(self, line: bytes, timeout_s: float) -> dict[str, Any]:
        """Sends a line and returns the answer, or raises TimeoutError, OSError or ValueError."""
        if self._make_setup is not None:
            setup = json.dumps(self._make_setup()).encode() + b"\n"
            deadline = time.monotonic() + STARTUP_TIMEOUT_S
            self._send(setup, deadline)
            json.loads(self._receive(deadline))  # the child reports that it is ready
            self._make_setup = None
        deadline = time.monotonic() + timeout_s
        self._send(line, deadline)
        return _loads(self._receive(deadline))

    def _send(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            _wait(self._stdin.fileno(), select.POLLOUT, deadline)
            view = view[os.write(self._stdin.fileno(), view) :]

    def _receive(self, deadline: float) -> bytes:
        pieces: list[bytes] = []
        while True:
            _wait(self._stdout.fileno(), select.POLLIN, deadline)
            piece = os.read(self._stdout.fileno(), READ_SIZE)
            if not piece:
                raise ConnectionResetError("the process ended")
            pieces.append(piece)
            if piece.endswith(b"\n"):  # each call has one answer, which ends at a newline
                return b"".join(pieces)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._stdin.close()
        self._stdout.close()


def _line(question: dict[str, Any]) -> bytes:
    """Uses orjson where it can, which holds the interpreter for a fifth of the time. Each item of a
    list, such as a message, is written by itself, so that other threads go on between them."""
    try:
        written = {name: _written(value) for name, value in question.items()}
        return orjson.dumps(written, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # a lone surrogate, for example
        return json.dumps(question).encode() + b"\n"


def _written(value: Any) -> Any:
    if isinstance(value, list):
        return [orjson.Fragment(orjson.dumps(item)) for item in value]
    return value


def _loads(line: bytes) -> dict[str, Any]:
    try:
        answer: dict[str, Any] = orjson.loads(line)
    except ValueError:
        answer = json.loads(line)
    return answer


def _wait(fd: int, event: int, deadline: float) -> None:
    poll = select.poll()
    poll.register(fd, event)
    remaining_s = deadline - time.monotonic()
    if remaining_s <= 0 or not poll.poll(remaining_s * 1000):
        raise TimeoutError
