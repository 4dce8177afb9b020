"""How long drafts are beside prompts: never slower, and within the limits of the chunks."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import pytest

from serve.request import Request
from serve.sampling_params import SamplingParams
from serve.scheduler.chunking import ChunkPolicy
from serve.scheduler.sequence import Sequence, make_sequences
from serve.scheduler.step_plan import SchedulerLimits, StepPlan
from serve.scheduler.step_time import StepTimeModel, StepWork
from serve.speculation.beside_prompts import DraftsBesidePrompts, Offer, Room
from serve.speculation.speculation import Speculation
from tests.serve.speculation.test_lengths import (
    MOST,
    AllRight,
    Machine,
    busy,
    cpu,
    gpu,
    sequences_of,
)
from tests.serve.speculation.test_lengths import (
    Room as AllRoom,
)

ROWS = 256


class Speeds(NamedTuple):
    """Tokens of the streams and rows of the prompts in a second."""

    tokens: float
    rows: float

    @property
    def both(self) -> float:
        return self.tokens + self.rows


class MixedMachine(Machine):
    """Streams beside prompts that never end. Its chunks are sized as the scheduler sizes them."""

    def __init__(
        self, batch: int, seconds: Callable[[int], float], factor: float, *, has_drafts: bool
    ) -> None:
        super().__init__(batch, seconds)
        self.chunks = ChunkPolicy(SchedulerLimits(99, ROWS, ROWS, None, factor))
        self.model = self.chunks.model
        self.has_drafts = has_drafts
        self.drafting = Speculation(AllRight(), self.model, AllRoom(), MOST)  # type: ignore[arg-type]
        self.prompt = prompt_of(1 << 20)
        self.num_beyond = 0

    def step_beside(self, rate: float) -> tuple[int, int, float]:
        """Returns a step's tokens, prompt rows and seconds."""
        n, model = len(self.sequences), self.model
        left = ROWS - n
        kept = self.drafting.reserve(left) if self.has_drafts else 0
        prompts = [(0, self.prompt)]
        budget = self.chunks.begin(prompts, self.sequences, left, 0.0, num_drafts=kept)
        budget.release()
        rows = budget.rows_for(0, ROWS)
        budget.take(rows, 0)
        self.chunks.end(budget)
        sequences, total = [*self.sequences, self.prompt], n + rows
        plan = StepPlan(sequences, [1] * n + [rows], n, [True] * n + [False], total)
        alone_s = model.predict(StepWork.of(plan))
        if self.has_drafts:
            self.drafting.extend(plan, n, ROWS - total, self.chunks.limit_s)
        assert plan.num_total_rows <= ROWS
        if model.predict(StepWork.of(plan)) > max(alone_s, self.chunks.limit_s):
            self.num_beyond += 1
        assert plan.num_prompt_rows == rows
        assert plan.sequences[-1] is self.prompt
        tokens = 0
        for sequence, count in zip(plan.sequences[:n], plan.num_rows[:n], strict=True):
            accepted = 0
            while accepted < count - 1 and self.rng.random() < rate:
                accepted += 1
            if count > 1:
                self.drafting.learn(sequence, count - 1, accepted)
            tokens += accepted + 1
        seconds = self.seconds(plan.num_total_rows) * self.rng.uniform(0.98, 1.02)
        model.learn(StepWork.of(plan), seconds)
        return tokens, rows, seconds

    def speeds(self, rate: float, steps: int = 600) -> Speeds:
        for _ in range(40):
            self.model.learn(StepWork.of(self._decoding()), self.seconds(len(self.sequences)))
        done = [self.step_beside(rate) for _ in range(steps)]
        tokens, rows, seconds = (sum(each) for each in zip(*done, strict=True))
        return Speeds(tokens / seconds, rows / seconds)

    def _decoding(self) -> StepPlan:
        n = len(self.sequences)
        return StepPlan([*self.sequences], [1] * n, n, [True] * n, n)


def prompt_of(size: int) -> Sequence:
    params = SamplingParams(max_tokens=9, seed=0)
    [sequence] = make_sequences(Request("p", None, (5,) * size, params, 0.0), frozenset())
    return sequence


@pytest.mark.covering(2)
@pytest.mark.parametrize("rate", [0.0, 0.6, 0.9])
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("factor", [3.0, math.inf])
@pytest.mark.parametrize("seconds", [cpu, busy, gpu])
def test_never_slower(seconds, factor, batch, rate):
    """With no draft right, neither streams nor prompts; else not both together."""
    without = MixedMachine(batch, seconds, factor, has_drafts=False).speeds(rate)
    machine = MixedMachine(batch, seconds, factor, has_drafts=True)
    drafted = machine.speeds(rate)
    assert drafted.both > 0.97 * without.both
    if not rate:
        assert drafted.both > 0.98 * without.both
    # chunks are multiples of 16 rows, so that a little noise moves some of the time to the prompts
    assert drafted.tokens > 0.95 * without.tokens
    assert drafted.rows > (0.98 if not rate else 0.84) * without.rows
    assert not machine.num_beyond


@pytest.mark.parametrize("factor", [3.0, math.inf])
def test_streams_gain(factor):
    without = MixedMachine(16, gpu, factor, has_drafts=False).speeds(0.9)
    drafted = MixedMachine(16, gpu, factor, has_drafts=True).speeds(0.9)
    assert drafted.tokens > 1.5 * without.tokens


def model_of(seconds: Callable[[int], float]) -> StepTimeModel:
    """Returns a model that knows a machine."""
    model = StepTimeModel(ROWS)
    for _ in range(40):
        for rows in (1, 4, 8, 16, 32, 128, 200, 256):
            model.learn(StepWork(rows, 8, rows, samples=True), seconds(rows))
            work = StepWork(1, 8, 1, samples=True)
            work.add(rows, 8)
            model.learn(work, seconds(rows + 1))
    return model


ALL = Room(ROWS, math.inf)


def lengths(
    seconds: Callable[[int], float],
    num_prompt: int,
    rates: list[float],
    room: Room = ALL,
) -> tuple[int, int]:
    """Returns the draft tokens of a step, and for how many the next one has room."""
    beside = DraftsBesidePrompts(model_of(seconds))
    beside._pause = 99  # no trials
    plan = plan_of(len(rates), num_prompt)
    found = beside.lengths(plan, [Offer(MOST, rate) for rate in rates], room)
    assert max(found) <= MOST
    if len(set(rates)) == 1:
        assert max(found) - min(found) <= 1, "the most probable tokens come first"
    return sum(found), beside.reserve(1 << 20)


def plan_of(n: int, num_prompt: int) -> StepPlan:
    sequences = [*sequences_of(n), prompt_of(400)]
    return StepPlan(sequences, [1] * n + [num_prompt], n, [True] * n + [False], n + num_prompt)


def equal(rows: int) -> float:
    """Each row takes as long as any other."""
    return 1e-3 * rows


def test_rows_that_wait_for_the_weights_are_free():
    assert lengths(lambda rows: 1.0 + 1e-6 * rows, 16, [0.5, 0.9]) == (2 * MOST, 2 * MOST)


def test_rows_that_take_as_long_as_any_other_are_given_little():
    """Of 205 rows, 2 % are 4.1: at 1 - p^j each, but one for eight prompt rows at most."""
    assert lengths(equal, 200, [0.9] * 5)[0] == 18
    assert lengths(equal, 200, [0.4] * 5)[0] == 0
    assert lengths(equal, 96, [0.999] * 5)[0] == 12


def test_what_had_no_room_is_wanted():
    assert lengths(equal, 200, [0.9] * 5, Room(3, math.inf)) == (3, 18)
    assert lengths(equal, 200, [0.9] * 5, Room(ROWS, 0.2075)) == (2, 18)
    assert lengths(equal, 200, [0.9] * 5, Room(ROWS, 0.1)) == (0, 18)
    beside = DraftsBesidePrompts(model_of(equal))
    beside.lengths(plan_of(5, 200), [Offer(MOST, 0.9)] * 5, Room(0, math.inf))
    assert beside.reserve(32) == 4, "an eighth at most"
    beside.lengths(plan_of(5, 200), [], Room(0, math.inf))
    assert beside.reserve(32) == 0


def test_trials_grow_rare():
    """What is not worth it is tried, with a row of its own."""
    beside = DraftsBesidePrompts(model_of(equal))
    tried = []
    for number in range(400):
        room = Room(beside.reserve(200), math.inf)
        found = beside.lengths(plan_of(2, 200), [Offer(MOST, 0.1), Offer(MOST, 0.2)], room)
        assert found in ([0, 0], [0, 1])
        if any(found):
            tried.append(number)
    gaps = [b - a for a, b in pairwise(tried)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 60
    assert len(tried) > 6


def test_nothing_is_known():
    beside = DraftsBesidePrompts(StepTimeModel(ROWS))
    assert beside.lengths(plan_of(1, 60), [Offer(MOST, 1.0)], Room(0, math.inf)) == [0]
