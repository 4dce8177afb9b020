"""One block of keys in an online softmax (Milakov and Gimelshein 2018) over K/V tiles.

Decode and prefill differ in their rows and keys and share this computation of a block. Scores are
in units of log2, so that a weight is one exp2.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from ops.triton_kernels.tiles import LOG2E, as_operand, load_scales, load_values

_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def attend_block(
    q0,
    q1,
    most,
    total,
    acc0,
    acc1,
    tile,
    head,
    tokens,
    present,
    mapped,
    visible,
    scale,
    CAP: tl.constexpr,
    HAS_MASK: tl.constexpr,
    TILE_STRIDE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    PART_PAD: tl.constexpr,
    TYPE: tl.constexpr,
    COMPUTE: tl.constexpr,
):
    """q0, q1: [M, PART_PAD], parts of the rows' queries; most, total: [M]; acc0, acc1 as q, fp32.

    tile: where the layer's part of the block's first tile begins; tokens: [N] from there on;
    present: [N], which are there; mapped: [N], which lie in tiles of which some are there and
    so may be read; visible: [M or 1, N], which count, if HAS_MASK.
    scale: of a score, times log2(e). CAP: the soft cap of scores, times log2(e); 0: none. Returns
    most, total, acc0, acc1 with the block in them.
    """
    k = load_values(
        tile, head, tokens, present, mapped, 0, False, not HAS_MASK,
        TILE_STRIDE, KV_HEADS, HEAD_DIM, NUM_GROUPS, PARTS, PART_PAD, TYPE, COMPUTE,
    )  # fmt: skip
    scores = tl.dot(q0, tl.trans(k), input_precision="ieee")
    if NUM_GROUPS == 1 or NUM_GROUPS == 2:
        k_scale, k_scale1, v_scale, v_scale1 = load_scales(
            tile, head, tokens, present, TILE_STRIDE, KV_HEADS, HEAD_DIM, NUM_GROUPS
        )
    if PARTS == 2:
        scores *= (k_scale * scale)[None, :]
        k = load_values(
            tile, head, tokens, present, mapped, 1, False, not HAS_MASK,
            TILE_STRIDE, KV_HEADS, HEAD_DIM, NUM_GROUPS, PARTS, PART_PAD, TYPE, COMPUTE,
        )  # fmt: skip
        scores1 = tl.dot(q1, tl.trans(k), input_precision="ieee")
        scores += scores1 * (k_scale1 * scale)[None, :]
    elif NUM_GROUPS == 1:
        scores *= (k_scale * scale)[None, :]
    else:
        scores *= scale
    if CAP > 0:
        # cap * tanh(score / cap), where tanh(x) = 1 - 2 / (exp(2 x) + 1)
        scores = CAP - 2 * CAP / (tl.exp2(scores * (2 * _LOG2E / CAP)) + 1)
    if HAS_MASK:
        scores = tl.where(visible, scores, float("-inf"))
    now = tl.maximum(most, tl.max(scores, 1))
    # A row without keys so far has a maximum of -inf, and -inf - -inf is NaN.
    base = tl.where(now == float("-inf"), 0.0, now)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(most - base)
    total = total * shrink + tl.sum(weights, 1)
    v = load_values(
        tile, head, tokens, present, mapped, 0, True, not HAS_MASK,
        TILE_STRIDE, KV_HEADS, HEAD_DIM, NUM_GROUPS, PARTS, PART_PAD, TYPE, COMPUTE,
    )  # fmt: skip
    acc0 = acc0 * shrink[:, None]
    if PARTS == 2:
        scaled = as_operand(weights * v_scale[None, :], COMPUTE)
        acc0 = tl.dot(scaled, v, acc0, input_precision="ieee")
        v = load_values(
            tile, head, tokens, present, mapped, 1, True, not HAS_MASK,
            TILE_STRIDE, KV_HEADS, HEAD_DIM, NUM_GROUPS, PARTS, PART_PAD, TYPE, COMPUTE,
        )  # fmt: skip
        scaled = as_operand(weights * v_scale1[None, :], COMPUTE)
        acc1 = tl.dot(scaled, v, acc1 * shrink[:, None], input_precision="ieee")
    else:
        if NUM_GROUPS == 1:
            weights *= v_scale[None, :]
        acc0 = tl.dot(as_operand(weights, COMPUTE), v, acc0, input_precision="ieee")
    return now, total, acc0, acc1
