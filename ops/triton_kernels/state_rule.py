"""The recurrence of ops/states.py, row by row: a program holds a block of a head's state.

A program of one warp has all Dk rows of a few columns of the state in registers, so that sums over
Dk are sums within threads and a few shuffles, and no warp waits for another one. Reading and
writing the state is the bound of decode steps; for prompts it is the latency of a row, about a
thousand instructions on registers. What the next row needs is loaded meanwhile.

Every row is computed by the same instructions in the same order, so no bit of a row depends on
other rows, or on how the rows of its sequence are cut.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ops.states import Recurrence, StateSegments

UNIT_EPS = tl.constexpr(1e-6)
# Numbers of the state that a program, of one warp, holds.
_STATE_BLOCK = 2048


@triton.jit
def softplus(x):
    """Returns log(1 + exp(x)) with the relative precision of fp32, as the logarithm of a number
    near 1 would not have it: log(1 + e) = 2 artanh(e / (2 + e))."""
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)  # up to 1 / 3
    s2 = s * s
    series = 1.0 / 13 + s2 * (1.0 / 15)
    series = 1.0 / 9 + s2 * (1.0 / 11 + s2 * series)
    series = 1.0 / 5 + s2 * (1.0 / 7 + s2 * series)
    return tl.maximum(x, 0.0) + 2.0 * s * (1.0 + s2 * (1.0 / 3 + s2 * series))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(tl.minimum(-x, 88.0)))


@triton.jit
def rule_kernel(
    q_at, k_at, v_at, a_at, b_at, rates_at, bias_at, skip_at, states_at, out_at,
    firsts_at, sources_at, targets_at, sequences_at,
    q_stride, k_stride, v_stride, a_stride, b_stride, record_stride,
    scale, beta_scale, dt_min, dt_max, long_rows,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DK_PAD: tl.constexpr, BV: tl.constexpr, DELTA: tl.constexpr, UNIT: tl.constexpr,
    BY_DIM: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """Applies the rows of a sequence to BV columns of a head's state, segment by segment.

    BY_DIM: decay has a factor for each row of the state. Sequences of long_rows rows or more are
    left to another kernel.
    """
    states_at = tl.multiple_of(states_at.to(tl.pointer_type(tl.float32)), 16)
    head, sequence = tl.program_id(1), tl.program_id(2)
    d = tl.arange(0, DK_PAD)
    cols = tl.program_id(0) * BV + tl.arange(0, BV)
    is_dim, is_col = d < DK, cols < DV
    in_state = is_dim[:, None] & is_col[None, :]
    place = head * (DK * DV) + d[:, None] * DV + cols[None, :]
    key_head = head // (HEADS // KEY_HEADS)
    q_at += key_head * DK + d
    k_at += key_head * DK + d
    v_at += head * DV + cols
    out_at += head * DV + cols
    rate = tl.load(rates_at + head)
    if BY_DIM:
        a_at += head * DK + d
        bias = tl.load(bias_at + head * DK + d, mask=is_dim, other=0.0)
    else:
        a_at += head
        bias = tl.load(bias_at + head)
    if DELTA:
        b_at += head
    skip = 0.0
    if SKIP:
        skip = tl.load(skip_at + head)
    begin, stop = tl.load(sequences_at + sequence), tl.load(sequences_at + sequence + 1)
    if tl.load(firsts_at + stop) - tl.load(firsts_at + begin) >= long_rows:
        stop = begin
    for segment in range(begin, stop):
        first, end = tl.load(firsts_at + segment), tl.load(firsts_at + segment + 1)
        source, target = tl.load(sources_at + segment), tl.load(targets_at + segment)
        is_used = (source >= 0) & ((end > first) | (target >= 0))
        in_source = (d < tl.where(is_used, DK, 0))[:, None] & is_col[None, :]
        state = tl.load(states_at + source * record_stride + place, mask=in_source, other=0.0)
        is_row = first < end
        in_key, in_value = d < tl.where(is_row, DK, 0), cols < tl.where(is_row, DV, 0)
        q = tl.load(q_at + first * q_stride, mask=in_key, other=0.0)
        k = tl.load(k_at + first * k_stride, mask=in_key, other=0.0)
        v = tl.load(v_at + first * v_stride, mask=in_value, other=0.0)
        if BY_DIM:
            a = tl.load(a_at + first * a_stride, mask=in_key, other=0.0)
        else:
            a = tl.load(a_at + first * a_stride, mask=is_row, other=0.0)
        b = a
        if DELTA:
            b = tl.load(b_at + first * b_stride, mask=is_row, other=0.0)
        for row in range(first, end):
            # the operands of the next row
            after = row + 1
            is_row = after < end
            in_key, in_value = d < tl.where(is_row, DK, 0), cols < tl.where(is_row, DV, 0)
            next_q = tl.load(q_at + after * q_stride, mask=in_key, other=0.0)
            next_k = tl.load(k_at + after * k_stride, mask=in_key, other=0.0)
            next_v = tl.load(v_at + after * v_stride, mask=in_value, other=0.0)
            if BY_DIM:
                next_a = tl.load(a_at + after * a_stride, mask=in_key, other=0.0)
            else:
                next_a = tl.load(a_at + after * a_stride, mask=is_row, other=0.0)
            next_b = next_a
            if DELTA:
                next_b = tl.load(b_at + after * b_stride, mask=is_row, other=0.0)

            wide_q, wide_k, value = q.to(tl.float32), k.to(tl.float32), v.to(tl.float32)
            if UNIT:
                wide_q *= 1.0 / tl.sqrt(tl.sum(wide_q * wide_q, 0) + UNIT_EPS)
                wide_k *= 1.0 / tl.sqrt(tl.sum(wide_k * wide_k, 0) + UNIT_EPS)
            dt = tl.minimum(tl.maximum(softplus(a.to(tl.float32) + bias), dt_min), dt_max)
            decay = tl.exp(-rate * dt)
            if BY_DIM:
                state *= decay[:, None]
            else:
                state *= decay
            if DELTA:
                known = tl.sum(wide_k[:, None] * state, 0)
                added = sigmoid(b.to(tl.float32)) * beta_scale * (value - known)
            else:
                added = dt * value
            state += wide_k[:, None] * added[None, :]
            result = scale * tl.sum(wide_q[:, None] * state, 0)
            if SKIP:
                result += skip * value
            at = out_at + row * (HEADS * DV)
            tl.store(at, result.to(out_at.dtype.element_ty), mask=is_col)
            q, k, v, a, b = next_q, next_k, next_v, next_a, next_b
        if target >= 0:
            tl.store(states_at + target * record_stride + place, state, mask=in_state)
            tl.debug_barrier()  # the next segment may begin with it


def dense(x: Tensor) -> Tensor:
    """Returns x: [T, ...] with rows that are dense, as they are or copied."""
    stride = 1
    for dim in range(x.dim() - 1, 0, -1):
        if x.shape[dim] > 1 and x.stride(dim) != stride:
            return x.contiguous()
        stride *= x.shape[dim]
    return x


def apply_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor | None,
    rule: Recurrence,
    states: Tensor,
    segments: StateSegments,
    out: Tensor,
    long_rows: int,
) -> None:
    """Computes StateOps.linear_attention into out for sequences of less than long_rows rows in
    the step. The rows of each operand are dense."""
    _, heads, value_dim = v.shape
    _, key_heads, key_dim = q.shape
    pad = triton.next_power_of_2(key_dim)
    block = min(triton.next_power_of_2(value_dim), max(1, _STATE_BLOCK // pad))
    grid = (triton.cdiv(value_dim, block), heads, len(segments.sequences) - 1)
    rule_kernel[grid](
        q, k, v, a, b, rule.rates, rule.bias, rule.skip, states.data_ptr(), out, *segments,
        q.stride(0), k.stride(0), v.stride(0), a.stride(0),
        0 if b is None else b.stride(0), states.stride(0),
        rule.scale, rule.beta_scale, rule.dt_min, rule.dt_max, long_rows,
        HEADS=heads, KEY_HEADS=key_heads, DK=key_dim, DV=value_dim, DK_PAD=pad, BV=block,
        DELTA=rule.is_delta, UNIT=rule.has_unit_keys, BY_DIM=rule.bias.dim() == 2,
        SKIP=rule.skip is not None,
        num_warps=1,
    )  # fmt: skip
