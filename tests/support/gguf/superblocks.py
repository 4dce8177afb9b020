"""Random weights in superblocks, and what they mean in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.backend import IQ4_VALUES
from ops.superblocks import SUPERBLOCK, SUPERBLOCK_KINDS, Superblocks


def random_superblocks(kind: str, num_out: int, num_in: int) -> Superblocks:
    """Returns weights of about 0.02, with all codes, steps and lifts that files may have."""
    bits, group, has_minimums, _ = SUPERBLOCK_KINDS[kind]
    blocks, groups = (num_out, num_in // SUPERBLOCK), (num_out, num_in // group)
    codes = torch.randint(0, 1 << bits, (num_out, num_in), dtype=torch.uint8)
    if not has_minimums:
        scales = (torch.rand(blocks) + 0.1) * 2e-5
        steps = torch.randint(-128, 128, groups, dtype=torch.int8)
        return Superblocks(kind, codes, scales.half(), steps)
    scales, minimums = (torch.rand(blocks) + 0.1) * 1e-4, torch.randn(blocks) * 5e-4
    steps = torch.randint(0, 64, groups, dtype=torch.int8)
    lifts = torch.randint(0, 64, groups, dtype=torch.uint8)
    return Superblocks(kind, codes, scales.half(), steps, minimums.half(), lifts)


def terms(weight: Superblocks) -> tuple[Tensor, Tensor | None]:
    """Returns the products of scales and codes, [out, in] float64, and what is subtracted."""
    bits, group, has_minimums, has_table = SUPERBLOCK_KINDS[weight.kind]

    def spread(halves: Tensor, factors: Tensor) -> Tensor:
        whole = halves.double().repeat_interleave(SUPERBLOCK // group, 1) * factors.double()
        return whole.repeat_interleave(group, 1)

    values = weight.codes.double() - (0 if has_minimums else 1 << bits - 1)
    if has_table:
        values = torch.tensor(IQ4_VALUES).double()[weight.codes.long()]
    scaled = values * spread(weight.scales, weight.steps)
    if weight.minimums is None or weight.lifts is None:
        return scaled, None
    return scaled, spread(weight.minimums, weight.lifts)


def dequantized(weight: Superblocks) -> Tensor:
    """Returns the weight, [out, in] float64."""
    scaled, minimums = terms(weight)
    return scaled if minimums is None else scaled - minimums


def magnitudes(weight: Superblocks) -> Tensor:
    """Returns the magnitudes of what a kernel adds for the weight, [out, in] float64."""
    scaled, minimums = terms(weight)
    return scaled.abs() if minimums is None else scaled.abs() + minimums.abs()
