"""A model's child process: `serve run` on a loopback port of its own.

It ends with this process, however that ends. Its settings travel in a file that has no name, its
secrets in its environment.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field

from serve.cluster.rank_process import memory_file, ready_url
from serve.errors import MergestepError

_LINE_BYTES = 1 << 16
_MAX_LINES = 50  # of the log that are kept, to say why a start failed
_TERM_S = 10.0  # from SIGTERM to SIGKILL, beside the time that running requests get


class ChildFailedError(MergestepError):
    """A child process has ended. The message has its last words."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What a child runs. settings: those of `serve run` as TOML. secrets: variables of its
    environment."""

    name: str
    settings: str = field(repr=False)
    secrets: Mapping[str, str] = field(repr=False)


class Child:
    """A running or ended child. url: its address, "" until it is ready. status: its exit status,
    None while it runs."""

    def __init__(self, spec: ChildSpec, say: Callable[[str], object]) -> None:
        """say: is called with each line of its log."""
        self.spec = spec
        self.url = ""
        self.status: int | None = None
        self._say = say
        self._process: asyncio.subprocess.Process | None = None
        self._lines: collections.deque[str] = collections.deque(maxlen=_MAX_LINES)
        self._is_ready = asyncio.Event()  # or has ended
        self._watching: asyncio.Task[None] | None = None

    async def start(self, on_end: Callable[[], object]) -> None:
        """Starts the process and returns when it is ready. on_end: is called when it has ended.

        Raises ChildFailedError, and OSError if it cannot be started at all. Call it in the main
        thread, with which the process ends.
        """
        fd = memory_file(self.spec.settings)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *[sys.executable, "-m", "serve.cluster.rank_process"],
                *[str(os.getpid()), f"/proc/self/fd/{fd}"],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=_environment(os.environ, self.spec.secrets),
                pass_fds=[fd],
                limit=_LINE_BYTES,
            )
        finally:
            os.close(fd)
        self._watching = asyncio.create_task(self._watch(self._process, on_end))
        await self._is_ready.wait()
        if not self.url:
            raise ChildFailedError(f"its process ended with {self.how}{self._last_words()}")

    @property
    def pid(self) -> int:
        return 0 if self._process is None else self._process.pid

    @property
    def how(self) -> str:
        """Says how it ended."""
        status = self.status or 0
        return f"status {status}" if status >= 0 else f"signal {-status}"

    def send_signal(self, number: int) -> None:
        if self._process is not None and self.status is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Ends the process, after its requests unless they take longer than drain_s."""
        if self._watching is None:
            return
        self.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(drain_s + _TERM_S):
                await asyncio.shield(self._watching)
        except TimeoutError:
            await self.kill()

    async def wait(self, seconds: float) -> None:
        """Waits until it has ended, but at most so many seconds."""
        if self._watching is not None:
            await asyncio.wait([self._watching], timeout=seconds)

    async def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        if self._watching is not None:
            await asyncio.shield(self._watching)

    async def _watch(
        self, process: asyncio.subprocess.Process, on_end: Callable[[], object]
    ) -> None:
        assert process.stdout is not None
        async for text in _lines(process.stdout):
            url = ready_url(text)
            if url:
                self.url = url
                self._is_ready.set()
            elif text:
                self._lines.append(text)
                self._say(text)
        self.status = await process.wait()
        self._is_ready.set()
        on_end()

    def _last_words(self) -> str:
        errors = [line for line in self._lines if line.startswith("error: ")]
        last = (errors or list(self._lines) or [""])[-1]
        return f": {last.removeprefix('error: ')}" if last else ""


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Yields lines; of longer ones than the limit, pieces."""
    while True:
        try:
            line = await stream.readuntil(b"\n")
        except asyncio.IncompleteReadError as error:
            line = error.partial
            if not line:
                return
        except asyncio.LimitOverrunError as error:
            line = await stream.readexactly(max(1, error.consumed))
        yield line.decode("utf-8", "replace").rstrip()


def _environment(inherited: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without settings of this process, which are in the child's file."""
    kept = {name: text for name, text in inherited.items() if not name.startswith("MERGESTEP_")}
    return kept | dict(secrets)
