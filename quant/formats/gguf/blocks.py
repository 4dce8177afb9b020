"""Unpacks the blocks of each kind to whole numbers with a scale, and perhaps a minimum, per group.

    weight = (code - offset) * scale - minimum, or the table's value of code, times scale

That is the meaning of ggml's `dequantize_row_*`, computed in fp32 in the same order. What a scale
consists of (an fp16 of the block times a number of 4 to 8 bits) is multiplied here, exactly.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ops.superblocks import SUPERBLOCK_KINDS, Superblocks
from quant.formats.gguf.kinds import BY_NAME


class Groups(NamedTuple):
    """Unpacked rows. codes: [rows, in] uint8 or int8; scales, minimums: [rows, groups] fp32."""

    codes: Tensor
    scales: Tensor
    minimums: Tensor | None = None


Unpack = Callable[[Tensor], Groups]
"""Unpacks blocks: [rows, blocks, bytes of a block] uint8."""


class Layout(NamedTuple):
    """How a kind is unpacked.

    group: weights that share a scale. offset: of codes, with table "int4" only. halves: the first
    bytes of fp16 numbers in a block, which must be finite. bits: 4 if codes are below 16.
    """

    unpack: Unpack
    group: int
    bits: int
    halves: tuple[int, ...]
    offset: int = 0
    has_minimums: bool = False
    table: str = "int4"


def _half(blocks: Tensor, at: int) -> Tensor:
    """Returns the fp16 at a byte of each block, [rows, blocks, 1] fp32."""
    return blocks.view(torch.float16)[..., at // 2, None].float()


def blocks_of(kind: str, stored: Tensor) -> Tensor:
    """Returns rows, [.., bytes of a row], as [.., blocks, bytes of a block]."""
    return _parted(stored, BY_NAME[kind].num_bytes)


def _parted(values: Tensor, size: int) -> Tensor:
    """Divides the last dimension into parts of a size."""
    return values.view(*values.shape[:-1], -1, size)


def _nibbles(packed: Tensor, width: int) -> Tensor:
    """Unpacks [rows, blocks, n * width] to [rows, blocks, n, 2, width]: the lower bits first."""
    parts = _parted(packed, width)
    out = torch.empty(*parts.shape[:-1], 2, width, dtype=torch.uint8)
    torch.bitwise_and(parts, 15, out=out[..., 0, :])
    torch.bitwise_right_shift(parts, 4, out=out[..., 1, :])
    return out


def _pairs(packed: Tensor) -> Tensor:
    """Unpacks [rows, blocks, n * 32] to [rows, blocks, n, 4, 32]: the lowest two bits first."""
    parts = _parted(packed, 32)
    out = torch.empty(*parts.shape[:-1], 4, 32, dtype=torch.uint8)
    for number in range(4):
        shifted = parts if number == 0 else parts >> 2 * number
        torch.bitwise_and(shifted, 3, out=out[..., number, :])
    return out


def _set_bit(codes: Tensor, packed: Tensor, bit: int) -> None:
    """Sets a bit of codes: [rows, blocks, 8, n] from the bits 0 to 7 of packed: [.., n]."""
    for number in range(8):
        # the bit moves straight to its place
        moved = packed >> number - bit if number > bit else packed << bit - number
        codes[..., number, :] |= moved.bitwise_and_(1 << bit)


def _flat(codes: Tensor) -> Tensor:
    return codes.reshape(len(codes), -1)


def _q4_0(blocks: Tensor) -> Groups:
    return Groups(_flat(_nibbles(blocks[..., 2:], 16)), _half(blocks, 0)[..., 0])


def _q4_1(blocks: Tensor) -> Groups:
    codes = _flat(_nibbles(blocks[..., 4:], 16))
    return Groups(codes, _half(blocks, 0)[..., 0], -_half(blocks, 2)[..., 0])


@functools.cache
def _fifth_bits() -> Tensor:
    """Returns eight bytes with the bits of a byte as their fifth bits, [2^8] int64."""
    bits = torch.arange(256, dtype=torch.uint8)[:, None] >> torch.arange(8, dtype=torch.uint8)
    return (bits & 1).bitwise_left_shift_(4).view(torch.int64).flatten()


def _with_fifth_bit(blocks: Tensor, at: int) -> Tensor:
    """Returns codes of 5 bits, of which the fifth are four bytes, before 16 bytes of the others."""
    codes = _flat(_nibbles(blocks[..., at + 4 :], 16))
    high = _fifth_bits()[blocks[..., at : at + 4].int()]
    return codes.bitwise_or_(_flat(high).view(torch.uint8))


def _q5_0(blocks: Tensor) -> Groups:
    codes = _with_fifth_bit(blocks, 2).sub_(16).view(torch.int8)
    return Groups(codes, _half(blocks, 0)[..., 0])


def _q5_1(blocks: Tensor) -> Groups:
    codes = _with_fifth_bit(blocks, 4)
    return Groups(codes, _half(blocks, 0)[..., 0], -_half(blocks, 2)[..., 0])


def _q8_0(blocks: Tensor) -> Groups:
    return Groups(_flat(blocks[..., 2:]).view(torch.int8), _half(blocks, 0)[..., 0])


def _q2_k(blocks: Tensor) -> Groups:
    steps = blocks[..., :16]
    scales = _half(blocks, 80) * (steps & 15)
    minimums = _half(blocks, 82) * (steps >> 4)
    return Groups(_flat(_pairs(blocks[..., 16:80])), _flat(scales), _flat(minimums))


def _q3_k(blocks: Tensor) -> Groups:
    """A code's third bit is set for numbers that are not negative; eight is added in all."""
    codes = _pairs(blocks[..., 32:96]).view(*blocks.shape[:2], 8, 32)
    _set_bit(codes, blocks[..., :32], 2)
    codes += 4
    low, high = blocks[..., 96:104], blocks[..., 104:108]
    steps = torch.cat((low & 15, low >> 4), -1)
    steps |= torch.cat([(high >> 2 * number & 3) << 4 for number in range(4)], -1)
    scales = _half(blocks, 108) * (steps.float() - 32)
    return Groups(_flat(codes), _flat(scales))


def _steps_of_6_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Unpacks the 12 bytes of Q4_K and Q5_K to eight factors of scales and eight of minimums."""
    first, second, both = _parted(packed, 4).unbind(-2)
    scales = torch.cat((first & 63, both & 15 | first >> 2 & 48), -1)
    minimums = torch.cat((second & 63, both >> 4 | second >> 2 & 48), -1)
    return scales, minimums


def _halves(blocks: Tensor, at: int) -> Tensor:
    """Returns the fp16 at a byte of each block, [rows, blocks]."""
    return blocks.view(torch.float16)[..., at // 2]


def _with_steps(kind: str, codes: Tensor, blocks: Tensor) -> Superblocks:
    """Returns weights of Q4_K and Q5_K."""
    steps, lifts = map(_flat, _steps_of_6_bits(blocks[..., 4:16]))
    scales, minimums = _halves(blocks, 0), _halves(blocks, 2)
    return Superblocks(kind, _flat(codes), scales, steps.view(torch.int8), minimums, lifts)


def _q4_k(blocks: Tensor) -> Superblocks:
    return _with_steps("q4_k", _nibbles(blocks[..., 16:], 32), blocks)


def _q5_k(blocks: Tensor) -> Superblocks:
    codes = _nibbles(blocks[..., 48:], 32).view(*blocks.shape[:2], 8, 32)
    _set_bit(codes, blocks[..., 16:48], 4)
    return _with_steps("q5_k", codes, blocks)


def _q6_k(blocks: Tensor) -> Superblocks:
    low, high = blocks[..., :128], _parted(blocks[..., 128:192], 32)
    # 64 bytes hold the lower bits of weights 0 to 63 and then those of 64 to 127
    codes = _nibbles(low, 64).view(*blocks.shape[:2], 2, 4, 32)
    codes[..., 0, :] |= (high & 3) << 4
    codes[..., 1, :] |= (high & 12) << 2
    codes[..., 2, :] |= high & 48
    codes[..., 3, :] |= (high & 192) >> 2
    steps = _flat(blocks[..., 192:208]).view(torch.int8)
    return Superblocks("q6_k", _flat(codes), _halves(blocks, 208), steps)


def _multiplied(weight: Superblocks) -> Groups:
    """Returns weights with one level of scales; codes without minimums and a table are signed."""
    kind, codes, scales, steps, minimums, lifts = weight

    def product(halves: Tensor, factors: Tensor) -> Tensor:
        return _flat(
            halves.float()[..., None] * _parted(factors, factors.shape[1] // halves.shape[1])
        )

    if SUPERBLOCK_KINDS[kind].has_table:
        return Groups(codes, product(scales, steps))
    if minimums is None or lifts is None:
        middle = 1 << SUPERBLOCK_KINDS[kind].bits - 1
        return Groups(codes.sub_(middle).view(torch.int8), product(scales, steps))
    return Groups(codes, product(scales, steps), product(minimums, lifts))


def _iq4_xs(blocks: Tensor) -> Superblocks:
    places = torch.arange(0, 8, 2, dtype=torch.uint8)
    high = blocks[..., 2:4, None].bitwise_right_shift(places).flatten(-2) & 3
    steps = _nibbles(blocks[..., 4:8], 1).flatten(-3) | high << 4
    signed = _flat(steps.view(torch.int8) - 32)
    codes = _flat(_nibbles(blocks[..., 8:], 16))
    return Superblocks("iq4_xs", codes, _halves(blocks, 0), signed)


SUPERBLOCKS: dict[str, Callable[[Tensor], Superblocks]] = {
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_XS": _iq4_xs,
}
"""The kinds whose two levels of scales products keep, and what unpacks their blocks."""


def _mxfp4(blocks: Tensor) -> Groups:
    stored = blocks[..., 0].int()
    # 2^(e - 127) as the bits of fp32, whose normal numbers end above 2^-127
    powers = torch.where(stored > 0, stored << 23, 1 << 22).to(torch.int32).view(torch.float32)
    return Groups(_flat(_nibbles(blocks[..., 1:], 16)), powers)


LAYOUTS = {
    "Q4_0": Layout(_q4_0, 32, 4, (0,), offset=8),
    "Q4_1": Layout(_q4_1, 32, 4, (0, 2), has_minimums=True),
    "Q5_0": Layout(_q5_0, 32, 8, (0,)),
    "Q5_1": Layout(_q5_1, 32, 8, (0, 2), has_minimums=True),
    "Q8_0": Layout(_q8_0, 32, 8, (0,)),
    "Q2_K": Layout(_q2_k, 16, 4, (80, 82), has_minimums=True),
    "Q3_K": Layout(_q3_k, 16, 4, (108,), offset=8),
    "Q4_K": Layout(lambda blocks: _multiplied(_q4_k(blocks)), 32, 4, (0, 2), has_minimums=True),
    "Q5_K": Layout(lambda blocks: _multiplied(_q5_k(blocks)), 32, 8, (0, 2), has_minimums=True),
    "Q6_K": Layout(lambda blocks: _multiplied(_q6_k(blocks)), 16, 8, (208,)),
    "IQ4_NL": Layout(_q4_0, 32, 4, (0,), table="iq4"),
    "IQ4_XS": Layout(lambda blocks: _multiplied(_iq4_xs(blocks)), 32, 4, (0,), table="iq4"),
    "MXFP4": Layout(_mxfp4, 32, 4, (), table="fp4"),
}


def unpack(kind: str, stored: Tensor) -> Groups:
    """Unpacks rows, [rows, bytes of a row] uint8."""
    return LAYOUTS[kind].unpack(blocks_of(kind, stored))


def unpack_superblocks(kind: str, stored: Tensor) -> Superblocks:
    """Unpacks rows, [rows, bytes of a row] uint8, of one of SUPERBLOCKS."""
    return SUPERBLOCKS[kind](blocks_of(kind, stored))
