"""What the thread of a link does, one after the other: questions, and pages to pull."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

ASK_S = 0.25  # the longest wait for which pages a peer has

OnAnswer = Callable[[list[bytes], list[bytes]], None]


@dataclass(slots=True)
class AskJob:
    """A question about names; on_answer gets those that the peer has, and those that it is
    computing: none without an answer."""

    names: list[bytes]
    on_answer: OnAnswer
    until_s: float = field(default_factory=lambda: time.monotonic() + ASK_S)
    is_answered: bool = False

    def answer(self, names: list[bytes], coming: list[bytes]) -> None:
        """Ends the question; a second answer does not count."""
        if not self.is_answered:
            self.is_answered = True
            self.on_answer(names, coming)

    def fail(self) -> None:
        """Ends it if it has not ended: the peer has nothing."""
        self.answer([], [])


@dataclass(slots=True)
class PullJob:
    """Pages to pull, as (name, address), and a future for each."""

    pages: Sequence[tuple[bytes, int]]
    futures: list[Future[bool]]

    def fail(self) -> None:
        """Ends the futures that have not ended: their pages are not there."""
        for future in self.futures:
            if not future.done():
                future.set_result(False)


@dataclass(slots=True)
class NewsJob:
    """A question for new pages of running sequences: at most so many names. on_news gets the number
    of each one's sequence, and the name."""

    most: int
    on_news: Callable[[list[tuple[int, bytes]]], None]

    def fail(self) -> None:
        """Nothing is new."""


Job = AskJob | PullJob | NewsJob
