"""What the scheduler decides for one step, and the bounds it keeps."""

from __future__ import annotations

from dataclasses import dataclass

from serve.sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class StepPlan:
    """The rows of one step: sequences in row order, those with one row first.

    num_rows[i] rows of sequences[i]; num_decodes: how many have exactly one. samples[i]: the
    step brings the sequence up to date, so a token is sampled from its last row. contexts[i]:
    computed tokens before it, noted when the step is in flight; None before.
    """

    sequences: list[Sequence]
    num_rows: list[int]
    num_decodes: int
    samples: list[bool]
    num_total_rows: int
    contexts: list[int] | None = None


def plan_of(decodes: list[Sequence], chunks: list[tuple[Sequence, int]]) -> StepPlan | None:
    """Of those that still run, with one row and with more (how many)."""
    # A sequence planned early in the loop may have been preempted by a later one.
    running = SequenceStatus.RUNNING
    sequences = [s for s in decodes if s.status is running]
    num_decodes = len(sequences)
    num_rows = [1] * num_decodes
    for sequence, rows in chunks:
        if sequence.status is running:
            sequences.append(sequence)
            num_rows.append(rows)
    if not sequences:
        return None
    samples = [
        s.num_computed_tokens + rows == len(s.token_ids)
        for s, rows in zip(sequences, num_rows, strict=True)
    ]
    return StepPlan(sequences, num_rows, num_decodes, samples, sum(num_rows))


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """max_num_seqs run at once; a step has at most max_num_batched_tokens rows, of which one
    sequence gets at most max_chunk_tokens. While somebody decodes, prompt rows are as many as
    keep the step within inter_token_slo_s."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_chunk_tokens: int
    inter_token_slo_s: float | None = None
