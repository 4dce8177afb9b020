"""Pool 1: the threads that tokenize and check what comes in."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

from serve.engine.counters import PoolMeter
from serve.errors import OverloadedError

MAX_COMPILING = 64


class PromptPool:
    """Jobs in any order. executor: None makes num_threads."""

    def __init__(self, num_threads: int, executor: Executor | None = None) -> None:
        self.meter = PoolMeter()
        self._tokenizing = executor or ThreadPoolExecutor(num_threads, "mergestep-tokenize")
        # Grammars that have to be compiled wait for each other, and nobody else for them.
        self._compiling = executor or ThreadPoolExecutor(1, "mergestep-compile")
        self._num_compiling = 0  # that wait, or are at it
        self._counting = threading.Lock()

    def check_room(self) -> None:
        """For one that compiles. OverloadedError: too many wait for it."""
        if self._num_compiling >= MAX_COMPILING:
            raise OverloadedError(f"{self._num_compiling} requests wait for grammars")

    def submit(self, job: Callable[[], None], *, compiles: bool) -> None:
        self.meter.queued()
        if not compiles:
            self._tokenizing.submit(self._work, job)
            return
        with self._counting:
            self._num_compiling += 1
        self._compiling.submit(self._compile, job)

    def shutdown(self) -> None:
        """When all that was submitted is done."""
        self._tokenizing.shutdown(wait=True)
        self._compiling.shutdown(wait=True)

    def _compile(self, job: Callable[[], None]) -> None:
        try:
            self._work(job)
        finally:
            with self._counting:
                self._num_compiling -= 1

    def _work(self, job: Callable[[], None]) -> None:
        with self.meter.working():
            job()
