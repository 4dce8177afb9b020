"""The interface of what proposes tokens, before the model has computed them."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass
from typing import Protocol

from serve.scheduler.sequence import Sequence
from serve.scheduler.step_time import StepTimeModel

MOST_MISSING = 15
"""Tokens that a draft model computes with the first token of a draft; more are computed before."""


@dataclass(slots=True)
class Draft:
    """token_ids: may follow the sequence's tokens. kind: numbers drafts that are about as likely to
    agree, from 0 to the drafter's num_kinds - 1. is_predicted: it is from the prediction that the
    request came with."""

    token_ids: list[int]
    kind: int
    is_predicted: bool = False


class Drafter(Protocol):
    """Proposes tokens. Only the compute thread calls it."""

    @property
    def first_guesses(self) -> abc.Sequence[float]:
        """For each kind of draft, how probable it is that a token agrees if those before did, as
        long as nothing has been learned."""

    def propose(self, sequences: abc.Sequence[Sequence], most: int) -> list[Draft | None]:
        """Returns a draft of at most `most` tokens for each sequence, or None. All tokens of the
        sequences are known."""

    @property
    def kept_bytes(self) -> tuple[int, int]:
        """The texts that are kept, and their bytes. Any thread may ask."""

    def ended(self, sequence: Sequence) -> None:
        """Frees what is kept for a sequence."""


class DraftSource(Protocol):
    """What computes drafts, which takes time: a small model, or a head beside the model. Only the
    compute thread calls it. time: predicts its steps, which clock times."""

    time: StepTimeModel

    @property
    def clock(self) -> abc.Callable[[], float]: ...

    @property
    def num_pages_in_use(self) -> int:
        """The pages of memory of its own that sequences hold."""

    def follow(self) -> float:
        """Computes what must not wait until there are drafts. Returns the seconds."""

    def most_drafted(self, sequence: Sequence) -> int:
        """Returns how many tokens can be drafted for a sequence; 0 if it can have none."""

    def num_missing(self, sequence: Sequence) -> int:
        """Returns how many of a sequence's tokens are computed before its draft."""

    def catch_up(self, chunks: abc.Sequence[tuple[Sequence, int]]) -> None:
        """Computes tokens that sequences have, about as many as their chunks say."""

    def draft(
        self, sequences: abc.Sequence[Sequence], depths: abc.Sequence[int]
    ) -> list[list[int]]:
        """Returns what may follow each sequence, at most depths[i] > 0 tokens."""

    def ended(self, sequence: Sequence) -> None:
        """Frees what a sequence has."""

    def trim(self) -> None:
        """Returns unused memory to the system, while nothing runs."""

    def close(self) -> None:
        """Frees memory of its own."""
