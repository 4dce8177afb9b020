"""Updates of the scheduler for steps that overlap. Integers only: no torch, no asyncio.

A step is in flight from its launch until its tokens are known. Later steps are planned meanwhile,
as if they were known: `apply_launch` counts the computed tokens at once and puts PENDING_TOKEN into
token_ids for each token to come; `Scheduler.update` replaces it and ends sequences. A length limit
is known by count alone.

What is planned depends on where a pending token is known (OverlappingRunner in
serve/runner/runner.py):
- The device does: the sequence is planned on. A stop token is seen late; the rows that the
  sequence has in flight by then are dropped, and count in no metric, prefix cache or output.
- A pipeline, whose last stage samples: the sequence is skipped until its token has come, so it has
  rows in one step, and nothing is dropped after a stop token. The tokens of a prompt are known, so
  its chunks follow each other in as many steps as are in flight.

Invariants: of `depth` steps in flight, one fewer when the next step is planned, each may have rows
of a sequence. While it has some, it runs with the range they were launched with, or it was
preempted since and is not admitted again, or it has ended. Pages that rows in flight read belong to
the sequence while it runs, so that those rows can be computed again. Steps end in the order of
their launch, and are rolled back in the opposite order.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import PENDING_TOKEN, Sequence, SequenceStatus
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
    scheduler.launched.append(plan)
    if scheduler.num_stages > 1:
        for sequence in plan.sequences:
            sequence.last_step = scheduler.num_steps


def roll_back(scheduler: Scheduler, plan: StepPlan) -> None:
    """Undoes the launch of a step that failed. The last launched step is rolled back first."""
    assert plan.contexts is not None
    last = scheduler.launched.pop()
    assert last is plan, "steps are rolled back in the opposite order of their launch"
    for index in plan.unfinished():
        sequence = plan.sequences[index]
        sequence.rows_in_flight -= plan.num_rows[index]
        sequence.recheck_at = 0
        if sequence.status is SequenceStatus.RUNNING:
            sequence.num_computed_tokens = plan.contexts[index]
        if plan.samples[index]:
            scheduler.truncate(sequence, plan.num_known(index))
    plan.contexts = None


def take_back_late(scheduler: Scheduler, plan: StepPlan, late: Collection[Sequence]) -> StepPlan:
    """Takes back the rows of a pipeline's step that were to be sampled for `late`, whose masks were
    not ready. Returns what counts of the plan."""
    assert plan.contexts is not None
    for index in plan.unfinished():
        sequence = plan.sequences[index]
        if sequence in late:
            num_rows = plan.num_sampled(index)
            sequence.rows_in_flight -= num_rows
            sequence.recheck_at = 0
            if sequence.status is SequenceStatus.RUNNING:
                sequence.num_computed_tokens -= num_rows
            scheduler.truncate(sequence, plan.num_known(index))
    return plan.without_late(late)


@contextmanager
def tokens_as_launched(plan: StepPlan) -> Iterator[None]:
    """Hides the pending tokens of a pipeline's step while it is sampled. A sequence has none of
    another step."""
    pairs = zip(plan.sequences, plan.samples, strict=True)
    hidden = [s for s, samples in pairs if samples and s.token_ids[-1] == PENDING_TOKEN]
    for sequence in hidden:
        del sequence.token_ids[-1]
    try:
        yield
    finally:
        for sequence in hidden:
            sequence.token_ids.append(PENDING_TOKEN)
