"""Traces of an engine's steps, one row for each step, for measurements and the simulator."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from serve.scheduler.scheduler import Scheduler
from serve.scheduler.step_plan import StepPlan
from serve.scheduler.step_time import StepWork


class TracedStep(NamedTuple):
    """One step of a trace.

    began_s, ended_s: from the end of the step before (if the engine was busy) until the tokens were
    there, on the engine's clock. num_running, num_waiting, pages_in_use: at ended_s; they include
    sequences that end with this step and, with overlapped steps, what the next step has already.
    """

    began_s: float
    ended_s: float
    work: StepWork
    num_running: int
    num_waiting: int
    pages_in_use: int


class StepTrace:
    """The last max_steps steps. The compute thread adds them; any thread reads. num_lost: earlier
    steps that were dropped."""

    def __init__(self, max_steps: int) -> None:
        self.steps: deque[TracedStep] = deque(maxlen=max_steps)
        self.num_lost = 0

    def add(self, plan: StepPlan, scheduler: Scheduler, began_s: float, ended_s: float) -> None:
        """Adds a step. Called before the scheduler's update."""
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
    """The open traces. One thread opens and closes them; the compute thread writes to them. A new
    measurement replaces the one before."""

    def __init__(self) -> None:
        self.open: tuple[StepTrace, ...] = ()
        self._measured: StepTrace | None = None

    def watch(self, max_steps: int) -> StepTrace:
        """Opens a trace, which is written until it is closed."""
        trace = StepTrace(max_steps)
        self.open = (*self.open, trace)
        return trace

    def close(self, trace: StepTrace | None) -> None:
        self.open = tuple(other for other in self.open if other is not trace)

    def measure(self, max_steps: int) -> StepTrace:
        """Opens a measurement in place of an earlier one; 0 only ends the earlier one."""
        self.close(self._measured)
        self._measured = self.watch(max_steps) if max_steps else None
        return self._measured or StepTrace(0)
