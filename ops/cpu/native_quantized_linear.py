"""Linear layers with quantized weights on the native kernels, for `Backend.quantized`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ops.backend import (
    INT4_GROUPS,
    MAX_INT8_INPUTS,
    NO_FUSION,
    TABLES,
    Fusion,
    LinearOp,
)
from ops.cpu.native_fusion import ACTIVATIONS, checked_bias, set_norm, sizes
from ops.cpu.native_library import TYPES, address, library
from ops.linear import nf4_bounds, stored4
from ops.superblocks import SUPERBLOCK, SUPERBLOCK_KINDS, Superblocks

_NF4_BOUNDS = nf4_bounds()


class NativeLinear:
    """A LinearOp that fuses norm, int8 quantization, product, bias, activation and residual.

    Rows are fp32 or bf16 and are rounded to int8 with a scale per row. The result is fp32, or bf16
    after an activation, because the next layer quantizes it. A row's bits do not depend on other
    rows.
    """

    def __init__(self, op: Any, num_in: int, num_out: int, fusion: Fusion) -> None:
        """op: the library's packed product. num_out: number of outputs after gating."""
        self.packed, self.num_in, self.num_out = op, num_in, num_out
        self.in_dtype: torch.dtype | None = None  # any of TYPES
        self.out_dtype = torch.float32 if fusion.activation is None else torch.bfloat16
        self._is_gated = fusion.is_gated
        self.norm = set_norm(op, fusion.norm, num_in)
        self.memory: tuple[Tensor, ...] = ()  # of the weights, if the library has not allocated it

    @property
    def size_bytes(self) -> int:
        return int(self.packed.bytes)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rows = x.shape[0]
        if residual is None:
            out = torch.empty(rows, self.num_out, dtype=self.out_dtype)
        else:
            out = residual
            assert out.shape == (rows, self.num_out) and out.dtype == torch.float32
            assert out.stride(1) == 1 and not self._is_gated, "a dense residual, no gates"
        assert x.shape[1] == self.num_in, f"{x.shape} times [{self.num_out}, {self.num_in}]"
        if x.stride(1) != 1:
            x = x.contiguous()
        if rows:
            self.packed.run(
                x.data_ptr(),
                x.stride(0),
                TYPES[x.dtype],
                rows,
                out.data_ptr(),
                out.stride(0),
                TYPES[out.dtype],
                residual is not None,
            )
        return out

    def only_quantize(self, x: Tensor) -> None:
        """Runs norm and quantization without the product, for benchmarks."""
        self.packed.only_quantize(x.data_ptr(), x.stride(0), TYPES[x.dtype], x.shape[0])


class Int8Linear(NativeLinear):
    """int8 x int8 with symmetric weights and a scale per output channel: QuantizedLinears.int8."""

    def __init__(
        self,
        weight: Tensor | Sequence[Tensor],
        bias: Tensor | None,
        fusion: Fusion = NO_FUSION,
        *,
        scales: Tensor | None = None,
        is_head: bool = False,
    ) -> None:
        """Packs a copy of weight: [out, in], or of parts to be concatenated along the output.

        is_head has no effect: results are fp32.
        """
        parts = [weight] if isinstance(weight, Tensor) else list(weight)
        num_out, num_in = sizes(sum(len(part) for part in parts), parts[0].shape[1], fusion)
        if num_in > MAX_INT8_INPUTS:
            raise ValueError(f"{num_in:,} inputs: int8 products sum at most {MAX_INT8_INPUTS:,}")
        bias, kind = checked_bias(bias, num_out, fusion), ACTIVATIONS[fusion.activation]
        args: tuple[object, ...]
        if scales is not None:
            whole = (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()
            scales = scales.float().contiguous()
            assert whole.dtype == torch.int8 and scales.shape == whole.shape[:1]
            args = (whole.data_ptr(), scales.data_ptr())
        else:
            parts = _packable(parts)
            args = (_addresses(parts), TYPES[parts[0].dtype])
        op = library().Int8Linear(num_in, num_out, *args, address(bias), kind, fusion.is_gated)
        super().__init__(op, num_in, num_out, fusion)


def _packable(parts: list[Tensor]) -> list[Tensor]:
    """Returns at most MAX_PARTS parts of one type that the kernel supports, with dense rows."""
    if len(parts) > library().MAX_PARTS or any(part.dtype != parts[0].dtype for part in parts):
        parts = [torch.cat(parts)]
    if parts[0].dtype not in TYPES:
        parts = [part.float() for part in parts]
    return [part if part.stride(1) == 1 else part.contiguous() for part in parts]


def _addresses(parts: list[Tensor]) -> list[int]:
    """Returns the address, the row stride and the number of rows of each part."""
    return [x for part in parts for x in (part.data_ptr(), part.stride(0), len(part))]


class Int4Linear(NativeLinear):
    """4-bit weights with a scale and perhaps an offset per group: QuantizedLinears.int4."""

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bias: Tensor | None,
        fusion: Fusion = NO_FUSION,
        *,
        group: int,
        table: str = "int4",
        minimums: Tensor | None = None,
        channel_scales: Tensor | None = None,
    ) -> None:
        num_out, num_in = sizes(codes.shape[0], codes.shape[1], fusion)
        codes, bias = codes.contiguous(), checked_bias(bias, num_out, fusion)
        halves, lows, channels = stored4(
            codes,
            scales,
            zeros,
            group=group,
            table=table,
            minimums=minimums,
            channel_scales=channel_scales,
        )
        if zeros is not None:
            zeros = zeros.to(torch.uint8).contiguous()
        op = library().Int4Linear(
            num_in,
            num_out,
            codes.data_ptr(),
            halves.data_ptr(),
            address(zeros),
            address(lows),
            channels.data_ptr(),
            group,
            TABLES.index(table),
            address(bias),
            ACTIVATIONS[fusion.activation],
            fusion.is_gated,
        )
        super().__init__(op, num_in, num_out, fusion)


class Rounded4Linear(NativeLinear):
    """Plain weights that are rounded and packed in one pass: QuantizedLinears.rounded4."""

    def __init__(
        self,
        parts: Sequence[Tensor],
        bias: Tensor | None,
        fusion: Fusion = NO_FUSION,
        *,
        group: int,
        is_nf4: bool,
        is_searched: bool = False,
    ) -> None:
        num_out, num_in = sizes(sum(len(part) for part in parts), parts[0].shape[1], fusion)
        assert group in INT4_GROUPS and not (is_nf4 and is_searched)
        parts, bias = _packable(list(parts)), checked_bias(bias, num_out, fusion)
        op = library().Int4Linear(
            num_in,
            num_out,
            _addresses(parts),
            TYPES[parts[0].dtype],
            group,
            address(_NF4_BOUNDS if is_nf4 else None),
            is_searched,
            address(bias),
            ACTIVATIONS[fusion.activation],
            fusion.is_gated,
        )
        super().__init__(op, num_in, num_out, fusion)


class SuperblockLinear(NativeLinear):
    """Codes of 4 to 6 bits with two levels of scales: QuantizedLinears.superblocks."""

    def __init__(
        self,
        weight: Superblocks,
        bias: Tensor | None,
        fusion: Fusion = NO_FUSION,
        *,
        factor: float = 1.0,
    ) -> None:
        num_rows, blocks = weight.scales.shape
        num_out, num_in = sizes(num_rows, blocks * SUPERBLOCK, fusion)
        parts = [None if part is None else part.contiguous() for part in _parts(weight)]
        factors, bias = torch.full((num_rows,), factor), checked_bias(bias, num_out, fusion)
        op = library().SuperblockLinear(
            num_in,
            num_out,
            list(SUPERBLOCK_KINDS).index(weight.kind),
            [address(part) for part in parts],
            factors.data_ptr(),
            address(bias),
            ACTIVATIONS[fusion.activation],
            fusion.is_gated,
        )
        super().__init__(op, num_in, num_out, fusion)


def _parts(weight: Superblocks) -> tuple[Tensor | None, ...]:
    """Returns the tensors in the library's order, of the shapes and types that it reads."""
    layout = SUPERBLOCK_KINDS[weight.kind]
    rows, blocks = weight.scales.shape
    num_in = blocks * SUPERBLOCK
    assert int(weight.codes.max()) < 1 << layout.bits, f"codes of {layout.bits} bits"
    parts = (weight.codes, weight.scales, weight.steps, weight.minimums, weight.lifts)
    columns = (num_in, blocks, num_in // layout.group, blocks, num_in // layout.group)
    types = (torch.uint8, torch.float16, torch.int8, torch.float16, torch.uint8)
    for i, (part, width, dtype) in enumerate(zip(parts, columns, types, strict=True)):
        assert (part is not None) == (i < 3 or layout.has_minimums), "minimums and lifts, or none"
        assert part is None or (part.shape == (rows, width) and part.dtype == dtype), f"part {i}"
    return parts


class NativeLinears:
    """`QuantizedLinears` of the native kernels. RuntimeError if they are not built."""

    int8 = Int8Linear
    int4 = Int4Linear
    rounded4 = Rounded4Linear
    superblocks = SuperblockLinear
    has_superblocks = True

    @staticmethod
    def fp8(
        parts: Sequence[Tensor],
        bias: Tensor | None,
        fusion: Fusion = NO_FUSION,
        *,
        scales: Tensor | None = None,
    ) -> LinearOp:
        raise ValueError("this processor has no fp8 products")


NATIVE = NativeLinears()
