"""Loads into memory that other processes can have: each layer and tensor is moved there as soon as
it is made, to the place that it would have in a file of packed weights."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence

from torch import Tensor

from ops.backend import Fusion, LinearOp
from ops.cpu.native_stored import restore
from serve.models.loaded_tensors import LoadedTensors
from serve.models.packed_cache.layout import DTYPES, LayerEntry, Span, TensorEntry
from serve.models.packed_cache.shared_memory import Arena, NotShared, SharedMemory
from serve.models.packed_cache.sources import NotedTensors
from serve.models.packed_cache.writer import Made, Placing, can_keep

logger = logging.getLogger(__name__)

_ROOM = 4  # times the checkpoint's bytes: as much as 8 bits in each of their float32
_MORE_BYTES = 1 << 30


class MovedTensors(NotedTensors):
    """Moves what it gives. Where the system has no such memory, what follows stays where it is."""

    def __init__(self, loaded: LoadedTensors, checkpoint_bytes: int) -> None:
        super().__init__(loaded)
        self._placing = Placing()
        self._entries: list[LayerEntry | TensorEntry] = []  # of what was moved last
        self._arena: Arena | None = None
        try:
            self._arena = Arena(_ROOM * checkpoint_bytes + _MORE_BYTES)
            self._arena.begin_ahead()
        except OSError as error:
            self._give_up(str(error))

    def shared(self) -> SharedMemory | None:
        """Returns the memory, if all is in it."""
        arena, self._arena = self._arena, None
        try:
            return None if arena is None else arena.seal()
        except OSError as error:
            self._give_up(str(error))
            return None

    def close(self) -> None:
        """Makes no further memory. Call it when all is loaded, or cannot be."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _note(self, call: str, parts: Sequence[LinearOp | Tensor]) -> None:
        super()._note(call, parts)
        self._entries = []
        if self._arena is not None and all(map(can_keep, parts)):
            self._move(self._arena, parts)

    def _move(self, arena: Arena, parts: Sequence[LinearOp | Tensor]) -> None:
        placing = self._placing
        entries = list(map(placing.part, parts))
        try:
            arena.grow(placing.end)
        except NotShared as error:
            self._give_up(str(error))
            return
        base = arena.data.data_ptr()
        for start, (address, num_bytes) in placing.pieces:
            ctypes.memmove(base + start, address, num_bytes)
        placing.pieces.clear()
        placing.kept.clear()
        self._entries = entries

    def _noted_layers(
        self, call: str, layers: Sequence[LinearOp], fusion: Fusion
    ) -> Sequence[LinearOp]:
        """Returns the layers where they are now; their own memory is free for the next ones."""
        self._note(call, layers)
        entries = [entry for entry in self._entries if isinstance(entry, LayerEntry)]
        if not entries:
            return layers
        moved = [
            restore(entry.kind, [self._bytes(span) for span in entry.buffers], fusion)
            for entry in entries
        ]
        self.made[-1] = Made(call, tuple(moved))
        return moved

    def _noted_tensor(self, call: str, made: Tensor) -> Tensor:
        self._note(call, [made])
        for entry in self._entries:
            assert isinstance(entry, TensorEntry)
            made = self._bytes(entry.data).view(DTYPES[entry.dtype]).view(entry.shape)
            self.made[-1] = Made(call, (made,))
        return made

    def _bytes(self, span: Span) -> Tensor:
        assert self._arena is not None
        return self._arena.data[span.start : span.start + span.num_bytes]

    def _give_up(self, why: str) -> None:
        logger.info("weights_listen: replicas on this machine get copies of the weights: %s", why)
        self.close()
