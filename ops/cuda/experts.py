"""Mixtures of experts on a CUDA device: all experts of a layer in four launches, six
if rows are quantized.

A call neither waits for the device nor reads its data, so that it can be part of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import triton
from torch import Tensor

from ops.backend import Fusion, LinearOp, Routing
from ops.cuda import tune
from ops.cuda.block_linear import BlockFp8Linear
from ops.cuda.linear import Int4Linear, PlainLinear, ScaledLinear
from ops.kv_tiles import architecture
from ops.triton_kernels.block_fp8 import BlockWeight, block_product, quantize_groups
from ops.triton_kernels.experts import (
    SortedPairs,
    address_table,
    expert_weights,
    experts_product,
    sort_pairs,
    sum_parts,
)
from ops.triton_kernels.experts_plain import TILES, plain_experts_product, plain_weights
from ops.triton_kernels.linear import Tile
from ops.triton_kernels.linear4 import Int4Weight
from ops.triton_kernels.rows import Quantized, quantize_rows


def can_group(ups: Sequence[LinearOp], downs: Sequence[LinearOp]) -> bool:
    """Returns whether CudaExperts takes these layers, with weights of one kind a side."""
    return is_one_kind(ups) and is_one_kind(downs)


def is_one_kind(ops: Sequence[LinearOp]) -> bool:
    """Returns whether one launch multiplies these layers."""
    kinds = {_kind(op) for op in ops}
    return len(kinds) == 1 and None not in kinds


def _kind(op: LinearOp) -> tuple[object, ...] | None:
    if isinstance(op, PlainLinear):
        return (PlainLinear, op.weight.dtype) if op.weight.dtype in TILES else None
    if isinstance(op, BlockFp8Linear):
        return (BlockFp8Linear,)
    return (type(op), op.kernel) if isinstance(op, ScaledLinear | Int4Linear) else None


class Side(Protocol):
    """The products of one side of the experts."""

    num_in: int
    num_out: int
    out_dtype: torch.dtype
    size_bytes: int

    def run(
        self, x: Tensor, pairs: SortedPairs, num_rows: int, out: Tensor | None = None
    ) -> Tensor:
        """Returns the results of all pairs, [pairs, out] of out_dtype, for x: [T, in] fp32 or bf16.
        out: where they are written; rows of pairs whose expert is none of these stay as they are.
        """


def one_side(ops: Sequence[LinearOp]) -> Side:
    """Combines layers that satisfy is_one_kind. ValueError if they differ in shape."""
    if isinstance(ops[0], BlockFp8Linear):
        return _BlockProducts(ops)
    return _PlainProducts(ops) if isinstance(ops[0], PlainLinear) else _Products(ops)


class _PlainProducts:
    """The products of one side with plain weights. Sums are fp32, results of the weights' type."""

    def __init__(self, ops: Sequence[LinearOp]) -> None:
        layers = [op for op in ops if isinstance(op, PlainLinear)]
        self._layers, self._fusion = layers, _one_fusion([layer.fusion for layer in layers])
        weights = [layer.weight for layer in layers]
        self._weights = plain_weights(weights, [layer.bias for layer in layers])
        self.out_dtype = weights[0].dtype
        num_rows, self.num_in = weights[0].shape
        self.num_out = num_rows // 2 if self._fusion.is_gated else num_rows
        self.size_bytes = sum(layer.size_bytes for layer in layers)

    def run(
        self, x: Tensor, pairs: SortedPairs, num_rows: int, out: Tensor | None = None
    ) -> Tensor:
        dtype = self._weights.first.dtype
        if out is None:
            out = torch.empty(len(pairs.order), self.num_out, dtype=dtype, device=x.device)
        _, activation, is_gated = self._fusion
        whole = x.to(dtype).contiguous(), pairs, self._weights, out, activation
        return plain_experts_product(*whole, is_gated=is_gated, most_rows=num_rows)


class _BlockProducts:
    """The products of one side in fp8 with scales for 128 inputs."""

    out_dtype = torch.bfloat16

    def __init__(self, ops: Sequence[LinearOp]) -> None:
        layers = [op for op in ops if isinstance(op, BlockFp8Linear)]
        self._layers, self._fusion = layers, _one_fusion([layer.fusion for layer in layers])
        self.num_in, self.num_out = layers[0].num_in, layers[0].num_out
        self.size_bytes = sum(layer.size_bytes for layer in layers)
        tables = [address_table(parts) for parts in zip(*(x.weight for x in layers), strict=True)]
        codes, scales, bias = tables
        assert codes is not None and scales is not None
        self._weight = BlockWeight(codes, scales, bias)

    def run(
        self, x: Tensor, pairs: SortedPairs, num_rows: int, out: Tensor | None = None
    ) -> Tensor:
        count = len(pairs.order)
        if out is None:
            out = torch.empty(count, self.num_out, dtype=torch.bfloat16, device=x.device)
        return block_product(
            quantize_groups(x),
            self._weight,
            self._layers[0].num_rows,
            out,
            activation=self._fusion.activation,
            is_gated=self._fusion.is_gated,
            pairs=pairs,
            most_rows=num_rows,
            rows_per_expert=triton.cdiv(count, len(self._layers)),
        )


def _one_fusion(fusions: Sequence[Fusion]) -> Fusion:
    assert all(fusion == fusions[0] for fusion in fusions), "experts of one activation"
    assert fusions[0].norm is None, "experts have no norm"
    return fusions[0]


class _Products:
    """The products of one side with 8-bit or 4-bit weights."""

    def __init__(self, ops: Sequence[LinearOp]) -> None:
        layers = [op for op in ops if isinstance(op, ScaledLinear | Int4Linear)]
        first = layers[0]
        self.layers, self.kernel = layers, first.kernel
        self.fusion = _one_fusion([layer.fusion for layer in layers])
        self.size_bytes = sum(layer.size_bytes for layer in layers)
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

    def run(
        self, x: Tensor, pairs: SortedPairs, num_rows: int, out: Tensor | None = None
    ) -> Tensor:
        count = len(pairs.order)
        if out is None:
            out = torch.empty(count, self.num_out, dtype=self.out_dtype, device=self._device)
        return experts_product(
            self.quantize(x),
            pairs,
            self._weights,
            out,
            self.fusion.activation,
            is_gated=self.fusion.is_gated,
            tile=self.tile(triton.cdiv(count, len(self.layers))),
            most_rows=num_rows,
        )


class CudaExperts:
    """An ExpertsOp over layers with 8-bit, 4-bit or plain weights, which stay where they are.

    Rows are fp32 or bf16; the result has their type, or the residual's. The results of a row do not
    depend on other rows, except in fp8 with a scale per row, whose tile depends on their number.
    """

    def __init__(
        self, ups: Sequence[LinearOp], downs: Sequence[LinearOp], scales_input: bool
    ) -> None:
        """The layers satisfy can_group. ValueError if they differ in shape."""
        assert len(ups) == len(downs) > 0
        self._ups, self._downs, self._scales_input = one_side(ups), one_side(downs), scales_input
        self._num_experts = len(ups)
        # of a rank that holds some columns, downs take the columns of all ranks (ops/sharded.py)
        assert self._downs.num_in >= self._ups.num_out
        self.between_dtype: torch.dtype | None = self._ups.out_dtype

    @property
    def size_bytes(self) -> int:
        return self._ups.size_bytes + self._downs.size_bytes

    def __call__(self, x: Tensor, routing: Routing, residual: Tensor | None = None) -> Tensor:
        out = residual
        if out is None:
            out = torch.empty(len(x), self._downs.num_out, dtype=x.dtype, device=x.device)
        if len(x):
            pairs = self._sorted(routing)
            self._sum(self._up(x, routing, pairs), routing, pairs, residual, out)
        return out

    def up(self, x: Tensor, routing: Routing, out: Tensor) -> None:
        """Computes `PhasedExperts.up` (ops/sharded.py); pair k of row t is row t * K + k."""
        if len(x):
            out.copy_(self._up(x, routing, self._sorted(routing)))

    def down(self, between: Tensor, routing: Routing, out: Tensor, *, add: bool) -> None:
        """Computes `PhasedExperts.down`."""
        if len(out):
            self._sum(between, routing, self._sorted(routing), out if add else None, out)

    def compute_some(self, x: Tensor, routing: Routing, parts: Tensor) -> None:
        """Writes the results of pairs whose expert is one of these, without their weights, to
        parts: [T, K, out], and leaves the others, whose expert has a negative number."""
        pairs = self._sorted(routing)
        between = self._up(x, routing, pairs)  # of the other pairs nothing is kept
        self._downs.run(between, pairs, len(x), parts.view(len(pairs.order), -1))

    @property
    def part_dtype(self) -> torch.dtype:
        """The type of the results of pairs."""
        return self._downs.out_dtype

    @property
    def num_out(self) -> int:
        return self._downs.num_out

    def add_up(self, parts: Tensor, routing: Routing, residual: Tensor | None, out: Tensor) -> None:
        """Writes the weighted sums of a row's parts, in their order, plus the residual to out."""
        weighted = None if self._scales_input else routing.weights.contiguous()
        sum_parts(parts, weighted, residual, out)

    def _sorted(self, routing: Routing) -> SortedPairs:
        return sort_pairs(routing.experts.contiguous(), self._num_experts, 1)

    def _up(self, x: Tensor, routing: Routing, pairs: SortedPairs) -> Tensor:
        """Returns act(gate) * up of all pairs, [pairs, in of down]."""
        experts, weights = routing
        num_rows, top_k = experts.shape
        assert x.shape == (num_rows, self._ups.num_in), f"{x.shape} of {num_rows} rows"
        rows = x
        if self._scales_input:
            rows = (x[:, None] * weights.to(x.dtype)[..., None]).flatten(0, 1)
        per_row = 1 if self._scales_input else top_k
        return self._ups.run(rows, pairs._replace(per_row=per_row), num_rows)

    def _sum(
        self,
        between: Tensor,
        routing: Routing,
        pairs: SortedPairs,
        residual: Tensor | None,
        out: Tensor,
    ) -> None:
        """Writes the weighted sums of all pairs' downs, plus the residual, to out."""
        parts = self._downs.run(between, pairs, len(routing.experts))
        self.add_up(parts.view(*routing.experts.shape, -1), routing, residual, out)
