"""The steps an engine ran, one row each, for those who measure or simulate it."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from serve.scheduler.scheduler import Scheduler
from serve.scheduler.step_plan import StepPlan
from serve.scheduler.step_time import StepWork


class TracedStep(NamedTuple):
    """began_s to ended_s: from the end of the step before, if the engine was busy, until the
    tokens were there (the engine's clock). Sequences and pages: at ended_s, with those that end
    with it and, where steps overlap, with what the next step was given already."""

    began_s: float
    ended_s: float
    work: StepWork
    num_running: int
    num_waiting: int
    pages_in_use: int


class StepTrace:
    """The last max_steps of them. Rows are added by the compute thread; read from any.
    num_lost: how many came before those that are kept."""

    def __init__(self, max_steps: int) -> None:
        self.steps: deque[TracedStep] = deque(maxlen=max_steps)
        self.num_lost = 0

    def add(self, plan: StepPlan, scheduler: Scheduler, began_s: float, ended_s: float) -> None:
        """Before the scheduler's update."""
        self.num_lost += len(self.steps) == self.steps.maxlen
        self.steps.append(
            TracedStep(
                began_s,
                ended_s,
                StepWork.of(plan),
                len(scheduler.running),
                len(scheduler.waiting),
                scheduler.kv.num_in_use,
            )
        )


class StepTraces:
    """Those that are written now. Opened and closed by one thread, read by the compute thread.
    One of them, the measurement's, is replaced by the next one of its kind."""

    def __init__(self) -> None:
        self.open: tuple[StepTrace, ...] = ()
        self._measured: StepTrace | None = None

    def watch(self, max_steps: int) -> StepTrace:
        """One more, until it is closed."""
        trace = StepTrace(max_steps)
        self.open = (*self.open, trace)
        return trace

    def close(self, trace: StepTrace | None) -> None:
        self.open = tuple(other for other in self.open if other is not trace)

    def measure(self, max_steps: int) -> StepTrace:
        """Replaces an earlier measurement; 0: only that."""
        self.close(self._measured)
        self._measured = self.watch(max_steps) if max_steps else None
        return self._measured or StepTrace(0)
