"""Pool 1's threads."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any


class TokenizePool:
    """Some that tokenize, and one for requests whose grammar has to be compiled: these wait for
    each other, and nobody else for them."""

    def __init__(self, num_threads: int, executor: Executor | None = None) -> None:
        """executor: does all of it; None: threads of this pool."""
        self._quick = executor or ThreadPoolExecutor(num_threads, "mergestep-tokenize")
        self._slow = executor or ThreadPoolExecutor(1, "mergestep-compile")

    def submit(self, is_slow: bool, job: Callable[..., None], *arguments: Any) -> None:
        (self._slow if is_slow else self._quick).submit(job, *arguments)

    def shutdown(self) -> None:
        """Waits; it is quick, as what is aborted is neither tokenized nor compiled."""
        self._quick.shutdown(wait=True)
        self._slow.shutdown(wait=True)
