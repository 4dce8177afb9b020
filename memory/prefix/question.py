"""A question to a page store about which pages it can load, if the answer takes time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

Ask = Callable[[Sequence[bytes]], Future[bool] | None]
"""Asks a store about the pages with these keys. The future ends when `contains` knows of them, or
when it is not worth waiting any longer. None: `contains` knows already."""


class Question:
    """The one question that is open. The computing thread uses it."""

    def __init__(self) -> None:
        self.ask_store: Ask = lambda keys: None
        self.is_coming: Callable[[bytes], bool] = lambda key: False
        """Returns whether a peer was computing the page when the store asked for it."""
        self._open: Future[bool] | None = None

    @property
    def is_open(self) -> bool:
        """Whether an answer is awaited, or came after the last `poll`."""
        return self._open is not None

    @property
    def futures(self) -> list[Future[bool]]:
        return [] if self._open is None else [self._open]

    def ask(self, keys: Sequence[bytes]) -> bool:
        """Asks the store about the pages, if that takes time. Returns whether it does."""
        self._open = self.ask_store(keys) if keys else None
        return self._open is not None

    def poll(self) -> None:
        """Closes the question if it was answered."""
        if self._open is not None and self._open.done():
            self._open = None
