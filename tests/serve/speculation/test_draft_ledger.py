"""Drafts whose time is not in the step-time model, as Python's is, rest where they do not pay."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from serve.speculation.draft_ledger import DraftLedger
from serve.speculation.speculation import Speculation
from tests.serve.speculation.test_lengths import MOST, AllRight, Machine, Room


def tiny(rows: int) -> float:
    return 400e-6 + 5e-6 * rows


class HiddenTime(Machine):
    """A machine whose searches, and whose rows of drafts, take time that the model does not see."""

    def __init__(self, batch: int, search_s: float, row_s: float) -> None:
        super().__init__(batch, tiny)
        self.now_s, self.row_s = 0.0, row_s
        room: Any = Room()
        drafter = Searched(self, search_s)
        ledger = DraftLedger(lambda: self.now_s)
        self.drafting = Speculation(drafter, self.model, room, MOST, ledger=ledger)

    def step(self, rate: float) -> tuple[int, float]:
        began_s, drafted = self.now_s, self.drafting.learned  # type: ignore[attr-defined]
        tokens, seconds = super().step(rate)
        drafted = self.drafting.learned - drafted  # type: ignore[attr-defined]
        self.now_s += seconds + self.row_s * drafted
        return tokens, self.now_s - began_s


class Searched(AllRight):
    def __init__(self, machine: HiddenTime, search_s: float) -> None:
        self.machine, self.search_s = machine, search_s

    def propose(self, sequences: Any, most: int) -> Any:
        self.machine.now_s += self.search_s
        return super().propose(sequences, most)


def machine(batch: int, search_s: float, row_s: float) -> HiddenTime:
    made = HiddenTime(batch, search_s, row_s)
    drafting: Any = made.drafting
    drafting.learned, learn = 0, drafting.learn

    def counted(sequence: Any, num_drafted: int, num_accepted: int) -> None:
        drafting.learned += num_drafted
        learn(sequence, num_drafted, num_accepted)

    drafting.learn = counted
    return made


@pytest.mark.covering(1)
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("batch", [1, 8])
def test_never_slower(batch, rate):
    """A search takes 10 % of a step, and a draft's row a quarter, where the model sees 1 %."""
    speed = machine(batch, 40e-6, 100e-6).speed(rate, 6000)
    assert speed > 0.97 * batch / (tiny(batch) * 1.01)


def test_what_pays_goes_on():
    cheap = machine(1, 4e-6, 4e-6)
    assert cheap.speed(0.9, 1000) > 4.0 / tiny(1)
    assert cheap.drafting._ledger._last_rest_s == 0.0  # type: ignore[union-attr]


def test_rests_grow_longer():
    dear = machine(8, 0.0, 200e-6)
    lengths = []
    for _ in range(20000):
        dear.step(0.5)
        rest_s = dear.drafting._ledger._last_rest_s  # type: ignore[union-attr]
        if rest_s and (not lengths or lengths[-1] != rest_s):
            lengths.append(rest_s)
    assert len(lengths) > 2
    assert all(b >= 1.5 * a for a, b in pairwise(lengths[:3]))
