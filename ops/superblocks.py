"""Weights with two levels of scales, as k-quants and IQ4_XS of GGUF files have them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

SUPERBLOCK = 256
"""Inputs that share the scales of `Superblocks`."""


class SuperblockKind(NamedTuple):
    """bits: of a code; group: inputs with a step; has_minimums: codes count from a minimum up, and
    without it from the middle of their range; has_table: codes are indexes into IQ4_VALUES."""

    bits: int
    group: int
    has_minimums: bool
    has_table: bool = False

    def bits_in_memory(self) -> float:
        """Returns the bits of a weight with its share of the scales."""
        factors = 1 + self.has_minimums
        return self.bits + factors * (8 / self.group + 16 / SUPERBLOCK)


SUPERBLOCK_KINDS = {
    "q4_k": SuperblockKind(4, 32, True),
    "q5_k": SuperblockKind(5, 32, True),
    "q6_k": SuperblockKind(6, 16, False),
    "iq4_xs": SuperblockKind(4, 32, False, has_table=True),
}


class Superblocks(NamedTuple):
    """The weights of a product.

        weight = scales * steps * (codes - middle)            q6_k, middle 2^(bits - 1)
        weight = scales * steps * codes - minimums * lifts    q4_k and q5_k
        weight = scales * steps * IQ4_VALUES[codes]           iq4_xs

    kind: of SUPERBLOCK_KINDS. codes: [out, in] uint8, below 2^bits; scales, minimums: [out,
    in / SUPERBLOCK] fp16; steps: [out, groups] int8; lifts: [out, groups] uint8.
    """

    kind: str
    codes: Tensor
    scales: Tensor
    steps: Tensor
    minimums: Tensor | None = None
    lifts: Tensor | None = None
