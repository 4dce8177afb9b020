"""When a draft model drafts, and how long: never slower, near the best, whatever its steps take."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from serve.scheduler.sequence import Sequence
from serve.scheduler.step_time import StepTimeModel, StepWork
from serve.speculation.draft_ledger import DraftLedger
from serve.speculation.speculation import Speculation
from tests.serve.speculation.test_lengths import MOST, Machine, Room, busy, cpu
from tests.support.speculation.scripted import NoLookup

Seconds = Callable[[int], float]


class TimedDrafts:
    """A draft model whose step of n rows takes seconds(n), and which knows nothing of the first
    `prompt` tokens of a sequence."""

    def __init__(self, seconds: Seconds, rng: random.Random, prompt: int) -> None:
        self.time = StepTimeModel(256)
        self.now_s, self.prompt = 0.0, prompt
        self.missing: dict[Sequence, int] = {}
        self.num_drafted = 0
        self._seconds, self._rng = seconds, rng

    def clock(self) -> float:
        return self.now_s

    def follow(self) -> float:
        return 0.0

    def most_drafted(self, sequence: Sequence) -> int:
        return 1 << 16

    def num_missing(self, sequence: Sequence) -> int:
        return self.missing.setdefault(sequence, self.prompt)

    def catch_up(self, chunks: list[tuple[Sequence, int]]) -> None:
        work = StepWork(samples=True)
        for sequence, rows in chunks:
            work.add(rows, 0)
            self.missing[sequence] = max(1, self.missing[sequence] - rows)
        self._pass(work)

    def draft(self, sequences: list[Sequence], depths: list[int]) -> list[list[int]]:
        self.num_drafted += sum(depths)
        for depth in range(max(depths)):
            rows = sum(each > depth for each in depths)
            self._pass(StepWork(rows, 0, rows, samples=True))
        return [[7] * depth for depth in depths]

    def _pass(self, work: StepWork) -> None:
        seconds = self._seconds(work.num_rows) * self._rng.uniform(0.97, 1.05)
        self.time.learn(work, seconds)
        self.now_s += seconds


class TwoMachines(Machine):
    """Steps of two models, with some noise."""

    def __init__(self, batch: int, seconds: Seconds, drafts: Seconds, prompt: int = 1) -> None:
        self.drafts = TimedDrafts(drafts, random.Random(batch), prompt)
        super().__init__(batch, seconds, seed=batch)

    def make_drafting(self) -> Speculation:
        room: Any = Room()
        drafts: Any = self.drafts
        ledger = DraftLedger(self.drafts.clock)
        return Speculation(NoLookup(), self.model, room, MOST, None, drafts, ledger)

    def step(self, rate: float) -> tuple[int, float]:
        began_s = self.drafts.now_s
        tokens, seconds = super().step(rate)
        assert seconds > self.drafts.now_s - began_s, "the drafts' time is in the step's"
        self.drafts.now_s = began_s + seconds
        return tokens, seconds


def small(rows: int) -> float:
    """A tenth of the 1B shape."""
    return 2.3e-3 + 0.1e-3 * rows


def as_large(rows: int) -> float:
    """A draft model that is as slow as its target."""
    return cpu(rows)


def best(batch: int, seconds: Seconds, drafts: Seconds, rate: float) -> float:
    """Returns the tokens per second with the best equal length of all drafts."""
    gains = [sum([rate**j for j in range(k + 1)]) for k in range(MOST + 1)]
    return max(
        batch * gain / (seconds(batch * (k + 1)) + k * drafts(batch))
        for k, gain in enumerate(gains)
    )


@pytest.mark.covering(2)
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("batch", [1, 4, 8, 32])
@pytest.mark.parametrize("drafts", [small, as_large])
@pytest.mark.parametrize("seconds", [cpu, busy])
def test_never_slower_and_near_the_best(seconds, drafts, batch, rate):
    without = batch / (seconds(batch) * 1.01)  # the noise's mean
    speed = TwoMachines(batch, seconds, drafts).speed(rate)
    assert speed > 0.98 * without
    assert speed > 0.88 * best(batch, seconds, drafts, rate) / 1.01


@pytest.mark.parametrize("prompt", [100, 10000])
def test_prompts(prompt):
    """A prompt is computed if the rest of the answer is worth it; else it costs nothing."""
    machine = TwoMachines(1, cpu, small, prompt)
    [sequence] = machine.sequences
    sequence.max_tokens_total = len(sequence.token_ids) + 40
    machine.speed(0.9, 40)
    assert (machine.drafts.num_drafted > 0) == (prompt == 100)
    machine = TwoMachines(1, cpu, small, prompt)
    assert machine.speed(0.0, 400) > 0.97 / (cpu(1) * 1.01)


def test_answers_get_longer():
    """The rest of an answer is expected to be as long as the answer is."""
    machine = TwoMachines(1, cpu, small, 20000)
    [sequence] = machine.sequences
    machine.speed(0.9, 50)
    assert machine.drafts.missing[sequence] > 19900, "a chunk, to learn what one takes"
    sequence.token_ids.extend([9] * 2000)
    machine.speed(0.9, 50)
    assert machine.drafts.missing[sequence] < 18000
