"""An engine on a pipeline of stages under a virtual clock.

The scheduler plans as serve/engine/overlapped_executor.py lets it: `depth` steps are in flight, and
the next one is planned when the oldest has ended, or when there is room for another. Launches and
results are applied by the same code (serve/scheduler/in_flight.py). A cost says how long each stage
is busy with a step, and StagePipeline when each stage begins.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from bench.plan.grid import GridWork
from bench.plan.pipeline import StageCost, StagePipeline
from bench.simulate.engine import Step, VirtualEngine, sampled_of
from serve.scheduler.in_flight import apply_launch
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence
from serve.scheduler.step_time import StepWork, stage_seconds


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step in flight with the tokens that it will sample."""

    step: Step
    tokens: list[int]


class PipelinedEngine(VirtualEngine):
    """Keeps up to `depth` steps in flight, by default one in each stage."""

    def __init__(self, scheduler: Scheduler, cost: StageCost, depth: int | None = None) -> None:
        super().__init__(scheduler)
        self.cost = cost
        self.pipeline = StagePipeline(cost.num_stages)
        self._depth = cost.num_stages if depth is None else depth
        self._in_flight: deque[_Launched] = deque()
        self._busy_since_s: float | None = None
        scheduler.use_pipeline(self._depth)

    def step(self, watch: Callable[[Step], None] = lambda step: None) -> list[Sequence] | None:
        """Launches a step if one can be planned, and completes the oldest one if the pipeline is
        full or none can. Returns the sequences that finished with it, or None if nothing is in
        flight and nothing can be planned."""
        plan = self.scheduler.schedule(self.now_s)
        if plan is None:
            if not self._in_flight:
                self._busy_since_s = None
                return None
            return self._complete(watch)
        self.scheduler.kv.commit()
        work, rows = StepWork.of(plan), GridWork.of(plan)
        hop_s = self.cost.hop_seconds(rows.num_rows)
        ended_s = self.pipeline.run(self.cost.stage_seconds(rows), hop_s, self.now_s)
        sampled = sampled_of(plan)
        # a sequence is sampled in one step in flight at most, so its number of tokens is known
        tokens, firsts = self._answer(sampled)
        seconds = ended_s - self.now_s
        step = Step(plan, work, self.now_s, seconds, ended_s, list(sampled), firsts)
        self._in_flight.append(_Launched(step, tokens))
        apply_launch(self.scheduler, plan)
        return self._complete(watch) if len(self._in_flight) >= self._depth else []

    def forward(self, watch: Callable[[Step], None], until_s: float) -> None:
        """Does nothing: each step is planned, since the sequences of the next one differ."""

    def _complete(self, watch: Callable[[Step], None]) -> list[Sequence]:
        launched = self._in_flight.popleft()
        step = launched.step
        began_s = step.began_s if self._busy_since_s is None else self._busy_since_s
        self.now_s = self._busy_since_s = step.ended_s
        interval_s = step.ended_s - began_s
        in_stage_s = stage_seconds(interval_s, step.seconds, self._depth)
        self.scheduler.observe(step.plan, in_stage_s, step.work)
        watch(step)
        return self.scheduler.update(step.plan, launched.tokens)
