"""Computes steps on a CUDA device, one at a time, where memory nodes hold the K/V."""

from __future__ import annotations

import collections.abc as abc

from serve.runner.cuda_runner import CudaRunner
from serve.runner.runner import StepResult
from serve.scheduler.step_plan import StepPlan


def _nothing() -> None:
    """Does nothing."""


class CudaRemoteRunner:
    """A Runner that has no step in flight when it returns, because the host posts and receives in
    every layer of a step.

    Ranges of different partitions share the slots of the device's last tokens. No step reads them,
    because the host knows all tokens.
    """

    def __init__(self, runner: CudaRunner) -> None:
        self._runner = runner

    def run(self, plan: StepPlan, launched: abc.Callable[[], None]) -> StepResult:
        launched()  # tokens of the last step need not wait until this one has been posted
        return self._runner.run(plan, _nothing)

    def close(self) -> None:
        self._runner.close()
