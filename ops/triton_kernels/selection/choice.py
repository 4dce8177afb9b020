"""The tiles with the largest scores, in the order of their positions.

The least order that is chosen is found bit by bit: counts of integers have one result however they
are added, there is no sort, and the work depends on sizes only, so that it fits a CUDA graph. Of
tiles with the same score at the edge, the newest are chosen.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_TILES = 32768  # of a sequence: so many numbers fit a program's registers
_ABSENT = tl.constexpr(-(2**31))


@triton.jit
def choose_kernel(
    choices,
    num_choices,
    orders,
    STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PAD: tl.constexpr,
):
    """Reads choices: [(row, tiles with bounds, how many of them are chosen, ...)] int32 (axis 0);
    replaces the orders of a row and K/V head (axis 1) by the numbers of the chosen tiles and, last,
    of the row's own, which follows those with bounds.

    The latency of 31 counts in one program is the bound; the orders stay in registers. No number is
    written before the last count, to which all threads contribute what they have read.
    """
    index, head = tl.program_id(0), tl.program_id(1)
    if index < tl.load(num_choices):
        choice = choices + index * 4
        row, count, wanted = tl.load(choice), tl.load(choice + 1), tl.load(choice + 2)
        at = orders + (row.to(tl.int64) * KV_HEADS + head) * STRIDE
        n = tl.arange(0, PAD)
        present = n < count
        order = tl.load(at + n, mask=present, other=_ABSENT)
        order = tl.where(present, tl.maximum(order, _ABSENT + 1), _ABSENT)
        enough = tl.sum((order >= 0).to(tl.int32), 0) >= wanted
        least = tl.where(enough, 0, _ABSENT)
        for i in range(31):
            higher = least + (1 << (30 - i))
            enough = tl.sum((order >= higher).to(tl.int32), 0) >= wanted
            least = tl.where(enough, higher, least)
        left_out = tl.sum((order >= least).to(tl.int32), 0) - wanted
        is_edge = (order == least).to(tl.int32)
        chosen = (order > least) | ((order == least) & (tl.cumsum(is_edge, 0) > left_out))
        slot = tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(at + slot, n, mask=chosen)
        tl.store(at + wanted, count)


def choose_tiles(choices: Tensor, num_choices: Tensor, orders: Tensor, most: int) -> None:
    """Replaces orders: [rows, Hk, tiles] int32 of at most `most` choices; see choose_kernel."""
    _, heads, stride = orders.shape
    assert stride <= MAX_TILES and orders.is_contiguous(), f"{orders.shape}"
    assert orders.dtype == choices.dtype == torch.int32 and choices.stride(0) == 4
    pad = triton.next_power_of_2(stride)
    if most:
        choose_kernel[(most, heads)](
            choices,
            num_choices,
            orders,
            STRIDE=stride,
            KV_HEADS=heads,
            PAD=pad,
            num_warps=num_warps(pad),
        )


def num_warps(pad: int) -> int:
    """Returns the warps of a program for so many orders: at least 16 orders in a thread."""
    return min(max(pad // 512, 1), 32)
