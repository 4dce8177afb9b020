"""The recurrence of ops/states.py for prompts: 64 rows at a time, as products of matrices.

With S the state before a chunk, g the sum of its log decays up to a row, and u what a row adds to
the state beside its key, the outputs and the state afterwards are (Mamba-2's duality, arXiv
2405.21060; for the delta rule DeltaNet's form, arXiv 2406.06484, with decays as in 2412.06464)

    o[t] = scale (exp(g[t]) q[t]^T S + sum over i <= t of exp(g[t] - g[i]) (q[t] k[i]) u[i]^T)
    S'   = exp(g[63]) S + sum over i of exp(g[63] - g[i]) k[i] u[i]^T

u is dt v without the delta rule; with it (I + A) u = beta (v - exp(g) k^T S), where A[t, i] =
beta[t] exp(g[t] - g[i]) (k[t] k[i]) for i < t, 0 otherwise. One launch inverts I + A and multiplies
q and k for all chunks at once; another one goes from chunk to chunk with a block of the state.

Tensor cores multiply q and k as they are, in bf16, and fp32 numbers as sums of two bf16 numbers. No
exponent is above 0. Results differ from those row by row by less than 1e-4 of the largest output
(bf16 rounds by 40 times as much), but they do differ, so bits depend on where chunks begin: at the
first row of a segment and every 64 rows. Cuts at multiples of 64 rows change no bit, as long as the
sequence has LONG_ROWS rows in each step. Other sequences never do.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.states import Recurrence, StateSegments
from ops.triton_kernels.state_rule import UNIT_EPS, sigmoid, softplus
from ops.triton_kernels.tiles import as_operand

_IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
# A sequence with so many rows in a step is computed in chunks.
LONG_ROWS = 256
# Keys of more dims would not fit in shared memory.
MAX_KEY_DIM = 128
_CHUNK = tl.constexpr(64)
# Diagonal blocks of this size are inverted row by row, all at once.
_BLOCK = tl.constexpr(16)
# Columns of the state that a program holds; more would spill.
_VALUES = 16


# Numbers that differ from step to step must not be compiled into a kernel.
@triton.jit(do_not_specialize=["num_sequences", "num_slots"])
def plan_kernel(
    firsts_at, sequences_at, chunks_at, num_chunks_at, num_sequences, num_slots,
    long_rows, SEGMENTS: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """Lists the chunks of long sequences: chunks: [2, slots] int64, first rows and numbers of rows.

    One program looks at SEGMENTS segments and SEQUENCES sequences at a time.
    """
    lanes = tl.arange(0, SEGMENTS)
    total = tl.zeros((), tl.int64)
    num_segments = tl.load(sequences_at + num_sequences)  # without padding
    for start in range(0, num_segments, SEGMENTS):
        segment = start + lanes
        is_segment = segment < num_segments
        sequence = tl.zeros((SEGMENTS,), tl.int32)
        for other in range(0, num_sequences, SEQUENCES):
            place = other + tl.arange(0, SEQUENCES)
            ends = tl.load(sequences_at + place + 1, mask=place < num_sequences, other=num_segments)
            sequence += tl.sum((ends[:, None] <= segment[None, :]).to(tl.int32), 0)
        begin = tl.load(sequences_at + sequence, mask=is_segment, other=0)
        stop = tl.load(sequences_at + sequence + 1, mask=is_segment, other=0)
        rows = tl.load(firsts_at + stop) - tl.load(firsts_at + begin)
        first = tl.load(firsts_at + segment, mask=is_segment, other=0)
        own = tl.load(firsts_at + segment + 1, mask=is_segment, other=0) - first
        count = tl.where(is_segment & (rows >= long_rows), (own + _CHUNK - 1) // _CHUNK, 0)
        slot = total + tl.cumsum(count, 0) - count
        for i in range(0, tl.max(count, 0)):
            at = chunks_at + slot + i
            tl.store(at, first + i * _CHUNK, mask=i < count)
            tl.store(at + num_slots, tl.minimum(own - i * _CHUNK, _CHUNK), mask=i < count)
        total += tl.sum(count, 0)
    tl.store(num_chunks_at, total)


@triton.jit
def _rounded(x):
    """Returns x: fp32 as an operand of bf16, half to even. The interpreter would truncate, and it
    multiplies in fp32."""
    if _IS_INTERPRETED:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def _split(x):
    """Returns two operands of bf16 whose sum is x: fp32, but for a relative 2^-17."""
    high = _rounded(x)
    return high, _rounded(x - high.to(tl.float32))


@triton.jit
def _dot(x, y, total):
    """Returns total + x y for an operand x: bf16 and y: fp32."""
    high, low = _split(y)
    return tl.dot(x, high, tl.dot(x, low, total))


@triton.jit
def _wide_dot(x, y, total):
    """Returns total + x y for fp32."""
    x_high, x_low = _split(x)
    y_high, y_low = _split(y)
    total = tl.dot(x_low, y_high, total)
    return tl.dot(x_high, y_high, tl.dot(x_high, y_low, total))


@triton.jit
def _store_split(at, x, mask):
    """Stores x in two halves of the rows of 128 numbers at `at`."""
    high, low = _split(x)
    tl.store(at, high.to(tl.bfloat16), mask=mask)
    tl.store(at + _CHUNK, low.to(tl.bfloat16), mask=mask)


@triton.jit
def _dot_stored(at, y, total, mask):
    """Returns total + x y for x: [64, 64] as _store_split stores it, and y: fp32."""
    x_high = as_operand(tl.load(at, mask=mask, other=0.0), tl.bfloat16)
    x_low = as_operand(tl.load(at + _CHUNK, mask=mask, other=0.0), tl.bfloat16)
    y_high, y_low = _split(y)
    total = tl.dot(x_low, y_high, total)
    return tl.dot(x_high, y_high, tl.dot(x_high, y_low, total))


@triton.jit
def _inverse(a, t):
    """Returns the inverse of I + a, for a: [64, 64] below the diagonal.

    With X the inverse of its diagonal blocks and M = X times what is left of them, the inverse is
    the Y of Y = X - M Y, which three steps from X reach: M^4 is 0.
    """
    is_same = (t // _BLOCK)[:, None] == (t // _BLOCK)[None, :]
    inner = t % _BLOCK
    blocks = tl.where(is_same, a, 0.0)
    x = tl.where(t[:, None] == t[None, :], 1.0, 0.0)
    for i in range(1, _BLOCK):
        is_row = (inner == i)[:, None]
        factors = tl.sum(tl.where(is_row, blocks, 0.0), 0)  # row i of each block
        x -= tl.where(is_row & is_same, tl.sum(factors[:, None] * x, 0)[None, :], 0.0)
    m_high, m_low = _split(-_wide_dot(x, a - blocks, tl.zeros_like(a)))
    y = x
    for _ in range(3):
        high, low = _split(y)
        y = tl.dot(m_high, high, tl.dot(m_high, low, tl.dot(m_low, high, x)))
    return y


@triton.jit(do_not_specialize=["num_slots"])
def prepare_kernel(
    q_at, k_at, a_at, b_at, rates_at, bias_at, chunks_at, num_chunks_at,
    scores_at, inverses_at, factors_at,
    q_stride, k_stride, a_stride, b_stride, num_slots,
    scale, beta_scale, dt_min, dt_max,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DK: tl.constexpr, BK: tl.constexpr,
    DELTA: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Computes what a chunk's rows have to do with one another, for one head.

    scores: [T, H, 2, 64], factors of u in the outputs (of v, without the delta rule). inverses:
    [T, H, 2, 64], (I + A)^-1 beta; both as _split makes them. factors: [T, H, 4], those of q S,
    k S, and k in the new state, with the norms of q and k; and the decay of the whole chunk.
    """
    slot, head = tl.program_id(0), tl.program_id(1)
    if slot >= tl.load(num_chunks_at):
        return
    first, count = tl.load(chunks_at + slot), tl.load(chunks_at + num_slots + slot)
    t = tl.arange(0, _CHUNK)
    is_row = t < count
    row = first + t
    q_at += row[:, None] * q_stride + (head // (HEADS // KEY_HEADS)) * DK
    k_at += row[:, None] * k_stride + (head // (HEADS // KEY_HEADS)) * DK
    of_q, of_k = tl.zeros((_CHUNK,), tl.float32), tl.zeros((_CHUNK,), tl.float32)
    scores = tl.zeros((_CHUNK, _CHUNK), tl.float32)
    below = scores
    for start in range(0, DK, BK):
        d = (start + tl.arange(0, BK))[None, :]
        mask = is_row[:, None] & (d < DK)
        q, k = tl.load(q_at + d, mask=mask, other=0.0), tl.load(k_at + d, mask=mask, other=0.0)
        if UNIT:
            wide_q, wide_k = q.to(tl.float32), k.to(tl.float32)
            of_q += tl.sum(wide_q * wide_q, 1)
            of_k += tl.sum(wide_k * wide_k, 1)
        q, k = as_operand(q, tl.bfloat16), as_operand(k, tl.bfloat16)
        scores = tl.dot(q, tl.trans(k), scores)
        if DELTA:
            below = tl.dot(k, tl.trans(k), below)
    if UNIT:
        of_q, of_k = 1.0 / tl.sqrt(of_q + UNIT_EPS), 1.0 / tl.sqrt(of_k + UNIT_EPS)
    else:
        of_q, of_k = of_q + 1.0, of_k + 1.0
    a = tl.load(a_at + row * a_stride + head, mask=is_row, other=0.0).to(tl.float32)
    dt = softplus(a + tl.load(bias_at + head))
    dt = tl.where(is_row, tl.minimum(tl.maximum(dt, dt_min), dt_max), 0.0)
    # In fp64, since a row that forgets much must not round the small differences of others.
    logs = (-tl.load(rates_at + head) * dt).to(tl.float64)
    g, whole = tl.cumsum(logs, 0), tl.sum(logs, 0)
    decay = tl.exp(tl.minimum((g[:, None] - g[None, :]).to(tl.float32), 0.0))
    left = tl.exp(tl.minimum((whole - g).to(tl.float32), 0.0))
    so_far = tl.exp(g.to(tl.float32))
    decay *= of_k[None, :]

    at = (row * HEADS + head)[:, None] * (2 * _CHUNK) + t[None, :]
    scores *= decay * (of_q * scale)[:, None]
    scores = tl.where(t[:, None] >= t[None, :], scores, 0.0)
    if not DELTA:
        scores *= dt[None, :]
        left *= dt
    _store_split(scores_at + at, scores, is_row[:, None])
    if DELTA:
        b = tl.load(b_at + row * b_stride + head, mask=is_row, other=0.0).to(tl.float32)
        beta = tl.where(is_row, sigmoid(b) * beta_scale, 0.0)
        below *= decay * (of_k * beta)[:, None]
        inverse = _inverse(tl.where(t[:, None] > t[None, :], below, 0.0), t)
        _store_split(inverses_at + at, inverse * beta[None, :], is_row[:, None])
    at = factors_at + (row * HEADS + head) * 4
    tl.store(at, of_q * so_far * scale, mask=is_row)
    tl.store(at + 1, of_k * so_far, mask=is_row)
    tl.store(at + 2, of_k * left, mask=is_row)
    tl.store(at + 3, tl.zeros_like(left) + tl.exp(whole.to(tl.float32)), mask=is_row)


@triton.jit
def chunks_kernel(
    q_at, k_at, v_at, skip_at, scores_at, inverses_at, factors_at, states_at, out_at,
    firsts_at, sources_at, targets_at, sequences_at,
    q_stride, k_stride, v_stride, record_stride, long_rows,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    DK_PAD: tl.constexpr, BV: tl.constexpr, DELTA: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """Applies the chunks of a long sequence to BV columns of a head's state, one after another."""
    states_at = tl.multiple_of(states_at.to(tl.pointer_type(tl.float32)), 16)
    head, sequence = tl.program_id(1), tl.program_id(2)
    begin, stop = tl.load(sequences_at + sequence), tl.load(sequences_at + sequence + 1)
    if tl.load(firsts_at + stop) - tl.load(firsts_at + begin) < long_rows:
        return
    d = tl.arange(0, DK_PAD)
    t = tl.arange(0, _CHUNK)
    cols = tl.program_id(0) * BV + tl.arange(0, BV)
    is_dim, is_col = d < DK, cols < DV
    in_state = is_dim[:, None] & is_col[None, :]
    place = head * (DK * DV) + d[:, None] * DV + cols[None, :]
    key_place = (head // (HEADS // KEY_HEADS)) * DK + d[None, :]
    skip = 0.0
    if SKIP:
        skip = tl.load(skip_at + head)
    for segment in range(begin, stop):
        first, end = tl.load(firsts_at + segment), tl.load(firsts_at + segment + 1)
        source, target = tl.load(sources_at + segment), tl.load(targets_at + segment)
        in_source = (d < tl.where(source >= 0, DK, 0))[:, None] & is_col[None, :]
        state = tl.load(states_at + source * record_stride + place, mask=in_source, other=0.0)
        for start in range(first, end, _CHUNK):
            row = start + t
            is_row = row < end
            mask = is_row[:, None] & is_dim[None, :]
            in_value = is_row[:, None] & is_col[None, :]
            q = tl.load(q_at + row[:, None] * q_stride + key_place, mask=mask, other=0.0)
            k = tl.load(k_at + row[:, None] * k_stride + key_place, mask=mask, other=0.0)
            value_place = head * DV + cols[None, :]
            v = tl.load(v_at + row[:, None] * v_stride + value_place, mask=in_value, other=0.0)
            q, k, v = as_operand(q, tl.bfloat16), as_operand(k, tl.bfloat16), v.to(tl.float32)
            at = factors_at + (row * HEADS + head) * 4
            of_q = tl.load(at, mask=is_row, other=0.0)
            of_k = tl.load(at + 1, mask=is_row, other=0.0)
            of_new = tl.load(at + 2, mask=is_row, other=0.0)
            decay = tl.load(factors_at + (start * HEADS + head) * 4 + 3)
            at = (row * HEADS + head)[:, None] * (2 * _CHUNK) + t[None, :]
            zeros = tl.zeros_like(v)
            added = v
            if DELTA:
                new = v - of_k[:, None] * _dot(k, state, zeros)
                added = _dot_stored(inverses_at + at, new, zeros, is_row[:, None])
            result = of_q[:, None] * _dot(q, state, zeros)
            result = _dot_stored(scores_at + at, added, result, is_row[:, None])
            if SKIP:
                result += skip * v
            out = out_at + row[:, None] * (HEADS * DV) + value_place
            tl.store(out, result.to(out_at.dtype.element_ty), mask=in_value)
            state = _dot(tl.trans(k), of_new[:, None] * added, decay * state)
        if target >= 0:
            tl.store(states_at + target * record_stride + place, state, mask=in_state)
            tl.debug_barrier()  # the next segment may begin with it


def apply_chunks(
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
    """Computes StateOps.linear_attention into out for sequences of long_rows rows or more in the
    step. The rows of each operand are dense; a head has one decay for all dims."""
    rows, heads, value_dim = v.shape
    _, key_heads, key_dim = q.shape
    pad = max(16, triton.next_power_of_2(key_dim))
    num_segments, num_sequences = len(segments.sources), len(segments.sequences) - 1
    # No segments have more chunks. The launch cannot depend on where they are.
    num_slots = rows // _CHUNK.value + num_segments
    chunks = torch.empty(2 * num_slots + 1, dtype=torch.int64, device=v.device)
    plan_kernel[(1,)](
        segments.firsts, segments.sequences, chunks, chunks[-1:], num_sequences, num_slots,
        long_rows,
        SEGMENTS=min(256, triton.next_power_of_2(num_segments)), SEQUENCES=16,
    )  # fmt: skip
    scores = torch.empty(rows, heads, 2, _CHUNK.value, dtype=torch.bfloat16, device=v.device)
    inverses = torch.empty_like(scores) if rule.is_delta else scores
    factors = torch.empty(rows, heads, 4, device=v.device)
    shared = {"HEADS": heads, "KEY_HEADS": key_heads, "DK": key_dim}
    prepare_kernel[(num_slots, heads)](
        q, k, a, b, rule.rates, rule.bias, chunks, chunks[-1:], scores, inverses, factors,
        q.stride(0), k.stride(0), a.stride(0), 0 if b is None else b.stride(0), num_slots,
        rule.scale, rule.beta_scale, rule.dt_min, rule.dt_max,
        BK=min(32, pad), DELTA=rule.is_delta, UNIT=rule.has_unit_keys, **shared,
        num_warps=8,
    )  # fmt: skip
    chunks_kernel[(triton.cdiv(value_dim, _VALUES), heads, num_sequences)](
        q, k, v, rule.skip, scores, inverses, factors, states.data_ptr(), out, *segments,
        q.stride(0), k.stride(0), v.stride(0), states.stride(0), long_rows,
        DK_PAD=pad, DV=value_dim, BV=_VALUES,
        DELTA=rule.is_delta, SKIP=rule.skip is not None, **shared,
        num_warps=4, num_stages=2,
    )  # fmt: skip
