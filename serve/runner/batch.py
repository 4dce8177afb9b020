"""Flattens a plan into the arrays that the runner and the attention seam need."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from memory.attention.seam import AttentionStep
from memory.policies.setting import OFF, KVPolicy, policy_of_request
from serve.scheduler.sequence import Sequence
from serve.scheduler.step_plan import StepPlan


@dataclass(slots=True)
class Batch:
    """The rows of one step. input_ids, positions: [T] int64, packed by sequence, decode rows first.

    sampled has the sequences that get a token, in row order, and sample_rows ([len(sampled)]
    int64) their last rows; a sequence with a draft is there once for each of its rows. attention is
    the K/V side of the step.
    """

    input_ids: Tensor
    positions: Tensor
    sampled: list[Sequence]
    sample_rows: Tensor
    attention: AttentionStep


def make_batch(plan: StepPlan, *, selects: bool = False) -> Batch:
    """Flattens a plan, all of whose sequences are running and have committed pages. selects:
    whether decoded tokens select what they read."""
    selected = selected_by(plan) if selects else ()
    input_ids: list[int] = []
    positions: list[int] = []
    starts: list[int] = []
    kv_lens: list[int] = []
    sampled: list[Sequence] = []
    sample_rows: list[int] = []
    num_decodes = plan.num_decodes if plan.num_drafted else 0
    planned = zip(plan.sequences, plan.num_rows, plan.samples, strict=True)
    for index, (sequence, rows, samples) in enumerate(planned):
        first = sequence.num_computed_tokens
        end = first + rows
        if rows == 1:
            input_ids.append(sequence.token_ids[first])
            positions.append(first)
        elif index < num_decodes:
            sample_rows.extend(range(len(input_ids), len(input_ids) + rows - 1))
            sampled.extend([sequence] * (rows - 1))
            input_ids.append(sequence.token_ids[first])
            input_ids.extend(sequence.draft_ids)
            positions.extend(range(first, end))
        else:
            input_ids.extend(sequence.token_ids[first:end])
            positions.extend(range(first, end))
        target = sequence.kv_range
        assert target is not None
        starts.append(target.start)
        kv_lens.append(end - target.dropped)
        if samples:
            sampled.append(sequence)
            sample_rows.append(len(input_ids) - 1)
    return Batch(
        input_ids=torch.tensor(input_ids, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        sampled=sampled,
        sample_rows=torch.tensor(sample_rows, dtype=torch.int64),
        attention=AttentionStep(plan.num_decodes, starts, plan.num_rows, kv_lens, *selected),
    )


def selected_by(plan: StepPlan) -> tuple[list[int], list[KVPolicy | None] | None]:
    """Returns how many of each sequence's first rows read everything, and by what budgets of their
    own the others select: AttentionStep.prompt_lens and its policies."""
    said = [s.request.params.kv_policy for s in plan.sequences]
    if not any(said):
        return [s.num_prompt_tokens for s in plan.sequences], None
    lengths = [
        s.max_tokens_total if policy == OFF else s.num_prompt_tokens
        for s, policy in zip(plan.sequences, said, strict=True)
    ]
    policies = [None if policy is None else policy_of_request(policy) for policy in said]
    return lengths, policies if any(policies) else None
