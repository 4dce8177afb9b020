"""The source of a model's tensors that loads them, one product at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from ops.backend import NO_FUSION, Backend, ExpertsOp, Fusion, HeadsOp, LinearOp
from ops.experts import ExpertsOneByOne
from ops.linear import SideBySide
from quant.formats.base import CheckpointFormat
from serve.models.checkpoint import Checkpoint
from serve.models.packed import PackedProducts, Runs
from serve.models.parts import Part
from serve.models.tensors import MakeLinear, TensorSource, shape_in

T = TypeVar("T")


class LoadedTensors:
    """Fetches, casts and packs one product at a time."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        packed: CheckpointFormat | None,
        backend: Backend,
        dtype: torch.dtype,
        make_linear: MakeLinear,
        make_head: MakeLinear,
        *,
        weight_dtype: torch.dtype | None,
        unpack: bool,
        is_transposed: bool,
    ) -> None:
        """weight_dtype: the type in which products are packed; None: the file's. unpack: quantized
        products become plain weights. is_transposed: products other than the head are stored
        [in, out]. num_ungrouped: layers whose experts the back end computes one by one."""
        self.num_ungrouped = 0
        self._checkpoint = checkpoint
        self._packed = PackedProducts(packed, checkpoint)
        self.backend = backend
        self._linears = backend.quantized
        self._device = backend.device
        self._dtype = dtype
        self._make = {False: make_linear, True: make_head}
        self._weight_dtype = weight_dtype
        self._unpack = unpack
        self._is_transposed = is_transposed

    def on(self, backend: Backend, make_linear: MakeLinear) -> Self:
        """Returns the same for another back end, without products of the head."""
        other = copy(self)
        other.num_ungrouped = 0
        other.backend, other._linears, other._device = backend, backend.quantized, backend.device
        other._make = {False: make_linear}
        return other

    def product(
        self,
        parts: Sequence[Part],
        num_in: int,
        *,
        has_bias: bool = False,
        fusion: Fusion = NO_FUSION,
        scale: float = 1.0,
        is_head: bool = False,
    ) -> LinearOp:
        bias = None
        if has_bias:
            biases = [self._bias(part) for part in parts]
            bias = _scaled(biases[0] if len(biases) == 1 else torch.cat(biases), scale)
        runs = self._packed.runs(parts, num_in)
        if self._unpack or len(runs) == 1:
            return self._product(runs, num_in, bias, fusion, scale, is_head)
        inner, start, ops = Fusion(fusion.norm), 0, []
        for form, run in runs:
            end = start + sum(part.num_taken for part in run)
            own = None if bias is None else bias[start:end]
            ops.append(self._product([(form, run)], num_in, own, inner, scale, is_head))
            start = end
        return SideBySide(self.backend, ops, fusion)

    def _product(
        self,
        runs: Runs,
        num_in: int,
        bias: Tensor | None,
        fusion: Fusion,
        scale: float,
        is_head: bool,
    ) -> LinearOp:
        """Packs runs that become plain, or one."""
        weights = []
        for form, parts in runs:
            if form is None:
                is_transposed = self._is_transposed and not is_head
                plain = [_scaled(self._weight(part, is_transposed), scale) for part in parts]
            else:
                packed = self._packed.load(form, parts, num_in, scale)
                if not self._unpack:
                    assert self._linears is not None, "a back end without quantized products"
                    with self._packed.naming(parts):
                        return packed.linear(bias, fusion, self._linears)
                plain = [packed.plain()]
            weights += [self._cast(each) for each in plain]
        return self._make[is_head](weights, bias, fusion)

    def vector(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        offset: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        stored = self._checkpoint.fetch(name)
        if offset:
            stored = stored.float() + offset
        # a copy, so that the file can be unmapped
        return stored.to(self._device, dtype or self._dtype, copy=True)

    def table(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        is_looked_up: bool = True,
        columns: slice | None = None,
    ) -> Tensor:
        # a copy, so that replacing the file does not affect a running model
        if columns is None:
            return self._checkpoint.fetch(name).to(self._device, copy=True)
        own = self._checkpoint.fetch(name, cut=lambda stored: stored[:, columns])
        return own.to(self._device, copy=True, memory_format=torch.contiguous_format)

    def matrix(self, part: Part, num_in: int, *, stays_plain: bool = False) -> Tensor:
        form = self._packed.format_of(part, num_in)
        if form is not None:
            return self._cast(self._packed.load(form, [part], num_in, 1.0).plain())
        weight = self._cast(self._weight(part, self._is_transposed))
        # a copy, so that the file can be unmapped
        return weight.clone() if stays_plain else weight

    def pack(self, weight: Tensor) -> LinearOp:
        return self._make[False]([weight], None, NO_FUSION)

    def ones(self, size: int) -> Tensor:
        return torch.ones(size, dtype=self._dtype, device=self._device)

    def experts(
        self, ups: Sequence[LinearOp], downs: Sequence[LinearOp], *, scales_input: bool
    ) -> ExpertsOp:
        op = self.backend.pack_experts(ups, downs, scales_input=scales_input)
        self.num_ungrouped += isinstance(op, ExpertsOneByOne)
        return op

    def heads(self, ops: Sequence[LinearOp]) -> HeadsOp:
        return self.backend.pack_heads(ops)

    def has(self, name: str) -> bool:
        return name in self._checkpoint.entries

    def shape(self, name: str) -> tuple[int, ...] | None:
        return shape_in(self._checkpoint, name)

    def has_weight(self, name: str) -> bool:
        return self._packed.has_weight(name)

    def end_layer(self) -> None:
        self._checkpoint.release()

    def _weight(self, part: Part, is_transposed: bool) -> Tensor:
        if not (part.is_transposed or is_transposed):
            return self._rows(part.weight, part)
        stored = self._checkpoint.fetch(part.weight, part.index).t()
        return stored if part.rows is None else stored[part.rows]

    def _bias(self, part: Part) -> Tensor:
        return self._cast(self._rows(part.bias_name, part))

    def _rows(self, name: str, part: Part) -> Tensor:
        """Returns the rows of a part; a shard reads no others."""
        rows = part.rows
        if isinstance(rows, slice):
            return self._checkpoint.fetch(name, part.index, lambda stored: stored[rows])
        stored = self._checkpoint.fetch(name, part.index)
        return stored if rows is None else stored[rows]

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._device, self._weight_dtype or tensor.dtype)


class AroundTensors:
    """Passes on what a source around LoadedTensors does not do otherwise."""

    def __init__(self, loaded: LoadedTensors) -> None:
        self._loaded = loaded

    def vector(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        offset: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        return self._loaded.vector(name, shape, offset=offset, dtype=dtype)

    def table(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        is_looked_up: bool = True,
        columns: slice | None = None,
    ) -> Tensor:
        return self._loaded.table(name, shape, is_looked_up=is_looked_up, columns=columns)

    def matrix(self, part: Part, num_in: int, *, stays_plain: bool = False) -> Tensor:
        return self._loaded.matrix(part, num_in, stays_plain=stays_plain)

    def pack(self, weight: Tensor) -> LinearOp:
        return self._loaded.pack(weight)

    def ones(self, size: int) -> Tensor:
        return self._loaded.ones(size)

    def experts(
        self, ups: Sequence[LinearOp], downs: Sequence[LinearOp], *, scales_input: bool
    ) -> ExpertsOp:
        return self._loaded.experts(ups, downs, scales_input=scales_input)

    def heads(self, ops: Sequence[LinearOp]) -> HeadsOp:
        return self._loaded.heads(ops)

    def has(self, name: str) -> bool:
        return self._loaded.has(name)

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._loaded.shape(name)

    def has_weight(self, name: str) -> bool:
        return self._loaded.has_weight(name)

    def end_layer(self) -> None:
        self._loaded.end_layer()


def _scaled(tensor: Tensor, scale: float) -> Tensor:
    return tensor if scale == 1.0 else tensor.float() * scale


class TensorCache(Protocol):
    """Keeps what loading made for the next time."""

    def build(
        self,
        checkpoint: Checkpoint,
        loaded: LoadedTensors,
        settings: str,
        build: Callable[[TensorSource], T],
    ) -> T:
        """Returns what `build` makes of the tensors, kept or loaded ones; it may be called twice.
        settings: what decides how `loaded` packs, beside the checkpoint."""
