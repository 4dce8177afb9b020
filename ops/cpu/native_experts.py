"""Mixtures of experts on the native kernels: the router, and all experts of a layer in one call.

The experts are layers that were packed one by one; their weights stay where they are. The result
has the bits of `ExpertsOneByOne` over the same layers (ops/csrc/experts.inl).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ops.backend import LinearOp, Router, Routing
from ops.cpu.native_library import TYPES, address, library
from ops.cpu.native_plain_linear import PlainLinear
from ops.cpu.native_quantized_linear import NativeLinear

_INT8, _INT4, _PLAIN, _SUPERBLOCKS = range(4)  # the library's kinds of weights
_ALL, _UP, _DOWN = range(3)  # the library's parts of a mixture


def kind_of(op: LinearOp) -> int | None:
    """Returns the kind of a layer's weights, or None if it is not the library's."""
    if isinstance(op, PlainLinear):
        return _PLAIN
    if not isinstance(op, NativeLinear):
        return None
    if isinstance(op.packed, library().SuperblockLinear):
        return _SUPERBLOCKS
    return _INT4 if isinstance(op.packed, library().Int4Linear) else _INT8


def of_one_kind(ops: Sequence[LinearOp]) -> bool:
    """Returns whether the layers are the library's, of one kind of weights and one plain type."""
    kinds = {kind_of(op) for op in ops}
    types = {op.dtype for op in ops if isinstance(op, PlainLinear)}
    return len(kinds) == 1 and None not in kinds and len(types) <= 1


def can_group(ups: Sequence[LinearOp], downs: Sequence[LinearOp]) -> bool:
    """Returns whether NativeExperts takes these layers."""
    both = [*ups, *downs]
    if _PLAIN in map(kind_of, both):
        return of_one_kind(both)
    return of_one_kind(ups) and of_one_kind(downs)


class NativeExperts:
    """An ExpertsOp over layers of the native library. Rows and results are fp32 or bf16.

    A row's bits do not depend on other rows, nor on the number of threads.
    """

    def __init__(
        self, ups: Sequence[LinearOp], downs: Sequence[LinearOp], scales_input: bool
    ) -> None:
        """The layers satisfy can_group. ValueError if they differ in shape.

        Of a shard ups give some of downs' inputs; it runs in two phases (ops/sharded.py).
        """
        assert len(ups) == len(downs) > 0
        self._layers: list[Any] = [*ups, *downs]
        up, down = self._layers[0], self._layers[-1]
        assert all(layer.norm is None for layer in self._layers), "experts have no norm"
        self.num_in, self.num_between, self.num_out = up.num_in, down.num_in, down.num_out
        self.between_dtype: torch.dtype | None = up.out_dtype
        self._num_up = up.num_out
        self._dtype = up.dtype if isinstance(up, PlainLinear) else None
        products = [layer.packed.product for layer in self._layers]
        self._experts = library().ExpertLayer(
            products[: len(ups)], kind_of(up), products[len(ups) :], kind_of(down), scales_input
        )

    @property
    def size_bytes(self) -> int:
        return sum(layer.size_bytes for layer in self._layers)

    def __call__(self, x: Tensor, routing: Routing, residual: Tensor | None = None) -> Tensor:
        rows, num_in = x.shape
        assert num_in == self.num_in, f"{x.shape} times experts of {self.num_in} inputs"
        assert self._num_up == self.num_between, f"{self._num_up} for {self.num_between} inputs"
        assert self._dtype in (None, x.dtype), f"{x.dtype} times {self._dtype}"
        out = torch.empty(rows, self.num_out, dtype=x.dtype) if residual is None else residual
        self._run(x, routing, out, residual is not None, _ALL)
        return out

    def up(self, x: Tensor, routing: Routing, out: Tensor) -> None:
        """Computes `PhasedExperts.up`."""
        assert x.shape[1] == self.num_in, f"{x.shape} times experts of {self.num_in} inputs"
        assert out.shape == (routing.experts.numel(), self._num_up), f"{out.shape}"
        assert out.dtype == self.between_dtype and self._dtype in (None, x.dtype), f"{x.dtype}"
        self._run(x, routing, out, False, _UP)

    def down(self, between: Tensor, routing: Routing, out: Tensor, *, add: bool) -> None:
        """Computes `PhasedExperts.down`."""
        pairs = routing.experts.numel()
        assert between.shape == (pairs, self.num_between), f"{between.shape}"
        assert between.dtype == self.between_dtype and out.shape[1] == self.num_out, f"{out.shape}"
        self._run(between, routing, out, add, _DOWN)

    def _run(self, x: Tensor, routing: Routing, out: Tensor, add: bool, part: int) -> None:
        rows, top_k = routing.experts.shape
        assert len(x if part != _DOWN else out) == rows, f"{x.shape} of {rows} rows"
        assert out.stride(1) == 1, "dense rows of results"
        if x.stride(1) != 1:
            x = x.contiguous()
        experts, weights = routing.experts.contiguous(), routing.weights.contiguous()
        assert experts.dtype == torch.int32 and weights.dtype == torch.float32
        if rows:
            self._experts.run(
                x.data_ptr(),
                x.stride(0),
                TYPES[x.dtype],
                rows,
                top_k,
                experts.data_ptr(),
                weights.data_ptr(),
                out.data_ptr(),
                out.stride(0),
                TYPES[out.dtype],
                add,
                part,
            )


def can_route(x: Tensor, router: Router) -> bool:
    weight = router.weight
    return x.dtype in TYPES and weight.dtype in TYPES and weight.is_contiguous()


def route(x: Tensor, router: Router) -> Routing:
    """Computes Backend.route."""
    kind, weight, bias, correction, expert_scales = router
    num_experts, num_in = weight.shape
    assert x.shape[1] == num_in and kind.top_k <= num_experts, f"{x.shape} for {num_in} inputs"
    assert num_experts % kind.num_groups == 0 and kind.num_top_groups <= kind.num_groups
    for each in (bias, correction, expert_scales):
        assert each is None or (each.shape == (num_experts,) and each.dtype == torch.float32)
    if x.stride(1) != 1:
        x = x.contiguous()
    experts = torch.empty(len(x), kind.top_k, dtype=torch.int32)
    weights = torch.empty(len(x), kind.top_k)
    library().route(
        x.data_ptr(),
        x.stride(0),
        TYPES[x.dtype],
        len(x),
        experts.data_ptr(),
        weights.data_ptr(),
        weight.data_ptr(),
        TYPES[weight.dtype],
        address(bias),
        address(correction),
        address(expert_scales),
        num_experts,
        num_in,
        kind.top_k,
        kind.score == "sigmoid",
        kind.is_after_top_k,
        kind.is_normalized,
        kind.sum_eps,
        kind.scale,
        kind.num_groups,
        kind.num_top_groups,
        kind.group_best,
    )
    return Routing(experts, weights)
