"""The interface of what proposes tokens, before the model has computed them."""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass
from typing import Protocol

from serve.scheduler.sequence import Sequence

MOST_MISSING = 15
"""Tokens that a draft model computes with the first token of a draft; more are computed before."""


@dataclass(slots=True)
class Draft:
    """token_ids: may follow the sequence's tokens. kind: numbers drafts that are about as likely to
    agree, from 0 to the drafter's num_kinds - 1."""

    token_ids: list[int]
    kind: int


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
