"""A question to a page store about which pages it can load, if the answer takes time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

Ask = Callable[[Sequence[bytes]], Future[bool] | None]
"""Asks a store about the pages with these keys. The future ends when `contains` knows of them, or
when it is not worth waiting any longer. None: `contains` knows already."""


_POLL_S = 0.005  # how soon a sequence that waits for a peer is looked at again


class Question:
    """The one question that is open. The computing thread uses it."""

    def __init__(self) -> None:
        self.ask_store: Ask = lambda keys: None
        self.is_coming: Callable[[bytes], bool] = lambda key: False
        """Returns whether a peer was computing the page when the store asked for it."""
        self.is_awaited = False
        """Whether a sequence waits for pages that a peer computes; until the next `poll`."""
        self._never: Future[bool] = Future()
        self._open: Future[bool] | None = None

    @property
    def is_open(self) -> bool:
        """Whether an answer is awaited, or came after the last `poll`."""
        return self._open is not None

    @property
    def is_waited_for(self) -> bool:
        """Whether there is an answer to wait for, or a peer that computes."""
        return self._open is not None or self.is_awaited

    @property
    def futures(self) -> list[Future[bool]]:
        """What to wait for: for a peer that computes, only the time."""
        if self._open is not None:
            return [self._open]
        return [self._never] if self.is_awaited else []

    def limited(self, timeout_s: float) -> float:
        """Returns for how long to wait at most if the caller would wait for timeout_s."""
        return min(timeout_s, _POLL_S) if self.is_awaited else timeout_s

    def ask(self, keys: Sequence[bytes]) -> bool:
        """Asks the store about the pages, if that takes time. Returns whether it does."""
        self._open = self.ask_store(keys) if keys else None
        return self._open is not None

    def poll(self) -> None:
        """Closes the question if it was answered."""
        self.is_awaited = False
        if self._open is not None and self._open.done():
            self._open = None
