"""Tokens a second of decoding from peaks alone: devices of one kind, and (a, b) as in Lamina.

Published prices, models and network (arXiv 2405.01814; SYSTEMS 2.1, 2.5, 2.7); what a device
reaches of its peaks is assumed. The weights are bf16. The batch is what the K/V memory holds of
sequences that are all as long as they are on average: admission is perfect and the load even.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

BANDWIDTH_SHARE = 0.8
ARITHMETIC_SHARE = 0.6
MEMORY_SHARE = 0.9
WIRE_ELEMENT_BYTES = 2
SLOWDOWN = 0.2  # alpha of SYSTEMS 2.1: the network may add a fifth


@dataclass(frozen=True, slots=True)
class Link:
    """One device's, each way; seconds: what every exchange takes, whatever its size."""

    bytes_per_s: float
    seconds: float


NETWORK = Link(50e9, 33e-6)  # 400 Gbit/s, and the round trip of Lamina's host-bypassed network
NVLINK = Link(450e9, 10e-6)  # the latency of an all-reduce is assumed


@dataclass(frozen=True, slots=True)
class Device:
    """Peaks of a data sheet. peers: to other devices of its kind."""

    name: str
    bytes_per_s: float
    flops: float
    memory_bytes: float
    dollars_per_h: float
    peers: Link

    @property
    def room_bytes(self) -> float:
        return MEMORY_SHARE * self.memory_bytes


H100 = Device("H100", 3.35e12, 989e12, 80e9, 11.06, NVLINK)
H20 = Device("H20", 4.0e12, 148e12, 96e9, 4.63, NVLINK)


@dataclass(frozen=True, slots=True)
class Model:
    """group: query heads to a K/V head. kv_bytes: of an element."""

    name: str
    weight_bytes: float
    num_layers: int
    hidden: int
    group: int
    kv_bytes: int = 2

    @property
    def token_bytes(self) -> float:
        """K/V of a token."""
        return 2 * self.hidden / self.group * self.num_layers * self.kv_bytes

    @property
    def layer_traffic_bytes(self) -> float:
        """q and output, k and v of a token in a layer."""
        return (2 + 2 / self.group) * WIRE_ELEMENT_BYTES * self.hidden

    def products_s(self, batch: float, device: Device, num_devices: int) -> float:
        read = self.weight_bytes / (num_devices * BANDWIDTH_SHARE * device.bytes_per_s)
        num_parameters = self.weight_bytes / 2  # bf16
        multiply = 2 * num_parameters * batch / (num_devices * ARITHMETIC_SHARE * device.flops)
        if num_devices == 1:
            return max(read, multiply)
        num_bytes = 2 * (1 - 1 / num_devices) * batch * self.hidden * 2  # a ring's, bf16
        reduce = device.peers.seconds + num_bytes / device.peers.bytes_per_s
        return max(read, multiply) + 2 * self.num_layers * reduce

    def attention_s(self, batch: float, context: float, device: Device, num_devices: int) -> float:
        tokens = batch * context / num_devices
        read = tokens * self.token_bytes / (BANDWIDTH_SHARE * device.bytes_per_s)
        operations = 4 * tokens * self.hidden * self.num_layers
        return max(read, operations / (ARITHMETIC_SHARE * device.flops))

    def asked_bytes_per_s(self, batch: float, model_s: float, attention_s: float) -> float:
        """Of all links together, so that the network adds SLOWDOWN (SYSTEMS 2.1)."""
        traffic = batch * self.num_layers * self.layer_traffic_bytes
        return traffic / (SLOWDOWN * (model_s + attention_s))


MODELS = (
    Model("LLaMA-33B", 64.7e9, 60, 6656, 1),
    Model("LLaMA-65B", 130.1e9, 80, 8192, 1),
    Model("LLaMA3-70B", 137.5e9, 80, 8192, 8),
)


@dataclass(frozen=True, slots=True)
class Figures:
    """A configuration that works. step_s: between two tokens of a sequence. asked_bytes_per_s:
    None without a network."""

    name: str
    dollars_per_h: float
    batch: float
    in_flight: int
    step_s: float
    asked_bytes_per_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.step_s

    @property
    def tokens_per_dollar(self) -> float:
        return 3600 * self.tokens_per_s / self.dollars_per_h

    def as_json(self) -> dict[str, Any]:
        derived = {"tokens_per_s": self.tokens_per_s, "tokens_per_dollar": self.tokens_per_dollar}
        return asdict(self) | derived


def homogeneous(model: Model, context: float, device: Device, num_devices: int) -> Figures | None:
    """None: weights and one sequence do not fit."""
    room = num_devices * device.room_bytes - model.weight_bytes
    batch = room / (context * model.token_bytes)
    if batch < 1:
        return None
    step = model.products_s(batch, device, num_devices)
    step += model.attention_s(batch, context, device, num_devices)
    dollars = num_devices * device.dollars_per_h
    return Figures(f"{num_devices} {device.name}", dollars, batch, 1, step)


def turn_s(
    products: float, attention: float, network: float, wire: float, in_flight: int, replicas: int
) -> float:
    """Until each batch in flight has had a step: the longest of one batch's own way, and of what
    memory devices, replicas (Lamina's rotation) and links have to do for all of them."""
    own = products + attention + network
    return max(own, in_flight * attention, in_flight * products / replicas, in_flight * wire)


def disaggregated(model: Model, context: float, memory: Device, a: int, b: int) -> Figures | None:
    """(a, b), a of them H100. None: a is not some whole replicas, or no sequence fits."""
    width = 1
    while model.weight_bytes > width * H100.room_bytes:
        width *= 2
    batch = b * memory.room_bytes / (context * model.token_bytes)
    if a % width or batch < 1:
        return None
    replicas = a // width

    def step_s(in_flight: int) -> float:
        rows = batch / in_flight
        traffic = rows * model.num_layers * model.layer_traffic_bytes / NETWORK.bytes_per_s
        return turn_s(
            model.products_s(rows, H100, width),
            model.attention_s(rows, context, memory, b),
            # a batch is on one replica at a time, and has no more links than that
            model.num_layers * NETWORK.seconds + traffic / min(width, b),
            traffic / min(a, b),
            in_flight,
            replicas,
        )

    most = min(replicas + 1, int(batch))
    in_flight = min(range(1, most + 1), key=step_s)
    asked = model.asked_bytes_per_s(
        batch, model.products_s(batch, H100, width), model.attention_s(batch, context, memory, b)
    )
    dollars = a * H100.dollars_per_h + b * memory.dollars_per_h
    return Figures(f"({a}, {b})", dollars, batch, in_flight, step_s(in_flight), asked)


def best(candidates: Iterable[Figures | None]) -> Figures | None:
    usable = [figures for figures in candidates if figures is not None]
    return max(usable, key=lambda figures: figures.tokens_per_dollar, default=None)
