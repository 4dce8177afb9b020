"""Builds a model of which a part stays in host memory beside its GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from ops import get_backend
from serve.errors import ConfigError
from serve.loading.host_weights.link import Link, device_speed, link_speed, open_link
from serve.loading.host_weights.needs import LayerNotes, PackedSizes, needs_of
from serve.loading.host_weights.placement import (
    DeviceNeeds,
    HostPlacement,
    LinkSpeeds,
    expected_step_s,
    place,
)
from serve.loading.host_weights.ring import DeviceRing
from serve.loading.host_weights.source import PlacedTensors
from serve.loading.streaming.speeds import memory_speed
from serve.loading.streaming.stats import StreamStats
from serve.machine import available_memory
from serve.models import ModelSpec
from serve.models.checkpoint import Checkpoint
from serve.models.decoder import DecoderWeights
from serve.models.layers.blocks import Block, MixtureMlp, SideBySideMlp
from serve.models.loaded_tensors import LoadedTensors
from serve.models.tensors import MakeLinear, TensorSource
from serve.units import format_memory

logger = logging.getLogger(__name__)

T = TypeVar("T")


class HostWeights:
    """A BlockStream of a model of which a part is in host memory. ring: None: no layers come
    through one; numbers: of each layer in it, None for others."""

    def __init__(
        self,
        link: Link,
        needs: DeviceNeeds,
        placement: HostPlacement,
        ring: DeviceRing | None,
        source: PlacedTensors,
    ) -> None:
        self.link, self.needs, self.placement, self.ring = link, needs, placement, ring
        self.experts_on_cpu = source.experts_on_cpu
        self._is_closed = False
        numbers = {layer: number for number, layer in enumerate(placement.ring_layers)}
        self._numbers = [numbers.get(layer) for layer in range(len(needs.layers))]

    def blocks(self, blocks: Sequence[Block]) -> Iterator[Block]:
        for number, block in zip(self._numbers, blocks, strict=True):
            if number is None or self.ring is None:
                yield block
            else:
                self.ring.enter(number)
                yield block
                self.ring.leave(number)

    def stats(self) -> StreamStats:
        """Returns the device's bytes, and those that were copied to it for steps."""
        copied = 0 if self.ring is None else self.ring.copied_bytes
        resident = 0 if self._is_closed else self.placement.device_bytes
        return StreamStats(resident, copied)

    def close(self) -> None:
        """Raises nothing, so that the rest is freed, too, if the device is lost."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self.link.close()
        except Exception:
            logger.exception("copies of weights to the device cannot be waited for")


@dataclass(slots=True)
class HostWeightsCache:
    """A TensorCache that keeps nothing, but puts at most `budget` bytes of weights on the device
    and the rest into host memory. make_linear: packs for the CPU. is_fp8: products are in fp8."""

    spec: ModelSpec
    sizes: PackedSizes
    budget: int
    make_linear: MakeLinear
    device: torch.device
    is_fp8: bool

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
        placement = place(needs, self.budget)
        if placement.is_whole:
            return build(loaded)
        self._check(placement)
        link = open_link(self.device)
        try:
            self._announce(needs, placement, link)
            host = loaded.on(get_backend("cpu"), self.make_linear)
            source = PlacedTensors(loaded, host, placement, link)
            weights = build(source)
            assert isinstance(weights, DecoderWeights)
            loaded.num_ungrouped = source.num_ungrouped
            ring = None
            if source.ring_layers:
                ring = DeviceRing(source.ring_layers, placement.buffers, link)
        except BaseException:
            link.close()
            raise
        for layer, experts in source.experts_on_cpu.items():
            mixture = _mixture_of(weights.blocks[layer])
            if mixture.latent_in is None:
                mixture.begin = experts.begin
        weights.stream = HostWeights(link, needs, placement, ring, source)
        return weights

    def _check(self, placement: HostPlacement) -> None:
        if placement.on_cpu and self.is_fp8:
            raise ConfigError(
                "weight_memory_bytes: CPUs have no products in fp8 for the experts that do not fit"
                " the device; use dtype int8"
            )
        free = available_memory()
        if placement.host_bytes > free:
            raise ConfigError(
                f"weight_memory_bytes: {format_memory(placement.host_bytes)} of weights would be in"
                f" host memory, of which {format_memory(free)} are free"
            )

    def _announce(self, needs: DeviceNeeds, placement: HostPlacement, link: Link) -> None:
        """Says what to expect before anything is loaded."""
        speeds = measure_speeds(link)
        one_s, many_s = (expected_step_s(needs, placement, speeds, rows) for rows in (1, 8))
        logger.info(
            "weights: %s of %s on the device; the CPU computes the experts of %d layers (%s/s),"
            " %d layers are copied in every step (%s/s): at most about %.2f tokens a second for"
            " one request, %.1f for 8 at once; steps are launched kernel by kernel",
            format_memory(placement.device_bytes),
            format_memory(needs.total),
            len(placement.on_cpu),
            format_memory(int(speeds.host)),
            len(placement.ring_layers),
            format_memory(int(speeds.link)),
            1 / one_s,
            8 / many_s,
        )


def measure_speeds(link: Link) -> LinkSpeeds:
    """Measures for less than a second."""
    return LinkSpeeds(memory_speed(), device_speed(link), link_speed(link))


def _mixture_of(block: Block) -> MixtureMlp:
    mlp = block.mlp.mixture if isinstance(block.mlp, SideBySideMlp) else block.mlp
    assert isinstance(mlp, MixtureMlp), "a layer with experts"
    return mlp
