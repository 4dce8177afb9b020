"""Packs a step's rows for the device, in one int64 block of pinned memory that is copied at once.

The block is [4, padded rows]: tokens (a negative one stands for the last token that was sampled
for the slot), positions, slots, and the rows that are sampled, in the plan's order. A slot is the
index of a range, where the device keeps the sequence's last sampled token.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from serve.scheduler.step_plan import StepPlan

NUM_FIELDS = 4
_ITEM_BYTES = 8


def block_bytes(max_rows: int) -> int:
    """Returns the bytes of the block of a step with max_rows rows."""
    return NUM_FIELDS * max_rows * _ITEM_BYTES


def fill(pinned: Tensor, plan: StepPlan, padded_rows: int) -> None:
    """Writes the plan to the block's first block_bytes(padded_rows) bytes. Padding rows have token
    0 at position 0 of slot 0; their results are not used."""
    size_bytes = block_bytes(padded_rows)
    block: npt.NDArray[np.int64] = pinned[:size_bytes].numpy().view(np.int64)
    tokens, positions, slots, sampled = block.reshape(NUM_FIELDS, padded_rows)
    # of the sequences that decode, those with a draft come last
    num_decodes = plan.num_decodes
    if plan.num_drafted:
        num_decodes = sum([rows == 1 for rows in plan.num_rows[:num_decodes]])
    decodes = plan.sequences[:num_decodes]
    tokens[:num_decodes] = [s.token_ids[s.num_computed_tokens] for s in decodes]
    positions[:num_decodes] = [s.num_computed_tokens for s in decodes]
    slots[:num_decodes] = [s.kv_range.index for s in decodes]  # type: ignore[union-attr]
    row = num_decodes
    for index in range(num_decodes, len(plan.sequences)):
        sequence, rows = plan.sequences[index], plan.num_rows[index]
        first = sequence.num_computed_tokens
        known = sequence.token_ids[first : first + rows]
        tokens[row : row + rows] = known + sequence.draft_ids[: rows - len(known)]
        positions[row : row + rows] = np.arange(first, first + rows)
        slots[row : row + rows] = sequence.kv_range.index  # type: ignore[union-attr]
        row += rows
    block.reshape(NUM_FIELDS, padded_rows)[:3, row:] = 0
    ends = np.cumsum(plan.num_rows)
    sample_rows = ends[np.asarray(plan.samples, dtype=bool)] - 1
    if plan.num_drafted:
        sample_rows = np.array(_drafted_sample_rows(plan, ends.tolist()))
    sampled[: len(sample_rows)] = sample_rows
    sampled[len(sample_rows) :] = 0


def _drafted_sample_rows(plan: StepPlan, ends: list[int]) -> list[int]:
    """Returns the sampled rows of a plan with drafts: all rows of those that decode."""
    rows: list[int] = []
    for index, (end, samples) in enumerate(zip(ends, plan.samples, strict=True)):
        if samples:
            rows.extend(range(end - plan.num_sampled(index), end))
    return rows


def fields(device_block: Tensor, padded_rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns views of the block on the device (uint8): tokens, positions, slots and sampled rows,
    each [padded_rows] int64."""
    block = device_block[: block_bytes(padded_rows)].view(torch.int64)
    tokens, positions, slots, sampled = block.view(NUM_FIELDS, padded_rows).unbind(0)
    return tokens, positions, slots, sampled
