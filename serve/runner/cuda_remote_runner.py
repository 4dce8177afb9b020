"""Computes steps on a CUDA device, one at a time, where memory nodes hold the K/V."""

from __future__ import annotations

import collections.abc as abc

from memory.nodes.errors import NodesLostError
from serve.runner.cuda_runner import CudaRunner
from serve.runner.runner import StepResult
from serve.scheduler.step_plan import StepPlan


def _nothing() -> None:
    """Does nothing."""


class CudaRemoteRunner:
    """A Runner that has no step in flight when it returns, because the host posts and receives in
    every layer of a step, unless a lane does (memory/nodes/engine_lanes.py).

    Ranges of different partitions share the slots of the device's last tokens. No step reads them,
    because the host knows all tokens.
    """

    def __init__(self, runner: CudaRunner, check: abc.Callable[[], None]) -> None:
        """check: raises NodesLostError if a node was lost while a step ran without the host."""
        self._runner = runner
        self._check = check

    def run(self, plan: StepPlan, launched: abc.Callable[[], None]) -> StepResult:
        launched()  # tokens of the last step need not wait until this one has been posted
        try:
            result = self._runner.run(plan, _nothing)
        except NodesLostError:
            raise
        except Exception:
            self._check()  # a released stream computes with anything
            raise
        self._check()
        return result

    def close(self) -> None:
        self._runner.close()
