"""Decides which weights are on the device, which experts the CPU computes, and what a ring brings.

Of a mixture a row uses few experts, so that reading them where they are costs little of the host's
bandwidth, and their bytes are most of the model: they leave the device first, from the last layer
backwards. What is left of the layers is used whole in every step; if it does not fit either, some
layers come through a ring of buffers, spread evenly so that copies run while others compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serve.errors import ConfigError
from serve.loading.streaming.placement import BUFFERS, MIN_BUFFERS, spread
from serve.units import format_memory


@dataclass(frozen=True, slots=True)
class LayerNeeds:
    """The bytes of a layer's products, and of its experts, of which a row uses a share. Norms and
    routers count elsewhere."""

    products: int
    experts: int = 0
    used_share: float = 0.0

    def experts_of(self, rows: int) -> float:
        """Returns the bytes of the experts that so many rows use, if each is as likely."""
        return self.experts * (1 - (1 - self.used_share) ** rows)


@dataclass(frozen=True, slots=True)
class DeviceNeeds:
    """What a model is made of. fixed_bytes: what is always on the device, such as the embedding,
    the last product and norms."""

    fixed_bytes: int
    layers: tuple[LayerNeeds, ...]

    @property
    def total(self) -> int:
        return self.fixed_bytes + sum(each.products + each.experts for each in self.layers)


@dataclass(frozen=True, slots=True)
class HostPlacement:
    """What is where. on_cpu: layers whose experts the CPU computes. is_resident: of each layer's
    products; the others come through a ring of so many buffers. device_bytes, host_bytes: of
    weights, with the ring's buffers."""

    on_cpu: frozenset[int]
    is_resident: tuple[bool, ...]
    buffers: int
    device_bytes: int
    host_bytes: int

    @property
    def ring_layers(self) -> list[int]:
        return [layer for layer, stays in enumerate(self.is_resident) if not stays]

    @property
    def is_whole(self) -> bool:
        """Whether all weights are on the device."""
        return not self.host_bytes


def least_bytes(needs: DeviceNeeds) -> int:
    """Returns the least device memory with which a model can be computed."""
    products = [each.products for each in needs.layers]
    return needs.fixed_bytes + min(sum(products), MIN_BUFFERS * max(products, default=0))


def place(needs: DeviceNeeds, budget: int) -> HostPlacement:
    """Returns the placement that leaves the device the most. ConfigError if nothing fits."""
    used, on_cpu = needs.total, set[int]()
    for layer in reversed(range(len(needs.layers))):
        if used <= budget:
            break
        if needs.layers[layer].experts:
            used -= needs.layers[layer].experts
            on_cpu.add(layer)
    host = needs.total - used
    products = [each.products for each in needs.layers]
    if used <= budget:
        return HostPlacement(frozenset(on_cpu), (True,) * len(products), 0, used, host)
    least = least_bytes(needs)
    if budget < least:
        raise ConfigError(
            f"weight_memory_bytes {format_memory(budget)} is too little: this model needs"
            f" {format_memory(least)} of the device for the embedding, the last product, norms and"
            f" {MIN_BUFFERS} layers without experts"
        )
    return _with_ring(needs, frozenset(on_cpu), products, budget)


def _with_ring(
    needs: DeviceNeeds, on_cpu: frozenset[int], products: Sequence[int], budget: int
) -> HostPlacement:
    left, largest = budget - needs.fixed_bytes, max(products)
    buffers = BUFFERS if BUFFERS * largest <= left else MIN_BUFFERS
    stays = tuple(
        is_resident or not size
        for is_resident, size in zip(
            spread(products, left - buffers * largest), products, strict=True
        )
    )
    streamed = [size for size, is_resident in zip(products, stays, strict=True) if not is_resident]
    buffers = min(buffers, len(streamed))
    experts = sum(needs.layers[layer].experts for layer in on_cpu)
    host = experts + sum(streamed)
    used = needs.total - host + buffers * max(streamed)
    return HostPlacement(on_cpu, stays, buffers, used, host)


@dataclass(frozen=True, slots=True)
class LinkSpeeds:
    """Bytes a second: the host's memory as experts are read, the device's, and the link's."""

    host: float
    device: float
    link: float


def expected_step_s(
    needs: DeviceNeeds, placement: HostPlacement, speeds: LinkSpeeds, rows: int = 1
) -> float:
    """Returns the seconds of a step of so many decode rows. The CPU's experts and the device take
    turns, and the ring's copies run beside both."""
    host = sum(needs.layers[layer].experts_of(rows) for layer in placement.on_cpu)
    device = float(needs.fixed_bytes)
    for number, layer in enumerate(needs.layers):
        device += layer.products
        device += 0 if number in placement.on_cpu else layer.experts_of(rows)
    copied = sum(needs.layers[layer].products for layer in placement.ring_layers)
    return max(copied / speeds.link, host / speeds.host + device / speeds.device)
