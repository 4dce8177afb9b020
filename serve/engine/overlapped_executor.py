"""Runs steps on a device that computes beside the host: it launches step k+1 while the tokens of
step k are still being computed.

    host    make k+1, launch | wait for k, apply its result | make k+2, launch | ...
    device  k ---------------> k+1 --------------------------------> k+2 ...

The device never waits for the host as long as making a step takes less time than computing one.
A pipeline of S stages has S steps in flight, one in each stage; the host waits for the oldest when
the newest is launched, or when no other step can be planned:

    stage 0  k+2 | k+3 | k+4 | ...
    stage 1  k+1 | k+2 | k+3 | ...
    stage 2  k   | k+1 | k+2 | ...      the tokens of k are known when k+3 is planned

After a failure, steps run one at a time until the sequence at fault is found.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from memory.nodes.errors import NodesLostError
from serve.engine.pools import OutputThread
from serve.engine.step_executor import EndSequence, StepExecutor, clear_frames
from serve.runner.runner import OverlappingRunner, PendingStep, Runner, StepResult
from serve.scheduler.in_flight import (
    apply_launch,
    roll_back,
    take_back_late,
    tokens_as_launched,
)
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
    """Keeps up to depth - 1 steps in flight between two calls of `run`."""

    def __init__(
        self,
        runner: OverlappingRunner,
        scheduler: Scheduler,
        output: OutputThread,
        *,
        end_sequence: EndSequence,
        on_finished: Callable[[list[Sequence]], None],
        on_nodes_lost: Callable[[NodesLostError], None] | None,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(
            runner,
            scheduler,
            output,
            end_sequence=end_sequence,
            on_finished=on_finished,
            on_nodes_lost=on_nodes_lost,
            clock=clock,
        )
        self._device = runner
        self._in_flight: deque[LaunchedStep] = deque()
        if not runner.tokens_on_device:
            scheduler.use_pipeline(runner.depth)

    def run(self, plan: StepPlan, now_s: float) -> None:
        if self._in_flight and (self._suspects or self._device.needs_tokens(plan)):
            num_steps = len(self._in_flight)
            # A failed step is computed again, but those behind it are not: then the plan lacks
            # rows before its own, and is made anew.
            is_whole = self._complete_all() or num_steps == 1
            left = plan.still_running() if is_whole else None
            if left is None:
                return
            plan = left
        if self._suspects:
            super().run(plan, now_s)
            return
        try:
            pending = self._device.launch(plan, self._output.flush)
        except NodesLostError as error:
            self._take_back_lost(error)
            return
        except Exception as error:
            self._launch_failed(plan, error)
            return
        if pending.late:
            plan = self._without_late(plan, pending.late)
        self._in_flight.append(LaunchedStep(plan, pending, now_s))
        apply_launch(self._scheduler, plan)
        drafting = self._scheduler.drafting if self._device.tokens_on_device else None
        if drafting is not None and drafting.wants_tokens(plan):
            self.drain()
        elif len(self._in_flight) >= self._device.depth:
            self.complete_oldest()

    def complete_oldest(self) -> bool:
        if not self._in_flight:
            return False
        self._complete(self._in_flight.popleft())
        return True

    def drain(self) -> bool:
        had_steps = bool(self._in_flight)
        while self._in_flight:
            self.complete_oldest()
        return had_steps

    def abandon(self) -> None:
        while self._in_flight:
            self._discard(self._in_flight.popleft())

    def _complete_all(self) -> bool:
        """Completes the steps in flight up to one that fails; returns whether none has failed."""
        while self._in_flight:
            if not self._complete(self._in_flight.popleft()):
                return False
        return True

    def _complete(self, launched: LaunchedStep) -> bool:
        """Waits for the oldest step, updates the scheduler with its tokens and delivers them.
        Returns False if the step has failed."""
        plan = launched.plan
        try:
            result = self._wait(launched)
        except NodesLostError as error:
            self._in_flight.appendleft(launched)
            self._take_back_lost(error)
            return False
        except Exception as error:
            self._step_failed(plan, error)
            return False
        busy_since_s, is_pipeline = self._busy_since_s, not self._device.tokens_on_device
        now_s = self._record_time(
            plan,
            launched.began_s if busy_since_s is None else busy_since_s,
            launched.began_s if is_pipeline else None,
        )
        if is_pipeline and result.late:
            plan = take_back_late(self._scheduler, plan, result.late)
        plan, result = _without_ended(plan, result)
        self._apply(plan, result, now_s)
        return True

    def _wait(self, launched: LaunchedStep) -> StepResult:
        if self._device.tokens_on_device:
            return launched.pending.wait()
        with tokens_as_launched(launched.plan):
            return launched.pending.wait()

    def _launch_failed(self, plan: StepPlan, error: Exception) -> None:
        # A device may report a step's failure only when a later one is launched. Then its
        # completion fails too, and the next plan is made anew.
        if self._complete_all():
            self._find_fault(plan, error)

    def _isolate(self, plan: StepPlan, error: Exception) -> None:
        self._device.check()
        super()._isolate(plan, error)

    def _step_failed(self, plan: StepPlan, error: Exception) -> None:
        """Takes back a failed step, and those behind it, which have computed with its tokens or
        K/V."""
        later = [launched.plan for launched in self._in_flight]
        self.abandon()
        for behind in reversed(later):
            roll_back(self._scheduler, behind)
        roll_back(self._scheduler, plan)
        if self._has_states:
            self._preempt_behind(plan, later)
        self._find_fault(plan, error)

    def _preempt_behind(self, plan: StepPlan, later: list[StepPlan]) -> None:
        """Preempts the sequences of steps behind a failed one whose rows were taken back, but may
        have changed their states. Those of the failed step are its own matter."""
        self._preempt(s for behind in later for s in behind.sequences if s not in plan.sequences)

    def _take_back_lost(self, error: NodesLostError) -> None:
        """Takes back all steps in flight, whose K/V is lost with a rank of the pipeline."""
        assert self._on_nodes_lost is not None and not self._device.tokens_on_device
        while self._in_flight:
            roll_back(self._scheduler, self._in_flight.pop().plan)
        self._busy_since_s = None
        self._on_nodes_lost(error)

    def _find_fault(self, plan: StepPlan, error: Exception) -> None:
        """Runs the failed plan in parts, or first as a whole if the fault may be that of an earlier
        step in a pipeline. No step is in flight."""
        self._busy_since_s = None
        left = plan.still_running()
        if left is plan and self._device.tokens_on_device:
            self._isolate(plan, error)
        elif left is not None and self._has_states:  # its rows cannot be computed again
            self._device.check()
            clear_frames(error)
            self._suspect(left)
        elif left is not None:  # the sequence at fault may have ended since
            self._run(left)

    def _discard(self, launched: LaunchedStep) -> None:
        """Waits for a step whose result is dropped: the device may still use memory that is about
        to be freed."""
        try:
            self._wait(launched)
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

    on_nodes_lost is set where others hold K/V: memory nodes, which take one step at a time, or the
    ranks of a group.
    """
    if isinstance(runner, OverlappingRunner):
        assert on_nodes_lost is None or not runner.tokens_on_device, "nodes take one step at a time"
        return OverlappedExecutor(
            runner,
            scheduler,
            output,
            end_sequence=end_sequence,
            on_finished=on_finished,
            on_nodes_lost=on_nodes_lost,
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
