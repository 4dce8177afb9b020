"""Latent attention in Triton: one vector for each token, all of it K and its first part V.

All query heads of a token read the same vectors, so the heads are rows of one product. A block of
vectors is loaded once and used for the scores and for the values. Work lists are those of
ops.cuda.attention.StepArrays, and a row's bits depend neither on other rows nor on the chunks of
its prompt; those of a decode row and a prefill row differ.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.kv_tiles import architecture
from ops.triton_kernels.latent_tiles import LatentTiles, latent_constants, latent_distance
from ops.triton_kernels.tiles import LOG2E, Config, as_operand, row_stride, tile_pointer

_LN2 = tl.constexpr(0.6931471805599453)
PAIRS = 64  # of a token and a head in a tile of a prefill chunk, if a token has no more


def tile_rows(num_heads: int) -> int:
    """Returns the tokens of a tile of a prefill chunk."""
    return max(1, PAIRS // num_heads)


@triton.jit
def _queries(q, at, seen, first: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
             COMPUTE: tl.constexpr):  # fmt: skip
    d = tl.arange(0, PAD)[None, :]
    mask = seen[:, None] & (d < DIM)
    return as_operand(tl.load(q + at[:, None] + first + d, mask=mask, other=0), COMPUTE)


@triton.jit
def _vectors(
    tile, tokens, present, first: tl.constexpr, scale_at: tl.constexpr, DIM: tl.constexpr,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr, PAD: tl.constexpr,
    TILE_STRIDE: tl.constexpr, TYPE: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """Loads values [first, first + DIM) of each token as [N, PAD] of COMPUTE."""
    ITEM: tl.constexpr = TYPE.primitive_bitwidth // 8
    d = tl.arange(0, PAD)[None, :]
    mask = present[:, None] & (d < DIM)
    at = (tokens // 16).to(tl.int64) * (TILE_STRIDE // ITEM) + tokens % 16 * WIDTH + first
    x = tl.load(tile.to(tl.pointer_type(TYPE), bitcast=True) + at[:, None] + d, mask=mask, other=0)
    if tl.int8 == TYPE:
        scales = (tile + 16 * WIDTH).to(tl.pointer_type(tl.float16), bitcast=True)
        # one load for each scale, not for each value
        PARTS: tl.constexpr = PAD // SIZE
        g = tl.arange(0, PARTS)[None, :]
        at = (tokens // 16).to(tl.int64) * (TILE_STRIDE // 2) + tokens % 16 * GROUPS + scale_at
        mask = present[:, None] & (g < DIM // SIZE)
        scale = tl.load(scales + at[:, None] + g, mask=mask, other=0).to(tl.float32)
        N: tl.constexpr = tokens.shape[0]
        parts = tl.reshape(x.to(tl.float32), [N, PARTS, SIZE]) * scale[:, :, None]
        x = tl.reshape(parts, [N, PAD])
    return as_operand(x, COMPUTE)


@triton.jit
def _attend_keys(
    q, at, is_row, last, tile, first, end, scale,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, COMPUTE: tl.constexpr, TILE_STRIDE: tl.constexpr,
    VALUE_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr,
    ROPE_PAD: tl.constexpr, GROUP: tl.constexpr, ROPE_GROUP: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Returns (largest scores in base 2, totals, weighted values: [ROWS, VALUE_PAD]) of the keys
    from first, a multiple of BLOCK, to end. at: [ROWS], places of the queries; last: [ROWS], the
    last key that each sees. A masked key adds zero."""
    WIDTH: tl.constexpr = VALUE_DIM + ROPE_DIM
    GROUPS: tl.constexpr = VALUE_DIM // GROUP + ROPE_DIM // ROPE_GROUP
    q_values = _queries(q, at, is_row, 0, VALUE_DIM, VALUE_PAD, COMPUTE)
    q_rest = _queries(q, at, is_row, VALUE_DIM, ROPE_DIM, ROPE_PAD, COMPUTE)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    for key in range(first, end, BLOCK):
        tokens = key + tl.arange(0, BLOCK)
        present = tokens < end
        values = _vectors(tile, tokens, present, 0, 0, VALUE_DIM, GROUP, WIDTH, GROUPS, VALUE_PAD,
                          TILE_STRIDE, TYPE, COMPUTE)  # fmt: skip
        rest = _vectors(tile, tokens, present, VALUE_DIM, VALUE_DIM // GROUP, ROPE_DIM, ROPE_GROUP,
                        WIDTH, GROUPS, ROPE_PAD, TILE_STRIDE, TYPE, COMPUTE)  # fmt: skip
        score = tl.dot(q_values, tl.trans(values), input_precision="ieee")
        score = tl.dot(q_rest, tl.trans(rest), score, input_precision="ieee") * scale
        score = tl.where(tokens[None, :] <= last[:, None], score, float("-inf"))
        now = tl.maximum(most, tl.max(score, axis=1))
        shift = tl.where(now == float("-inf"), 0.0, now)
        weights = tl.exp2(score - shift[:, None])
        shrink = tl.exp2(most - shift)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(as_operand(weights, COMPUTE), values, acc, input_precision="ieee")
        most = now
    return most, total, acc


@triton.jit
def decode_kernel(
    q, q_stride, anchor, distance: tl.int64, starts, items, num_items, outs, lses,
    scale: tl.float32,
    HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, COMPUTE: tl.constexpr,
    TILE_STRIDE: tl.constexpr, VALUE_DIM: tl.constexpr, ROPE_DIM: tl.constexpr,
    VALUE_PAD: tl.constexpr, ROPE_PAD: tl.constexpr, GROUP: tl.constexpr,
    ROPE_GROUP: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Reads items: [(row, first key, end, slot)] int32; writes fp32 outs: [slots, H, VALUE_DIM] and
    lses: [slots, H].

    Bytes are the bound: ROWS heads share a vector, and further heads read it from the L2 cache.
    """
    BLOCKS: tl.constexpr = (HEADS + ROWS - 1) // ROWS
    for work in range(tl.program_id(0), tl.load(num_items) * BLOCKS, tl.num_programs(0)):
        item = items + work // BLOCKS * 4
        row, first, end, slot = (
            tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
        )  # fmt: skip
        tile = tile_pointer(anchor, distance, tl.load(starts + row), TILE_STRIDE)
        head = work % BLOCKS * ROWS + tl.arange(0, ROWS)
        is_row = head < HEADS
        at = row.to(tl.int64) * q_stride + head * (VALUE_DIM + ROPE_DIM)
        last = tl.zeros([ROWS], tl.int32) + (end - 1)
        most, total, acc = _attend_keys(
            q, at, is_row, last, tile, first, end, scale, ROWS, BLOCK, COMPUTE, TILE_STRIDE,
            VALUE_DIM, ROPE_DIM, VALUE_PAD, ROPE_PAD, GROUP, ROPE_GROUP, TYPE,
        )  # fmt: skip
        at = slot.to(tl.int64) * HEADS + head
        d = tl.arange(0, VALUE_PAD)[None, :]
        mask = is_row[:, None] & (d < VALUE_DIM)
        tl.store(outs + at[:, None] * VALUE_DIM + d, acc / total[:, None], mask=mask)
        tl.store(lses + at, (most + tl.log2(total)) * _LN2, mask=is_row)


@triton.jit
def prefill_kernel(
    q, q_stride, anchor, distance: tl.int64, starts, sequences, tile_list, num_tiles, out,
    out_stride, lse, scale: tl.float32, HAS_LSE: tl.constexpr,
    HEADS: tl.constexpr, TILE_ROWS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    COMPUTE: tl.constexpr, TILE_STRIDE: tl.constexpr, VALUE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr, VALUE_PAD: tl.constexpr, ROPE_PAD: tl.constexpr,
    GROUP: tl.constexpr, ROPE_GROUP: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Reads sequences: [(first row, rows, K/V length, 0)] and tile_list: [(sequence, row)], int32.

    Rows of the products are pairs of a token and a head, in this order. The tensor cores are the
    bound. Grid: blocks of ROWS pairs of a tile, tiles.
    """
    first_pair, index = tl.program_id(0) * ROWS, tl.program_id(1)
    if index < tl.load(num_tiles):
        sequence, row = tl.load(tile_list + index * 2), tl.load(tile_list + index * 2 + 1)
        q_start = tl.load(sequences + sequence * 4)
        num_rows = tl.load(sequences + sequence * 4 + 1)
        kv_len = tl.load(sequences + sequence * 4 + 2)
        tile = tile_pointer(anchor, distance, tl.load(starts + sequence), TILE_STRIDE)
        pair = first_pair + tl.arange(0, ROWS)
        token, head = row + pair // HEADS, pair % HEADS
        is_row = (pair < TILE_ROWS * HEADS) & (token < num_rows)
        position = kv_len - num_rows + token
        end = tl.max(tl.where(is_row, position + 1, 0), axis=0)
        at = (q_start + token).to(tl.int64) * q_stride + head * (VALUE_DIM + ROPE_DIM)
        most, total, acc = _attend_keys(
            q, at, is_row, position, tile, 0, end, scale, ROWS, BLOCK, COMPUTE, TILE_STRIDE,
            VALUE_DIM, ROPE_DIM, VALUE_PAD, ROPE_PAD, GROUP, ROPE_GROUP, TYPE,
        )  # fmt: skip
        total = tl.where(is_row, total, 1.0)
        d = tl.arange(0, VALUE_PAD)[None, :]
        at = out + (q_start + token).to(tl.int64) * out_stride + head * VALUE_DIM
        y = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(at[:, None] + d, y, mask=is_row[:, None] & (d < VALUE_DIM))
        if HAS_LSE:
            at = lse + (q_start + token).to(tl.int64) * HEADS + head
            tl.store(at, (most + tl.log2(total)) * _LN2, mask=is_row)


def constants(tiles: LatentTiles, of_q: torch.dtype) -> dict[str, Any]:
    """Returns the compile-time arguments of the attention kernels that depend on the layer."""
    is_wide = torch.float32 in (tiles.dtype, of_q)
    compute = tl.float32 if is_wide else tl.bfloat16
    return {"HEADS": tiles.num_heads, "COMPUTE": compute} | latent_constants(tiles)


def config(tiles: LatentTiles, of_q: torch.dtype, arch: int, *, is_prefill: bool) -> Config:
    """Returns the rows and keys of a program. A vector of 576 values of bf16 is 1.1 KiB in shared
    memory, for a key and for a query alike, and sm_89 has 99 KiB. The sums of 32 rows take half of
    the registers of 8 warps, and int8 takes more of them while it is converted."""
    is_wide = torch.float32 in (tiles.dtype, of_q)
    is_narrow = is_wide or arch == 89 or tiles.dtype == torch.int8
    rows = 32 if is_prefill and not is_wide else 16
    constants = {"ROWS": rows, "BLOCK": 16 if is_narrow else 32, "num_stages": 2}
    return Config(constants, 8 if rows == 32 else 4)


def decode(
    q: Tensor,
    tiles: LatentTiles,
    base: int,
    starts: Tensor,
    items: Tensor,
    num_items: Tensor,
    outs: Tensor,
    lses: Tensor,
    num_programs: int,
) -> None:
    """Computes attention of q: [S, H, D] over each item's keys into the item's slot of outs and
    lses. The arguments are those of ops.triton_kernels.decode; outs: [slots, H, value_dim]."""
    assert q.shape[1:] == (tiles.num_heads, tiles.head_dim), f"{q.shape}"
    chosen = config(tiles, q.dtype, architecture(q.device), is_prefill=False)
    decode_kernel[(num_programs,)](
        q,
        row_stride(q),
        items,
        latent_distance(tiles, base, items),
        starts,
        items,
        num_items,
        outs,
        lses,
        tiles.scale * LOG2E,
        **constants(tiles, q.dtype),
        **chosen.options(),
    )


def prefill(
    q: Tensor,
    tiles: LatentTiles,
    base: int,
    starts: Tensor,
    sequences: Tensor,
    tile_list: Tensor,
    num_tiles: Tensor,
    max_tiles: int,
    out: Tensor,
    lse: Tensor | None = None,
) -> None:
    """Computes attention of chunks' rows of q: [T, H, D] into the same rows of out: [T, H,
    value_dim], and of lse: [T, H] fp32. The arguments are those of ops.triton_kernels.prefill; a
    tile has tile_rows."""
    assert q.shape[1:] == (tiles.num_heads, tiles.head_dim), f"{q.shape}"
    assert out.shape == (*q.shape[:2], tiles.value_dim), f"{out.shape}"
    chosen = config(tiles, q.dtype, architecture(q.device), is_prefill=True)
    of_tile = tile_rows(tiles.num_heads)
    blocks = triton.cdiv(of_tile * tiles.num_heads, chosen.constants["ROWS"])
    if max_tiles:
        prefill_kernel[(blocks, max_tiles)](
            q,
            row_stride(q),
            starts,
            latent_distance(tiles, base, starts),
            starts,
            sequences,
            tile_list,
            num_tiles,
            out,
            row_stride(out),
            starts if lse is None else lse,
            tiles.scale * LOG2E,
            HAS_LSE=lse is not None,
            TILE_ROWS=of_tile,
            **constants(tiles, q.dtype),
            **chosen.options(),
        )
