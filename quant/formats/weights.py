"""The weights of quantized products as they are stored: 8-bit and 4-bit codes with scales.

What the kernels cannot compute with is rounded to int8 with a scale per output, in pieces, so that
no plain copy of a product exists.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ops.backend import INT4_GROUPS, NO_FUSION, Fusion, LinearOp, QuantizedLinears
from ops.cpu import native_library
from ops.cpu.native_quantized_linear import NATIVE
from ops.cpu.native_rounding import can_round, round_codes, unpack_nibbles
from quant.formats.base import joined
from quant.int4 import Int4Weight

E4M3 = torch.float8_e4m3fn
FP8_GROUP = 128  # inputs that share a scale in QuantizedLinears.fp8
_PIECE_VALUES = 1 << 18  # values of a plain piece, 1 MiB of fp32
# The expected change of 8-bit weights that are rounded again (tests/quant/formats measures it).
ROUNDED = (
    "become int8 with a scale per output, which changes them by about 0.9 % (root mean square, of "
    "normal weights)"
)


class Reordered:
    """A product with reordered inputs (GPTQ's order by decreasing activations)."""

    def __init__(self, op: LinearOp, order: Tensor) -> None:
        self.op, self._order = op, order

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if self._order.device != x.device:
            self._order = self._order.to(x.device)
        return self.op(x.index_select(1, self._order), residual)


@dataclass(frozen=True, slots=True)
class Weight4:
    """A 4-bit weight. order: the input of each column of codes, None for their own order."""

    weight: Int4Weight
    order: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        num_out, num_in = self.weight.codes.shape
        return num_out, num_in

    def linear(
        self, bias: Tensor | None, fusion: Fusion = NO_FUSION, linears: QuantizedLinears = NATIVE
    ) -> LinearOp:
        if self.order is None:
            return self.weight.linear(bias, fusion, linears)
        norm = fusion.norm
        if norm is not None:
            order = self.order.to(norm.weight.device)
            norm_bias = None if norm.bias is None else norm.bias[order]
            norm = norm._replace(weight=norm.weight[order], bias=norm_bias)
        return Reordered(self.weight.linear(bias, fusion._replace(norm=norm), linears), self.order)

    def plain(self) -> Tensor:
        weight = self.weight.plain()
        return weight if self.order is None else weight[:, self.order.argsort()]

    def scaled(self, factor: float) -> Weight4:
        channels = self.weight.channel_scales
        if channels is None:
            channels = torch.ones(len(self.weight.codes))
        return replace(self, weight=self.weight._replace(channel_scales=channels * factor))

    def rows(self, order: Tensor) -> Weight4:
        return replace(self, weight=int4_rows(self.weight, order))


def int4_rows(weight: Int4Weight, order: Tensor) -> Int4Weight:
    """Returns the outputs that order lists."""

    def some(each: Tensor | None) -> Tensor | None:
        return None if each is None else each[order]

    return weight._replace(
        codes=weight.codes[order],
        scales=weight.scales[order],
        zeros=some(weight.zeros),
        minimums=some(weight.minimums),
        channel_scales=some(weight.channel_scales),
    )


def joined_int4(parts: Sequence[Int4Weight]) -> Int4Weight:
    """Concatenates weights of one table and group along the output."""

    def some(each: Sequence[Tensor | None]) -> Tensor | None:
        given = [part for part in each if part is not None]
        assert len(given) in (0, len(each)), "all parts have it or none"
        return joined(given) if given else None

    codes, scales, zeros, groups, tables, minimums, channels = zip(*parts, strict=True)
    assert len(set(groups)) == len(set(tables)) == 1
    return Int4Weight(
        joined(codes),
        joined(scales),
        some(zeros),
        groups[0],
        tables[0],
        some(minimums),
        some(channels),
    )


def kernel_group(size: int, num_in: int) -> tuple[int, int]:
    """Returns (the kernel's group, how often a scale of `size` inputs is repeated).

    ValueError if no group of the kernels divides it. One scale for all inputs always fits.
    """
    if size == num_in:
        largest = INT4_GROUPS[-1]
        return largest, -(-num_in // largest)
    fits = [group for group in INT4_GROUPS if size % group == 0]
    if not fits:
        raise ValueError(f"groups of {size} inputs are not supported")
    return fits[-1], size // fits[-1]


def byte_nibbles(packed: Tensor, *, is_low_first: bool) -> Tensor:
    """Unpacks packed: [n, m] uint8 to [n, 2 m] uint8 below 16."""
    if native_library.is_available():
        return unpack_nibbles(packed, is_low_first=is_low_first)
    out = torch.empty(packed.shape[0], packed.shape[1], 2, dtype=torch.uint8)
    low = 0 if is_low_first else 1
    torch.bitwise_and(packed, 15, out=out[..., low])
    torch.bitwise_right_shift(packed, 4, out=out[..., 1 - low])
    return out.flatten(1)


@dataclass(frozen=True, slots=True)
class Weight8:
    """A weight of 8-bit codes: (codes - zeros) * scales * factor.

    codes: [out, in] int8, uint8 or e4m3; scales: [out, groups] fp32, of `group` inputs each, the
    last of which may be shorter; zeros: [out, groups] fp32. order: the group of each input, None
    for their own order.
    """

    codes: Tensor
    scales: Tensor
    group: int
    zeros: Tensor | None = None
    order: Tensor | None = None
    factor: float = 1.0

    @property
    def shape(self) -> tuple[int, int]:
        num_out, num_in = self.codes.shape
        return num_out, num_in

    @property
    def is_per_channel(self) -> bool:
        return self.scales.shape[1] == 1 and self.zeros is None

    @property
    def is_fp8(self) -> bool:
        """Whether devices with fp8 products take it as it is."""
        in_order = self.zeros is None and self.order is None
        has_size = self.is_per_channel or self.group == FP8_GROUP
        return self.codes.dtype == E4M3 and in_order and has_size

    def linear(
        self, bias: Tensor | None, fusion: Fusion = NO_FUSION, linears: QuantizedLinears = NATIVE
    ) -> LinearOp:
        """Computes in int8, with e4m3 per channel or 128 inputs in fp8 if the device has such
        products."""
        codes, scales = self.codes, self.scales[:, 0]
        if self.is_fp8:
            of_fp8 = scales if self.is_per_channel else self.scales
            try:
                return linears.fp8([codes], bias, fusion, scales=of_fp8 * self.factor)
            except ValueError:  # this device has none
                pass
        if not self.is_per_channel or codes.dtype != torch.int8:
            codes, scales = self.rounded()
        return linears.int8([codes], bias, fusion, scales=scales * self.factor)

    def plain(self) -> Tensor:
        out = torch.empty(self.shape)
        for rows, values in self._pieces():
            out[rows] = values
        return out if self.factor == 1.0 else out.mul_(self.factor)

    def scaled(self, factor: float) -> Weight8:
        return replace(self, factor=self.factor * factor)

    def rows(self, order: Tensor) -> Weight8:
        zeros = None if self.zeros is None else self.zeros[order]
        codes = self.codes.view(torch.uint8)[order].view(self.codes.dtype)
        return replace(self, codes=codes, scales=self.scales[order], zeros=zeros)

    def as_bytes(self) -> Weight8:
        """Returns int8 codes as bytes with a zero point of 128."""
        assert self.codes.dtype == torch.int8 and self.zeros is None
        codes = self.codes.view(torch.uint8) ^ 128
        return replace(self, codes=codes, zeros=torch.full_like(self.scales, 128.0))

    def rounded(self) -> tuple[Tensor, Tensor]:
        """Rounds to the nearest of 127 steps of each output's largest magnitude.

        Returns codes and steps, to be multiplied by the factor, which decides no rounding.
        """
        if self.order is None and can_round(self.codes):
            group = self.group if self.scales.shape[1] > 1 else self.shape[1]
            return round_codes(self.codes, self.scales, group, self.zeros)
        return self._rounded_in_torch()

    def _rounded_in_torch(self) -> tuple[Tensor, Tensor]:
        codes, steps = torch.empty(self.shape, dtype=torch.int8), torch.empty(self.shape[0])
        for rows, values in self._pieces():
            low, high = values.aminmax(dim=1)
            largest = torch.maximum(-low, high)
            usual = largest >= 1e-30
            values *= torch.where(usual, 127 / largest, 0.0)[:, None]
            codes[rows] = values.round_()
            steps[rows] = torch.where(usual, largest / 127, 0.0)
        return codes, steps

    def _pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields slices of outputs and their plain values but for the factor."""
        num_out, num_in = self.shape
        size = max(1, _PIECE_VALUES // max(1, num_in))
        for start in range(0, num_out, size):
            rows = slice(start, min(start + size, num_out))
            values = _floats(self.codes[rows])
            if self.zeros is not None:
                grouped, zeros = self._in_groups(values, self.zeros[rows])
                grouped -= zeros
            grouped, scales = self._in_groups(values, self.scales[rows])
            grouped *= scales
            yield rows, values

    def _in_groups(self, values: Tensor, each: Tensor) -> tuple[Tensor, Tensor]:
        """Returns views of values: [n, in] and of each: [n, groups] that broadcast."""
        if each.shape[1] == 1:
            return values, each
        if self.order is not None:
            return values, each[:, self.order]
        if values.shape[1] % self.group:
            return values, each.repeat_interleave(self.group, 1)[:, : values.shape[1]]
        return values.view(len(values), -1, self.group), each[..., None]


def _floats(codes: Tensor) -> Tensor:
    """Returns codes in fp32. The bits of e4m3 are those of fp16 / 256, which torch casts faster."""
    if codes.dtype != E4M3:
        return codes.float()
    bits = codes.view(torch.int8).to(torch.int16)
    halves = bits.bitwise_left_shift_(7).bitwise_and_(~0x407F).view(torch.float16)
    return halves.float().mul_(256)


def joined_8(parts: Sequence[Weight8]) -> Weight8:
    """Concatenates weights of one type, group and order along the output."""
    assert len({part.group for part in parts}) == 1
    if len(parts) == 1:
        return parts[0]
    if any(part.zeros is None for part in parts) and any(part.zeros is not None for part in parts):
        parts = [part if part.zeros is not None else part.as_bytes() for part in parts]
    kind = parts[0].codes.dtype
    codes = joined([part.codes.view(torch.uint8) for part in parts]).view(kind)
    zeros = [part.zeros for part in parts if part.zeros is not None]
    assert len(zeros) in (0, len(parts))
    return replace(
        parts[0],
        codes=codes,
        scales=joined([part.scales for part in parts]),
        zeros=joined(zeros) if zeros else None,
    )
