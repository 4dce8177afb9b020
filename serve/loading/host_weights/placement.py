"""Decides which weights are on the device, in host memory and on the disk.

It is a linear program like that of FlexGen (Sheng et al., ICML 2023): minimize the seconds of a
decode step, of which the slowest of three paths decides,

    link    bytes of the ring / link
    disk    (bytes of the ring's layers there + used share x bytes of experts there) / disk
    turns   used share x bytes of the CPU's experts / host + bytes that the device reads / device

subject to the memory of the device and of the host. What is equal in it is only counted: layers are
nearly as large as one another. So its choices are few, and all of them are compared: how many
layers' experts the CPU computes, from the last layer backwards. For each number the rest is greedy,
which is exact here (a knapsack with one bound each, Dantzig 1957): as few layers as possible come
through the ring, and what the host cannot take is on the disk, experts first, since a step uses few
of them. Layers of the ring, and those of them on the disk, are spread evenly, so that copies and
reads run while others compute.

Copies read host memory, too. So for the choice their bytes count as if the CPU read them in turn
with experts, and of what is within 5 % of the fastest, the one that copies the least is taken. So
where the host can take all, experts leave the device first, and layers if that does not suffice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from serve.errors import ConfigError
from serve.loading.streaming.placement import BUFFERS, MIN_BUFFERS, spread
from serve.units import format_memory

_AS_FAST = 1.05
SHARE_OF_HOST = 0.9
"""Of the free host memory, for weights; the rest is for the process and the system."""

ROOM_SHARE = 0.5
"""Of the largest mixture's experts: the device memory that is kept for those in host memory."""


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
    products; the others come through a ring of so many buffers. on_disk: those of them that are
    read from the disk, through `staging` buffers of host memory. slot_bytes: host memory for the
    CPU's experts, the others being on the disk; None: all of them are in host memory. device_bytes,
    host_bytes: memory for weights, with buffers and slots; disk_bytes: of the file."""

    on_cpu: frozenset[int]
    is_resident: tuple[bool, ...]
    buffers: int
    device_bytes: int
    host_bytes: int
    on_disk: frozenset[int] = frozenset()
    staging: int = 0
    slot_bytes: int | None = None
    disk_bytes: int = 0

    @property
    def ring_layers(self) -> list[int]:
        return [layer for layer, stays in enumerate(self.is_resident) if not stays]

    @property
    def is_whole(self) -> bool:
        """Whether all weights are on the device."""
        return not self.host_bytes


@dataclass(frozen=True, slots=True)
class LinkSpeeds:
    """Bytes a second: the host's memory as experts are read, the device's, the link's and the
    disk's."""

    host: float
    device: float
    link: float
    disk: float = inf


def least_bytes(needs: DeviceNeeds) -> int:
    """Returns the least device memory with which a model can be computed."""
    return needs.fixed_bytes + _least_ring([each.products for each in needs.layers])


def _least_ring(products: Sequence[int]) -> int:
    return min(sum(products), MIN_BUFFERS * max(products, default=0))


def place(needs: DeviceNeeds, budget: int, host: int, speeds: LinkSpeeds) -> HostPlacement:
    """Returns the fastest placement of at most `budget` bytes on the device and `host` bytes in
    host memory. ConfigError if there is none."""
    if needs.total <= budget:
        return _on_device(needs, frozenset())
    mixtures = [number for number, each in enumerate(needs.layers) if each.experts]
    found: list[tuple[float, int, HostPlacement]] = []
    least_host = inf
    for first in range(len(mixtures) + 1):
        on_device = _beside(needs, frozenset(mixtures[first:]), budget)
        if on_device is None:
            continue
        placed = _spill(needs, on_device, host)
        if isinstance(placed, int):
            least_host = min(least_host, placed)
            continue
        copied = sum(needs.layers[layer].products for layer in placed.ring_layers)
        seconds = expected_step_s(needs, placed, speeds)
        seconds = max(seconds, _turns_s(needs, placed, speeds) + copied / speeds.host)
        found.append((seconds, copied, placed))
    if found:
        fastest = min(seconds for seconds, _, _ in found)
        as_fast = [each for each in found if each[0] <= _AS_FAST * fastest]
        return min(as_fast, key=lambda each: (each[1], each[0]))[2]
    if least_host < inf:
        raise ConfigError(
            f"host_weight_bytes {format_memory(host)} is too little: this model needs"
            f" {format_memory(int(least_host))} of host memory beside this device"
        )
    raise ConfigError(
        f"weight_memory_bytes {format_memory(budget)} is too little: this model needs"
        f" {format_memory(least_bytes(needs))} of the device for the embedding, the last product,"
        f" norms and {MIN_BUFFERS} layers without experts"
    )


def with_room(
    needs: DeviceNeeds, budget: int, host: int, speeds: LinkSpeeds, placement: HostPlacement
) -> HostPlacement:
    """Returns a placement that leaves room for what the device takes of the CPU's experts
    (device_experts.py), if there is one in which the host takes all the rest; else this one of
    `place`. budget, host: as for `place`."""
    if not placement.on_cpu or placement.disk_bytes:
        return placement
    room = int(ROOM_SHARE * max(needs.layers[layer].experts for layer in placement.on_cpu))
    if budget - placement.device_bytes >= room or budget - room < least_bytes(needs):
        return placement
    try:
        smaller = place(needs, budget - room, host, speeds)
    except ConfigError:  # the host cannot take more
        return placement
    return placement if smaller.disk_bytes else smaller


def _on_device(needs: DeviceNeeds, on_cpu: frozenset[int]) -> HostPlacement:
    experts = sum(needs.layers[layer].experts for layer in on_cpu)
    stays = (True,) * len(needs.layers)
    return HostPlacement(on_cpu, stays, 0, needs.total - experts, experts)


def _beside(needs: DeviceNeeds, on_cpu: frozenset[int], budget: int) -> HostPlacement | None:
    """Returns the placement that copies the least if the CPU computes these experts and the host
    takes all the rest; None if the device cannot take its part."""
    placed = _on_device(needs, on_cpu)
    if placed.device_bytes <= budget:
        return placed
    products = [each.products for each in needs.layers]
    left, largest = budget - placed.device_bytes + sum(products), max(products, default=0)
    if left < _least_ring(products):
        return None
    buffers = BUFFERS if BUFFERS * largest <= left else MIN_BUFFERS
    stays = tuple(
        is_resident or not size
        for is_resident, size in zip(
            spread(products, left - buffers * largest), products, strict=True
        )
    )
    streamed = [size for size, is_resident in zip(products, stays, strict=True) if not is_resident]
    buffers = min(buffers, len(streamed))
    used = placed.device_bytes - sum(streamed) + buffers * max(streamed)
    return HostPlacement(on_cpu, stays, buffers, used, placed.host_bytes + sum(streamed))


def _spill(needs: DeviceNeeds, placed: HostPlacement, host: int) -> HostPlacement | int:
    """Puts on the disk what the host cannot take. Returns the least that it has to take if that is
    more than it can."""
    if placed.host_bytes <= host:
        return placed
    ring = {layer: needs.layers[layer].products for layer in placed.ring_layers}
    held = sum(ring.values())
    experts = placed.host_bytes - held
    slots = max(_least_slots(needs, placed.on_cpu), min(experts, host - held))
    left, staging, on_disk = host - slots, 0, frozenset[int]()
    if held > left:
        largest = max(ring.values(), default=0)
        least = min(held, MIN_BUFFERS * largest)
        if least > left or not ring:
            return slots + least
        staging = BUFFERS if BUFFERS * largest <= left else MIN_BUFFERS
        kept = spread(list(ring.values()), left - staging * largest)
        on_disk = frozenset(layer for layer, stays in zip(ring, kept, strict=True) if not stays)
    read = [ring[layer] for layer in on_disk]
    staging = min(staging, len(read))
    held += staging * max(read, default=0) - sum(read)
    slots = min(experts, host - held)  # and what whole layers leave over
    return replace(
        placed,
        host_bytes=slots + held,
        on_disk=on_disk,
        staging=staging,
        slot_bytes=slots if slots < experts else None,
        disk_bytes=sum(read) + (experts if slots < experts else 0),
    )


def _least_slots(needs: DeviceNeeds, on_cpu: frozenset[int]) -> int:
    """Returns the least host memory for experts: twice those of a row in the largest layer."""
    layers = [needs.layers[layer] for layer in on_cpu]
    return max((int(min(1.0, 2 * each.used_share) * each.experts) for each in layers), default=0)


def expected_step_s(
    needs: DeviceNeeds, placement: HostPlacement, speeds: LinkSpeeds, rows: int = 1
) -> float:
    """Returns the seconds of a step of so many decode rows. The CPU's experts and the device take
    turns; the ring's copies, and reads from the disk, run beside both."""
    copied = sum(needs.layers[layer].products for layer in placement.ring_layers)
    return max(
        copied / speeds.link,
        read_bytes(needs, placement, rows) / speeds.disk,
        _turns_s(needs, placement, speeds, rows),
    )


def _turns_s(
    needs: DeviceNeeds, placement: HostPlacement, speeds: LinkSpeeds, rows: int = 1
) -> float:
    """Returns the seconds of the CPU's experts and of the device."""
    host = sum(needs.layers[layer].experts_of(rows) for layer in placement.on_cpu)
    device = float(needs.fixed_bytes)
    for number, layer in enumerate(needs.layers):
        device += layer.products
        device += 0 if number in placement.on_cpu else layer.experts_of(rows)
    return host / speeds.host + device / speeds.device


def read_bytes(needs: DeviceNeeds, placement: HostPlacement, rows: int = 1) -> float:
    """Returns the bytes that a step of so many decode rows reads from the disk. Experts count as if
    each were used equally often, which measured frequencies only better."""
    read = float(sum(needs.layers[layer].products for layer in placement.on_disk))
    if placement.slot_bytes is not None:
        layers = [needs.layers[layer] for layer in placement.on_cpu]
        missing = 1 - placement.slot_bytes / sum(each.experts for each in layers)
        read += missing * sum(each.experts_of(rows) for each in layers)
    return read
