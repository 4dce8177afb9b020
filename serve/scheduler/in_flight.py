"""The scheduler's books while steps are in flight. Integers only: no torch, no asyncio.

A step is in flight from its launch until its tokens are known. Meanwhile the next one is made as
if they were: computed tokens count at once (`apply_launch`), and a token that is not known yet
has its index in token_ids, as PENDING_TOKEN. `apply_result` puts the tokens there and sees who
ends. Length limits are known by count alone; a stop token is seen one step late, and the row that
the sequence has in flight by then is nobody's: it is in no counter, no page of the prefix cache,
no output.

+--------------------------------------------------------------------------------------+
| invariants: a sequence has rows in flight in at most two steps, and only in one when  |
| the next is made; while it has some it is running with the range that they were       |
| launched with, or was preempted since and is not admitted, or has ended; pages that    |
| rows in flight read stay its own while it runs, so those rows can be computed again.   |
+--------------------------------------------------------------------------------------+
"""

from __future__ import annotations

from serve.request import FinishReason
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import PENDING_TOKEN, Sequence, SequenceStatus, finish_reason_after
from serve.scheduler.step_plan import StepPlan


def apply_launch(scheduler: Scheduler, plan: StepPlan) -> None:
    """The plan has been launched: from now on its rows count."""
    contexts: list[int] = []
    for sequence, rows, sampled in zip(plan.sequences, plan.num_rows, plan.samples, strict=True):
        contexts.append(sequence.num_computed_tokens)
        sequence.num_computed_tokens += rows
        sequence.rows_in_flight += rows
        if sampled:
            sequence.token_ids.append(PENDING_TOKEN)
    plan.contexts = contexts
    scheduler.chunks_in_flight = plan.sequences[plan.num_decodes :]


def apply_result(scheduler: Scheduler, plan: StepPlan, tokens: list[int]) -> list[Sequence]:
    """Take in a launched step's result, as Scheduler.update does for one that is not. The plan
    has no finished sequences (StepPlan.unfinished). The steps are applied in their order."""
    assert plan.contexts is not None
    finished: list[Sequence] = []
    next_token = iter(tokens)
    for sequence, rows, sampled, context in zip(
        plan.sequences, plan.num_rows, plan.samples, plan.contexts, strict=True
    ):
        sequence.rows_in_flight -= rows
        end = context + rows
        if end >= sequence.next_cacheable_at:
            scheduler.prefixes.insert(sequence, end)
        if not sampled:
            if end >= sequence.max_tokens_total:  # it has no answer
                scheduler.finish(sequence, FinishReason.LENGTH)
                finished.append(sequence)
            continue
        token = next(next_token)
        sequence.token_ids[end] = token
        reason = finish_reason_after(sequence, token, end + 1)
        if reason is not None:
            scheduler.finish(sequence, reason)
            finished.append(sequence)
    return finished


def roll_back(scheduler: Scheduler, plan: StepPlan) -> None:
    """A launched step has failed: as if it had never been. The last one in flight goes first."""
    assert plan.contexts is not None
    for index in plan.unfinished():
        sequence = plan.sequences[index]
        sequence.rows_in_flight -= plan.num_rows[index]
        sequence.recheck_at = 0
        if sequence.status is SequenceStatus.RUNNING:
            sequence.num_computed_tokens = plan.contexts[index]
        if plan.samples[index]:
            scheduler.truncate(sequence, plan.contexts[index] + plan.num_rows[index])
    plan.contexts = None
