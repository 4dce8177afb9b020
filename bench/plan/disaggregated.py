"""The cost of a pair (a, b): attention runs on memory devices, as in Lamina (arXiv 2405.01814).

The a compute devices hold r replicas of the weights, the b memory devices hold the K/V, and n
batches of B / n sequences are in flight. In each layer a token sends q, k and v and receives its
output, and each layer has a round trip. From the times of one such batch, every batch has had a
step after

    max(products + attention + network, n attention, n products / r, n wire)

where wire is the transfer time without round trips, and n is the best of 1 .. r + 1. The time that
sending q early hides (3 to 13 % in the paper) is left out.

The network adds the share SLOWDOWN to a step of one batch if all links together have the rate

    B x layers x 2 (q_width + kv_width) x 2 bytes / (SLOWDOWN x (products + attention))
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
SLOWDOWN = 0.2  # share of a step that the network may add, alpha in Lamina


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a configuration. step_s is the time between two tokens of a sequence.
    required_bytes_per_s is the rate of all links together at which the network adds SLOWDOWN; None
    without a network."""

    name: str
    dollars_per_h: float | None
    batch: float
    in_flight: int
    step_s: float
    required_bytes_per_s: float | None = None

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
    """Returns the bytes of q, k, v and the output that a token sends and receives in a layer."""
    return 2.0 * (shape.q_width + shape.kv_width) * WIRE_ELEMENT_BYTES


def products_s(cost: MachineCost, rows: float) -> float:
    """Returns the seconds of a decode step without attention."""
    return sum(stage.seconds for stage in cost.products(rows, rows))


def turn_s(
    products: float, attention: float, network: float, wire: float, in_flight: int, replicas: int
) -> float:
    """Returns the seconds until each batch in flight has had a step: the longest of one batch's own
    time and the times that memory devices, replicas (in rotation) and links take for all batches.
    The arguments are the seconds of one batch."""
    own = products + attention + network
    return max(own, in_flight * attention, in_flight * products / replicas, in_flight * wire)


def required_bytes_per_s(shape: Shape, batch: float, products: float, attention: float) -> float:
    """Returns the rate of all links together at which the network adds SLOWDOWN to a step."""
    traffic = batch * shape.num_layers * layer_traffic_bytes(shape)
    return traffic / (SLOWDOWN * (products + attention))


def homogeneous(cost: MachineCost, context: float) -> Figures | None:
    """Returns the figures of a machine without memory devices that decodes as many sequences as it
    holds; None if the weights and one sequence do not fit."""
    machine = cost.machine
    batch = kv_bytes(cost) / sequence_bytes(cost.shape, cost.precision, context)
    if batch < 1:
        return None
    attention = cost.attention
    step = products_s(cost, batch) + attention.decode(batch, batch * context).seconds
    step += attention.states(batch).seconds
    name = f"{machine.num_devices} {machine.device.name}"
    return Figures(name, machine.dollars_per_h, batch, 1, step)


@dataclass(frozen=True, slots=True)
class Split:
    """A model whose products run on compute devices and whose attention runs on memory devices.
    efficiencies are those of the compute and of the memory devices."""

    shape: Shape
    precision: Precision
    compute: Device
    memory: Device
    efficiencies: tuple[Efficiency, Efficiency]

    def figures(
        self, context: float, a: int, b: int, *, tpot_s: float = inf, max_batch: float = inf
    ) -> Figures | None:
        """Returns the figures of the largest batch that memory and tpot_s allow; None if `a` is not
        a multiple of a replica's devices, b exceeds the K/V heads, or no sequence fits."""
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
        required = required_bytes_per_s(self.shape, batch, *steps.times(batch))
        return Figures(f"({a}, {b})", self._dollars(a, b), batch, in_flight, step_s, required)

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
    """The step times of a configuration by batch size."""

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
        """Returns the best number of batches in flight and the seconds until each had a step."""
        most = max(1, min(self._replicas + 1, int(batch)))
        return min(((n, self._step_s(batch, n)) for n in range(1, most + 1)), key=lambda f: f[1])

    def _step_s(self, batch: float, in_flight: int) -> float:
        rows = batch / in_flight
        traffic = rows * self._token_bytes / self._network.bytes_per_s
        a = self._width * self._replicas
        return turn_s(
            *self.times(rows),
            # a batch is on one replica at a time and uses only the links of that replica
            self._round_trips_s + traffic / min(self._width, self._b),
            traffic / min(a, self._b),
            in_flight,
            self._replicas,
        )


def slower(one: Device, other: Device) -> Link:
    """Returns a link with the lower rate and the longer latency of the two devices' networks.
    Raises ConfigError if a device has no network."""
    for device in (one, other):
        if device.network is None:
            raise ConfigError(f"disaggregated: hardware has no network for {device.name}")
    assert one.network is not None and other.network is not None
    return Link(
        min(one.network.bytes_per_s, other.network.bytes_per_s),
        max(one.network.seconds, other.network.seconds),
    )


def _largest(steps: _Steps, most: float, tpot_s: float) -> int:
    """Returns the largest whole batch whose step takes at most tpot_s; 0 if none does."""
    low, high = 0, int(most) + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if steps.best(middle)[1] <= tpot_s else (low, middle)
    return low


def best(candidates: Iterable[Figures | None]) -> Figures | None:
    """Returns the candidate with the most tokens per dollar; None if none has a price."""
    priced = [figures for figures in candidates if figures and figures.tokens_per_dollar]
    return max(priced, key=lambda figures: figures.tokens_per_dollar or 0.0, default=None)
