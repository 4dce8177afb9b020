"""The seconds of a step on a machine: bytes over bandwidth and operations over peaks, by stage.

    products          reads the weights once, with 2 operations for each weight and row; of a
                      mixture the experts that its rows draw, with 2 for each weight of a row's own
    last product      the same for the sampled rows
    decode attention  reads K/V of the decode rows' tokens, with 4 x q_width operations for each;
                      a latent is read once, with 2 x heads x (its K and V) operations
    states            reads and writes the states of the decode rows
    prefill attention 4 x q_width operations for each pair of a row and a token
    rows              reads and writes inputs and outputs of products
    network           two all-reduces per layer between n tensor-parallel devices (a ring)

n devices divide weights, heads and K/V equally; K/V is divided between at most as many devices as
it has heads. A window limits tokens as if all sequences had the mean context. The K/V that a chunk
reads before it is left out, because all rows of the chunk share each token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from bench.plan.efficiency import Efficiency
from bench.plan.hardware import Device, Link
from bench.plan.shapes import Precision, Shape
from serve.errors import ConfigError
from serve.scheduler.step_time import StepWork

RESOURCES = ("memory", "compute", "network", "overheads")
_ATTENTION_FACTORS = {"float32": (), "bfloat16": ("bf16",), "int8": ("bf16",), "int4": ("bf16",)}
_LOGIT_BYTES = 4
_REDUCED_BYTES = 2  # a number in an all-reduce


class StepCost(Protocol):
    """A model of how long a step takes."""

    def seconds(self, work: StepWork) -> float: ...


@dataclass(frozen=True, slots=True)
class Stage:
    """Seconds that a device spends on memory, arithmetic, the network and fixed overheads."""

    name: str
    memory_s: float = 0.0
    compute_s: float = 0.0
    network_s: float = 0.0
    fixed_s: float = 0.0

    @property
    def seconds(self) -> float:
        """The whole time; reading and multiplying overlap."""
        return max(self.memory_s, self.compute_s) + self.network_s + self.fixed_s


@dataclass(frozen=True, slots=True)
class Machine:
    """Devices of one kind, tensor parallel over the links to their peers. most_kv_bytes: of K/V in
    their memory; None: what is beside the weights."""

    device: Device
    num_devices: int = 1
    most_kv_bytes: int | None = None

    @property
    def name(self) -> str:
        prefix = f"{self.num_devices}x" if self.num_devices > 1 else ""
        return prefix + self.device.name

    @property
    def dollars_per_h(self) -> float | None:
        one = self.device.dollars_per_h
        return None if one is None else self.num_devices * one

    @property
    def watts(self) -> float | None:
        return None if self.device.watts is None else self.num_devices * self.device.watts


def all_reduce_s(num_bytes: float, num_devices: int, link: Link, share: float = 1.0) -> float:
    """Returns the seconds of a ring all-reduce at a share of the link's rate, without latency."""
    return 2 * (1 - 1 / num_devices) * num_bytes / (share * link.bytes_per_s)


class _LayerCost(NamedTuple):
    """Layers that attend alike: seconds to read a token's K/V, and to attend to it."""

    number: int
    window: int | None
    token_s: float
    decode_s: float
    prefill_s: float

    def tokens(self, rows: float, tokens: float) -> float:
        """Returns the tokens of all these layers that rows attend to, `tokens` being those of one
        layer without a window."""
        return self.number * (tokens if self.window is None else min(tokens, rows * self.window))


class Attention:
    """The cost of attention in all layers over K/V that a machine's devices divide by heads."""

    def __init__(
        self, shape: Shape, precision: Precision, machine: Machine, efficiency: Efficiency
    ) -> None:
        device, n = machine.device, machine.num_devices
        peak = device.peak(*_ATTENTION_FACTORS[precision.kv], "fp32")
        assert peak is not None, f"{device}"
        # our kernels compute latents in the absorbed form in prefill, too
        is_bound, shards = efficiency.is_overlapped, min(n, shape.num_kv_heads)
        read = efficiency.kv * device.bytes_per_s * shards
        self._state_s = 2 * shape.state_bytes / (efficiency.kv * device.bytes_per_s * n)
        self._layers = [
            _LayerCost(
                number,
                layer.window,
                layer.read_bytes(precision.kv, precision.kv_group) / read,
                layer.decode / (efficiency.decode * peak * n),
                (layer.prefill if is_bound else layer.decode) / (efficiency.prefill * peak * n),
            )
            for layer, number in shape.layer_attentions().items()
        ]

    def decode(self, rows: float, attended: float) -> Stage:
        """Returns the stage of decode rows. attended: tokens of all rows, including their own."""
        seen = [(layer, layer.tokens(rows, attended)) for layer in self._layers]
        return Stage(
            "decode attention",
            sum(tokens * layer.token_s for layer, tokens in seen),
            sum(tokens * layer.decode_s for layer, tokens in seen),
        )

    def states(self, rows: float) -> Stage:
        """Returns the stage of the states of decode rows. A prompt's state is read and written once
        for many rows."""
        return Stage("states", rows * self._state_s)

    def prefill(self, rows: float, pairs: float) -> Stage:
        """Returns the stage of prompt rows. pairs counts each row with each token it attends to."""
        multiply_s = sum(layer.tokens(rows, pairs) * layer.prefill_s for layer in self._layers)
        return Stage("prefill attention", compute_s=multiply_s)


class MachineCost:
    """The cost of a model's steps on a machine. Raises ConfigError if the machine cannot compute in
    this precision."""

    def __init__(
        self, shape: Shape, precision: Precision, machine: Machine, efficiency: Efficiency
    ) -> None:
        self.shape, self.precision, self.machine = shape, precision, machine
        self.efficiency = efficiency
        self.attention = Attention(shape, precision, machine, efficiency)
        device, n = machine.device, machine.num_devices
        product_peak = device.peak(*precision.factors)
        if product_peak is None:
            raise ConfigError(f"{device.name} does not multiply {precision.weights}")
        if precision.kv == "int4" and device.kind == "gpu":
            raise ConfigError(f"{device.name}: K/V in int4 is for CPUs")
        if n > 1 and device.peers is None:
            raise ConfigError(f"{machine.name}: hardware has no peers for {device.name}")
        bandwidth = device.bytes_per_s
        weights = efficiency.weights * bandwidth * n
        self._block_s = shape.block_bytes(precision) / weights
        self._head_s = shape.head_bytes(precision) / weights
        self._weights_rate = weights
        row_parameters = shape.block_parameters + shape.routed_parameters
        self._block_row_s = 2 * row_parameters / (product_peak * n)
        self._head_row_s = 2 * shape.head_parameters / (product_peak * n)
        elements = 4 * shape.hidden + (2 * shape.q_width + 2 * shape.kv_width + 2 * shape.ffn) / n
        wide = device.kind == "cpu" and precision.weights != "bfloat16"
        moved = efficiency.rows * bandwidth
        self._row_s = shape.num_layers * elements * (4 if wide else 2) / moved
        self._logits_s = 2 * _LOGIT_BYTES * shape.head_parameters / shape.hidden / moved / n
        self._cached_s = device.cache_bytes / bandwidth

    @property
    def is_assumed(self) -> bool:
        """Whether some peaks or shares, and with them all times, are assumed and not measured."""
        return not (self.efficiency.is_measured and self.machine.device.is_measured)

    def stages(self, work: StepWork) -> list[Stage]:
        """Returns the stages of a step with at least one row."""
        sampled = work.num_decodes + work.num_chunks if work.samples else 0
        attended = work.num_context + work.num_decodes
        return [
            *self.products(work.num_rows, sampled),
            self.attention.decode(work.num_decodes, attended),
            self.attention.states(work.num_decodes),
            self.attention.prefill(work.num_rows - work.num_decodes, work.num_pairs),
            Stage("overheads", fixed_s=self._fixed_s(work.num_decodes + work.num_chunks)),
        ]

    def products(self, rows: float, sampled: float) -> list[Stage]:
        """Returns the stages that need no K/V; `sampled` rows have the last product."""
        efficiency = self.efficiency
        multiply_s = efficiency.product_rows(rows) * self._block_row_s
        experts_s = self.shape.expert_bytes(self.precision, rows) / self._weights_rate
        last_s = efficiency.product_rows(sampled) * self._head_row_s
        return [
            Stage("products", self._block_s + experts_s, multiply_s),
            Stage("last product", self._head_s if sampled else 0.0, last_s),
            Stage("rows", rows * self._row_s + sampled * self._logits_s),
            self._network(rows),
        ]

    def seconds(self, work: StepWork) -> float:
        """Returns the seconds of a step; 0 without rows."""
        if not work.num_rows:
            return 0.0
        if self.efficiency.is_overlapped:
            return max(self.resources(work).values())
        return sum(stage.seconds for stage in self.stages(work))

    def resources(self, work: StepWork) -> dict[str, float]:
        """Returns the seconds that are spent on each of RESOURCES."""
        spent = dict.fromkeys(RESOURCES, 0.0)
        is_overlapped = self.efficiency.is_overlapped
        for stage in self.stages(work):
            spent["network"] += stage.network_s
            spent["overheads"] += stage.fixed_s
            if is_overlapped or stage.memory_s >= stage.compute_s:
                spent["memory"] += stage.memory_s
            if is_overlapped or stage.memory_s < stage.compute_s:
                spent["compute"] += stage.compute_s
        if is_overlapped:
            spent["memory"] = max(0.0, spent["memory"] - self._cached_s)
        return spent

    def binds(self, work: StepWork) -> str:
        """Returns the resource on which most of the time is spent."""
        resources = self.resources(work)
        return max(resources, key=resources.__getitem__)

    def _network(self, rows: float) -> Stage:
        n, device = self.machine.num_devices, self.machine.device
        if n == 1:
            return Stage("network")
        assert device.peers is not None, f"{device}"
        row_bytes = rows * self.shape.hidden * _REDUCED_BYTES
        one_s = all_reduce_s(row_bytes, n, device.peers, self.efficiency.network)
        if not self.efficiency.is_overlapped:
            one_s += device.peers.seconds
        return Stage("network", network_s=2 * self.shape.num_layers * one_s)

    def _fixed_s(self, sequences: int) -> float:
        efficiency = self.efficiency
        layers_s = self.shape.num_layers * efficiency.layer_s
        return efficiency.step_s + layers_s + sequences * efficiency.sequence_s
