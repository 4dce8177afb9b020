"""A runner whose steps take as long as those of a machine that nothing disturbs.

The model computes every step as before; then the runner waits until the step has taken the time
that the virtual clock of the simulated orders gives it, times a factor. All else that an engine
does, between steps and beside them, takes the time that it takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from bench.simulate.memory_policy import EMBEDDED
from serve import Engine
from serve.runner.runner import Runner, StepResult
from serve.scheduler.step_plan import StepPlan
from serve.scheduler.step_time import StepWork

_MOST_LATE_S = 0.005


class PacedRunner:
    """num_late counts the steps of which the model itself took longer than their time."""

    def __init__(self, runner: Runner, factor: float) -> None:
        self._runner = runner
        self._factor = factor
        self._late_s = 0.0  # by which the last wait was too long; the next one is shorter by it
        self.num_steps = self.num_late = 0

    def run(self, plan: StepPlan, launched: Callable[[], None]) -> StepResult:
        due_s = time.perf_counter() - self._late_s
        due_s += self._factor * EMBEDDED.seconds(StepWork.of(plan))
        result = self._runner.run(plan, launched)
        left_s = due_s - time.perf_counter()
        if left_s > 0.0:
            time.sleep(left_s)
        self.num_steps += 1
        self.num_late += left_s <= 0.0
        self._late_s = min(_MOST_LATE_S, max(0.0, time.perf_counter() - due_s))
        return result

    def close(self) -> None:
        self._runner.close()


def pace(engine: Engine, factor: float) -> PacedRunner:
    """Lets the steps of a started engine, on a CPU, take `factor` times the simulated time."""
    loaded = engine._loaded
    assert loaded is not None, "started"
    executor = loaded.core._executor
    runner = PacedRunner(executor._runner, factor)
    executor._runner = runner
    return runner
