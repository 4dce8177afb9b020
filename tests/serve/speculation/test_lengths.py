"""How long drafts are: never slower, near the best, whatever a machine's steps take."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from serve.request import Request
from serve.sampling_params import SamplingParams
from serve.scheduler.sequence import Sequence, make_sequences
from serve.scheduler.step_plan import StepPlan
from serve.scheduler.step_time import StepTimeModel, StepWork
from serve.speculation.drafter import Draft
from serve.speculation.speculation import Speculation

MOST = 15


class AllRight:
    """Proposes as many tokens as are asked for; whether they are right is decided elsewhere."""

    first_guesses = (0.5,)
    kept_bytes = 0, 0

    def propose(self, sequences: Any, most: int) -> list[Draft | None]:
        return [Draft([7] * most, 0) for _ in sequences]

    def ended(self, sequence: Sequence) -> None:
        """Keeps nothing for a sequence."""


class Room:
    """K/V memory with room for everything."""

    num_available = 1 << 20
    layout = SimpleNamespace(groups=())
    state_interval = None

    def grow(self, target: Any, num_tokens: int, num_computed: int = 0) -> bool:
        return True


class FullRange:
    capacity = 1 << 20


def sequences_of(count: int) -> list[Sequence]:
    params = SamplingParams(max_tokens=1 << 16, seed=0)
    made = []
    for number in range(count):
        request = Request(f"{number}", None, (5, 6, 7), params, 0.0)
        [sequence] = make_sequences(request, frozenset())
        sequence.kv_range = FullRange()  # type: ignore[assignment]
        sequence.num_computed_tokens = len(sequence.token_ids) - 1
        made.append(sequence)
    return made


class Machine:
    """Steps of a machine whose step of n rows takes seconds(n), with some noise."""

    def __init__(self, batch: int, seconds: Callable[[int], float], seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.model = StepTimeModel(256)
        self.drafting = self.make_drafting()
        self.sequences = sequences_of(batch)
        self.seconds = seconds

    def make_drafting(self) -> Speculation:
        return Speculation(AllRight(), self.model, Room(), MOST)  # type: ignore[arg-type]

    def step(self, rate: float) -> tuple[int, float]:
        """Returns a step's tokens and seconds, if a draft's tokens agree at this rate."""
        n = len(self.sequences)
        plan = StepPlan([*self.sequences], [1] * n, n, [True] * n, n)
        self.drafting.extend(plan, n, 256 - n)
        tokens = 0
        for sequence, rows in zip(plan.sequences, plan.num_rows, strict=True):
            accepted = 0
            while accepted < rows - 1 and self.rng.random() < rate:
                accepted += 1
            if rows > 1:
                self.drafting.learn(sequence, rows - 1, accepted)
            tokens += accepted + 1
        seconds = self.seconds(plan.num_total_rows) * self.rng.uniform(0.97, 1.05)
        self.model.learn(StepWork.of(plan), seconds)
        return tokens, seconds + plan.draft_s

    def speed(self, rate: float, steps: int = 400) -> float:
        """Returns the tokens per second, the first steps included."""
        done = [self.step(rate) for _ in range(steps)]
        return sum([tokens for tokens, _ in done]) / sum([seconds for _, seconds in done])


def cpu(rows: int) -> float:
    """The 1B shape on two cores: eight rows take a quarter longer than one; many are dear."""
    return 23e-3 + 0.8e-3 * rows + 2.2e-3 * max(0, rows - 16)


def busy(rows: int) -> float:
    """Each row is dear from the second one on."""
    return 40e-3 + 6e-3 * rows


def gpu(rows: int) -> float:
    return 8e-3 + 0.01e-3 * rows + 0.05e-3 * max(0, rows - 192)


def best(batch: int, seconds: Callable[[int], float], rate: float) -> float:
    """Returns the tokens per second with the best equal length of all drafts."""
    gains = [sum([rate**j for j in range(k + 1)]) for k in range(MOST + 1)]
    return max(batch * gain / seconds(batch * (k + 1)) for k, gain in enumerate(gains))


@pytest.mark.covering(2)
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6, 0.9])
@pytest.mark.parametrize("batch", [1, 4, 8, 32, 64])
@pytest.mark.parametrize("seconds", [cpu, busy, gpu])
def test_never_slower_and_near_the_best(seconds, batch, rate):
    without = batch / (seconds(batch) * 1.01)  # the noise's mean
    with_drafts = Machine(batch, seconds).speed(rate)
    assert with_drafts > 0.98 * without
    assert with_drafts > 0.9 * best(batch, seconds, rate) / 1.01


def test_rates_may_change():
    """After a text that repeats itself, and after one that does not."""
    machine = Machine(4, cpu)
    quick = machine.speed(0.9)
    assert machine.speed(0.0, 100) > 0.88 * 4 / (cpu(4) * 1.01)
    assert machine.speed(0.9) > 0.9 * quick


def test_limits():
    machine = Machine(1, gpu)
    [sequence] = machine.sequences
    sequence.max_tokens_total = len(sequence.token_ids) + 3
    plan = StepPlan([sequence], [1], 1, [True], 1)
    for _ in range(5):
        machine.drafting.extend(plan, 1, 200)
        assert plan.num_total_rows == 1 + plan.num_drafted == plan.num_rows[0] <= 3
        plan = StepPlan([sequence], [1], 1, [True], 1)
    machine.drafting.extend(plan, 1, 1)
    assert plan.num_drafted == 1, "no more rows than the step has"
