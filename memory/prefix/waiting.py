"""How the prefix cache waits for transfers of its store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

WaitFor = Callable[[Sequence[Future[bool]], float], None]
"""Waits until one of some futures of a store has ended, or for so many seconds. It ends futures in
the calling thread, if the store has no threads that do."""


def wait_for_any(futures: Sequence[Future[bool]], timeout_s: float) -> None:
    """The WaitFor of a store whose threads end its futures."""
    if futures:
        wait(futures, timeout_s, return_when=FIRST_COMPLETED)


def is_success(future: Future[bool]) -> bool:
    """Returns whether a future that has ended is a success. An exception is a failure."""
    return not future.cancelled() and future.exception() is None and future.result()
