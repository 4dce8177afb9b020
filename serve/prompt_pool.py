"""Pool 1: the threads that tokenize and check what comes in."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

from serve.meters import PoolMeter


class PromptPool:
    """Jobs in any order. executor: None makes num_threads."""

    def __init__(self, num_threads: int, executor: Executor | None = None) -> None:
        self.meter = PoolMeter()
        self._tokenizing = executor or ThreadPoolExecutor(num_threads, "mergestep-tokenize")
        # Grammars that have to be compiled wait for each other, and nobody else for them.
        self._compiling = executor or ThreadPoolExecutor(1, "mergestep-compile")

    def submit(self, job: Callable[[], None], *, compiles: bool) -> None:
        self.meter.queued()
        pool = self._compiling if compiles else self._tokenizing
        pool.submit(self._work, job)

    def shutdown(self) -> None:
        """When all that was submitted is done."""
        self._tokenizing.shutdown(wait=True)
        self._compiling.shutdown(wait=True)

    def _work(self, job: Callable[[], None]) -> None:
        with self.meter.working():
            job()
