"""Sampling from rows of logits on a GPU: maxima, penalties, and the sums for top-k and top-p.

A row is split into chunks, one program each, so that few rows keep a whole GPU busy. All sums are
of integers (probabilities in fixed point, 2^-44 of the best token's), so no result depends on the
order of addition, on the chunks, on the number of threads or on other rows.

A row's parameters are a record of WORDS int32 words; the constants below are indexes into it.
Nothing here waits for the device, and grids depend on shapes only.

The expected cost on an H200 for 64 rows of 128k logits (33.6 MB, which stay in the L2 cache; none
of it is measured): argmax takes one pass and two launches, about 10 us. Sampling reads the logits
twice more (sums, about 45 instructions per logit: 15 us; candidates, only for rows with top-k or
top-p: 10 us). Then one program per row searches a list of mostly some hundred candidates, 10 to 20
us. Penalties read the counts once more, only for rows that have them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

# Words of a record. SEED and POSITION are 64-bit integers, TOP_P is float64, then fp32 and int32.
WORDS = tl.constexpr(16)
SEED = tl.constexpr(0)
POSITION = tl.constexpr(2)
TOP_P = tl.constexpr(4)
TEMPERATURE = tl.constexpr(6)
FLOOR = tl.constexpr(7)
REPETITION = tl.constexpr(8)
PRESENCE = tl.constexpr(9)
FREQUENCY = tl.constexpr(10)
TOP_K = tl.constexpr(11)
SLOT = tl.constexpr(12)
COUNTS_ROW = tl.constexpr(13)
FIRST_EDIT = tl.constexpr(14)
NUM_EDITS = tl.constexpr(15)

# This bit of a token count marks tokens of the prompt; lower bits count tokens of the output.
IN_PROMPT = 1 << 30
_IN_PROMPT = tl.constexpr(IN_PROMPT)
LOWEST = tl.constexpr(-3.4028234663852886e38)
INFINITY = tl.constexpr(float("inf"))
# There is a sum of probabilities for logits at most 1.5, 3, 4.5, ... below the largest.
EDGES = 8
_EDGE_STEP = tl.constexpr(1.5)
# The largest probability is 2^44, so that the sum over this many logits stays below 2^63.
MAX_VOCABULARY = (1 << 19) - 1


class Config(NamedTuple):
    """Launch parameters of the sampling kernels.

    chunk: logits per program; block: candidates per iteration of sample_kernel; capacity: length of
    the candidate list (with more candidates, sample_kernel reads the whole row); warps,
    sample_warps: warps per program, and per program of sample_kernel.
    """

    chunk: int = 4096
    block: int = 2048
    capacity: int = 16384
    warps: int = 8
    sample_warps: int = 16


@triton.jit
def number(plan, row, FIELD: tl.constexpr):
    """Returns an int32 of a row's record."""
    return tl.load(plan + row * WORDS + FIELD)


@triton.jit
def real(plan, row, FIELD: tl.constexpr):
    """Returns an fp32 of a row's record."""
    return number(plan, row, FIELD).to(tl.float32, bitcast=True)


@triton.jit
def long(plan, row, FIELD: tl.constexpr):
    """Returns a 64-bit integer of a row's record."""
    low = number(plan, row, FIELD).to(tl.int64) & 0xFFFFFFFF
    return low | (number(plan, row, FIELD + 1).to(tl.int64) << 32)


@triton.jit
def weigh(scaled, top):
    """Returns exp(scaled - top) in units of 2^-44, rounded to int64; scaled is at most top.

    The polynomial is that of ops/csrc/logits.inl, with a relative error below 6e-11. Every
    multiplication is part of an fma, so that all call sites round equally.
    """
    x = tl.maximum(scaled.to(tl.float64) - top.to(tl.float64), -60.0)
    log2e = tl.full(x.shape, 1.4426950408889634, tl.float64)
    # adding 1.5 * 2^52 rounds to the nearest integer
    rounder = tl.full(x.shape, 6755399441055744.0, tl.float64)
    exponent = tl.fma(x, log2e, rounder) - rounder
    r = tl.fma(x, log2e, -exponent)
    y = tl.full(x.shape, 1.5303699001378845e-05, tl.float64)
    y = tl.fma(y, r, tl.full(x.shape, 0.00015469729140704658, tl.float64))
    y = tl.fma(y, r, tl.full(x.shape, 0.0013333478480888061, tl.float64))
    y = tl.fma(y, r, tl.full(x.shape, 0.009618025613598036, tl.float64))
    y = tl.fma(y, r, tl.full(x.shape, 0.055504109063177154, tl.float64))
    y = tl.fma(y, r, tl.full(x.shape, 0.24022651213495422, tl.float64))
    y = tl.fma(y, r, tl.full(x.shape, 0.6931471805568341, tl.float64))
    y = tl.fma(y, r, tl.full(x.shape, 0.9999999999595622, tl.float64))
    unit = ((exponent.to(tl.int64) + (1023 + 44)) << 52).to(tl.float64, bitcast=True)
    half = tl.full(x.shape, 0.5, tl.float64)
    return tl.fma(y, unit, half).to(tl.int64)


@triton.jit
def top_k_of(plan, row, size):
    """Returns the top-k of a row; 0 is off."""
    top_k = number(plan, row, TOP_K)
    return tl.where(top_k < size, top_k, 0)


@triton.jit
def top_of(maxima, indices, row, num_chunks, CHUNKS: tl.constexpr):
    """Returns (largest logit of the row, its first index)."""
    chunk = tl.arange(0, CHUNKS)
    found = tl.load(maxima + row * num_chunks + chunk, mask=chunk < num_chunks, other=-INFINITY)
    top = tl.max(found, 0)
    first = tl.min(tl.where(found == top, chunk, CHUNKS), 0)
    return top, tl.load(indices + row * num_chunks + first)


@triton.jit
def least_of(plan, row, top):
    """Returns the smallest scaled logit that min-p keeps, or without min-p, that counts."""
    return tl.maximum(top + real(plan, row, FLOOR), LOWEST)


@triton.jit
def edge_of(top, least, edge, EDGES: tl.constexpr):
    """Returns the scaled logit of an edge; the last one is `least`."""
    border = tl.maximum(top - (edge + 1).to(tl.float32) * _EDGE_STEP, least)
    return tl.where(edge == EDGES - 1, least, border)


@triton.jit
def share_of(top_p, total):
    """Returns the mass that top-p requires as int64, at least 1, which keeps the best token."""
    part = tl.ceil(top_p * total.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(part, total), 1)


@triton.jit
def is_finite(x):
    return tl.abs(x) <= -LOWEST


@triton.jit
def chunk_max_kernel(
    logits, stride, size, maxima, indices, num_chunks, CHUNK: tl.constexpr
):  # grid (chunks, rows)
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * stride + i, mask=i < size, other=-INFINITY)
    x = tl.where(x == x, x, -INFINITY)
    top = tl.max(x, 0)
    to = row * num_chunks + tl.program_id(0)
    tl.store(maxima + to, top)
    tl.store(indices + to, tl.min(tl.where(x == top, i, size), 0))


@triton.jit
def emit(tokens, last_tokens, token_counts, counts_stride, plan, row, token):
    """Stores a row's token in all places that are read later."""
    tl.store(tokens + row, token)
    slot = number(plan, row, SLOT)
    tl.store(last_tokens + slot, token, mask=slot >= 0)
    counts_row = number(plan, row, COUNTS_ROW)
    count = token_counts + counts_row.to(tl.int64) * counts_stride + token
    tl.store(count, tl.load(count, mask=counts_row >= 0, other=0) + 1, mask=counts_row >= 0)


@triton.jit
def best_kernel(
    plan,
    maxima,
    indices,
    num_chunks,
    tokens,
    last_tokens,
    token_counts,
    counts_stride,
    CHUNKS: tl.constexpr,
):  # grid (rows,)
    row = tl.program_id(0).to(tl.int64)
    token = top_of(maxima, indices, row, num_chunks, CHUNKS)[1]
    emit(tokens, last_tokens, token_counts, counts_stride, plan, row, token)


@triton.jit
def adjust_kernel(
    logits,
    stride,
    size,
    plan,
    token_counts,
    counts_stride,
    edit_tokens,
    edit_values,
    CHUNK: tl.constexpr,
    EDIT_BLOCK: tl.constexpr,
):  # grid (chunks, rows)
    """Applies penalties, then edits, in place. Edits are added; -inf excludes a token."""
    row = tl.program_id(1).to(tl.int64)
    begin = tl.program_id(0) * CHUNK
    x_row = logits + row * stride
    counts_row = number(plan, row, COUNTS_ROW)
    if counts_row >= 0:
        i = begin + tl.arange(0, CHUNK)
        count = tl.load(
            token_counts + counts_row.to(tl.int64) * counts_stride + i, mask=i < size, other=0
        )
        x = tl.load(x_row + i, mask=count != 0, other=0.0)
        repetition = real(plan, row, REPETITION)
        x = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        num_output = count & (_IN_PROMPT - 1)
        x = tl.where(num_output > 0, x - real(plan, row, PRESENCE), x)
        x = x - num_output.to(tl.float32) * real(plan, row, FREQUENCY)
        tl.store(x_row + i, x, mask=count != 0)
    num_edits = number(plan, row, NUM_EDITS)
    if num_edits > 0:
        tl.debug_barrier()  # the next loads read values of other threads
        first = number(plan, row, FIRST_EDIT)
        for at in range(first, first + num_edits, EDIT_BLOCK):
            e = at + tl.arange(0, EDIT_BLOCK)
            token = tl.load(edit_tokens + e, mask=e < first + num_edits, other=-1)
            value = tl.load(edit_values + e, mask=e < first + num_edits, other=0.0)
            mine = (token >= begin) & (token < tl.minimum(begin + CHUNK, size))
            x = tl.load(x_row + token, mask=mine, other=0.0)
            tl.store(x_row + token, tl.where(value == -INFINITY, value, x + value), mask=mine)


@triton.jit
def chunk_sums_kernel(
    logits,
    stride,
    size,
    plan,
    maxima,
    indices,
    num_chunks,
    counts,
    masses,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    EDGES: tl.constexpr,
):  # grid (chunks, rows)
    """Computes counts, masses: [rows, EDGES, chunks] of the logits that reach an edge.

    Rows without top-k and top-p only need the last edge; rows with top-k need no masses.
    """
    row = tl.program_id(1).to(tl.int64)
    temperature = real(plan, row, TEMPERATURE)
    if temperature > 0:
        top = top_of(maxima, indices, row, num_chunks, CHUNKS)[0]
        top = tl.div_rn(top, temperature)
        if is_finite(top):
            top_k = top_k_of(plan, row, size)
            is_cut = (top_k > 0) | (long(plan, row, TOP_P).to(tl.float64, bitcast=True) < 1.0)
            i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(logits + row * stride + i, mask=i < size, other=-INFINITY)
            scaled = tl.div_rn(x, temperature)
            weight = tl.zeros([CHUNK], tl.int64)
            if top_k == 0:
                weight = weigh(scaled, top)
            least = least_of(plan, row, top)
            here = tl.load(maxima + row * num_chunks + tl.program_id(0))
            here = tl.div_rn(here, temperature)
            to = row * EDGES * num_chunks + tl.program_id(0)
            for e in tl.static_range(EDGES):
                border = least
                if e < EDGES - 1:
                    border = tl.maximum(top - (e + 1) * _EDGE_STEP, least)
                count = tl.full((), 0, tl.int32)
                mass = tl.full((), 0, tl.int64)
                if (here >= border) & (is_cut | (e == EDGES - 1)):
                    inside = scaled >= border
                    count = tl.sum(inside.to(tl.int32), 0)
                    mass = tl.sum(tl.where(inside, weight, 0), 0)
                tl.store(counts + to + e * num_chunks, count)
                tl.store(masses + to + e * num_chunks, mass)


@triton.jit
def bracket(
    counts, masses, row, num_chunks, top_k, top_p, CHUNKS: tl.constexpr, EDGES: tl.constexpr
):
    """Returns (edge that all kept logits reach, number that reach it, number of all, their mass).

    top_k 0 is off. Top-p applies to the tokens that top-k keeps.
    """
    edges = tl.arange(0, EDGES)
    chunk = tl.arange(0, CHUNKS)[None, :]
    at = (row * EDGES + edges[:, None]) * num_chunks + chunk
    count = tl.sum(tl.load(counts + at, mask=chunk < num_chunks, other=0), 1)
    mass = tl.sum(tl.load(masses + at, mask=chunk < num_chunks, other=0), 1)
    is_last = edges == EDGES - 1
    total = tl.sum(tl.where(is_last, mass, 0), 0)
    enough = tl.where(top_k > 0, count >= top_k, mass >= share_of(top_p, total))
    edge = tl.min(tl.where(enough, edges, EDGES - 1), 0)
    reaching = tl.sum(tl.where(edges == edge, count, 0), 0)
    return edge, reaching, tl.sum(tl.where(is_last, count, 0), 0), total


@triton.jit
def gather_kernel(
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
    CAPACITY: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    EDGES: tl.constexpr,
):  # grid (chunks, rows)
    """Writes values, ids: [rows, CAPACITY], logits that top-k and top-p may keep, by token id."""
    row = tl.program_id(1).to(tl.int64)
    temperature = real(plan, row, TEMPERATURE)
    top_p = long(plan, row, TOP_P).to(tl.float64, bitcast=True)
    top_k = top_k_of(plan, row, size)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1.0)):
        top = top_of(maxima, indices, row, num_chunks, CHUNKS)[0]
        top = tl.div_rn(top, temperature)
        if is_finite(top):
            found = bracket(counts, masses, row, num_chunks, top_k, top_p, CHUNKS, EDGES)
            edge, reaching = found[0], found[1]
            chunk = tl.arange(0, CHUNKS)
            at = counts + (row * EDGES + edge) * num_chunks + chunk
            before = tl.sum(tl.load(at, mask=chunk < tl.program_id(0), other=0), 0)
            here = tl.load(maxima + row * num_chunks + tl.program_id(0))
            border = edge_of(top, least_of(plan, row, top), edge, EDGES)
            if (reaching <= CAPACITY) & (tl.div_rn(here, temperature) >= border):
                i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
                x = tl.load(logits + row * stride + i, mask=i < size, other=-INFINITY)
                inside = tl.div_rn(x, temperature) >= border
                to = row * CAPACITY + before + tl.cumsum(inside.to(tl.int32), 0) - 1
                tl.store(values + to, x, mask=inside)
                tl.store(ids + to, i, mask=inside)


def grid_of(logits: Tensor, config: Config) -> tuple[tuple[int, int], int]:
    """Returns (grid over all chunks of all rows, CHUNKS) for logits: [R, V]."""
    num_chunks = triton.cdiv(logits.shape[1], config.chunk)
    return (num_chunks, logits.shape[0]), triton.next_power_of_2(num_chunks)


def chunk_max(logits: Tensor, maxima: Tensor, indices: Tensor, config: Config) -> None:
    """Writes maxima, indices: [R, chunks] fp32, int32 of logits: [R, V] fp32 with dense rows."""
    grid, _ = grid_of(logits, config)
    args: Any = (logits, logits.stride(0), logits.shape[1], maxima, indices, grid[0])
    chunk_max_kernel[grid](*args, CHUNK=config.chunk, num_warps=config.warps)


@triton.jit(do_not_specialize=["size"])
def input_ids_kernel(given, slots, last_tokens, ids, size, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(given + i, mask=i < size, other=0)
    slot = tl.load(slots + i, mask=(i < size) & (token < 0), other=0)
    newest = tl.load(last_tokens + slot, mask=(i < size) & (token < 0), other=0)
    tl.store(ids + i, tl.where(token < 0, newest, token).to(tl.int64), mask=i < size)
