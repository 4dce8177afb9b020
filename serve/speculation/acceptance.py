"""Learns how probable it is that a draft's next token agrees, if those before did.

A draft's tokens are trials that end with the first failure. Their rate is estimated for each kind
of draft over all sequences, and for a sequence from its own recent drafts, of which the kind's rate
counts as _KIND_TRIALS. Old trials fade, and with nothing tried the estimates return to what was
guessed first, so that what has failed for long is tried again now and then.
"""

from __future__ import annotations

import collections.abc as abc
from dataclasses import dataclass

_KIND_TRIALS = 6.0  # what the rate of a kind weighs beside a sequence's own trials
_GUESS_TRIALS = 2.0  # what the first guess weighs beside the trials of a kind
_KEPT_OF_KIND = 0.99  # of the earlier trials, at each draft
_KEPT_OF_SEQUENCE = 0.9
_KEPT_AT_REST = 0.995  # at each step without a draft


@dataclass(slots=True)
class Trials:
    """Fading counts of tokens that agreed and of drafts that failed."""

    agreed: float = 0.0
    failed: float = 0.0

    def fade(self, kept: float) -> None:
        self.agreed *= kept
        self.failed *= kept

    def add(self, num_drafted: int, num_accepted: int, kept: float) -> None:
        self.fade(kept)
        self.agreed += num_accepted
        self.failed += num_accepted < num_drafted

    def rate(self, guess: float, weight: float) -> float:
        """Returns the rate, with `weight` trials at the guessed rate among them."""
        return (guess * weight + self.agreed) / (weight + self.agreed + self.failed)


class Acceptance:
    """The rates of one engine. The trials of a sequence are kept with the sequence."""

    def __init__(self, first_guesses: abc.Sequence[float]) -> None:
        self._guesses = list(first_guesses)
        self._kinds = [Trials() for _ in first_guesses]

    def rate(self, kind: int, own: Trials) -> float:
        """Returns the probability for a sequence with these trials of its own."""
        of_kind = self._kinds[kind].rate(self._guesses[kind], _GUESS_TRIALS)
        return own.rate(of_kind, _KIND_TRIALS)

    def learn(self, kind: int, own: Trials, num_drafted: int, num_accepted: int) -> None:
        self._kinds[kind].add(num_drafted, num_accepted, _KEPT_OF_KIND)
        own.add(num_drafted, num_accepted, _KEPT_OF_SEQUENCE)

    def rest(self, own: abc.Iterable[Trials]) -> None:
        """Takes note of a step in which these sequences' drafts were not worth their time."""
        for trials in own:
            trials.fade(_KEPT_AT_REST)
        for trials in self._kinds:
            trials.fade(_KEPT_AT_REST)
