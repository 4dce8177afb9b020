"""The units in which weights are read: the products of one layer, one expert, a part of the head.

A model is built once over memory that is never touched, which shows what belongs to which layer.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ops.backend import NO_FUSION, ExpertsOp, Fusion, LinearOp
from ops.cpu.native_stored import LayerKind
from serve.models.loaded_tensors import LoadedTensors
from serve.models.packed_cache.layout import PAGE, Entry, LayerEntry, Span, TensorEntry
from serve.models.packed_cache.sources import KeptTensors
from serve.models.parts import Part

PIECE_BYTES = 2 << 20
"""The most that is read at once; what is read begins and ends in one stretch of so many bytes."""
_GAP_BYTES = 256 << 10  # what is not needed between two spans is read along up to this size
_NORESERVE = 0x4000

FIXED, TABLE, LAYER, EXPERT, HEAD = range(5)  # roles of an entry


class Piece(NamedTuple):
    """Bytes of the file, whole pages, and where they are in the memory of their unit."""

    start: int
    num_bytes: int
    at: int


@dataclass(frozen=True, slots=True)
class Unit:
    """Weights that are read together. num_bytes: of the memory they need, whole pages."""

    name: str
    pieces: tuple[Piece, ...]
    num_bytes: int

    def offset_of(self, start: int) -> int:
        """Returns where the byte at this offset of the file is in the unit's memory."""
        for piece in self.pieces:
            if piece.start <= start < piece.start + piece.num_bytes:
                return piece.at + start - piece.start
        raise AssertionError(f"{self.name} does not have the byte at {start}")


def unit_of(name: str, spans: Iterable[Span]) -> Unit:
    """Returns the unit of these bytes."""
    runs: list[list[int]] = []
    for start, num_bytes in sorted((span.start, span.num_bytes) for span in spans):
        first, end = start // PAGE * PAGE, -(-(start + num_bytes) // PAGE) * PAGE
        if runs and first - runs[-1][1] <= _GAP_BYTES:
            runs[-1][1] = max(end, runs[-1][1])
        else:
            runs.append([first, end])
    pieces, at = [], 0
    for first, end in runs:
        while first < end:
            stop = min(end, first // PIECE_BYTES * PIECE_BYTES + PIECE_BYTES)
            pieces.append(Piece(first, stop - first, at))
            at, first = at + stop - first, stop
    return Unit(name, tuple(pieces), at)


@dataclass(slots=True)
class Use:
    """An entry of the file's index and what it is for. layer: its number; expert: that of the
    layer, by the order of the mixture."""

    entry: Entry
    role: int
    layer: int = 0
    expert: int = 0

    @property
    def layers(self) -> list[LayerEntry]:
        return [part for part in self.entry.parts if isinstance(part, LayerEntry)]

    @property
    def spans(self) -> list[Span]:
        return [span for part in self.entry.parts for span in spans_of(part)]


def spans_of(part: LayerEntry | TensorEntry) -> list[Span]:
    if isinstance(part, TensorEntry):
        return [part.data]
    return [span for span in part.buffers if span.num_bytes]


@dataclass(frozen=True, slots=True)
class MixtureUse:
    """The entries of a layer's experts, and what is computed with them."""

    layer: int
    ups: tuple[Use, ...]
    downs: tuple[Use, ...]
    up_fusion: Fusion
    down_fusion: Fusion
    scales_input: bool

    @property
    def signature(self) -> tuple[object, ...]:
        """Mixtures with the same one can share memory."""
        up, down = self.ups[0].layers[0], self.downs[0].layers[0]
        shapes = [_relative(each) for each in (up, down)]
        kinds: list[LayerKind] = [up.kind, down.kind]
        return (*kinds, *shapes, self.up_fusion, self.down_fusion, self.scales_input)

    @property
    def is_uniform(self) -> bool:
        """Whether all experts have the same form, each in whole pages of its own."""
        return all(
            len(use.entry.parts) == len(use.layers) == 1
            and use.layers[0].kind == uses[0].layers[0].kind
            and _relative(use.layers[0]) == _relative(uses[0].layers[0])
            and use.layers[0].buffers[0].start % PAGE == 0
            for uses in (self.ups, self.downs)
            for use in uses
        )


def _relative(entry: LayerEntry) -> tuple[tuple[int, int], ...]:
    """Returns where the buffers of a layer are, as seen from its first byte."""
    first = entry.buffers[0].start
    return tuple(
        (span.start - first if span.num_bytes else 0, span.num_bytes) for span in entry.buffers
    )


@dataclass(slots=True)
class ModelUses:
    """What the entries of a model are for."""

    num_layers: int = 0
    uses: list[Use] = field(default_factory=list)
    mixtures: list[MixtureUse] = field(default_factory=list)


def untouched(num_bytes: int) -> Tensor:
    """Returns addresses without memory, which must not be written to."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    return torch.frombuffer(memory, dtype=torch.uint8)


class UnitNotes(KeptTensors):
    """Notes what each entry is for while a model is built over addresses without memory."""

    def __init__(self, loaded: LoadedTensors, entries: Sequence[Entry], data_end: int) -> None:
        super().__init__(loaded, untouched(data_end), entries)
        self.found = ModelUses()
        self._role, self._expert, self._fusion = FIXED, 0, NO_FUSION
        self._experts: list[tuple[Use, Fusion]] = []

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
        expert = parts[0].expert
        self._role = HEAD if is_head else LAYER if expert is None else EXPERT
        self._expert, self._fusion = expert or 0, fusion
        return super().product(
            parts, num_in, has_bias=has_bias, fusion=fusion, scale=scale, is_head=is_head
        )

    def table(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        is_looked_up: bool = True,
        columns: slice | None = None,
    ) -> Tensor:
        self._role = TABLE if is_looked_up else FIXED
        return super().table(name, shape, is_looked_up=is_looked_up, columns=columns)

    def pack(self, weight: Tensor) -> LinearOp:
        self._role = LAYER
        return super().pack(weight)

    def experts(
        self, ups: Sequence[LinearOp], downs: Sequence[LinearOp], *, scales_input: bool
    ) -> ExpertsOp:
        noted, self._experts = self._experts, []
        pairs, layer = list(zip(noted[::2], noted[1::2], strict=True)), self.found.num_layers
        mixture = MixtureUse(
            layer,
            tuple(up for (up, _), _ in pairs),
            tuple(down for _, (down, _) in pairs),
            noted[0][1],
            noted[1][1],
            scales_input,
        )
        if mixture.is_uniform and {use.expert for use in mixture.ups} == set(range(len(ups))):
            self.found.mixtures.append(mixture)
        else:
            for use, _ in noted:
                use.role = LAYER
        return super().experts(ups, downs, scales_input=scales_input)

    def end_layer(self) -> None:
        super().end_layer()
        self.found.num_layers += 1

    def _next(self, call: str) -> tuple[LayerEntry | TensorEntry, ...]:
        parts = super()._next(call)
        role, self._role = self._role, FIXED
        layer = self.found.num_layers
        if role == LAYER and not call.startswith("pack ") and f".{layer}." not in f".{call}":
            role = FIXED  # before the first layer, or behind the last one
        use = Use(Entry(call, parts), role, layer, self._expert)
        self.found.uses.append(use)
        if role == EXPERT:
            self._experts.append((use, self._fusion))
        return parts
