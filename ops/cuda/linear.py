"""Linear layers on a CUDA device: packing, and the choice of kernels for a call.

A call neither waits for the device nor reads its data, so that it can be part of a CUDA graph. The
result of a row does not depend on other rows, except in the library's products of plain types.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as functional
from torch import Tensor

from ops.backend import MAX_INT8_INPUTS, NO_FUSION, Fusion, Norm
from ops.cuda import tune
from ops.cuda.upload import on_device
from ops.linear import round_to_4_bits, stored4
from ops.triton_kernels.linear import ScaledWeight, library_linear, scaled_linear, split_scratch
from ops.triton_kernels.linear4 import int4_linear, pack_int4
from ops.triton_kernels.rows import activation_rows, gated_rows, norm_rows, quantize_rows
from ops.triton_kernels.small_batch import small_batch_linear

# Weights are rounded in pieces of that many values, which bounds the temporary memory.
PACK_VALUES = 1 << 26


class CudaLinear:
    """A LinearOp. Rows are fp32 or bf16; the result is bf16 or out_dtype, fp32 with a residual."""

    def __init__(
        self,
        kernel: str,
        num_in: int,
        num_rows: int,
        fusion: Fusion,
        out_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """num_rows: number of rows of the weight."""
        assert not fusion.is_gated or (num_rows % 2 == 0 and fusion.activation is not None)
        self.kernel, self.num_in, self.fusion, self.device = kernel, num_in, fusion, device
        self.num_out = num_rows // 2 if fusion.is_gated else num_rows
        self.out_dtype = out_dtype
        self._num_rows = num_rows
        self._norm = None if fusion.norm is None else norm_on(fusion.norm, num_in, device)
        self._choices: dict[tuple[int, bool], tune.Choice] = {}

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        assert x.shape[1] == self.num_in, f"{x.shape} times [{self.num_out}, {self.num_in}]"
        out = residual
        if out is None:
            out = torch.empty(len(x), self.num_out, dtype=self.out_dtype, device=x.device)
        else:
            assert out.shape == (len(x), self.num_out) and out.dtype == torch.float32
            assert out.stride(1) == 1 and not self.fusion.is_gated, "a dense residual, no gates"
        if len(x):
            self._run(x, out, residual, self.choice(len(x), residual is not None))
        return out

    def choice(self, num_rows: int, adds: bool) -> tune.Choice:
        """Returns the choice for num_rows rows."""
        at = tune.bucket(num_rows), adds
        if at not in self._choices:
            self._choices[at] = tune.choose(self.shape(*at), self.device)
        return self._choices[at]

    def job(self, num_rows: int, adds: bool) -> tune.Job:
        """Returns a job for tune.tune with random rows as they occur in a model."""
        x = torch.randn(num_rows, self.num_in, device=self.device)
        if self._norm is None:
            x = x.bfloat16()
        residual = None
        if adds:
            residual = torch.randn(num_rows, self.num_out, device=self.device)

        def run(choice: tune.Choice) -> Tensor:
            out = torch.empty(num_rows, self.num_out, dtype=self.out_dtype, device=self.device)
            if residual is not None:
                out = residual.clone()
            self._run(x, out, out if adds else None, choice)
            return out

        shape = self.shape(tune.bucket(num_rows), adds)
        return tune.Job(shape, run, is_exact=self.kernel == "int8")

    def shape(self, rows: int, adds: bool) -> tune.Shape:
        return tune.Shape(self.kernel, rows, self._num_rows, self.num_in, adds)

    def _run(self, x: Tensor, out: Tensor, residual: Tensor | None, choice: tune.Choice) -> None:
        raise NotImplementedError


class ScaledLinear(CudaLinear):
    """8-bit weights and rows, with a scale per output channel and per row."""

    def __init__(
        self,
        kernel: str,
        dtype: torch.dtype,
        weight: Tensor | Sequence[Tensor],
        bias: Tensor | None,
        fusion: Fusion,
        scales: Tensor | None,
        out_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        parts = [weight] if isinstance(weight, Tensor) else list(weight)
        num_rows, num_in = sum(len(part) for part in parts), parts[0].shape[1]
        super().__init__(kernel, num_in, num_rows, fusion, out_dtype, device)
        self.dtype = dtype
        padded = (num_in + 15) // 16 * 16
        codes = torch.zeros(num_rows, padded, dtype=dtype, device=device)
        steps = torch.empty(num_rows, dtype=torch.float32, device=device)
        for some, to in placed_rows(parts, fusion.is_gated):
            if scales is None:
                codes[to, :num_in], steps[to] = round_weight(on_device(some, device), dtype)
            else:
                assert some.dtype == dtype, f"{some.dtype}"
                codes[to, :num_in] = on_device(some, device)
        if scales is not None:
            assert scales.shape == (num_rows,), f"{scales.shape}"
            steps = interleaved(scales.to(device, torch.float32), fusion)
        self.weight = ScaledWeight(codes, steps, packed_bias(bias, num_rows, fusion, device))

    @property
    def size_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.weight if t is not None)

    def _run(self, x: Tensor, out: Tensor, residual: Tensor | None, choice: tune.Choice) -> None:
        _, activation, is_gated = self.fusion
        if choice.implementation == tune.FUSED:
            whole = x, self._norm, self.weight, out, residual, activation
            small_batch_linear(*whole, is_gated=is_gated, tile=choice.tile)
            return
        rows = quantize_rows(x, self._norm, dtype=self.dtype)
        args = rows, self.weight, out, residual, activation
        if choice.implementation == tune.LIBRARY:
            library_linear(*args, is_gated=is_gated)
        else:
            scaled_linear(*args, is_gated=is_gated, tile=choice.tile)


class Int8Linear(ScaledLinear):
    """int8 x int8: QuantizedLinears.int8 on a device."""

    def __init__(
        self,
        weight: Tensor | Sequence[Tensor],
        bias: Tensor | None,
        fusion: Fusion = NO_FUSION,
        *,
        scales: Tensor | None = None,
        is_head: bool = False,
        device: torch.device,
    ) -> None:
        """weight may be on any device. ValueError beyond MAX_INT8_INPUTS."""
        num_in = (weight if isinstance(weight, Tensor) else weight[0]).shape[1]
        if num_in > MAX_INT8_INPUTS:
            raise ValueError(f"{num_in:,} inputs: int8 products sum at most {MAX_INT8_INPUTS:,}")
        out_dtype = torch.float32 if is_head else torch.bfloat16
        super().__init__("int8", torch.int8, weight, bias, fusion, scales, out_dtype, device)
        split_scratch(device)


class Fp8Linear(ScaledLinear):
    """e4m3 x e4m3: QuantizedLinears.fp8 on a device."""

    def __init__(
        self,
        weight: Tensor | Sequence[Tensor],
        bias: Tensor | None,
        fusion: Fusion = NO_FUSION,
        *,
        scales: Tensor | None = None,
        device: torch.device,
    ) -> None:
        """ValueError on a device whose tensor cores do not know the type."""
        require_fp8(device)
        kind = torch.float8_e4m3fn
        super().__init__("fp8", kind, weight, bias, fusion, scales, torch.bfloat16, device)


def require_fp8(device: torch.device) -> None:
    """Raises ValueError if the device's tensor cores do not know e4m3."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        raise ValueError("fp8 needs a GPU of compute capability 8.9 at least")


class Int4Linear(CudaLinear):
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
        device: torch.device,
    ) -> None:
        """The tensors may be on any device."""
        num_rows, num_in = codes.shape
        super().__init__("int4", num_in, num_rows, fusion, torch.bfloat16, device)
        order = interleaved(torch.arange(num_rows, device=device), fusion)

        def placed(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else on_device(tensor, device)[order]

        codes, scales = on_device(codes, device)[order], on_device(scales, device)[order]
        zeros = placed(zeros)
        stored = stored4(
            codes,
            scales,
            zeros,
            group=group,
            table=table,
            minimums=placed(minimums),
            channel_scales=placed(channel_scales),
        )
        bias = packed_bias(bias, num_rows, fusion, device)
        self.weight = pack_int4(codes, stored, zeros, bias, group=group, table=table)

    @property
    def size_bytes(self) -> int:
        each = (self.weight.packed, self.weight.words, self.weight.channels, self.weight.bias)
        return sum(t.numel() * t.element_size() for t in each if t is not None)

    def _run(self, x: Tensor, out: Tensor, residual: Tensor | None, choice: tune.Choice) -> None:
        rows = quantize_rows(x, self._norm, multiple=max(self.weight.group, 64))
        _, activation, is_gated = self.fusion
        args = rows, self.weight, out, residual, activation
        int4_linear(*args, is_gated=is_gated, tile=choice.tile)


def rounded4_linear(
    parts: Sequence[Tensor],
    bias: Tensor | None,
    fusion: Fusion = NO_FUSION,
    *,
    group: int,
    is_nf4: bool,
    is_searched: bool = False,
    device: torch.device,
) -> Int4Linear:
    """Implements QuantizedLinears.rounded4 on a device, with the temporary memory of one part."""
    how = {"is_nf4": is_nf4, "is_searched": is_searched}
    rounded = [round_to_4_bits(on_device(part, device), group, **how) for part in parts]
    codes, scales = (torch.cat(each) for each in zip(*rounded, strict=True))
    table = "nf4" if is_nf4 else "int4"
    return Int4Linear(codes, scales, None, bias, fusion, group=group, table=table, device=device)


class PlainLinear:
    """A LinearOp in the type of its weight, which uses torch's product."""

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        fusion: Fusion = NO_FUSION,
        *,
        device: torch.device,
    ) -> None:
        """Copies weight: [out, in] and bias: [out] to the device. Rows are cast to their type."""
        placed = on_device(weight, device)
        self.weight = (placed.clone() if placed is weight else placed).contiguous()
        self.bias = None if bias is None else bias.to(device, weight.dtype, copy=True)
        self.fusion = fusion
        num_in = weight.shape[1]
        self._norm = None if fusion.norm is None else norm_on(fusion.norm, num_in, device)

    @property
    def size_bytes(self) -> int:
        both = (self.weight, self.bias)
        return sum(t.numel() * t.element_size() for t in both if t is not None)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        _, activation, is_gated = self.fusion
        dtype = self.weight.dtype
        x = x.to(dtype) if self._norm is None else norm_rows(x, self._norm, dtype)
        if residual is not None and residual.dtype == dtype and activation is None:
            total = residual if self.bias is None else residual + self.bias
            return torch.addmm(total, x, self.weight.t())
        y = functional.linear(x, self.weight, self.bias)
        if activation is not None:
            y = (gated_rows if is_gated else activation_rows)(y, activation)
        return y if residual is None else residual + y


def round_weight(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rounds weight: [N, K] to codes, int8 or e4m3, and scales [N] fp32.

    The largest code of a row is 127 or 448.
    """
    limit = 127 if dtype == torch.int8 else 448
    weight = weight.float()
    largest = weight.abs().amax(1)
    usual = largest >= 1e-30
    steps = torch.where(usual, limit / torch.where(usual, largest, 1.0), 0.0)
    codes = weight * steps[:, None]
    if dtype == torch.int8:
        codes = codes.round_()
    return codes.clamp_(-limit, limit).to(dtype), torch.where(usual, largest / limit, 0.0)


def placed_rows(parts: Sequence[Tensor], is_gated: bool) -> Iterator[tuple[Tensor, slice]]:
    """Yields the parts in pieces of a bounded size, each with its rows in the packed weight.

    Gates are the first half of all rows and become even rows; up factors become odd rows.
    """
    half = sum(len(part) for part in parts) // 2
    at = 0
    for part in parts:
        size = max(1, PACK_VALUES // max(1, part.shape[1]))
        start = 0
        while start < len(part):
            end = min(start + size, len(part))
            if is_gated and at < half:
                end = min(end, start + half - at)
            count = end - start
            if is_gated:
                first = 2 * at if at < half else 2 * (at - half) + 1
                to = slice(first, first + 2 * count - 1, 2)
            else:
                to = slice(at, at + count)
            yield part[start:end], to
            start, at = end, at + count


def interleaved(values: Tensor, fusion: Fusion) -> Tensor:
    """Returns values: [N] in the row order of the packed weight."""
    if not fusion.is_gated:
        return values.contiguous()
    return values.reshape(2, -1).t().reshape(-1).contiguous()


def packed_bias(
    bias: Tensor | None, num_rows: int, fusion: Fusion, device: torch.device
) -> Tensor | None:
    if bias is None:
        return None
    assert bias.shape == (num_rows,), f"{bias.shape} for {num_rows}"
    return interleaved(bias.to(device, torch.float32), fusion)


def norm_on(norm: Norm, num_in: int, device: torch.device) -> Norm:
    """Returns the norm in fp32 on the device."""
    weight = norm.weight.to(device, torch.float32).contiguous()
    bias = None if norm.bias is None else norm.bias.to(device, torch.float32).contiguous()
    assert weight.shape == (num_in,), f"{weight.shape} for {num_in} inputs"
    return Norm(norm.kind, weight, bias, norm.eps)
