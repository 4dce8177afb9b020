"""The causal convolution over a state of inputs, and the gated norm after a recurrence.

Memory is the bound of both: a value is read (the convolution's inputs again from L1, once for each
tap) and written once, with about 20 instructions between. Sums of a value are in one order, so no
bit depends on other rows, or on how the rows of a sequence are cut.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ops.states import StateSegments
from ops.triton_kernels.rows import ACTIVATIONS, activate

# Rows and channels of a program's tile.
_TILE_ROWS = 16
_TILE_CHANNELS = 64
# A sequence's rows are divided among programs if the step has more than so many.
_ROWS_OF_A_PROGRAM = 1024
# Groups of a row are normalized by one program up to so many values.
_NORM_BLOCK = 4096
_GATES = {"silu": 1, "sigmoid": 2}


@triton.jit
def conv_kernel(
    x_at, weight_at, bias_at, states_at, out_at, firsts_at, sources_at, targets_at, sequences_at,
    x_stride, record_stride, num_channels,
    WIDTH: tl.constexpr, ACT: tl.constexpr, BIAS: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Computes BC channels of a sequence: program 0 of axis 2 the first tile of each segment and
    the states, the others their share of further tiles, which read no state.

    So one program alone reads and writes a state. TAPS: WIDTH - 1 as a power of two.
    """
    states_at = tl.multiple_of(states_at.to(tl.pointer_type(tl.float32)), 16)
    sequence, part = tl.program_id(1), tl.program_id(2)
    channels = tl.program_id(0) * BC + tl.arange(0, BC)
    is_channel = channels < num_channels
    kept = tl.arange(0, TAPS)
    dtype: tl.constexpr = out_at.dtype.element_ty
    for segment in range(tl.load(sequences_at + sequence), tl.load(sequences_at + sequence + 1)):
        first = tl.load(firsts_at + segment)
        rows = tl.load(firsts_at + segment + 1) - first
        source, target = tl.load(sources_at + segment), tl.load(targets_at + segment)
        known = tl.where(source >= 0, 0, -WIDTH)  # the record has rows before this one
        before_at = states_at + source * record_stride + channels[None, :]
        for start in range(part * BT, rows, BT * tl.num_programs(2)):
            t = start + tl.arange(0, BT)
            total = tl.zeros((BT, BC), tl.float32)
            for i in tl.static_range(WIDTH):
                tap = (t + (i - WIDTH + 1))[:, None]  # the row in the segment
                here = is_channel[None, :] & (t < rows)[:, None]
                inputs = x_at + (first + tap) * x_stride + channels[None, :]
                value = tl.load(inputs, mask=here & (tap >= 0), other=0.0).to(tl.float32)
                earlier = before_at + (tap + (WIDTH - 1)) * num_channels
                value += tl.load(earlier, mask=here & (tap < known), other=0.0)
                factor = tl.load(weight_at + channels * WIDTH + i, mask=is_channel, other=0.0)
                total += factor[None, :] * value
            if BIAS:
                total += tl.load(bias_at + channels, mask=is_channel, other=0.0)[None, :]
            total = activate(total, ACT)
            at = out_at + (first + t)[:, None] * num_channels + channels[None, :]
            tl.store(at, total.to(dtype), mask=is_channel[None, :] & (t < rows)[:, None])
        if (part == 0) & (target >= 0):
            tap = (rows - (WIDTH - 1) + kept)[:, None]
            here = is_channel[None, :] & (kept < WIDTH - 1)[:, None]
            inputs = x_at + (first + tap) * x_stride + channels[None, :]
            value = tl.load(inputs, mask=here & (tap >= 0), other=0.0).to(tl.float32)
            earlier = before_at + (tap + (WIDTH - 1)) * num_channels
            value += tl.load(earlier, mask=here & (tap < known), other=0.0)
            # The record may be the source, of which other threads have read other inputs.
            tl.debug_barrier()
            after = states_at + target * record_stride + channels[None, :]
            tl.store(after + kept[:, None] * num_channels, value, mask=here)
            tl.debug_barrier()  # the next segment may begin with it


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    states: Tensor,
    segments: StateSegments,
) -> Tensor:
    """Computes StateOps.causal_conv."""
    rows, channels = x.shape
    width = weight.shape[1]
    if activation not in (None, "silu"):
        raise ValueError(f"unknown activation {activation!r} of a convolution")
    assert states.shape[1:] == (width - 1, channels), f"{states.shape} for {weight.shape}"
    assert states[0].is_contiguous(), f"records of strides {states.stride()}"
    assert states.data_ptr() % 16 == 0, "kernels are compiled for such addresses"
    x = x if x.stride(1) == 1 else x.contiguous()
    out = x.new_empty(rows, channels)
    num_sequences = len(segments.sequences) - 1
    if not num_sequences or not channels:
        return out
    parts = max(1, -(-rows // _ROWS_OF_A_PROGRAM))
    tile_rows = min(_TILE_ROWS, triton.next_power_of_2(max(1, rows)))
    conv_kernel[(triton.cdiv(channels, _TILE_CHANNELS), num_sequences, parts)](
        x, weight.contiguous(), bias, states.data_ptr(), out, *segments,
        x.stride(0), states.stride(0), channels,
        WIDTH=width, ACT=ACTIVATIONS[activation], BIAS=bias is not None,
        BT=tile_rows, BC=_TILE_CHANNELS, TAPS=triton.next_power_of_2(width - 1),
        num_warps=4,
        enable_fp_fusion=False,  # the number of rows chooses the tile, but no bit
    )  # fmt: skip
    return out


@triton.jit
def gated_norm_kernel(
    x_at, gate_at, weight_at, out_at, x_stride, gate_stride, n, group, eps,
    SIGMOID: tl.constexpr, NORM: tl.constexpr, FIRST: tl.constexpr,
    GROUPS: tl.constexpr, GROUP_PAD: tl.constexpr,
):  # fmt: skip
    """Computes GROUPS groups of a row. NORM: 0 for the product with the gate alone."""
    row = tl.program_id(0).to(tl.int64)
    groups = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[:, None]
    inner = tl.arange(0, GROUP_PAD)[None, :]
    cols = groups * group + inner
    mask = (inner < group) & (cols < n)
    x = tl.load(x_at + row * x_stride + cols, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_at + row * gate_stride + cols, mask=mask, other=0.0).to(tl.float32)
    opening = 1.0 / (1.0 + tl.exp(tl.minimum(-gate, 88.0)))
    if not SIGMOID:
        opening *= gate
    if FIRST or not NORM:
        x *= opening
    if NORM:
        inverse = 1.0 / tl.sqrt(tl.sum(x * x, 1) / group + eps)
        x = x * inverse[:, None] * tl.load(weight_at + cols, mask=mask, other=0.0)
        if not FIRST:
            x *= opening
    tl.store(out_at + row * n + cols, x.to(out_at.dtype.element_ty), mask=mask)


def gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    group: int,
    activation: str,
    gates_first: bool = False,
) -> Tensor:
    """Computes StateOps.gated_norm."""
    rows, n = x.shape
    if activation not in _GATES:
        raise ValueError(f"unknown activation {activation!r} of a gate")
    assert gate.shape == x.shape and n % group == 0, f"{x.shape}, {gate.shape}, {group=}"
    x, gate = (each if each.stride(1) == 1 else each.contiguous() for each in (x, gate))
    out = x.new_empty(rows, n)
    if not rows or not n:
        return out
    pad = triton.next_power_of_2(group)
    groups = min(triton.next_power_of_2(n // group), max(1, _NORM_BLOCK // pad))
    gated_norm_kernel[(rows, triton.cdiv(n // group, groups))](
        x, gate, weight, out, x.stride(0), gate.stride(0), n, group, eps,
        SIGMOID=activation == "sigmoid", NORM=weight is not None, FIRST=gates_first,
        GROUPS=groups, GROUP_PAD=pad,
        num_warps=max(1, min(16, groups * pad // 512)),
    )  # fmt: skip
    return out
