"""Builds a model over the memory that its placement gives it, and joins it with what reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from memory.tiers.block_file import BlockFile
from ops.backend import ExpertsOp, Norm
from serve.loading.streaming.division import LINE, Division, Group, mixture_of
from serve.loading.streaming.experts import ExpertSlots, StreamedExperts
from serve.loading.streaming.first_read import Copy, read_once
from serve.loading.streaming.placement import Placement
from serve.loading.streaming.reader import WeightReader
from serve.loading.streaming.ring import Ring
from serve.loading.streaming.source import HeadPart, StreamedTensors, slot_layer
from serve.loading.streaming.stream import WeightStream
from serve.loading.streaming.tables import StreamedTable, blocks_of
from serve.loading.streaming.units import Piece, Unit, untouched
from serve.models.decoder import DecoderWeights
from serve.models.layers.blocks import Block
from serve.models.loaded_tensors import LoadedTensors
from serve.models.packed_cache.layout import DTYPES, PAGE, Index, Span, TensorEntry
from serve.models.packed_cache.region import huge_pages
from serve.models.packed_cache.writer import round_up

_HUGE_FROM = 1 << 20
_MAX_PINNED = 512 << 20  # bytes in one piece; the kernel takes at most 1 GiB


class StreamedModel:
    """Call read, open and begin, in this order."""

    def __init__(
        self, division: Division, placement: Placement, index: Index, loaded: LoadedTensors
    ) -> None:
        self._division, self._placement = division, placement
        self._index, self._loaded = index, loaded
        self._memory: list[Tensor] = []
        self._where: dict[int, Tensor] = {}  # memory of spans by their start in the file
        self._copies: list[Copy] = []
        self._pieces: list[Piece] = []
        self._streamed: list[Unit] = []
        # of each unit, its number in the ring; None: it is resident
        self._numbers: list[int | None] = []
        self._buffers: list[Tensor] = []
        self._checksums: dict[tuple[int, int], int] = {}
        self._ring: Ring | None = None

    # -- memory

    def read(self, fd: int) -> StreamedTensors:
        """Takes the memory, reads the whole file once, and returns the source of the model.
        DamagedCache, OSError."""
        division, placement = self._division, self._placement
        fixed, at = self._take(max(LINE, division.needs.fixed_bytes)), 0
        for span in division.fixed:
            self._make_resident(span, fixed[at:])
            at += round_up(max(1, span.num_bytes), LINE)
        for use in division.tables:
            for span in use.spans:
                if placement.has_tables:
                    self._make_resident(span, self._take(span.num_bytes))
                else:
                    self._where[span.start] = untouched(span.num_bytes)
                    self._pieces += blocks_of(span, self._index.data_end)
        self._place_units()
        for group, count in zip(division.groups, placement.slots, strict=True):
            self._place_experts(group, count)
        self._checksums = read_once(fd, self._index, self._copies, self._pieces)
        experts, head = self._expert_ops(), self._head_parts()
        return StreamedTensors(self._loaded, division.uses, self._where, experts, head)

    def _take(self, num_bytes: int) -> Tensor:
        if num_bytes >= _HUGE_FROM:
            memory = huge_pages(num_bytes)
        else:
            whole = torch.empty(num_bytes + PAGE, dtype=torch.uint8)
            skipped = -whole.data_ptr() % PAGE
            memory = whole[skipped : skipped + num_bytes]
        self._memory.append(memory)
        return memory

    def _make_resident(self, span: Span, memory: Tensor) -> None:
        memory = memory[: span.num_bytes]
        self._where[span.start] = memory
        self._copies.append(Copy(span.start, span.num_bytes, memory.data_ptr()))

    def _place_units(self) -> None:
        units = list(
            zip(
                self._division.units,
                self._division.spans,
                self._placement.is_resident,
                strict=True,
            )
        )
        for unit, spans, stays in units:
            self._numbers.append(None if stays or not spans else len(self._streamed))
            if stays and spans:
                self._place(unit, spans, self._take(unit.num_bytes), is_resident=True)
            elif spans:
                self._streamed.append(unit)
                self._pieces += unit.pieces
        if not self._streamed:
            return
        size, count = self._placement.buffer_bytes, self._placement.buffers
        memory = self._take(size * count)
        memory.zero_()  # K/V is sized by what is free, perhaps before the first layers have come
        self._buffers = [memory[at * size : (at + 1) * size] for at in range(count)]
        for (unit, spans, _), number in zip(units, self._numbers, strict=True):
            if number is not None:
                self._place(unit, spans, self._buffers[number % count], is_resident=False)

    def _place(
        self, unit: Unit, spans: Sequence[Span], memory: Tensor, *, is_resident: bool
    ) -> None:
        for span in spans:
            at = unit.offset_of(span.start)
            part = self._where[span.start] = memory[at : at + span.num_bytes]
            if is_resident:
                self._copies.append(Copy(span.start, span.num_bytes, part.data_ptr()))

    def _place_experts(self, group: Group, count: int) -> None:
        """Makes the slots, and reads the first experts into them."""
        size, mixture = group.units[0][0].num_bytes, group.mixtures[0]
        memory = group.memory = self._take(size * count)
        up, down = mixture.ups[0].layers[0], mixture.downs[0].layers[0]
        own = [memory[slot * size : (slot + 1) * size] for slot in range(count)]
        op = self._loaded.experts(
            [slot_layer(up, part, mixture.up_fusion) for part in own],
            [slot_layer(down, part[group.down_at :], mixture.down_fusion) for part in own],
            scales_input=mixture.scales_input,
        )
        addresses = [part.data_ptr() for part in own]
        slots = ExpertSlots(
            group.units,
            addresses,
            op,
            num_out=down.kind.num_out,
            scales_input=mixture.scales_input,
        )
        group.slots = slots
        for slot, (number, expert) in enumerate(slots.first_content()):
            slots.fill(slot, number, expert)
            for piece in group.units[number][expert].pieces:
                self._copies.append(Copy(piece.start, piece.num_bytes, addresses[slot] + piece.at))
        if count < sum(map(len, group.units)):
            self._pieces += [p for units in group.units for unit in units for p in unit.pieces]

    def _expert_ops(self) -> dict[int, ExpertsOp]:
        found: dict[int, ExpertsOp] = {}
        for group in self._division.groups:
            assert group.slots is not None
            for number, mixture in enumerate(group.mixtures):
                found[mixture.layer] = StreamedExperts(group.slots, number)
        return found

    def _head_parts(self) -> list[HeadPart]:
        numbers = self._numbers[self._division.num_layers :]
        return [
            HeadPart(entry, None if number is None else self._using(number))
            for entry, number in zip(self._division.head, numbers, strict=True)
        ]

    def _using(self, number: int) -> Callable[[], AbstractContextManager[None]]:
        def using() -> AbstractContextManager[None]:
            assert self._ring is not None, "the model has begun"
            return self._ring.using(number)

        return using

    # -- reading

    def open(self, path: Path, file: BlockFile) -> WeightReader:
        """Makes what reads the file, which it owns."""
        reader = WeightReader(path, file, self._checksums)
        slots = [group.memory for group in self._division.groups if group.memory is not None]
        reader.register(
            [
                (whole.data_ptr() + at, min(_MAX_PINNED, whole.nbytes - at))
                for whole in (*self._buffers, *slots)
                for at in range(0, whole.nbytes, _MAX_PINNED)
            ]
        )
        if self._streamed:
            buffers = [buffer.data_ptr() for buffer in self._buffers]
            self._ring = Ring(reader, self._streamed, buffers)
        for group in self._division.groups:
            assert group.slots is not None
            group.slots.reader = reader
        return reader

    def begin(self, weights: DecoderWeights, reader: WeightReader) -> WeightStream:
        """Joins the model with what reads its weights, and begins to read."""
        tables = 0
        if not self._placement.has_tables:
            tables = self._stream_table(weights, reader)
        for group in self._division.groups:
            self._join_routers(group, weights.blocks)
        if self._ring is not None:
            self._ring.start()
        slots = [group.slots for group in self._division.groups if group.slots is not None]
        numbers = self._numbers[: self._division.num_layers]
        return WeightStream(
            reader, self._ring, numbers, slots, self._placement, self._memory, tables
        )

    def _stream_table(self, weights: DecoderWeights, reader: WeightReader) -> int:
        """Leaves the embedding on the disk. Returns the bytes for its rows."""
        for use in self._division.tables:
            (entry,) = use.entry.parts
            assert isinstance(entry, TensorEntry)
            shape, dtype = entry.shape, DTYPES[entry.dtype]
            table = StreamedTable(reader, entry.data, shape, dtype, self._index.data_end)
            weights.embed = table
            return table.num_bytes
        return 0

    def _join_routers(self, group: Group, blocks: Sequence[Block]) -> None:
        """Tells each mixture the router of the next one, for guesses."""
        found = [mixture_of(blocks[mixture.layer]) for mixture in group.mixtures]
        for one, other in pairwise(found):
            assert one is not None and other is not None and group.slots is not None
            experts = one.experts
            if not isinstance(experts, StreamedExperts) or other.latent_in is not None:
                continue
            if group.slots.num_slots < group.slots.num_experts and other.router_norm is None:
                experts.route, experts.router = self._loaded.backend.route, other.router
                experts.ratio = _ratio(one.norm, other.norm)


def _ratio(one: Norm | None, other: Norm | None) -> Tensor | None:
    """Returns what turns rows behind one norm into about those behind the other."""
    if one is None or other is None or one.kind != "rms" or other.kind != "rms":
        return None
    weight = torch.where(one.weight.abs() < 1e-3, torch.ones_like(one.weight), one.weight)
    return other.weight / weight
