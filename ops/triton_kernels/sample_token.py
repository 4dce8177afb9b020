"""Sampling a token of a row on a GPU: top-k and top-p without sorting, then inversion.

One program computes a row. Its candidates, all tokens that top-k and top-p may keep, are a list of
gather_kernel, or the row itself if they are too many. The threshold is found by a search over the
logits' bits as integers of the same order, with three pivots per pass. Descending order is by
scaled logit, ties by token id, as in ops/csrc/sampling.inl; the same tokens are kept.

The cumulative distribution is in the order of token ids. With top-k or top-p the CPU uses
descending order, so the same seed may sample another of the same tokens there.

A search takes 8 to 16 passes over the candidates, about 1 us each for up to `block` of them. If
more than `capacity` logits are as near to the largest as the threshold (flat distributions), each
pass reads the row from the L2 cache: some 30 us for 128k logits, so half a millisecond for that
step.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from ops.triton_kernels.sampling import (
    INFINITY,
    POSITION,
    SEED,
    TEMPERATURE,
    TOP_P,
    bracket,
    edge_of,
    emit,
    is_finite,
    least_of,
    long,
    real,
    share_of,
    top_k_of,
    top_of,
    weigh,
)

_NOTHING = tl.constexpr(-(1 << 31))
_NO_TOKEN = tl.constexpr((1 << 31) - 1)


@triton.jit
def _mix(x):
    x = x + 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def uniform(plan, row):
    """Returns a float64 in [0, 1): splitmix64 of (seed, position), as serve/runner/sampler.py."""
    seed = long(plan, row, SEED).to(tl.uint64, bitcast=True)
    position = long(plan, row, POSITION).to(tl.uint64, bitcast=True)
    mixed = _mix(_mix(seed) ^ (position * 0x9E3779B97F4A7C15))
    return (mixed >> 11).to(tl.int64).to(tl.float64) * (1.0 / 9007199254740992.0)


@triton.jit
def key_of(scaled):
    """Returns an int32 with the order of fp32; -0 maps to 0."""
    bits = tl.where(scaled == 0.0, 0.0, scaled).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _scaled(values, first, end, temperature, least, BLOCK: tl.constexpr):
    """Returns (scaled logits, keys) of a block; other tokens than candidates have key _NOTHING."""
    i = first + tl.arange(0, BLOCK)
    x = tl.load(values + i, mask=i < end, other=-INFINITY)
    scaled = tl.div_rn(x, temperature)
    return scaled, tl.where(scaled >= least, key_of(scaled), _NOTHING)


@triton.jit
def _tokens(ids, first, num_listed, BLOCK: tl.constexpr):
    """Returns the token ids of a block; num_listed is 0 if the candidates are the row itself."""
    i = first + tl.arange(0, BLOCK)
    listed = tl.load(ids + i, mask=i < num_listed, other=_NO_TOKEN)
    return tl.where(num_listed > 0, listed, i)


@triton.jit
def _border(
    values,
    end,
    temperature,
    least,
    top,
    low,
    high,
    enough,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Returns (the largest key that candidates with sum >= enough reach, the sum above it).

    The sum of a set is its mass, or without WEIGHTED its size. Candidates with sum >= enough reach
    the key low; none reaches high. Both are int64.
    """
    above = enough * 0
    while high - low > 1:
        span = high - low
        a, b, c = low + span // 4, low + span // 2, low + span * 3 // 4
        sum_a = tl.zeros([BLOCK], tl.int64 if WEIGHTED else tl.int32)
        sum_b = tl.zeros([BLOCK], tl.int64 if WEIGHTED else tl.int32)
        sum_c = tl.zeros([BLOCK], tl.int64 if WEIGHTED else tl.int32)
        for first in range(0, end, BLOCK):
            scaled, key = _scaled(values, first, end, temperature, least, BLOCK)
            if WEIGHTED:
                each = weigh(scaled, top)
            else:
                each = tl.full([BLOCK], 1, tl.int32)
            sum_a += tl.where(key >= a.to(tl.int32), each, 0)
            sum_b += tl.where(key >= b.to(tl.int32), each, 0)
            sum_c += tl.where(key >= c.to(tl.int32), each, 0)
        of_a = tl.sum(sum_a, 0).to(tl.int64)
        of_b = tl.sum(sum_b, 0).to(tl.int64)
        of_c = tl.sum(sum_c, 0).to(tl.int64)
        if of_c >= enough:
            low = c
        elif of_b >= enough:
            low, high, above = b, c, of_c
        elif of_a >= enough:
            low, high, above = a, b, of_b
        else:
            high, above = a, of_a
    return low, above


@triton.jit
def _ties(values, end, temperature, least, top, border, BLOCK: tl.constexpr):
    """Returns (mass above the key `border`, number of candidates at it, weight of each)."""
    above = tl.zeros([BLOCK], tl.int64)
    at = tl.zeros([BLOCK], tl.int32)
    each = tl.zeros([BLOCK], tl.int64)
    for first in range(0, end, BLOCK):
        scaled, key = _scaled(values, first, end, temperature, least, BLOCK)
        weight = weigh(scaled, top)
        above += tl.where(key > border.to(tl.int32), weight, 0)
        is_at = key == border.to(tl.int32)
        at += is_at.to(tl.int32)
        each = tl.maximum(each, tl.where(is_at, weight, 0))
    return tl.sum(above, 0), tl.sum(at, 0), tl.max(each, 0)


@triton.jit
def _tie(values, ids, end, num_listed, temperature, least, border, nth, BLOCK: tl.constexpr):
    """Returns the token id of the nth (from 1) candidate at the key `border`."""
    found = tl.full((), _NO_TOKEN, tl.int32)
    seen = nth * 0
    first = end * 0
    while (first < end) & (seen < nth):
        key = _scaled(values, first, end, temperature, least, BLOCK)[1]
        is_at = (key == border.to(tl.int32)).to(tl.int32)
        is_it = (is_at > 0) & (tl.cumsum(is_at, 0) + seen == nth)
        tokens = _tokens(ids, first, num_listed, BLOCK)
        found = tl.minimum(found, tl.min(tl.where(is_it, tokens, _NO_TOKEN), 0))
        seen += tl.sum(is_at, 0)
        first += BLOCK
    return found


@triton.jit
def _walk(
    values,
    ids,
    first,
    end,
    num_listed,
    temperature,
    least,
    top,
    border,
    last_tie,
    target,
    BLOCK: tl.constexpr,
):
    """Returns the kept token, by token id, at which the cumulative mass exceeds the target."""
    found = tl.full((), _NO_TOKEN, tl.int32)
    mass = target * 0
    while (first < end) & (mass <= target):
        scaled, key = _scaled(values, first, end, temperature, least, BLOCK)
        tokens = _tokens(ids, first, num_listed, BLOCK)
        at = border.to(tl.int32)
        is_kept = (key > at) | ((key == at) & (tokens <= last_tie))
        weight = tl.where(is_kept, weigh(scaled, top), 0)
        here = tl.sum(weight, 0)
        if mass + here > target:
            passed = tl.cumsum(weight, 0) + mass > target
            found = tl.min(tl.where(passed, tokens, _NO_TOKEN), 0)
        mass += here
        first += BLOCK
    return found


@triton.jit
def _sample_cut(
    x_row,
    values,
    ids,
    size,
    counts,
    masses,
    row,
    num_chunks,
    temperature,
    top,
    floor,
    top_k,
    top_p,
    u,
    CAPACITY: tl.constexpr,
    CHUNKS: tl.constexpr,
    EDGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Samples a token of a row with top-k or top-p."""
    edge, end, num, total = bracket(counts, masses, row, num_chunks, top_k, top_p, CHUNKS, EDGES)
    least = edge_of(top, floor, edge, EDGES)
    if end <= CAPACITY:
        num_listed = end
        values = values + row * CAPACITY
    else:
        num_listed = end * 0
        values = x_row
        end = size
    ids = ids + row * CAPACITY
    border = key_of(least).to(tl.int64)
    high = key_of(top).to(tl.int64) + 1
    last_tie = tl.full((), _NO_TOKEN, tl.int32)
    if top_k > 0:
        kept = num
        if top_k < num:
            border, above = _border(
                values, end, temperature, least, top, border, high, top_k.to(tl.int64), False, BLOCK
            )
            kept = top_k - above.to(tl.int32)
        mass, ties, each = _ties(values, end, temperature, least, top, border, BLOCK)
        total = mass + tl.minimum(kept, ties) * each
        if kept < ties:
            last_tie = _tie(values, ids, end, num_listed, temperature, least, border, kept, BLOCK)
    if top_p < 1.0:
        enough = share_of(top_p, total)
        border, above = _border(
            values, end, temperature, least, top, border, high, enough, True, BLOCK
        )
        mass, ties, each = _ties(values, end, temperature, least, top, border, BLOCK)
        kept = ((enough - above + each - 1) // tl.maximum(each, 1)).to(tl.int32)
        total = above + kept * each
        last_tie = tl.full((), _NO_TOKEN, tl.int32)
        if kept < ties:
            last_tie = _tie(values, ids, end, num_listed, temperature, least, border, kept, BLOCK)
    target = tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)
    first = end * 0
    return _walk(
        values,
        ids,
        first,
        end,
        num_listed,
        temperature,
        least,
        top,
        border,
        last_tie,
        target,
        BLOCK,
    )


@triton.jit
def _sample_any(
    x_row,
    ids,
    size,
    masses,
    row,
    num_chunks,
    temperature,
    top,
    least,
    u,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    EDGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Samples a token of a row without top-k and top-p: first the chunk, then the token."""
    chunk = tl.arange(0, CHUNKS)
    at = masses + (row * EDGES + EDGES - 1) * num_chunks + chunk
    mass = tl.load(at, mask=chunk < num_chunks, other=0)
    total = tl.sum(mass, 0)
    target = tl.minimum((u * total.to(tl.float64)).to(tl.int64), total - 1)
    passed = tl.cumsum(mass, 0) > target
    chosen = tl.min(tl.where(passed, chunk, CHUNKS - 1), 0)
    target -= tl.sum(tl.where(chunk < chosen, mass, 0), 0)
    first = chosen * CHUNK
    end = tl.minimum(first + CHUNK, size)
    border = key_of(least).to(tl.int64)
    last_tie = tl.full((), _NO_TOKEN, tl.int32)
    return _walk(
        x_row, ids, first, end, 0, temperature, least, top, border, last_tie, target, BLOCK
    )


@triton.jit
def sample_kernel(
    logits,
    stride,
    size,
    plan,
    maxima,
    indices,
    num_chunks,
    counts,
    masses,
    values,
    ids,
    tokens,
    last_tokens,
    token_counts,
    counts_stride,
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    EDGES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # grid (rows,)
    """Samples a token per row from the results of chunk_max, chunk_sums and gather kernels."""
    row = tl.program_id(0).to(tl.int64)
    top, token = top_of(maxima, indices, row, num_chunks, CHUNKS)
    temperature = real(plan, row, TEMPERATURE)
    if temperature > 0:
        top = tl.div_rn(top, temperature)
        if is_finite(top):
            least = least_of(plan, row, top)
            top_k = top_k_of(plan, row, size)
            top_p = long(plan, row, TOP_P).to(tl.float64, bitcast=True)
            u = uniform(plan, row)
            x_row = logits + row * stride
            if (top_k > 0) | (top_p < 1.0):
                token = _sample_cut(
                    x_row, values, ids, size, counts, masses, row, num_chunks, temperature,
                    top, least, top_k, top_p, u, CAPACITY, CHUNKS, EDGES, BLOCK,
                )  # fmt: skip
            else:
                token = _sample_any(
                    x_row, ids, size, masses, row, num_chunks, temperature,
                    top, least, u, CHUNK, CHUNKS, EDGES, BLOCK,
                )  # fmt: skip
    emit(tokens, last_tokens, token_counts, counts_stride, plan, row, token)
