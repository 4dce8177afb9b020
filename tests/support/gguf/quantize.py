"""Rounds weights to the kinds of GGUF files, to the nearest step of each group.

The package `gguf` writes the simple kinds; the blocks of the others are written here from ggml's
description of them. Shares no code with what reads them (quant/formats/gguf).
"""

from __future__ import annotations

import gguf
import numpy as np
from gguf import GGMLQuantizationType
from torch import Tensor

IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
SIMPLE = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")
Array = np.ndarray


def quantize(kind: str, weight: Tensor) -> Array:
    """Returns weight: [.., in] as blocks, [.., bytes of a row] uint8."""
    values = weight.float().numpy()
    if kind in SIMPLE:
        return gguf.quants.quantize(values, GGMLQuantizationType[kind])
    size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
    written = WRITERS[kind](values.reshape(-1, size))
    return written.reshape(*values.shape[:-1], -1)


def dequantize(kind: str, blocks: Array) -> Array:
    """Returns what the package says that blocks mean, [.., in] fp32."""
    return gguf.quants.dequantize(blocks, GGMLQuantizationType[kind])


def halves(values: Array) -> tuple[Array, Array]:
    """Returns numbers as fp16's bytes, [n, 2], and as they are then, [n, 1]."""
    rounded = values.astype(np.float16)
    return rounded.reshape(-1, 1).view(np.uint8), rounded.astype(np.float32).reshape(-1, 1)


def divided(values: Array, steps: Array) -> Array:
    return np.divide(values, steps, out=np.zeros_like(values), where=steps != 0)


def rounded(values: Array, steps: Array, least: int, most: int) -> Array:
    return np.clip(np.rint(divided(values, steps + 0 * values)), least, most)


def with_minimums(weights: Array, group: int, bits: int, step_bits: int) -> tuple[Array, ...]:
    """Returns codes [n, groups, group], factors of scales and of minimums [n, groups], and d and
    dmin as bytes."""
    parts = weights.reshape(len(weights), -1, group)
    minimums = np.maximum(0, -parts.min(2))
    scales = (np.maximum(0, parts.max(2)) + minimums) / (2**bits - 1)
    most = 2**step_bits - 1
    d_bytes, d = halves(scales.max(1) / most)
    m_bytes, dmin = halves(minimums.max(1) / most)
    steps = rounded(scales, d, 0, most)
    lows = rounded(minimums, dmin, 0, most)
    shifted = parts + (dmin * lows)[..., None]
    codes = rounded(shifted, (d * steps)[..., None], 0, 2**bits - 1)
    return codes.astype(np.uint8), steps.astype(np.uint8), lows.astype(np.uint8), d_bytes, m_bytes


def without_minimums(
    weights: Array, group: int, bits: int, most_step: int
) -> tuple[Array, Array, Array]:
    """Returns signed codes [n, groups, group], factors [n, groups] and d as bytes."""
    parts = weights.reshape(len(weights), -1, group)
    extreme = np.take_along_axis(parts, np.abs(parts).argmax(2)[..., None], 2)[..., 0]
    scales = extreme / -(2 ** (bits - 1))
    d_bytes, d = halves(np.abs(scales).max(1) / most_step)
    steps = rounded(scales, d, -most_step, most_step)
    codes = rounded(parts, (d * steps)[..., None], -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return codes.astype(np.int8), steps.astype(np.int8), d_bytes


def two_in_a_byte(codes: Array, width: int) -> Array:
    """Packs [n, in]: of 2 * width codes the first half in the lower bits."""
    parts = codes.reshape(len(codes), -1, 2, width)
    return (parts[:, :, 0] | parts[:, :, 1] << 4).reshape(len(codes), -1)


def four_in_a_byte(codes: Array) -> Array:
    """Packs the lower two bits of [n, 256]: of 128 codes every 32 have bits of their own."""
    parts = codes.reshape(len(codes), 2, 4, 32) & 3
    packed = sum(parts[:, :, number] << 2 * number for number in range(4))
    return packed.astype(np.uint8).reshape(len(codes), 64)


def bits_of(codes: Array, bit: int) -> Array:
    """Packs one bit of [n, 256]: that of every 32 codes is a bit of the same 32 bytes."""
    parts = codes.reshape(len(codes), 8, 32) >> bit & 1
    return sum(parts[:, number] << number for number in range(8)).astype(np.uint8)


def twelve_bytes(scales: Array, minimums: Array) -> Array:
    """Packs eight factors of 6 bits each for scales and minimums."""
    first, second = scales[:, :4] | scales[:, 4:] >> 4 << 6, minimums[:, :4]
    second = second | minimums[:, 4:] >> 4 << 6
    return np.concatenate([first, second, scales[:, 4:] & 15 | (minimums[:, 4:] & 15) << 4], 1)


def q2_k(weights: Array) -> Array:
    codes, steps, lows, d, dmin = with_minimums(weights, 16, 2, 4)
    return np.concatenate([steps | lows << 4, four_in_a_byte(codes), d, dmin], 1)


def q3_k(weights: Array) -> Array:
    codes, steps, d = without_minimums(weights, 16, 3, 31)
    unsigned, factors = (codes + 4).view(np.uint8), (steps + 32).view(np.uint8)
    lower = factors[:, :8] & 15 | (factors[:, 8:] & 15) << 4
    upper = factors.reshape(-1, 4, 4) >> 4
    upper = sum(upper[:, number] << 2 * number for number in range(4)).astype(np.uint8)
    return np.concatenate([bits_of(unsigned, 2), four_in_a_byte(unsigned), lower, upper, d], 1)


def q4_k(weights: Array) -> Array:
    codes, steps, lows, d, dmin = with_minimums(weights, 32, 4, 6)
    return np.concatenate([d, dmin, twelve_bytes(steps, lows), two_in_a_byte(codes, 32)], 1)


def q5_k(weights: Array) -> Array:
    codes, steps, lows, d, dmin = with_minimums(weights, 32, 5, 6)
    packed = two_in_a_byte(codes & 15, 32)
    return np.concatenate([d, dmin, twelve_bytes(steps, lows), bits_of(codes, 4), packed], 1)


def q6_k(weights: Array) -> Array:
    codes, steps, d = without_minimums(weights, 16, 6, 127)
    unsigned = (codes + 32).view(np.uint8).reshape(len(weights), 256)
    low = two_in_a_byte(unsigned & 15, 64)
    return np.concatenate([low, four_in_a_byte(unsigned >> 4), steps.view(np.uint8), d], 1)


def iq4_codes(parts: Array, scales: Array) -> Array:
    distances = np.abs(divided(parts, scales + 0 * parts)[..., None] - IQ4)
    return distances.argmin(-1).astype(np.uint8).reshape(len(parts), -1)


def iq4_nl(weights: Array) -> Array:
    d_bytes, d = halves(np.abs(weights).max(1) / 127)
    return np.concatenate([d_bytes, two_in_a_byte(iq4_codes(weights, d), 16)], 1)


def iq4_xs(weights: Array) -> Array:
    parts = weights.reshape(len(weights), 8, 32)
    scales = np.abs(parts).max(2) / 127
    d_bytes, d = halves(scales.max(1) / 31)
    steps = rounded(scales, d, 0, 31)
    codes = iq4_codes(parts, (d * steps)[..., None])
    factors = steps.astype(np.uint8) + 32
    upper = sum((factors[:, i].astype(np.uint16) >> 4) << 2 * i for i in range(8))
    upper_bytes = upper.astype("<u2").reshape(-1, 1).view(np.uint8)
    lower = factors[:, 0::2] & 15 | (factors[:, 1::2] & 15) << 4
    return np.concatenate([d_bytes, upper_bytes, lower, two_in_a_byte(codes, 16)], 1)


WRITERS = {
    "Q2_K": q2_k,
    "Q3_K": q3_k,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
    "IQ4_NL": iq4_nl,
    "IQ4_XS": iq4_xs,
}
