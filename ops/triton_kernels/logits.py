"""Rows of logits on a GPU: masks of forbidden tokens, log-probabilities of chosen tokens.

The expected cost of masks on an H200 for 16 masked rows of 128k logits is about 5 us: 8 MB written
to the L2 cache and 0.25 MB of bits read. None of it is measured. A step without masks launches
nothing.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from ops.triton_kernels.sampling import INFINITY, Config, top_of, weigh


@triton.jit
def chunk_rank_kernel(
    logits,
    stride,
    size,
    tokens,
    maxima,
    indices,
    num_chunks,
    masses,
    larger,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # grid (chunks, rows)
    """Writes each chunk's mass, relative to the row's largest, and its logits above the token's."""
    row = tl.program_id(1).to(tl.int64)
    top = top_of(maxima, indices, row, num_chunks, CHUNKS)[0]
    x_row = logits + row * stride
    chosen = tl.load(x_row + tl.load(tokens + row))
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_row + i, mask=i < size, other=-INFINITY)
    weight = tl.where(x > -INFINITY, weigh(x, top), 0)
    to = row * num_chunks + tl.program_id(0)
    tl.store(masses + to, tl.sum(weight, 0))
    tl.store(larger + to, tl.sum((x > chosen).to(tl.int32), 0))


@triton.jit
def describe_kernel(
    logits,
    stride,
    tokens,
    maxima,
    indices,
    num_chunks,
    masses,
    larger,
    logprobs,
    ranks,
    top_logprobs,
    num_top,
    CHUNKS: tl.constexpr,
    TOP: tl.constexpr,
):  # grid (rows,)
    """Writes logprobs, ranks: [rows] of the tokens; turns top_logprobs: [rows, num_top] from logits
    into log-probabilities."""
    row = tl.program_id(0).to(tl.int64)
    top = top_of(maxima, indices, row, num_chunks, CHUNKS)[0]
    chunk = tl.arange(0, CHUNKS)
    at = row * num_chunks + chunk
    mass = tl.sum(tl.load(masses + at, mask=chunk < num_chunks, other=0), 0)
    rank = 1 + tl.sum(tl.load(larger + at, mask=chunk < num_chunks, other=0), 0)
    # the unit of the mass is 2^-44
    lse = top.to(tl.float64) + tl.log(mass.to(tl.float64) * (1.0 / 17592186044416.0))
    chosen = tl.load(logits + row * stride + tl.load(tokens + row)).to(tl.float64)
    tl.store(logprobs + row, (chosen - lse).to(tl.float32))
    tl.store(ranks + row, rank)
    i = tl.arange(0, TOP)
    x = tl.load(top_logprobs + row * num_top + i, mask=i < num_top, other=0.0)
    tl.store(
        top_logprobs + row * num_top + i, (x.to(tl.float64) - lse).to(tl.float32), mask=i < num_top
    )


@triton.jit
def mask_kernel(logits, stride, size, masked, words, num_words, CHUNK: tl.constexpr):
    # grid (chunks, masked rows)
    row = tl.load(masked + tl.program_id(1)).to(tl.int64)
    i = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    at = words + tl.program_id(1).to(tl.int64) * num_words + i // 32
    word = tl.load(at, mask=i < size, other=-1)
    is_forbidden = ((word >> (i % 32)) & 1) == 0
    never = tl.full([CHUNK], -INFINITY, tl.float32)
    tl.store(logits + row * stride + i, never, mask=(i < size) & is_forbidden)


def apply_masks(logits: Tensor, masked: Tensor, words: Tensor, config: Config) -> None:
    """Sets logits: [R, V] fp32 with dense rows to -inf where a row's mask has no bit.

    masked: [M] int32, the rows with masks; words: [M, W] int32.
    """
    grid = (triton.cdiv(logits.shape[1], config.chunk), len(masked))
    args: Any = (logits, logits.stride(0), logits.shape[1], masked, words, words.stride(0))
    mask_kernel[grid](*args, CHUNK=config.chunk, num_warps=config.warps)
