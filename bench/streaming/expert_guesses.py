"""How many guesses of the next layer's experts come true, whether they are read ahead or not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.table import Table

from serve.loading.streaming import experts as streamed_experts

NEVER, ALWAYS = 2.0, 0.0  # of the least precision with which guesses are read


class Guess(NamedTuple):
    """One layer's experts in one step. missing: those guessed that were not in memory."""

    mixture: int
    guessed: list[int]
    missing: list[int]
    used: list[int]


@dataclass(slots=True)
class GuessTrace:
    """Notes guesses, each when the experts are used that it was about."""

    guesses: list[Guess] = field(default_factory=list)
    _last: tuple[int, list[int], list[int]] = (-1, [], [])

    def use(self, mixture: int, experts: list[int]) -> None:
        guessed_for, guessed, missing = self._last
        if guessed_for == mixture:
            self.guesses.append(Guess(mixture, guessed, missing, experts))
            self._last = -1, [], []

    def guess(self, mixture: int, experts: list[int], missing: list[int]) -> None:
        self._last = mixture, experts, missing


@contextmanager
def reading_guesses(least_precision: float) -> Iterator[None]:
    """Meanwhile guesses are read ahead if their precision is at least this."""
    before = streamed_experts.LEAST_PRECISION
    streamed_experts.LEAST_PRECISION = least_precision
    try:
        yield
    finally:
        streamed_experts.LEAST_PRECISION = before


def right_share(guesses: Sequence[Guess], *, of_missing: bool) -> float:
    """Returns the share of guessed experts that were used, of those not in memory or of all."""
    pairs = [(each.missing if of_missing else each.guessed, each.used) for each in guesses]
    right = sum(len(set(guessed) & set(used)) for guessed, used in pairs)
    return right / max(1, sum(len(guessed) for guessed, _ in pairs))


def guess_table(traces: dict[int, Sequence[Guess]], num_experts: int) -> Table:
    """traces: of each number of requests. by chance: as many experts chosen at random."""
    table = Table("requests", "layer", "guesses right", "of missing ones", "by chance", "missing")
    for requests, every in traces.items():
        layers = sorted({each.mixture for each in every})
        for layer in (*layers, None):
            part = [each for each in every if layer in (each.mixture, None)]
            chance = sum(len(each.used) for each in part) / (max(1, len(part)) * num_experts)
            rates = right_share(part, of_missing=False), right_share(part, of_missing=True), chance
            missing = sum(len(each.missing) for each in part)
            name = "all" if layer is None else str(layer)
            table.add_row(str(requests), name, *(f"{each:.0%}" for each in rates), f"{missing}")
    return table
