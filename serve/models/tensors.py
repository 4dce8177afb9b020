"""A source of a model's tensors, and one that notes what is needed.

assemble.py walks a model with two sources: with ExpectedTensors before anything is read, so that
every name and shape is checked first, and with LoadedTensors (loaded_tensors.py) afterwards. This
module knows names, shapes and packed formats, not what the tensors are for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from ops.backend import NO_FUSION, ExpertsOp, Fusion, HeadsOp, LinearOp
from quant.formats.base import (
    RUN_TIME_SCALES,
    CheckpointFormat,
    ProductFormat,
    TensorRule,
)
from quant.formats.weights import ROUNDED
from serve.models.checkpoint import Checkpoint
from serve.models.packed import PackedProducts, bytes_in_memory
from serve.models.parts import Part

MakeLinear = Callable[[Sequence[Tensor], Tensor | None, Fusion], LinearOp]
Shapes = dict[str, tuple[int, ...]]


@dataclass(slots=True)
class ParameterCounts:
    """The numbers of weights: in products of blocks, in experts, in the last product, in tables
    that are looked up, and in norms, biases and routers. A table that is also the last product
    counts as that. idle: those in experts that one row does not use."""

    blocks: int = 0
    experts: int = 0
    head: int = 0
    tables: int = 0
    others: int = 0
    idle: int = 0

    def add(self, kind: str, number: int) -> None:
        setattr(self, kind, getattr(self, kind) + number)

    @property
    def total(self) -> int:
        return self.blocks + self.experts + self.head + self.tables + self.others

    @property
    def active(self) -> int:
        """All but the experts that one row does not use; tables count whole, as publishers count
        them."""
        return self.total - self.idle


class TensorSource(Protocol):
    """Where a model's weights come from."""

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
        """Packs the parts, concatenated along the output; scale multiplies weights and biases."""

    def vector(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        offset: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Returns a copy on the device in the compute type or `dtype`, plus offset."""

    def table(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        is_looked_up: bool = True,
        columns: slice | None = None,
    ) -> Tensor:
        """Returns a copy on the device in the file's type. is_looked_up: rows of it are read, and
        it takes part in no product. columns: those of the copy; None: all."""

    def matrix(self, part: Part, num_in: int, *, stays_plain: bool = False) -> Tensor:
        """Returns the plain weight of a product, [out, in], for `pack` unless it stays plain."""

    def pack(self, weight: Tensor) -> LinearOp:
        """Packs a plain weight, [out, in]."""

    def ones(self, size: int) -> Tensor:
        """Returns ones on the device in the compute type, for norms without weights."""

    def experts(
        self, ups: Sequence[LinearOp], downs: Sequence[LinearOp], *, scales_input: bool
    ) -> ExpertsOp:
        """Combines the products of a mixture's experts."""

    def heads(self, ops: Sequence[LinearOp]) -> HeadsOp:
        """Combines the products of an attention's heads."""

    def has(self, name: str) -> bool:
        """Returns whether the checkpoint has a tensor of this name."""

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Returns the shape of the checkpoint's tensor of this name, None if it has none."""

    def has_weight(self, name: str) -> bool:
        """Returns whether it has a product's weight, plain or quantized, or fused experts'."""

    def end_layer(self) -> None:
        """Tells that all tensors of a layer were read."""


class ExpectedTensors:
    """Notes the names and shapes of all tensors. Its results are empty and must not be used."""

    def __init__(
        self,
        checkpoint: Checkpoint | None,
        packed: CheckpointFormat | None,
        *,
        is_transposed: bool = False,
        has_superblocks: bool = True,
    ) -> None:
        """checkpoint: None for counting parameters without files. is_transposed: products other
        than the head are stored [in, out]. losses: what quantized weights lose. ignored: tensors
        that may be there. plain: products that are not quantized. mixed: those whose parts have
        different formats. packed_bytes: what quantized products take in memory, by kind;
        has_superblocks: as the device's `QuantizedLinears` has it."""
        self.shapes: Shapes = {}
        self.packed_rules: dict[str, TensorRule] = {}
        self.ignored: set[str] = set()
        self.losses: set[str] = set()
        self.plain: set[str] = set()
        self.mixed: set[str] = set()
        self.products: set[str] = set()
        self.counts = ParameterCounts()
        self.packed_bytes = ParameterCounts()
        self._checkpoint = checkpoint
        self._packed = None if checkpoint is None else PackedProducts(packed, checkpoint)
        self._is_transposed = is_transposed
        self._has_superblocks = has_superblocks

    def product(
        self,
        parts: Sequence[Part],
        num_in: int,
        *,
        has_bias: bool = False,
        fusion: Fusion = NO_FUSION,
        scale: float = 1.0,
        is_head: bool = False,
    ) -> Any:
        runs = [(None, parts)] if self._packed is None else self._packed.runs(parts, num_in)
        if len(runs) > 1:
            self.mixed.add(parts[0].module)
        for form, run in runs:
            if form is not None and form.loss is not None:
                self.losses.add(form.loss)
            for part in {part.module: part for part in run}.values():
                kind = "head" if is_head else "blocks" if part.expert is None else "experts"
                self._expect_product(form, part, num_in, kind)
                if has_bias:
                    self._expect(part.bias_name, part.bias_shape)
        return _nothing()

    def vector(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        offset: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> Any:
        self._expect(name, shape)
        return _nothing()

    def table(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        is_looked_up: bool = True,
        columns: slice | None = None,
    ) -> Any:
        self._expect(name, shape, "tables" if is_looked_up else "others")
        return _nothing()

    def matrix(self, part: Part, num_in: int, *, stays_plain: bool = False) -> Any:
        form = None if self._packed is None else self._packed.format_of(part, num_in)
        kind, num_weights = "others" if stays_plain else "blocks", part.num_rows * num_in
        if form is not None and not stays_plain:
            self.losses.add(f"weights that expand a latent {ROUNDED}")
        num_bytes = num_weights * (4 if stays_plain else 1)
        self._expect_product(form, part, num_in, kind, num_bytes=num_bytes)
        if stays_plain:
            self.plain.discard(part.module)
        return torch.empty(part.num_rows, num_in, device="meta")

    def pack(self, weight: Tensor) -> Any:
        return _nothing()

    def ones(self, size: int) -> Any:
        return _nothing()

    def experts(
        self, ups: Sequence[LinearOp], downs: Sequence[LinearOp], *, scales_input: bool
    ) -> Any:
        return _nothing()

    def heads(self, ops: Sequence[LinearOp]) -> Any:
        return _nothing()

    def has(self, name: str) -> bool:
        return self._checkpoint is not None and name in self._checkpoint.entries

    def shape(self, name: str) -> tuple[int, ...] | None:
        return None if self._checkpoint is None else shape_in(self._checkpoint, name)

    def has_weight(self, name: str) -> bool:
        return self._packed is not None and self._packed.has_weight(name)

    def end_layer(self) -> None:
        """Nothing was read."""

    def _expect_product(
        self,
        form: ProductFormat | None,
        part: Part,
        num_in: int,
        kind: str,
        *,
        num_bytes: int | None = None,
    ) -> None:
        """num_bytes: what a quantized weight takes that is not kept as it is stored."""
        self.products.add(part.module)
        ignored = RUN_TIME_SCALES if form is None else form.ignored
        joint = "_" if part.is_fused else "."
        self.ignored |= {f"{part.module}{joint}{ending}" for ending in ignored}
        if form is None:
            self.plain.add(part.module)
            is_transposed = self._is_transposed and kind != "head"
            self._expect(part.weight, part.shape(num_in, is_transposed), kind)
            return
        assert self._packed is not None and self._checkpoint is not None
        rules = self._packed.rules(form, part, num_in)
        new = [name for name in rules if name not in self.packed_rules]
        entries = [(name, self._checkpoint.entries.get(name)) for name in new]
        stored = (
            bytes_in_memory(form, name, entry, has_superblocks=self._has_superblocks)
            for name, entry in entries
            if entry
        )
        if new:
            self.packed_bytes.add(kind, sum(stored) if num_bytes is None else num_bytes)
        self.packed_rules |= rules

    def _expect(self, name: str, shape: tuple[int, ...], kind: str = "others") -> None:
        if name not in self.shapes:
            self.counts.add(kind, prod(shape))
        elif kind == "head":  # the embedding is the last product, too
            self.counts.add("tables", -prod(shape))
            self.counts.add("head", prod(shape))
        self.shapes[name] = shape


def _nothing() -> Any:
    """Returns what stands for a product or tensor while names are only noted."""
    return None


def shape_in(checkpoint: Checkpoint, name: str) -> tuple[int, ...] | None:
    entry = checkpoint.entries.get(name)
    return None if entry is None else entry.shape
