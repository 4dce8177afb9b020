"""What the scheduler decides for one step, and the bounds it keeps."""

from __future__ import annotations

from dataclasses import dataclass

from serve.scheduler.sequence import Sequence, SequenceStatus


@dataclass(slots=True)
class StepPlan:
    """The rows of one step: sequences in row order, those with one row first.

    num_rows[i] rows of sequences[i]; num_decodes: how many have exactly one. samples[i]: the
    step brings the sequence up to date, so a token is sampled from its last row, unless it ends
    with its prompt. contexts[i]:
    computed tokens before it, noted when the step is in flight; None before.
    """

    sequences: list[Sequence]
    num_rows: list[int]
    num_decodes: int
    samples: list[bool]
    num_total_rows: int
    contexts: list[int] | None = None


def plan_of(
    decodes: list[Sequence], chunks: list[tuple[Sequence, int]], num_certain: int = 0
) -> StepPlan | None:
    """Of those that still run, with one row and with more (how many). num_certain: of decodes,
    the first ones, that run and are sampled."""
    # A sequence planned early in the loop may have been preempted by a later one.
    running = SequenceStatus.RUNNING
    sequences = decodes
    if num_certain < len(decodes):
        sequences = decodes[:num_certain]
        sequences += [s for s in decodes[num_certain:] if s.status is running]
    num_decodes = len(sequences)
    num_rows = [1] * num_decodes
    for sequence, rows in chunks:
        if sequence.status is running:
            sequences.append(sequence)
            num_rows.append(rows)
    if not sequences:
        return None
    num_certain = min(num_certain, num_decodes)
    samples = [True] * num_certain
    for place in range(num_certain, len(sequences)):
        sequence = sequences[place]
        num_known = sequence.num_computed_tokens + num_rows[place]
        num_tokens = len(sequence.token_ids)
        samples.append(num_known == num_tokens < sequence.max_tokens_total)
    num_prompt_rows = sum(num_rows[num_decodes:])
    return StepPlan(sequences, num_rows, num_decodes, samples, num_decodes + num_prompt_rows)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """max_num_seqs run at once; a step has at most max_num_batched_tokens rows, of which one
    sequence gets at most max_chunk_tokens. While somebody decodes, prompt rows are as many as
    keep the step within inter_token_slo_s."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_chunk_tokens: int
    inter_token_slo_s: float | None = None
