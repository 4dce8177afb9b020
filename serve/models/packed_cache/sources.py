"""Two sources of a model's tensors: one notes what loading made, one gives it again from a file.

Both are asked by assemble.py for the same things in the same order, and leave to the source that
loads whatever no file has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ops.backend import NO_FUSION, Fusion, LinearOp
from ops.cpu.native_stored import restore
from ops.linear import SideBySide
from serve.models.loaded_tensors import AroundTensors, LoadedTensors
from serve.models.packed_cache.layout import (
    DTYPES,
    DamagedCache,
    Entry,
    LayerEntry,
    Span,
    TensorEntry,
    shown,
)
from serve.models.packed_cache.writer import Made, can_keep
from serve.models.parts import Part


class NotedTensors(AroundTensors):
    """Loads, and notes what it gave. is_whole: whether a file of `made` can replace loading."""

    def __init__(self, loaded: LoadedTensors) -> None:
        super().__init__(loaded)
        self.made: list[Made] = []
        self.is_whole = True

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
        op = self._loaded.product(
            parts, num_in, has_bias=has_bias, fusion=fusion, scale=scale, is_head=is_head
        )
        call = call_name("product", parts[0].module)
        if type(op) is not SideBySide:
            return self._noted_layers(call, [op], fusion)[0]
        layers = self._noted_layers(call, op.ops, Fusion(fusion.norm))
        return op if layers is op.ops else SideBySide(self._loaded.backend, layers, fusion)

    def vector(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        offset: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        made = self._loaded.vector(name, shape, offset=offset, dtype=dtype)
        return self._noted_tensor(call_name("vector", name), made)

    def table(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        is_looked_up: bool = True,
        columns: slice | None = None,
    ) -> Tensor:
        made = self._loaded.table(name, shape, is_looked_up=is_looked_up, columns=columns)
        return self._noted_tensor(call_name("table", name), made)

    def matrix(self, part: Part, num_in: int, *, stays_plain: bool = False) -> Tensor:
        made = self._loaded.matrix(part, num_in, stays_plain=stays_plain)
        return self._noted_tensor(call_name("matrix", part.module), made) if stays_plain else made

    def pack(self, weight: Tensor) -> LinearOp:
        op = self._loaded.pack(weight)
        self.is_whole = self.is_whole and can_keep(op)
        return self._noted_layers(call_name("pack", str(tuple(weight.shape))), [op], NO_FUSION)[0]

    def _noted_layers(
        self, call: str, layers: Sequence[LinearOp], fusion: Fusion
    ) -> Sequence[LinearOp]:
        """Notes layers, and returns those to be used for them. fusion: of each."""
        self._note(call, layers)
        return layers

    def _noted_tensor(self, call: str, made: Tensor) -> Tensor:
        """Notes a tensor, and returns the one to be used for it."""
        self._note(call, [made])
        return made

    def _note(self, call: str, parts: Sequence[LinearOp | Tensor]) -> None:
        self.made.append(Made(call, tuple(parts) if all(map(can_keep, parts)) else ()))


class KeptTensors(AroundTensors):
    """Gives what a file has. DamagedCache if it does not have what is asked for."""

    def __init__(self, loaded: LoadedTensors, data: Tensor, entries: Sequence[Entry]) -> None:
        """data: the file's bytes."""
        super().__init__(loaded)
        self._data = data
        self._entries = iter(entries)

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
        kept = self._next(call_name("product", parts[0].module))
        if not kept:
            return self._loaded.product(
                parts, num_in, has_bias=has_bias, fusion=fusion, scale=scale, is_head=is_head
            )
        num_out = sum(part.num_taken for part in parts)
        if len(kept) == 1:
            num_out = num_out // 2 if fusion.is_gated else num_out
            return self._layers(kept, num_in, num_out, fusion)[0]
        layers = self._layers(kept, num_in, num_out, Fusion(fusion.norm))
        return SideBySide(self._loaded.backend, layers, fusion)

    def vector(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        offset: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        kept = self._next(call_name("vector", name))
        if not kept:
            return self._loaded.vector(name, shape, offset=offset, dtype=dtype)
        return self._tensor(kept, shape)

    def table(
        self,
        name: str,
        shape: tuple[int, ...],
        *,
        is_looked_up: bool = True,
        columns: slice | None = None,
    ) -> Tensor:
        kept = self._next(call_name("table", name))
        if not kept:
            return self._loaded.table(name, shape, is_looked_up=is_looked_up, columns=columns)
        num_rows, width = shape
        if columns is not None:
            width = len(range(*columns.indices(width)))
        return self._tensor(kept, (num_rows, width))

    def matrix(self, part: Part, num_in: int, *, stays_plain: bool = False) -> Tensor:
        if not stays_plain:  # its products come from the file
            return torch.empty(part.num_rows, num_in, device="meta")
        kept = self._next(call_name("matrix", part.module))
        if not kept:
            return self._loaded.matrix(part, num_in, stays_plain=True)
        return self._tensor(kept, (part.num_taken, num_in))

    def pack(self, weight: Tensor) -> LinearOp:
        kept = self._next(call_name("pack", str(tuple(weight.shape))))
        if len(kept) != 1:
            raise DamagedCache("it lacks a product")
        num_out, num_in = weight.shape
        return self._layers(kept, num_in, num_out, NO_FUSION)[0]

    def _next(self, call: str) -> tuple[LayerEntry | TensorEntry, ...]:
        entry = next(self._entries, None)
        if entry is None or entry.call != call:
            found = "nothing" if entry is None else shown(entry.call)
            raise DamagedCache(f"it has {found} in place of {call}")
        return entry.parts

    def _layers(
        self, kept: Sequence[LayerEntry | TensorEntry], num_in: int, num_out: int, fusion: Fusion
    ) -> list[LinearOp]:
        """Returns layers with num_out outputs together, after gating."""
        entries = [entry for entry in kept if isinstance(entry, LayerEntry)]
        outputs = sum(entry.kind.num_out for entry in entries)
        inputs = {entry.kind.num_in for entry in entries}
        if len(entries) != len(kept) or inputs != {num_in} or outputs != num_out:
            raise DamagedCache("it has a product of another shape")
        try:
            return [
                restore(entry.kind, [self._bytes(span) for span in entry.buffers], fusion)
                for entry in entries
            ]
        except (ValueError, TypeError, OverflowError) as error:
            raise DamagedCache(f"it has a product that does not fit: {shown(error)}") from error

    def _tensor(self, kept: Sequence[LayerEntry | TensorEntry], shape: tuple[int, ...]) -> Tensor:
        entry = kept[0]
        if not isinstance(entry, TensorEntry) or entry.shape != shape:
            raise DamagedCache("it has a tensor of another shape")
        return self._bytes(entry.data).view(DTYPES[entry.dtype]).view(entry.shape)

    def _bytes(self, span: Span) -> Tensor:
        return self._data[span.start : span.start + span.num_bytes]


def call_name(kind: str, name: str) -> str:
    return f"{kind} {name}"
