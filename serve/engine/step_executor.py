"""Runs plans one step after the other: compute, update the scheduler, deliver to pool 3.

overlapped_executor.py is the variant for a device that computes beside the host.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from memory.evicting_kv import changes_with_rows
from memory.nodes.errors import NodesLostError
from memory.pages.lost_kv import KVLostError
from memory.prefix.cache import PrefixCache
from memory.prefix.lost_pages import drop_pages
from serve.engine.output_processor import StepRecord
from serve.engine.pools import OutputThread
from serve.engine.stats import StepCounters
from serve.engine.step_trace import StepTraces
from serve.errors import KV_LOST, WEIGHTS_LOST, WeightsLostError
from serve.request import FinishReason
from serve.runner.runner import Runner, StepResult
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence, SequenceStatus
from serve.scheduler.step_plan import StepPlan
from serve.scheduler.step_time import stage_seconds

logger = logging.getLogger(__name__)


class EndSequence(Protocol):
    def __call__(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """Ends a sequence outside a step's result."""


class StepExecutor:
    """Runs plans in the loop's thread. A step that fails ends only the sequences at fault."""

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
        """end_sequence: ends the sequence at fault for a failed step. on_finished: gets the
        sequences that a step has ended. on_nodes_lost: gets the error of a step during which
        memory nodes were lost."""
        self.counts = StepCounters()
        self.traces = StepTraces()
        self._runner = runner
        self._scheduler = scheduler
        self._output = output
        self._end_sequence = end_sequence
        self._on_finished = on_finished
        self._on_nodes_lost = on_nodes_lost
        self._clock = clock
        self._has_states = changes_with_rows(scheduler.kv)
        # Sequences of a step that failed -> the tokens they must have computed alone.
        self._suspects: dict[Sequence, int] = {}
        self._computed_again: set[Sequence] = set()  # as K/V on the disk was lost
        # When the previous step's tokens were there; None after a pause.
        self._busy_since_s: float | None = None

    def run(self, plan: StepPlan, now_s: float) -> None:
        """Runs a plan. now_s: when the loop began to make it."""
        if self._suspects:
            for part in self._apart(plan):
                self._run(part)
            return
        # A step's time runs from token to token, so it includes the work between two steps.
        self._run(plan, now_s if self._busy_since_s is None else self._busy_since_s)

    def complete_oldest(self) -> bool:
        """Completes the oldest step in flight; False if there was none."""
        return False

    def drain(self) -> bool:
        """Completes all steps in flight; False if there was none."""
        return False

    def abandon(self) -> None:
        """Waits for the steps in flight and drops their results: all requests have ended."""

    def pause(self) -> None:
        """Ends the timing of steps before the loop waits, because the wait belongs to no step, and
        flushes the output."""
        self._busy_since_s = None
        self._output.flush()

    def close(self) -> None:
        """Frees the device's memory, and what drafts have of it."""
        self._runner.close()
        if self._scheduler.drafting is not None:
            self._scheduler.drafting.close()

    def _run(self, plan: StepPlan, began_s: float | None = None) -> None:
        """began_s: when the step began; None for a part of a step, which is not timed."""
        if any(sequence.kv_range is None for sequence in plan.sequences):
            return  # another part of the step ran, and memory nodes were lost meanwhile
        try:
            result = self._runner.run(plan, self._output.flush)
        except NodesLostError as error:
            assert self._on_nodes_lost is not None
            self._busy_since_s = None
            self._on_nodes_lost(error)
            if self._has_states:  # the rows may have changed those of sequences on other nodes
                self._preempt(plan.sequences)
            return
        except Exception as error:
            self._busy_since_s = None
            self._isolate(plan, error)
            return
        now_s = self._record_time(plan, began_s)
        if result.late:
            plan = self._without_late(plan, result.late)
        self._apply(plan, result, now_s)

    def _apply(self, plan: StepPlan, result: StepResult, now_s: float) -> None:
        """Updates the scheduler with a step's tokens, and delivers them."""
        if result.counts is None:
            self._deliver(plan, result, self._scheduler.update(plan, result.tokens), now_s)
            return
        counts = [*result.counts]
        finished = self._scheduler.update(plan, result.tokens, counts)
        self._deliver(plan, result.cut_to(counts), finished, now_s)

    def _record_time(
        self, plan: StepPlan, began_s: float | None, made_s: float | None = None
    ) -> float:
        """Notes the time of a step whose tokens have just come; returns the time now. made_s: when
        the loop began to make it, if it has passed a pipeline since."""
        now_s = self._clock()
        if began_s is not None:
            for trace in self.traces.open:
                trace.add(plan, self._scheduler, began_s, now_s)
            seconds = now_s - began_s
            self.counts.seconds.observe(seconds)
            if made_s is not None:
                seconds = stage_seconds(seconds, now_s - made_s, self._scheduler.num_stages)
            self._scheduler.observe(plan, seconds)
        self._busy_since_s = now_s
        return now_s

    def _deliver(
        self, plan: StepPlan, result: StepResult, finished: list[Sequence], now_s: float
    ) -> None:
        """Counts a step and gives its tokens and the ended sequences to pool 3."""
        num_accepted = sum(result.counts) - len(result.counts) if result.counts else 0
        self.counts.add(plan, now_s, num_accepted)
        for part in result.prompts:
            part.take()
        for state in result.states:
            self._scheduler.policy.saw_state(*state)
        if result.sampled or finished:
            self._output.add(
                StepRecord(result.sampled, result.tokens, result.logprobs, finished, now_s)
            )
        if finished:
            self._on_finished(finished)

    def _isolate(self, plan: StepPlan, error: Exception) -> None:
        """Finds the sequence at fault for a failed step by running it again in halves. Rows are
        idempotent (they write the same K/V again), so the other sequences lose nothing. Rows that
        change states are not, so that in a model with states all sequences are preempted."""
        clear_frames(error)
        if len(plan.sequences) == 1:
            sequence = plan.sequences[0]
            if isinstance(error, KVLostError) and self._compute_again(sequence, error):
                return
            logger.error("a step of %s failed", sequence.request.request_id, exc_info=error)
            self._suspects.pop(sequence, None)
            self._end_sequence(sequence, FinishReason.ERROR, _reason(error))
            return
        if self._has_states:
            self._suspect(plan)
            return
        middle = len(plan.sequences) // 2
        for part in (range(middle), range(middle, len(plan.sequences))):
            self._run(plan.subset(part))

    def _compute_again(self, sequence: Sequence, error: KVLostError) -> bool:
        """Preempts a sequence some of whose K/V is lost, once, so that all of it is computed again;
        returns whether it did. None of its pages is found by other sequences any more."""
        self._drop_cached(sequence)
        again = {each for each in self._computed_again if not each.is_finished}
        self._computed_again = again
        if sequence in again:
            return False
        again.add(sequence)
        logger.warning("%s is computed again: %s", sequence.request.request_id, error)
        self._preempt([sequence])
        return True

    def _drop_cached(self, sequence: Sequence) -> None:
        prefixes, target = self._scheduler.kv.prefixes, sequence.kv_range
        if isinstance(prefixes, PrefixCache) and target is not None:
            to_copy = [source for part in target.parts for source, _ in part.copies]
            drop_pages(prefixes, [*target.pages, *to_copy])

    def _without_late(self, plan: StepPlan, late: Collection[Sequence]) -> StepPlan:
        """Returns what counts of a plan without sequences whose masks were late. Those of a model
        with states are preempted, as their rows have changed them."""
        if not self._has_states:
            return plan.without_late(late)
        self._preempt(late)
        return plan.subset(i for i, each in enumerate(plan.sequences) if each not in late)

    def _suspect(self, plan: StepPlan) -> None:
        """Preempts the sequences of a failed step, which may have changed the states of some of
        their layers. Until they are computed beyond its rows each runs in steps of its own, so
        that the one at fault fails alone."""
        for sequence, rows in zip(plan.sequences, plan.num_rows, strict=True):
            self._suspects[sequence] = sequence.num_computed_tokens + rows
        self._preempt(plan.sequences)

    def _preempt(self, sequences: Iterable[Sequence]) -> None:
        """Preempts those of the sequences that run."""
        held = {each.kv_range.start for each in sequences if each.kv_range is not None}
        self._scheduler.preempt_lost(lambda target: target.start in held)

    def _apart(self, plan: StepPlan) -> list[StepPlan]:
        """Returns a plan for each sequence under suspicion, and one for the others."""
        for sequence in list(self._suspects):
            is_over = sequence.status is SequenceStatus.FINISHED
            if is_over or sequence.num_computed_tokens >= self._suspects[sequence]:
                del self._suspects[sequence]
        alone = [i for i, each in enumerate(plan.sequences) if each in self._suspects]
        if not alone:
            return [plan]
        others = [i for i, each in enumerate(plan.sequences) if each not in self._suspects]
        return [plan.subset(part) for part in (*[[i] for i in alone], others) if part]


def _reason(error: Exception) -> str:
    """Returns what a client is told of a failed step."""
    if isinstance(error, WeightsLostError):
        return WEIGHTS_LOST
    return KV_LOST if isinstance(error, KVLostError) else f"{type(error).__name__} in the engine"


def clear_frames(error: BaseException | None) -> None:
    """Drops the local variables that an error's tracebacks keep alive. After a step that ran out
    of memory they hold the very memory that the next attempt needs."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
