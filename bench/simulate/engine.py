"""An engine under a virtual clock: the real scheduler decides, a cost model gives the time of each
step, and nothing else takes time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from bench.plan.cost import StepCost
from serve.request import Request
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence, make_sequences
from serve.scheduler.step_plan import StepPlan
from serve.scheduler.step_time import StepWork

EOS, OTHER = 1, 7
_STOPS = frozenset({EOS})


@dataclass(slots=True)
class Step:
    """A step that has run but whose tokens the scheduler does not have yet. sampled are the
    sequences that get a token, firsts those that get their first one."""

    plan: StepPlan
    work: StepWork
    began_s: float
    seconds: float
    ended_s: float
    sampled: list[Sequence]
    firsts: list[Sequence]


class VirtualEngine(ABC):
    """The virtual clock now_s, and the answers, each of which has a given length."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.now_s = 0.0
        self._ends: dict[Sequence, int] = {}  # by sequence that has no token yet

    def add(self, sequence: Sequence, num_output: int) -> None:
        """Queues a sequence whose answer ends with a stop token after num_output tokens, or earlier
        at max_tokens."""
        num_prompt = sequence.num_prompt_tokens
        # the length at which the next token is the first one, and later the last one
        sequence.history = num_prompt
        self._ends[sequence] = num_prompt + num_output - 1
        self.scheduler.add(sequence)

    @abstractmethod
    def step(self, watch: Callable[[Step], None] = lambda step: None) -> list[Sequence] | None:
        """Runs the next step. Returns the sequences that finished with it, or None if there was
        nothing to run. Calls watch with the step before the scheduler gets its tokens."""

    @abstractmethod
    def forward(self, watch: Callable[[Step], None], until_s: float) -> None:
        """Runs, without the scheduler, steps that certainly repeat the last one and begin before
        until_s. Calls watch with each."""

    def _answer(self, sampled: list[Sequence]) -> tuple[list[int], list[Sequence]]:
        """Returns the next token of each sequence, and the sequences that get their first one."""
        tokens = [OTHER] * len(sampled)
        firsts = []
        for index in [i for i, s in enumerate(sampled) if len(s.token_ids) == s.history]:
            sequence = sampled[index]
            end = self._ends.pop(sequence, None)
            if end is not None:
                firsts.append(sequence)
                sequence.history = end
            if len(sequence.token_ids) == sequence.history:
                tokens[index] = EOS
        return tokens, firsts


class SimulatedEngine(VirtualEngine):
    """Runs one step after the other."""

    def __init__(self, scheduler: Scheduler, cost: StepCost) -> None:
        super().__init__(scheduler)
        self.cost = cost
        self._last: Step | None = None

    def step(self, watch: Callable[[Step], None] = lambda step: None) -> list[Sequence] | None:
        scheduler = self.scheduler
        plan = scheduler.schedule(self.now_s)
        if plan is None:
            return None
        scheduler.kv.commit()
        work = StepWork.of(plan)
        seconds = self.cost.seconds(work)
        began_s = self.now_s
        self.now_s = ended_s = began_s + seconds
        scheduler.observe(plan, seconds, work)
        sampled = sampled_of(plan)
        tokens, firsts = self._answer(sampled)
        self._last = Step(plan, work, began_s, seconds, ended_s, sampled, firsts)
        watch(self._last)
        return scheduler.update(plan, tokens)

    def forward(self, watch: Callable[[Step], None], until_s: float) -> None:
        """Runs the steps that repeat the last one; sequences get all their tokens at the end."""
        if self._last is None or not (most := _num_steady_steps(self.scheduler, self._last.plan)):
            return
        plan, scheduler, context = self._last.plan, self.scheduler, self._last.work.num_context
        most = min(most, *[_num_plain_tokens(s) for s in plan.sequences])
        count = 0
        num_rows = plan.num_decodes
        while count < most and self.now_s < until_s:
            count += 1
            began_s = self.now_s
            _begin_steady_step(scheduler, began_s)
            work = StepWork(num_rows, context + count * num_rows, num_rows, samples=True)
            seconds = self.cost.seconds(work)
            self.now_s = began_s + seconds
            scheduler.observe(plan, seconds, work)
            watch(Step(plan, work, began_s, seconds, self.now_s, plan.sequences, []))
        _end_steady_steps(plan, count)


def sampled_of(plan: StepPlan) -> list[Sequence]:
    """Returns the sequences that get a token."""
    if all(plan.samples):
        return plan.sequences
    return [s for s, is_sampled in zip(plan.sequences, plan.samples, strict=True) if is_sampled]


def _num_steady_steps(scheduler: Scheduler, plan: StepPlan) -> int:
    """Returns how many of the next steps repeat the plan's rows, once its result is applied.

    They change nothing but the numbers of tokens, as long as no request arrives and no stop
    token is sampled.
    """
    running = scheduler.running
    # a sequence that finished with the plan is no longer running
    if scheduler.waiting or not plan.num_decodes == len(plan.sequences) == len(running):
        return 0
    # the last of these steps must not reach recheck_at
    return max(0, min([s.recheck_at - s.num_computed_tokens for s in running], default=0) - 1)


def _begin_steady_step(scheduler: Scheduler, now_s: float) -> None:
    """Updates the counters that schedule() would update for a steady step."""
    scheduler.waiting.tick(now_s)
    scheduler.num_steps += 1
    scheduler.num_page_steps += scheduler.kv.num_in_use


def _end_steady_steps(plan: StepPlan, num_steps: int) -> None:
    """Gives each sequence of the plan the tokens of num_steps steady steps."""
    tokens = [OTHER] * num_steps
    for sequence in plan.sequences:
        sequence.num_computed_tokens += num_steps
        sequence.token_ids += tokens


def _num_plain_tokens(sequence: Sequence) -> int:
    """Returns how many tokens a sequence gets before its next first or last one."""
    assert isinstance(sequence.history, int), "add has set it"
    return sequence.history - len(sequence.token_ids)


def make_sequence(request: Request) -> Sequence:
    """Returns the sequence of a request with one answer."""
    (sequence,) = make_sequences(request, _STOPS)
    return sequence
