"""Mixtures of experts on a CUDA device: all experts of a layer in six launches.

A call neither waits for the device nor reads its data, so that it can be part of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from ops.backend import LinearOp, Routing
from ops.cuda import tune
from ops.cuda.linear import CudaLinear, Int4Linear, ScaledLinear
from ops.kv_tiles import architecture
from ops.triton_kernels.experts import (
    SortedPairs,
    expert_weights,
    experts_product,
    sort_pairs,
    sum_parts,
)
from ops.triton_kernels.linear import Tile
from ops.triton_kernels.linear4 import Int4Weight
from ops.triton_kernels.rows import Quantized, quantize_rows


def can_group(ups: Sequence[LinearOp], downs: Sequence[LinearOp]) -> bool:
    """Returns whether CudaExperts takes these layers: 8-bit or 4-bit weights, one kind a side."""
    return all(
        all(isinstance(op, ScaledLinear | Int4Linear) for op in ops)
        and len({(type(op), op.kernel) for op in ops if isinstance(op, CudaLinear)}) == 1
        for ops in (ups, downs)
    )


class _Products:
    """The products of one side of the experts."""

    def __init__(self, ops: Sequence[LinearOp]) -> None:
        layers = [op for op in ops if isinstance(op, ScaledLinear | Int4Linear)]
        first = layers[0]
        assert all(layer.fusion == first.fusion for layer in layers), "experts of one activation"
        assert first.fusion.norm is None, "experts have no norm"
        self.layers, self.kernel, self.fusion = layers, first.kernel, first.fusion
        self.num_in, self.num_out, self.out_dtype = first.num_in, first.num_out, first.out_dtype
        self._width, self._device = (
            (2 if first.fusion.is_gated else 1) * first.num_out,
            first.device,
        )
        self._weights = expert_weights([layer.weight for layer in layers])

    def quantize(self, x: Tensor) -> Quantized:
        weight = self._weights.first
        if isinstance(weight, Int4Weight):
            return quantize_rows(x, multiple=max(weight.group, 64))
        return quantize_rows(x, dtype=weight.codes.dtype)

    def tile(self, rows_per_expert: int) -> Tile:
        rows = tune.bucket(rows_per_expert)
        shape = tune.Shape(self.kernel, rows, self._width, self.num_in)
        tile = tune.candidates(shape, architecture(self._device))[0].tile
        return tile._replace(split_k=1)

    def run(self, x: Quantized, pairs: SortedPairs, num_rows: int) -> Tensor:
        """Returns the results of all pairs, [pairs, out]."""
        count = len(pairs.order)
        out = torch.empty(count, self.num_out, dtype=self.out_dtype, device=self._device)
        return experts_product(
            x,
            pairs,
            self._weights,
            out,
            self.fusion.activation,
            is_gated=self.fusion.is_gated,
            tile=self.tile(triton.cdiv(count, len(self.layers))),
            most_rows=num_rows,
        )


class CudaExperts:
    """An ExpertsOp over layers with 8-bit or 4-bit weights, which stay where they are.

    Rows are fp32 or bf16; the result has their type, or the residual's. The int8 and 4-bit results
    of a row do not depend on other rows.
    """

    def __init__(
        self, ups: Sequence[LinearOp], downs: Sequence[LinearOp], scales_input: bool
    ) -> None:
        """The layers satisfy can_group. ValueError if they differ in shape."""
        assert len(ups) == len(downs) > 0
        self._ups, self._downs, self._scales_input = _Products(ups), _Products(downs), scales_input
        assert self._downs.num_in == self._ups.num_out

    @property
    def size_bytes(self) -> int:
        return sum(layer.size_bytes for layer in (*self._ups.layers, *self._downs.layers))

    def __call__(self, x: Tensor, routing: Routing, residual: Tensor | None = None) -> Tensor:
        experts, weights = routing
        num_rows, top_k = experts.shape
        assert x.shape == (num_rows, self._ups.num_in), f"{x.shape} of {num_rows} rows"
        out = residual
        if out is None:
            out = torch.empty(num_rows, self._downs.num_out, dtype=x.dtype, device=x.device)
        if not num_rows:
            return out
        rows = x
        if self._scales_input:
            rows = (x[:, None] * weights.to(x.dtype)[..., None]).flatten(0, 1)
        per_row = 1 if self._scales_input else top_k
        pairs = sort_pairs(experts.contiguous(), len(self._ups.layers), per_row)
        hidden = self._ups.run(self._ups.quantize(rows), pairs, num_rows)
        each = pairs._replace(per_row=1)
        parts = self._downs.run(self._downs.quantize(hidden), each, num_rows)
        weighted = None if self._scales_input else weights.contiguous()
        return sum_parts(parts.view(num_rows, top_k, -1), weighted, residual, out)
