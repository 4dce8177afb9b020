"""Pool 2's steps: a plan is computed, what it brings is taken in. One after the other."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from typing import Protocol

from memory.nodes.remote_attention import NodesLostError
from serve.engine.output_processor import StepRecord
from serve.engine.stats import StepCounters
from serve.engine.step_trace import StepTraces
from serve.engine.threads import OutputThread
from serve.request import FinishReason
from serve.runner.runner import Runner, StepResult
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence
from serve.scheduler.step_plan import StepPlan

logger = logging.getLogger(__name__)


class EndSequence(Protocol):
    def __call__(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """A sequence ends, and not with a step."""


class StepExecutor:
    """Runs plans. A step that fails ends only the sequences whose fault it is."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        output: OutputThread,
        *,
        end_sequence: EndSequence,
        on_finished: Callable[[list[Sequence]], None],
        on_nodes_lost: Callable[[NodesLostError], None] | None,
        clock: Callable[[], float],
    ) -> None:
        """on_finished: gets the sequences that ended with a step. on_nodes_lost: gets the error
        of a step during which memory nodes were lost."""
        self.counts = StepCounters()
        self.traces = StepTraces()
        self._runner = runner
        self._scheduler = scheduler
        self._output = output
        self._end_sequence = end_sequence
        self._on_finished = on_finished
        self._on_nodes_lost = on_nodes_lost
        self._clock = clock
        # Since when the loop has been busy with the next step; None: it was idle.
        self._busy_since_s: float | None = None

    def run(self, plan: StepPlan, now_s: float) -> None:
        """now_s: before the plan was made."""
        # From token to token: what lies between two steps counts too.
        self._run(plan, now_s if self._busy_since_s is None else self._busy_since_s)

    def drain(self) -> bool:
        """Take in what is in flight; whether anything was."""
        return False

    def abandon(self) -> None:
        """Wait for what is in flight, whatever it brings: everybody has been answered."""

    def pause(self) -> None:
        """Nothing is computed for a while: that belongs to no step."""
        self._busy_since_s = None
        self._output.flush()

    def _run(self, plan: StepPlan, began_s: float | None = None) -> None:
        """began_s: when its step began; None: a part of a step, whose time says nothing."""
        if any(sequence.kv_range is None for sequence in plan.sequences):
            return  # lost with its memory node, while a part of the step ran
        try:
            result = self._runner.run(plan, self._output.flush)
        except NodesLostError as error:
            assert self._on_nodes_lost is not None
            self._busy_since_s = None
            self._on_nodes_lost(error)
            return
        except Exception as error:
            self._busy_since_s = None
            self._isolate(plan, error)
            return
        now_s = self._ended(plan, began_s)
        if result.late:
            plan = plan.without_late(result.late)
        self._deliver(plan, result, self._scheduler.update(plan, result.tokens), now_s)

    def _ended(self, plan: StepPlan, began_s: float | None) -> float:
        """Its tokens are here: now."""
        now_s = self._clock()
        if began_s is not None:
            for trace in self.traces.open:
                trace.add(plan, self._scheduler, began_s, now_s)
            self.counts.seconds.observe(now_s - began_s)
            self._scheduler.observe(plan, now_s - began_s)
        self._busy_since_s = now_s
        return now_s

    def _deliver(
        self, plan: StepPlan, result: StepResult, finished: list[Sequence], now_s: float
    ) -> None:
        self.counts.add(plan, now_s)
        for part in result.prompts:
            part.take()
        if result.sampled or finished:
            self._output.add(
                StepRecord(result.sampled, result.tokens, result.logprobs, finished, now_s)
            )
        if finished:
            self._on_finished(finished)

    def _isolate(self, plan: StepPlan, error: Exception) -> None:
        """A step failed: find whose fault it is by halves. Rows are idempotent (they write the
        same K/V again), so those that are innocent simply run again."""
        forget_locals(error)
        if len(plan.sequences) == 1:
            sequence = plan.sequences[0]
            logger.error("a step of %s failed", sequence.request.request_id, exc_info=error)
            self._end_sequence(
                sequence, FinishReason.ERROR, f"{type(error).__name__} in the engine"
            )
            return
        middle = len(plan.sequences) // 2
        for part in (range(middle), range(middle, len(plan.sequences))):
            self._run(plan.subset(part))


def forget_locals(error: BaseException | None) -> None:
    """An error remembers the variables of every call it came through, and with them the memory of a
    step that had too little of it: whoever tries again needs that memory."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
