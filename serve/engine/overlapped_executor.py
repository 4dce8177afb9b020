"""Runs steps on a device that computes beside the host: it launches step k+1 while the tokens of
step k are still being computed.

    host    make k+1, launch | wait for k, apply its result | make k+2, launch | ...
    device  k ---------------> k+1 --------------------------------> k+2 ...

The device never waits for the host as long as making a step takes less time than computing one.
After a failure, steps run one at a time until the sequence at fault is found.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

from memory.nodes.node_link import NodesLostError
from serve.engine.pools import OutputThread
from serve.engine.step_executor import EndSequence, StepExecutor
from serve.runner.runner import OverlappingRunner, PendingStep, Runner, StepResult
from serve.scheduler.in_flight import apply_launch, roll_back
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence
from serve.scheduler.step_plan import StepPlan

logger = logging.getLogger(__name__)


class LaunchedStep(NamedTuple):
    """A step in flight. began_s: when the loop began to make it."""

    plan: StepPlan
    pending: PendingStep
    began_s: float


class OverlappedExecutor(StepExecutor):
    """Keeps one step in flight between two calls of `run`."""

    def __init__(
        self,
        runner: OverlappingRunner,
        scheduler: Scheduler,
        output: OutputThread,
        *,
        end_sequence: EndSequence,
        on_finished: Callable[[list[Sequence]], None],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(
            runner,
            scheduler,
            output,
            end_sequence=end_sequence,
            on_finished=on_finished,
            on_nodes_lost=None,
            clock=clock,
        )
        self._device = runner
        self._in_flight: LaunchedStep | None = None

    def run(self, plan: StepPlan, now_s: float) -> None:
        if self._in_flight is not None and self._device.needs_tokens(plan):
            self.drain()
            left = plan.still_running()
            if left is None:
                return
            plan = left
        try:
            pending = self._device.launch(plan, self._output.flush)
        except Exception as error:
            self._launch_failed(plan, error)
            return
        if pending.late:
            plan = plan.without_late(pending.late)
        before, self._in_flight = self._in_flight, LaunchedStep(plan, pending, now_s)
        apply_launch(self._scheduler, plan)
        if before is not None:
            self._complete(before)

    def drain(self) -> bool:
        launched, self._in_flight = self._in_flight, None
        if launched is not None:
            self._complete(launched)
        return launched is not None

    def abandon(self) -> None:
        launched, self._in_flight = self._in_flight, None
        if launched is not None:
            _discard(launched)

    def _complete(self, launched: LaunchedStep) -> bool:
        """Waits for a launched step, updates the scheduler with its tokens and delivers them.
        Returns False if the step has failed."""
        try:
            result = launched.pending.wait()
        except Exception as error:
            self._step_failed(launched.plan, error)
            return False
        busy_since_s = self._busy_since_s
        now_s = self._record_time(
            launched.plan, launched.began_s if busy_since_s is None else busy_since_s
        )
        plan, result = _without_ended(launched.plan, result)
        self._deliver(plan, result, self._scheduler.update(plan, result.tokens), now_s)
        return True

    def _launch_failed(self, plan: StepPlan, error: Exception) -> None:
        before, self._in_flight = self._in_flight, None
        is_sound = before is None or self._complete(before)
        # A device may report a step's failure only when the next one is launched. Then the
        # completion above has failed too, and the next plan is made anew.
        if is_sound:
            self._find_fault(plan, error)

    def _isolate(self, plan: StepPlan, error: Exception) -> None:
        self._device.check()
        super()._isolate(plan, error)

    def _step_failed(self, plan: StepPlan, error: Exception) -> None:
        """Takes back a failed step, and the one behind it, which has computed with its tokens."""
        later, self._in_flight = self._in_flight, None
        if later is not None:
            _discard(later)
            roll_back(self._scheduler, later.plan)
        roll_back(self._scheduler, plan)
        self._find_fault(plan, error)

    def _find_fault(self, plan: StepPlan, error: Exception) -> None:
        """Runs the failed plan in parts. No step is in flight."""
        self._busy_since_s = None
        left = plan.still_running()
        if left is plan:
            self._isolate(plan, error)
        elif left is not None:  # the sequence at fault may have ended since
            self._run(left)


def _discard(launched: LaunchedStep) -> None:
    """Waits for a step whose result is dropped: the device may still use memory that is about to
    be freed."""
    try:
        launched.pending.wait()
    except Exception:
        logger.info("a step in flight failed too", exc_info=True)


def _without_ended(plan: StepPlan, result: StepResult) -> tuple[StepPlan, StepResult]:
    """Removes the rows of sequences that have ended since the step was launched."""
    places = plan.unfinished()
    if len(places) == len(plan.sequences):
        return plan, result
    finished = {sequence for sequence in result.sampled if sequence.is_finished}
    return plan.subset(places), result.without(finished)


def make_executor(
    runner: Runner,
    scheduler: Scheduler,
    output: OutputThread,
    *,
    end_sequence: EndSequence,
    on_finished: Callable[[list[Sequence]], None],
    on_nodes_lost: Callable[[NodesLostError], None] | None,
    clock: Callable[[], float],
) -> StepExecutor:
    """Returns an OverlappedExecutor if the runner can overlap steps, else a StepExecutor.

    on_nodes_lost is set where memory nodes hold the K/V; they take one step at a time.
    """
    if isinstance(runner, OverlappingRunner):
        assert on_nodes_lost is None, "memory nodes need a runner of one step at a time"
        return OverlappedExecutor(
            runner,
            scheduler,
            output,
            end_sequence=end_sequence,
            on_finished=on_finished,
            clock=clock,
        )
    return StepExecutor(
        runner,
        scheduler,
        output,
        end_sequence=end_sequence,
        on_finished=on_finished,
        on_nodes_lost=on_nodes_lost,
        clock=clock,
    )
