"""Updates of the scheduler for steps that overlap. Integers only: no torch, no asyncio.

A step is in flight from its launch until its tokens are known. The next step is planned meanwhile,
as if they were known: `apply_launch` counts the computed tokens at once and puts PENDING_TOKEN into
token_ids for each token to come; `Scheduler.update` replaces it and ends sequences. A length limit
is known by count alone. A stop token is seen one step late; the row that the sequence has in flight
by then is dropped, and counts in no metric, prefix cache or output.

Invariants: a sequence has rows in flight in at most two steps, and in one when the next step is
planned. While it has some, it runs with the range they were launched with, or it was preempted
since and is not admitted again, or it has ended. Pages that rows in flight read belong to the
sequence while it runs, so that those rows can be computed again.
"""

from __future__ import annotations

from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import PENDING_TOKEN, SequenceStatus
from serve.scheduler.step_plan import StepPlan


def apply_launch(scheduler: Scheduler, plan: StepPlan) -> None:
    """Counts the rows of a plan that has been launched."""
    contexts: list[int] = []
    for sequence, rows, sampled in zip(plan.sequences, plan.num_rows, plan.samples, strict=True):
        contexts.append(sequence.num_computed_tokens)
        sequence.num_computed_tokens += rows
        sequence.rows_in_flight += rows
        if sampled:
            sequence.token_ids.append(PENDING_TOKEN)
    plan.contexts = contexts
    scheduler.chunks_in_flight = plan.sequences[plan.num_decodes :]


def roll_back(scheduler: Scheduler, plan: StepPlan) -> None:
    """Undoes the launch of a step that failed. The last launched step is rolled back first."""
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
