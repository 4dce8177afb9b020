"""Builds a model of which a part stays in host memory beside its GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from ops import get_backend
from serve.errors import ConfigError, reason
from serve.loading.host_weights.disk import DiskFeed, DiskFile
from serve.loading.host_weights.link import Link, device_speed, link_speed, open_link
from serve.loading.host_weights.needs import LayerNotes, PackedSizes, needs_of
from serve.loading.host_weights.placement import (
    SHARE_OF_HOST,
    DeviceNeeds,
    HostPlacement,
    LinkSpeeds,
    expected_step_s,
    place,
    read_bytes,
    with_room,
)
from serve.loading.host_weights.ring import DeviceRing
from serve.loading.host_weights.source import PlacedTensors
from serve.loading.streaming.division import mixture_of
from serve.loading.streaming.experts import ExpertSlots
from serve.loading.streaming.reader import WeightReader
from serve.loading.streaming.speeds import folder_speed, memory_speed
from serve.loading.streaming.stats import StreamStats
from serve.loading.streaming.stream import stats_of
from serve.machine import available_memory
from serve.models import ModelSpec
from serve.models.checkpoint import Checkpoint
from serve.models.decoder import DecoderWeights
from serve.models.layers.blocks import Block
from serve.models.loaded_tensors import LoadedTensors
from serve.models.packed_cache import folder as folders
from serve.models.tensors import MakeLinear, TensorSource
from serve.units import format_memory

if TYPE_CHECKING:
    from serve.loading.host_weights.device_experts import DeviceExperts

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _FromDisk:
    """What reads weights that are on the disk. feed: of layers; slots: of experts."""

    reader: WeightReader
    feed: DiskFeed | None
    slots: list[ExpertSlots]


class HostWeights:
    """A BlockStream of a model of which a part is in host memory, and perhaps on the disk. ring:
    None: no layers come through one; numbers: of each layer in it, None for others."""

    def __init__(
        self,
        link: Link,
        needs: DeviceNeeds,
        placement: HostPlacement,
        ring: DeviceRing | None,
        source: PlacedTensors,
        disk: _FromDisk | None = None,
    ) -> None:
        self._disk = disk
        self.link, self.needs, self.placement, self.ring = link, needs, placement, ring
        self.experts_on_cpu = source.experts_on_cpu
        self.on_device: DeviceExperts | None = None
        self._is_closed = False
        numbers = {layer: number for number, layer in enumerate(placement.ring_layers)}
        self._numbers = [numbers.get(layer) for layer in range(len(needs.layers))]

    def blocks(self, blocks: Sequence[Block]) -> Iterator[Block]:
        if self.on_device is not None:
            self.on_device.begin_step()
        for number, block in zip(self._numbers, blocks, strict=True):
            if number is None or self.ring is None:
                yield block
            else:
                self.ring.enter(number)  # WeightsLostError
                yield block
                self.ring.leave(number)

    def stats(self) -> StreamStats:
        """Returns the device's bytes, those that were copied to it for steps or read from the disk,
        and, unless these are on the disk, where experts that steps used were: on the device (hits),
        copied to it for many rows (late), or computed by the CPU (misses)."""
        copied = 0 if self.ring is None else self.ring.copied_bytes
        used = sum(each.num_used for each in self.experts_on_cpu.values())
        resident, hits, brought = self.placement.device_bytes, 0, 0
        if self.on_device is not None:
            copied += self.on_device.copied_bytes
            resident += self.on_device.num_bytes
            hits = 0 if self.on_device.hot is None else self.on_device.hot.hits
            brought = 0 if self.on_device.ring is None else self.on_device.ring.copied_experts
        resident = 0 if self._is_closed else resident
        found = StreamStats(resident, copied)
        if self._disk is not None:
            read = stats_of(resident, self._disk.reader.stats, self._disk.slots)
            found = replace(read, read_bytes=read.read_bytes + copied)
            if self._disk.slots:
                return found
        return replace(found, expert_hits=hits, expert_late=brought, expert_misses=used - hits)

    def close(self) -> None:
        """Raises nothing, so that the rest is freed, too, if the device is lost."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._disk is not None:
            self._disk.reader.close()  # before the memory that it reads into is freed
        try:
            self.link.close()
        except Exception:
            logger.exception("copies of weights to the device cannot be waited for")


@dataclass(slots=True)
class HostWeightsCache:
    """A TensorCache that keeps nothing, but puts at most `budget` bytes of weights on the device
    and the rest into host memory, of which it takes `host_bytes` (None: most of what is free), and
    then into a file. make_linear: packs for the CPU. is_fp8: products are in fp8. packed_cache: of
    EngineConfig, where the file is."""

    spec: ModelSpec
    sizes: PackedSizes
    budget: int
    host_bytes: int | None
    make_linear: MakeLinear
    device: torch.device
    is_fp8: bool
    packed_cache: str | Path

    def build(
        self,
        checkpoint: Checkpoint,
        loaded: LoadedTensors,
        settings: str,
        build: Callable[[TensorSource], T],
    ) -> T:
        """Returns a DecoderWeights, whose `stream` is a HostWeights unless all is on the device."""
        notes = LayerNotes(checkpoint, self.spec.packed, self.sizes.group)
        build(notes)
        needs = needs_of(notes, self.spec, self.sizes)
        if needs.total <= self.budget:
            return build(loaded)
        from serve.loading.host_weights.device_experts import give_room

        link = open_link(self.device)
        file: DiskFile | None = None
        disk: _FromDisk | None = None
        try:
            placement, speeds = self._place(needs, link, checkpoint.path)
            room = self.budget - placement.device_bytes if placement.slot_bytes is None else 0
            if placement.disk_bytes:
                file = DiskFile(self._folder(checkpoint.path), placement.disk_bytes)
            host = loaded.on(get_backend("cpu"), self.make_linear)
            source = PlacedTensors(loaded, host, placement, link, file=file, has_room=room > 0)
            weights = build(source)
            assert isinstance(weights, DecoderWeights)
            loaded.num_ungrouped = source.num_ungrouped
            if file is not None:
                disk = _open(file, source, placement, weights, link)
            ring = None
            if source.ring_layers:
                feed = None if disk is None else disk.feed
                ring = DeviceRing(source.ring_layers, placement.buffers, link, feed)
            on_device = give_room(source.experts_on_cpu, needs, room, link, speeds.link)
        except BaseException:
            if disk is not None:
                disk.reader.close()  # before the memory that it reads into is freed
            if file is not None:
                file.close()
            link.close()
            raise
        for layer, experts in source.experts_on_cpu.items():
            mixture = mixture_of(weights.blocks[layer])
            assert mixture is not None, "a layer with experts"
            if mixture.latent_in is None:
                mixture.begin = experts.begin
        stream = weights.stream = HostWeights(link, needs, placement, ring, source, disk)
        stream.on_device = on_device
        return weights

    def _folder(self, model: Path) -> Path:
        """Returns where the file is written. ConfigError."""
        if self.packed_cache == "off":
            raise ConfigError(
                "packed_cache off: the weights fit neither the device nor host memory"
                " (host_weight_bytes), so that they need a file"
            )
        chosen = None if self.packed_cache == "auto" else Path(self.packed_cache)
        candidates = folders.folders(model, chosen)
        try:
            return folders.writable(candidates)
        except folders.NoRoom as error:
            raise ConfigError(f"packed_cache: {error}") from error

    def _place(
        self, needs: DeviceNeeds, link: Link, model: Path
    ) -> tuple[HostPlacement, LinkSpeeds]:
        """Measures, decides what is where, and says what to expect before anything is loaded."""
        host = self.host_bytes or int(SHARE_OF_HOST * available_memory())
        speeds = measure_speeds(link)
        placement = place(needs, self.budget, host, speeds)
        if placement.disk_bytes:
            folder = self._folder(model)
            try:
                speeds = replace(speeds, disk=folder_speed(folder))
            except OSError as error:
                raise ConfigError(f"packed_cache: {folder}: {reason(error)}") from error
            placement = place(needs, self.budget, host, speeds)
        placement = with_room(needs, self.budget, host, speeds, placement)
        if placement.on_cpu and self.is_fp8:
            raise ConfigError(
                "weight_memory_bytes: CPUs have no products in fp8 for the experts that do not fit"
                " the device; use dtype int8"
            )
        _announce(needs, placement, speeds)
        return placement, speeds


def _open(
    file: DiskFile,
    source: PlacedTensors,
    placement: HostPlacement,
    weights: DecoderWeights,
    link: Link,
) -> _FromDisk:
    """Joins the model with what reads its weights from the file."""
    reader, feed, slots = file.open(), None, list[ExpertSlots]()
    try:
        units = [each.unit for each in source.ring_layers if each.unit is not None]
        if units:
            feed = DiskFeed(reader, units, placement.staging, link)
        if source.disk_experts is not None and placement.slot_bytes is not None:
            found = {layer: mixture_of(weights.blocks[layer]) for layer in placement.on_cpu}
            top_k = {layer: each.router.kind.top_k for layer, each in found.items() if each}
            slots = source.disk_experts.open(reader, placement.slot_bytes, top_k)
    except BaseException:
        reader.close()
        raise
    return _FromDisk(reader, feed, slots)


def _announce(needs: DeviceNeeds, placement: HostPlacement, speeds: LinkSpeeds) -> None:
    """Says what to expect before anything is loaded."""
    one_s, many_s = (expected_step_s(needs, placement, speeds, rows) for rows in (1, 8))
    logger.info(
        "weights: %s of %s on the device; the CPU computes the experts of %d layers (%s/s),"
        " %d layers are copied in every step (%s/s)%s: at most about %.2f tokens a second for"
        " one request, %.1f for 8 at once; steps are launched kernel by kernel",
        format_memory(placement.device_bytes),
        format_memory(needs.total),
        len(placement.on_cpu),
        format_memory(int(speeds.host)),
        len(placement.ring_layers),
        format_memory(int(speeds.link)),
        _said_of_disk(needs, placement, speeds),
        1 / one_s,
        8 / many_s,
    )


def measure_speeds(link: Link) -> LinkSpeeds:
    """Measures for less than a second."""
    return LinkSpeeds(memory_speed(), device_speed(link), link_speed(link))


def _said_of_disk(needs: DeviceNeeds, placement: HostPlacement, speeds: LinkSpeeds) -> str:
    if not placement.disk_bytes:
        return ""
    read = format_memory(int(read_bytes(needs, placement)))
    total, rate = format_memory(placement.disk_bytes), format_memory(int(speeds.disk))
    return f", {total} are in a file, of which a step of one row reads {read} at {rate}/s"
