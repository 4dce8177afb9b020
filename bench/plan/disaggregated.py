"""Attention on memory devices: (a, b), as in Lamina (arXiv 2405.01814; SYSTEMS 2.1, 2.3, 2.5).

r replicas of the weights on a compute devices, K/V on b memory devices, n batches of B / n in
flight. A token sends q, k and v and gets its output, for each layer, and each layer has a round
trip. With the times of one of these batches, each of them has had a step after

    max(products + attention + network, n attention, n products / r, n wire)

and n is the best of 1 .. r + 1. What sending q early hides is left out (3 to 13 % in the paper).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from bench.plan.capacity import kv_bytes, sequence_bytes
from bench.plan.cost import Attention, Machine, MachineCost
from bench.plan.efficiency import Efficiency
from bench.plan.hardware import Device, Link
from bench.plan.shapes import Precision, Shape
from serve.errors import ConfigError

WIRE_ELEMENT_BYTES = 2
SLOWDOWN = 0.2  # alpha of SYSTEMS 2.1: the network may add a fifth


@dataclass(frozen=True, slots=True)
class Figures:
    """A configuration that works. step_s: between two tokens of a sequence. asked_bytes_per_s:
    of all links together, so that the network adds SLOWDOWN; None without a network."""

    name: str
    dollars_per_h: float | None
    batch: float
    in_flight: int
    step_s: float
    asked_bytes_per_s: float | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.batch / self.step_s

    @property
    def tokens_per_dollar(self) -> float | None:
        dollars = self.dollars_per_h
        return None if dollars is None else 3600 * self.tokens_per_s / dollars

    def as_json(self) -> dict[str, Any]:
        derived = {"tokens_per_s": self.tokens_per_s, "tokens_per_dollar": self.tokens_per_dollar}
        return asdict(self) | derived


def layer_traffic_bytes(shape: Shape) -> float:
    """Returns the bytes of q, output, k and v of a token in a layer."""
    return 2.0 * (shape.q_width + shape.kv_width) * WIRE_ELEMENT_BYTES


def products_s(cost: MachineCost, rows: float) -> float:
    """Returns the seconds of a decode step without attention."""
    return sum(stage.seconds for stage in cost.products(rows, rows))


def turn_s(
    products: float, attention: float, network: float, wire: float, in_flight: int, replicas: int
) -> float:
    """Returns the seconds until each batch in flight has had a step: the longest of one batch's own
    time and the time of memory devices, replicas (Lamina's rotation) and links for all of them."""
    own = products + attention + network
    return max(own, in_flight * attention, in_flight * products / replicas, in_flight * wire)


def asked_bytes_per_s(shape: Shape, batch: float, products: float, attention: float) -> float:
    """Returns the rate of all links together with which the network adds SLOWDOWN (SYSTEMS 2.1)."""
    traffic = batch * shape.num_layers * layer_traffic_bytes(shape)
    return traffic / (SLOWDOWN * (products + attention))


def homogeneous(cost: MachineCost, context: float) -> Figures | None:
    """Returns the figures of devices of one kind that do everything, with as many sequences as they
    hold; None where the weights and one sequence do not fit."""
    machine = cost.machine
    batch = kv_bytes(cost) / sequence_bytes(cost.shape, cost.precision, context)
    if batch < 1:
        return None
    step = products_s(cost, batch) + cost.attention.decode(batch, batch * context).seconds
    name = f"{machine.num_devices} {machine.device.name}"
    return Figures(name, machine.dollars_per_h, batch, 1, step)


@dataclass(frozen=True, slots=True)
class Split:
    """A model on a compute and b memory devices. efficiencies: of the one and the other kind."""

    shape: Shape
    precision: Precision
    compute: Device
    memory: Device
    efficiencies: tuple[Efficiency, Efficiency]

    def figures(
        self, context: float, a: int, b: int, *, tpot_s: float = inf, max_batch: float = inf
    ) -> Figures | None:
        """Returns the figures of the largest batch that memory and the time between tokens allow;
        None where a is no multiple of a replica, b exceeds the K/V heads, or no sequence fits."""
        width = self._width()
        if a % width or b > self.shape.num_kv_heads:
            return None
        room = b * self.efficiencies[1].memory * self.memory.memory_bytes
        most = min(max_batch, room / sequence_bytes(self.shape, self.precision, context))
        steps = _Steps(self, context, width, a // width, b)
        batch = most if steps.best(most)[1] <= tpot_s else _largest(steps, most, tpot_s)
        if batch < 1:
            return None
        in_flight, step_s = steps.best(batch)
        asked = asked_bytes_per_s(self.shape, batch, *steps.times(batch))
        return Figures(f"({a}, {b})", self._dollars(a, b), batch, in_flight, step_s, asked)

    def _width(self) -> int:
        """Returns the number of devices of one replica, a power of two."""
        width, efficiency = 1, self.efficiencies[0]
        while (
            self.shape.weight_bytes(self.precision)
            > width * efficiency.memory * self.compute.memory_bytes
        ):
            width *= 2
        return width

    def _dollars(self, a: int, b: int) -> float | None:
        compute, memory = self.compute.dollars_per_h, self.memory.dollars_per_h
        return None if compute is None or memory is None else a * compute + b * memory


class _Steps:
    """Step times of one configuration, by the batch."""

    def __init__(self, split: Split, context: float, width: int, replicas: int, b: int) -> None:
        make, (fast, wide) = (split.shape, split.precision), split.efficiencies
        self._compute = MachineCost(*make, Machine(split.compute, width), fast)
        self._memory = Attention(*make, Machine(split.memory, b), wide)
        self._context, self._width, self._replicas, self._b = context, width, replicas, b
        self._network = slower(split.compute, split.memory)
        self._token_bytes = split.shape.num_layers * layer_traffic_bytes(split.shape)
        self._round_trips_s = split.shape.num_layers * self._network.seconds

    def times(self, rows: float) -> tuple[float, float]:
        """Returns the seconds of products and attention of one batch."""
        attention = self._memory.decode(rows, rows * self._context)
        return products_s(self._compute, rows), attention.seconds

    def best(self, batch: float) -> tuple[int, float]:
        """Returns the batches in flight, and the seconds until each of them has had a step."""
        most = max(1, min(self._replicas + 1, int(batch)))
        return min(((n, self._step_s(batch, n)) for n in range(1, most + 1)), key=lambda f: f[1])

    def _step_s(self, batch: float, in_flight: int) -> float:
        rows = batch / in_flight
        traffic = rows * self._token_bytes / self._network.bytes_per_s
        a = self._width * self._replicas
        return turn_s(
            *self.times(rows),
            # a batch is on one replica at a time, and has no more links than that
            self._round_trips_s + traffic / min(self._width, self._b),
            traffic / min(a, self._b),
            in_flight,
            self._replicas,
        )


def slower(one: Device, other: Device) -> Link:
    """Returns a link with the slower rate and the longer time of the two devices' networks. Raises
    ConfigError if one has none."""
    for device in (one, other):
        if device.network is None:
            raise ConfigError(f"disaggregated: hardware has no network for {device.name}")
    assert one.network is not None and other.network is not None
    return Link(
        min(one.network.bytes_per_s, other.network.bytes_per_s),
        max(one.network.seconds, other.network.seconds),
    )


def _largest(steps: _Steps, most: float, tpot_s: float) -> int:
    """Returns the largest whole batch that keeps the time, 0 if none does."""
    low, high = 0, int(most) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if steps.best(middle)[1] <= tpot_s else (low, middle)
    return low


def best(candidates: Iterable[Figures | None]) -> Figures | None:
    """Returns the candidate with a price and the most tokens per dollar."""
    priced = [figures for figures in candidates if figures and figures.tokens_per_dollar]
    return max(priced, key=lambda figures: figures.tokens_per_dollar or 0.0, default=None)
