"""4-bit weights with a scale per group of inputs, and rounding of plain weights to int4 or NF4.

int4 has 16 even steps, of which one is the group's largest magnitude, or whose size is searched.
NF4 has the quantiles of a normal distribution (QLoRA, arXiv 2305.14314), for weights that are about
normal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ops.backend import NO_FUSION, TABLE_VALUES, Fusion, LinearOp, QuantizedLinears
from ops.cpu.native_quantized_linear import NATIVE
from ops.linear import round_to_4_bits

GROUP = 64


class Int4Weight(NamedTuple):
    """A quantized weight: codes: [out, in] uint8 below 16; scales: [out, groups] fp32.

    zeros: [out, groups] uint8; minimums: [out, groups] fp32; channel_scales: [out] fp32. What they
    stand for, and the tables, are those of `QuantizedLinears.int4`.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int
    table: str = "int4"
    minimums: Tensor | None = None
    channel_scales: Tensor | None = None

    def linear(
        self, bias: Tensor | None, fusion: Fusion = NO_FUSION, linears: QuantizedLinears = NATIVE
    ) -> LinearOp:
        return linears.int4(
            self.codes,
            self.scales,
            self.zeros,
            bias,
            fusion,
            group=self.group,
            table=self.table,
            minimums=self.minimums,
            channel_scales=self.channel_scales,
        )

    def plain(self) -> Tensor:
        """Returns the dequantized weight, [out, in] fp32."""
        out = self.codes.float()
        if self.table != "int4":
            values = torch.tensor(TABLE_VALUES[self.table], dtype=torch.float32)
            out = values[self.codes.int()]
        for group, scales in enumerate(self.scales.unbind(1)):
            part = out[:, group * self.group : (group + 1) * self.group]
            if self.table == "int4" and self.minimums is None:
                part -= 8 if self.zeros is None else self.zeros[:, group, None]
            part *= scales[:, None]
            if self.minimums is not None:
                part -= self.minimums[:, group, None]
        return out if self.channel_scales is None else out * self.channel_scales[:, None]


def quantize_int4(weight: Tensor, group: int = GROUP, *, is_searched: bool = False) -> Int4Weight:
    """Rounds weight: [out, in] in any float type to the nearest of 16 steps per group, whose scale
    is the group's largest magnitude, or is searched."""
    rounded = round_to_4_bits(weight, group, is_nf4=False, is_searched=is_searched)
    return Int4Weight(*rounded, None, group)


def quantize_nf4(weight: Tensor, group: int = GROUP) -> Int4Weight:
    """Rounds weight: [out, in] in any float type to NF4 values times the group's largest."""
    return Int4Weight(*round_to_4_bits(weight, group, is_nf4=True), None, group, table="nf4")
