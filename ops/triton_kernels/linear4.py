"""Products of int8 rows with 4-bit weights that have a scale and perhaps an offset per group.

y[m, n] = act((sum over groups g of scale[g, n] * sum over k in g of x[m, k] * v[n, k]
                                    - minimum[g, n] * sum over k in g of x[m, k])
              * x_scale[m] * channel_scale[n] + bias[n])

A group's sum is an exact integer, and one program adds the groups in fp32 in one order. So a row
has the same bits in any batch and with any tile. K is not split for the same reason.

With few rows the bytes of the weights are the bound, half of int8's. The packed bytes stream
through shared memory in panels (see PANEL) of whole cache lines. Three instructions unpack four
codes (ten with a table) in the registers that the tensor cores read: 38 codes per clock and SM at
4.3 TB/s take 30 (95) of the 128 instructions per clock. With many rows, each group of 64 to 128
products needs a conversion and a multiply-add outside of the tensor cores, which limits them to
about 40 % of int8. Groups of 16 take twice the products, because the tensor cores add 32 at a time.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as functional
import triton
import triton.language as tl
from torch import Tensor

from ops.backend import IQ4_VALUES, TABLES
from ops.linear import Stored4
from ops.triton_kernels.linear import Tile, scale_and_finish, tile_place
from ops.triton_kernels.rows import ACTIVATIONS, Quantized

# The number of outputs whose bytes for a chunk of inputs are contiguous.
PANEL = 16
# The TABLE_VALUES of ops/backend.py: those of NF4 in 127ths, of FP4 in halves.
CODES = {
    "nf4": (-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127),
    "fp4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
    "iq4": IQ4_VALUES,
}


class Int4Weight(NamedTuple):
    """A packed 4-bit weight.

    packed: [N / PANEL, chunks, PANEL, half] bytes; words: [groups, N] int32, the bits of the fp16
    scale below the zero point or the fp16 minimum; channels: [N] fp32; bias: [N] fp32 or None. N is
    num_out, rounded up to a multiple of PANEL. A chunk has max(group, 64) inputs; byte j has input
    j in its low and input half + j in its high bits.
    """

    packed: Tensor
    words: Tensor
    channels: Tensor
    bias: Tensor | None
    group: int
    num_out: int
    table: str
    has_minimums: bool


def _word(values) -> int:
    """Returns eight int8 values as the bytes of a signed number of 64 bits."""
    return int.from_bytes(bytes(value & 255 for value in values), "little", signed=True)


def _look_up_words(values) -> str:
    """Returns the instructions that look up the codes of four packed bytes, $2, in 16 values.

    Bytes are picked from the first and from the last eight values by three bits of a code, and one
    of both by the fourth, which the last permutation copies to all bits of its byte.
    """
    low, high = (f"{_word(half) & (1 << 64) - 1:016X}" for half in (values[:8], values[8:]))
    return f"""{{
        .reg .b32 x<2>, y<2>, s<2>, l<2>, h<2>, m<2>;
        and.b32 x0, $2, 0x0F0F0F0F;
        shr.u32 x1, $2, 4;
        and.b32 x1, x1, 0x0F0F0F0F;
        shr.u32 y0, x0, 4;
        shr.u32 y1, x1, 4;
        or.b32 y0, x0, y0;
        or.b32 y1, x1, y1;
        prmt.b32 s0, y0, y0, 0x0020;
        prmt.b32 s1, y1, y1, 0x0020;
        and.b32 s0, s0, 0x7777;
        and.b32 s1, s1, 0x7777;
        prmt.b32 l0, 0x{low[8:]}, 0x{low[:8]}, s0;
        prmt.b32 l1, 0x{low[8:]}, 0x{low[:8]}, s1;
        prmt.b32 h0, 0x{high[8:]}, 0x{high[:8]}, s0;
        prmt.b32 h1, 0x{high[8:]}, 0x{high[:8]}, s1;
        shl.b32 m0, x0, 4;
        shl.b32 m1, x1, 4;
        prmt.b32 m0, m0, m0, 0xBA98;
        prmt.b32 m1, m1, m1, 0xBA98;
        lop3.b32 $0, m0, h0, l0, 0xCA;
        lop3.b32 $1, m1, h1, l1, 0xCA;
        }}"""


_NF4_LOW, _FP4_LOW, _IQ4_LOW = (tl.constexpr(_word(codes[:8])) for codes in CODES.values())
_NF4_HIGH, _FP4_HIGH, _IQ4_HIGH = (tl.constexpr(_word(codes[8:])) for codes in CODES.values())
_NF4_WORDS, _FP4_WORDS, _IQ4_WORDS = map(tl.constexpr, map(_look_up_words, CODES.values()))


@triton.jit
def _look_up(codes, LOW: tl.constexpr, HIGH: tl.constexpr):
    """Maps codes below 16 to int8 values, without byte permutation."""
    wide = codes.to(tl.int64)
    shift = (wide & 7) * 8
    return tl.where(wide < 8, LOW >> shift, HIGH >> shift).to(tl.int8)


@triton.jit
def unpack(packed, zeros, TABLE: tl.constexpr, ASM: tl.constexpr):
    """Returns int8 values of the low and of the high codes of packed bytes; zeros have that layout.

    TABLE: an index of TABLES. ASM processes four bytes at a time, which the interpreter cannot:
    (c | 128) - z never borrows from another byte.
    """
    LOW: tl.constexpr = _NF4_LOW if TABLE == 1 else (_FP4_LOW if TABLE == 2 else _IQ4_LOW)
    HIGH: tl.constexpr = _NF4_HIGH if TABLE == 1 else (_FP4_HIGH if TABLE == 2 else _IQ4_HIGH)
    WORDS: tl.constexpr = _NF4_WORDS if TABLE == 1 else (_FP4_WORDS if TABLE == 2 else _IQ4_WORDS)
    if ASM and TABLE:
        low, high = tl.inline_asm_elementwise(
            WORDS, "=&r,=&r,r", [packed], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
        )
    elif ASM:
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 x<2>;
            shr.u32 x1, $2, 4;
            lop3.b32 x0, $2, 0x0F0F0F0F, 0x80808080, 0xEA;
            lop3.b32 x1, x1, 0x0F0F0F0F, 0x80808080, 0xEA;
            sub.u32 x0, x0, $3;
            sub.u32 x1, x1, $3;
            xor.b32 $0, x0, 0x80808080;
            xor.b32 $1, x1, 0x80808080;
            }""",
            "=&r,=&r,r,r",
            [packed, zeros],
            dtype=(tl.int8, tl.int8),
            is_pure=True,
            pack=4,
        )
    else:
        low = packed & 15
        high = (packed >> 4) & 15
        if TABLE:
            low, high = _look_up(low, LOW, HIGH), _look_up(high, LOW, HIGH)
        else:
            low, high = low - zeros, high - zeros
    return low, high


@triton.jit
def scales_of(word):
    """Returns the scales in Int4Weight.words as fp32."""
    return (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def zeros_of(word, BN: tl.constexpr, HALF: tl.constexpr, MINIMUMS: tl.constexpr):
    """Returns the zero points in Int4Weight.words in the layout of a chunk's bytes."""
    if MINIMUMS:
        return tl.zeros((BN, HALF), tl.int8)
    return tl.broadcast_to((word >> 16).to(tl.int8)[:, None], (BN, HALF))


@triton.jit
def add_group(acc, products, word, sums_at, MINIMUMS: tl.constexpr):
    """Adds the scaled products of a group; sums_at: the group's sums of x, for the minimums."""
    acc = tl.fma(products.to(tl.float32), scales_of(word)[:, None], acc)
    if MINIMUMS:
        sums = -tl.load(sums_at).to(tl.float32)
        minimums = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        acc = tl.fma(sums[None, :], minimums[:, None], acc)
    return acc


@triton.jit
def add_quarters(
    acc, packed, x_ats, word_at, word_stride, sums_at,
    TABLE: tl.constexpr, ASM: tl.constexpr, MINIMUMS: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Adds a chunk of four groups, two in the low and two in the high codes.

    The tensor cores multiply the inputs of two groups at once, so that the x of the other is loaded
    as zeros.
    """
    none = tl.zeros((BN, BM), tl.int32)
    ks = tl.arange(0, HALF)
    in_first = tl.broadcast_to((ks < HALF // 2)[None, :], (BN, HALF))
    for half in tl.static_range(2):
        word0 = tl.load(word_at + 2 * half * word_stride)
        word1 = tl.load(word_at + (2 * half + 1) * word_stride)
        zeros = zeros_of(word0, BN, HALF, MINIMUMS)
        zeros = tl.where(in_first, zeros, zeros_of(word1, BN, HALF, MINIMUMS))
        low, high = unpack(packed, zeros, TABLE, ASM)
        values = low
        if half:
            values = high
        x0 = tl.load(x_ats + half * HALF, mask=(ks < HALF // 2)[:, None], other=0)
        products = tl.dot(values, x0, none, out_dtype=tl.int32)
        acc = add_group(acc, products, word0, sums_at + 2 * half, MINIMUMS)
        x1 = tl.load(x_ats + half * HALF, mask=(ks >= HALF // 2)[:, None], other=0)
        products = tl.dot(values, x1, none, out_dtype=tl.int32)
        acc = add_group(acc, products, word1, sums_at + (2 * half + 1), MINIMUMS)
    return acc


@triton.jit
def int4_sums(
    x_at, sums_at, w_at, words_at, rows, channels, N_padded, chunks, x_stride,
    STAGES: tl.constexpr, TABLE: tl.constexpr, MINIMUMS: tl.constexpr, ASM: tl.constexpr,
    GROUP: tl.constexpr, HALF: tl.constexpr, PANEL: tl.constexpr, CHUNKS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Returns the scaled sums of some rows of x for some channels, [BN, BM] fp32.

    CHUNKS: chunks per iteration, a divisor of chunks. With MINIMUMS, sums: [M, groups] int32 are
    the group sums of x.
    """
    ks = tl.arange(0, HALF)
    w_rows = (channels // PANEL).to(tl.int64) * (chunks * PANEL * HALF) + channels % PANEL * HALF
    w_ats = w_at + w_rows[:, None] + ks[None, :]
    x_ats = x_at + rows[None, :] * x_stride + ks[:, None]
    none = tl.zeros((BN, BM), tl.int32)
    acc = tl.zeros((BN, BM), tl.float32)
    PER_CHUNK: tl.constexpr = 2 * HALF // GROUP
    sums_ats = rows
    if MINIMUMS:
        sums_ats = sums_at + rows * (chunks * PER_CHUNK)
    # Explicit loads let the compiler prefetch the words, too.
    for start in tl.range(0, chunks, CHUNKS, num_stages=STAGES):
        for more in tl.static_range(CHUNKS):
            chunk = start + more
            packed = tl.load(w_ats + chunk * (PANEL * HALF))
            x_chunk = x_ats + chunk * (2 * HALF)
            word_at = words_at + chunk * PER_CHUNK * N_padded + channels
            group_sums = sums_ats + chunk * PER_CHUNK
            if PER_CHUNK == 4:
                acc = add_quarters(
                    acc, packed, x_chunk, word_at, N_padded, group_sums,
                    TABLE, ASM, MINIMUMS, BN, BM, HALF,
                )  # fmt: skip
            else:
                x_low, x_high = tl.load(x_chunk), tl.load(x_chunk + HALF)
                word = tl.load(word_at)
                low, high = unpack(packed, zeros_of(word, BN, HALF, MINIMUMS), TABLE, ASM)
                products = tl.dot(low, x_low, none, out_dtype=tl.int32)
                if PER_CHUNK == 2:
                    acc = add_group(acc, products, word, group_sums, MINIMUMS)
                    word = tl.load(word_at + N_padded)
                    if not TABLE:
                        zeros = zeros_of(word, BN, HALF, MINIMUMS)
                        low, high = unpack(packed, zeros, TABLE, ASM)
                    group_sums += 1
                    products = none
                products = tl.dot(high, x_high, products, out_dtype=tl.int32)
                acc = add_group(acc, products, word, group_sums, MINIMUMS)
    return acc


@triton.jit(do_not_specialize=["M"])
def int4_kernel(
    x_at, row_scales_at, sums_at, w_at, words_at, channels_at, bias_at, residual_at, out_at,
    M, N, N_padded, chunks, x_stride, residual_stride, out_stride,
    STAGES: tl.constexpr, TABLE: tl.constexpr, MINIMUMS: tl.constexpr, ASM: tl.constexpr,
    GROUP: tl.constexpr, HALF: tl.constexpr, PANEL: tl.constexpr, CHUNKS: tl.constexpr,
    BIAS: tl.constexpr, ACT: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Multiplies x: [M, K] int8 by int4_sums. Grid: tiles."""
    tile_m, tile_n = tile_place(tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP_M)
    m0, n0 = tile_m * BM, tile_n * BN
    rows = tl.minimum(m0 + tl.arange(0, BM), M - 1).to(tl.int64)
    channels = tl.minimum(n0 + tl.arange(0, BN), N_padded - 1)
    acc = int4_sums(
        x_at, sums_at, w_at, words_at, rows, channels, N_padded, chunks, x_stride,
        STAGES, TABLE, MINIMUMS, ASM, GROUP, HALF, PANEL, CHUNKS, BM, BN,
    )  # fmt: skip
    scale_and_finish(
        tl.trans(acc), tl.load(row_scales_at + rows), channels_at, bias_at, residual_at, out_at,
        m0, n0, M, N, residual_stride, out_stride, BIAS, ACT, GATED, RESIDUAL, BM, BN,
    )  # fmt: skip


def pack_int4(
    codes: Tensor,
    stored: Stored4,
    zeros: Tensor | None,
    bias: Tensor | None,
    *,
    group: int,
    table: str,
) -> Int4Weight:
    """Packs codes: [N, K] uint8 below 16; zeros: [N, groups] uint8."""
    num_out, num_in = codes.shape
    chunk = max(group, 64)
    # Inputs beyond the end may have any value, because their x is 0.
    codes = functional.pad(codes, (0, -num_in % chunk, 0, -num_out % PANEL))
    codes = codes.reshape(-1, PANEL, codes.shape[1] // chunk, 2, chunk // 2).transpose(1, 2)
    packed = (codes[:, :, :, 0] | codes[:, :, :, 1] << 4).contiguous().view(torch.int8)
    groups = packed.shape[1] * (chunk // group)
    words = stored.scales.view(torch.int16).int() & 0xFFFF
    if stored.minimums is not None:
        words |= stored.minimums.view(torch.int16).int() << 16
    else:
        words |= (torch.full_like(words, 8) if zeros is None else zeros.int()) << 16
    missing = (0, -num_out % PANEL, 0, groups - words.shape[1])
    return Int4Weight(
        packed,
        functional.pad(words.t(), missing).contiguous(),
        stored.channels,
        bias,
        group,
        num_out,
        table,
        stored.minimums is not None,
    )


def int4_linear(
    x: Quantized,
    weight: Int4Weight,
    out: Tensor,
    residual: Tensor | None = None,
    activation: str | None = None,
    *,
    is_gated: bool = False,
    tile: Tile,
) -> Tensor:
    """Computes scaled_linear; x.codes are padded to whole chunks. tile.k: bytes per iteration."""
    num_rows, num_out = len(x.codes), weight.num_out
    panels, chunks, _, half = weight.packed.shape
    assert x.codes.shape[1] == chunks * 2 * half and out.stride(1) == 1, f"{x.codes.shape}"
    if not num_rows:
        return out
    assert tile.swap and tile.split_k == 1, f"{tile}"
    tiles = triton.cdiv(num_rows, tile.m) * triton.cdiv(num_out, tile.n)
    sums = None
    if weight.has_minimums:
        sums = x.codes.view(num_rows, -1, weight.group).sum(2, dtype=torch.int32)
    int4_kernel[(tiles,)](
        x.codes,
        x.scales,
        sums,
        weight.packed,
        weight.words,
        weight.channels,
        weight.bias,
        residual,
        out,
        num_rows,
        num_out,
        panels * PANEL,
        chunks,
        x.codes.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        STAGES=tile.num_stages,
        TABLE=TABLES.index(weight.table),
        MINIMUMS=weight.has_minimums,
        ASM=not triton.knobs.runtime.interpret,
        GROUP=weight.group,
        HALF=half,
        PANEL=PANEL,
        CHUNKS=math.gcd(max(1, tile.k // half), chunks),
        BIAS=weight.bias is not None,
        ACT=ACTIVATIONS[activation],
        GATED=is_gated,
        RESIDUAL=residual is not None,
        BM=tile.m,
        BN=tile.n,
        GROUP_M=tile.group_m,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,
    )
    return out
