"""The seconds of a step on a grid of devices: tensor, sequence pipeline and K/V parallelism.

A grid of (tp, spp, kvp) has kvp holders of K/V, each of spp stages of layers, each of tp devices
that divide heads and output channels. Reports call spp "pp", as the option of `serve run` does.
One step on one stage takes

    products, rows     of the stage's layers (bench/plan/cost.py on tp devices)
    attention          of the holder with the most work; rows of a prompt read the K/V before them
                       once a chunk: max(4 x q_width x pairs / arithmetic, bytes / bandwidth)
    gathers            4 a layer, since nothing is summed across devices: attended rows, both
                       updates of the hidden state, and the up product: (1 - 1/tp) x (q_width +
                       2 x hidden + ffn) numbers a row over the link between peers
    exchange           with other holders, a layer: partial results of (q_width + heads) fp32
                       numbers a row and holder over the network (rows of q go the other way
                       meanwhile), their merge, and exchange_s for each layer

and between two stages a hop of the hidden state: hidden fp32 numbers a row, each device its
columns, which the next stage gathers. Layers count alike, so layers of several kinds are spread
evenly. The first segment_tokens tokens of a sequence are on the first holder, the next ones on the
second, and so on; the last holder takes what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from bench.plan.cost import Machine, MachineCost, Stage
from bench.plan.efficiency import Efficiency
from bench.plan.hardware import Device, Link
from bench.plan.shapes import Precision, Shape
from serve.errors import ConfigError
from serve.scheduler.step_plan import StepPlan

SERVER_DEVICES = 8
"""Devices whose links are those between peers, as in a DGX; more need the network."""
GATHER_S = 3e-6
"""The time that each gather adds on GPUs: kernels store to all peers and wait at a barrier."""
BARRIER_S = 10e-6
"""The same between processes of one machine, which write into one arena; no bytes are sent."""
EXCHANGE_S = 201e-6
"""The time that holders of K/V add to a layer, fitted to the Mnemosyne paper (bench/mnemosyne)."""
_GATHERS = 4
_PARTIAL_BYTES = _HIDDEN_BYTES = _LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True, order=True)
class Grid:
    """Numbers of tensor-parallel devices, of stages and of holders of K/V. Raises ConfigError for
    a number below 1."""

    tp: int = 1
    spp: int = 1
    kvp: int = 1

    def __post_init__(self) -> None:
        for name, number in (("tp", self.tp), ("pp", self.spp), ("kvp", self.kvp)):
            if number < 1:
                raise ConfigError(f"{name} must be at least 1, not {number}")

    @property
    def num_devices(self) -> int:
        return self.tp * self.spp * self.kvp

    def __str__(self) -> str:
        return f"tp {self.tp} x pp {self.spp} x kvp {self.kvp}"


@dataclass(frozen=True, slots=True)
class GridWork:
    """The rows of a step: chunks of prompts as (rows, context), and the context of each decode row.
    Each of `samples` rows gets a token."""

    chunks: tuple[tuple[int, int], ...] = ()
    decodes: tuple[int, ...] = ()
    samples: int = 0

    @classmethod
    def of(cls, plan: StepPlan) -> GridWork:
        """Returns the plan's work."""
        contexts = plan.contexts
        if contexts is None:
            contexts = [sequence.num_computed_tokens for sequence in plan.sequences]
        n = plan.num_decodes
        chunks = tuple(zip(plan.num_rows[n:], contexts[n:], strict=True))
        return cls(chunks, tuple(contexts[:n]), sum(plan.samples))

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + sum([rows for rows, _ in self.chunks])


def chunk_work(rows: int, context: int, decodes: tuple[int, ...] = ()) -> GridWork:
    """Returns a chunk that ends no prompt, beside decode rows with these contexts."""
    return GridWork(((rows, context),), decodes, len(decodes))


def decode_work(*contexts: int) -> GridWork:
    """Returns a step of decode rows."""
    return GridWork((), contexts, len(contexts))


@dataclass(slots=True)
class _Held:
    """What one holder attends to: rows, K/V tokens and pairs of chunks; the same of decodes."""

    chunk_rows: float = 0.0
    chunk_tokens: float = 0.0
    pairs: float = 0.0
    decode_rows: float = 0.0
    decode_tokens: float = 0.0

    @property
    def num_rows(self) -> float:
        return self.chunk_rows + self.decode_rows


class GridCost:
    """The cost of a model's steps on a grid of one kind of device.

    server_devices share the links between peers; segment_tokens is what a holder takes of a
    sequence before the next one begins. stage_layers are the layers of each stage; None divides
    them evenly, which is best for prompts, since only the last chunk of a prompt has the last
    product. Raises ConfigError if the grid does not divide the model, or the device has no such
    link.
    """

    def __init__(
        self,
        shape: Shape,
        precision: Precision,
        device: Device,
        grid: Grid,
        efficiency: Efficiency,
        *,
        segment_tokens: float = inf,
        exchange_s: float = EXCHANGE_S,
        server_devices: int = SERVER_DEVICES,
        stage_layers: Sequence[int] | None = None,
    ) -> None:
        _require_fitting(shape, device, grid, server_devices)
        self.shape, self.precision, self.grid = shape, precision, grid
        self.device, self.efficiency = device, efficiency
        self.segment_tokens, self.exchange_s = segment_tokens, exchange_s
        if device.kind == "cpu":  # processes that share memory send nothing to one another
            device = replace(device, peers=Link(inf, BARRIER_S))
        self._machine = MachineCost(shape, precision, Machine(device, grid.tp), efficiency)
        near = device.peers or Link(inf, 0.0)
        far = device.network or near
        self._hop_link = near if grid.tp * grid.spp <= server_devices else far
        self._exchange_link = near if grid.num_devices <= server_devices else far
        self._gather_s = BARRIER_S if device.kind == "cpu" else GATHER_S
        self._gather_rate = near.bytes_per_s * efficiency.network
        self._wide = 4 if device.kind == "cpu" else 2
        self.stage_layers = list(stage_layers or _stage_layers(shape.num_layers, grid.spp))
        if (len(self.stage_layers), sum(self.stage_layers)) != (grid.spp, shape.num_layers):
            raise ConfigError(
                f"stage_layers {self.stage_layers} are not {grid.spp} stages of"
                f" {shape.num_layers} layers"
            )

    @property
    def num_stages(self) -> int:
        return self.grid.spp

    @property
    def is_assumed(self) -> bool:
        return self._machine.is_assumed

    def stage_seconds(self, work: GridWork) -> list[float]:
        """Returns the seconds in which each stage is busy with a step."""
        if not work.num_rows:
            return [0.0] * self.grid.spp
        layer_s = sum(self.layer_seconds(work).values())
        fixed_s = self.efficiency.step_s
        fixed_s += (len(work.chunks) + len(work.decodes)) * self.efficiency.sequence_s
        seconds = [count * layer_s + fixed_s for count in self.stage_layers]
        seconds[-1] += self._head_s(work.samples)
        return seconds

    def pass_seconds(self, work: GridWork) -> float:
        """Returns the seconds of a step from its launch until its tokens are known, alone."""
        hops_s = (self.grid.spp - 1) * self.hop_seconds(work.num_rows)
        return sum(self.stage_seconds(work)) + hops_s

    def layer_seconds(self, work: GridWork) -> dict[str, float]:
        """Returns the seconds of an average layer by what they are spent on."""
        rows, layers = work.num_rows, self.shape.num_layers
        products, _, moved, _ = self._machine.products(rows, 0)
        return {
            "products": products.seconds / layers,
            "rows": moved.seconds / layers,
            "attention": self._attention_s(work) / layers,
            "gathers": self._gathers_s(rows),
            "exchange": self._exchanges_s(work),
            "overheads": self.efficiency.layer_s,
        }

    def hop_seconds(self, rows: int) -> float:
        """Returns the seconds from the end of a stage to the beginning of the next one."""
        if self.grid.spp == 1:
            return 0.0
        tp, link = self.grid.tp, self._hop_link
        row_bytes = rows * self.shape.hidden * _HIDDEN_BYTES
        seconds = link.seconds + row_bytes / tp / (link.bytes_per_s * self.efficiency.network)
        if tp > 1:
            seconds += self._gather_s + (1 - 1 / tp) * row_bytes / self._gather_rate
        return seconds

    def num_holders(self, context: float) -> int:
        """Returns the number of holders that a sequence of this context is on."""
        return max(1, min(self.grid.kvp, ceil(context / self.segment_tokens)))

    # ---- parts

    def _head_s(self, samples: int) -> float:
        if not samples:
            return 0.0
        last = self._machine.products(0, samples)
        tp, shape = self.grid.tp, self.shape
        seconds = last[1].seconds + last[2].seconds
        if tp > 1 and shape.hidden:
            logits = samples * _LOGIT_BYTES * shape.head_parameters / shape.hidden
            seconds += self._gather_s + (1 - 1 / tp) * logits / self._gather_rate
        return seconds

    def _gathers_s(self, rows: int) -> float:
        tp, shape = self.grid.tp, self.shape
        if tp == 1:
            return 0.0
        narrow = shape.q_width + 2 * shape.hidden  # fp32 on a CPU, where the hidden state is fp32
        row_bytes = self._wide * narrow + 2 * shape.ffn
        return _GATHERS * self._gather_s + (1 - 1 / tp) * rows * row_bytes / self._gather_rate

    def _attention_s(self, work: GridWork) -> float:
        return max([self._held_s(held) for held in self._held(work)])

    def _held_s(self, held: _Held) -> float:
        attention = self._machine.attention
        seconds = 0.0
        if held.decode_rows:
            seconds += attention.decode(held.decode_rows, held.decode_tokens).seconds
        if held.chunk_rows:
            computed = attention.prefill(held.chunk_rows, held.pairs)
            read_s = attention.decode(1, held.chunk_tokens).memory_s
            seconds += Stage("", read_s, computed.compute_s).seconds
        return seconds

    def _held(self, work: GridWork) -> list[_Held]:
        """Returns what each holder attends to; every row attends to itself and all before it."""
        held = [_Held() for _ in range(self.grid.kvp)]
        for rows, context in work.chunks:
            parts = self._segments(context + rows)
            own = min(rows, parts[-1])
            for holder, tokens in zip(held, parts, strict=False):
                holder.chunk_rows += rows
                holder.chunk_tokens += tokens
                holder.pairs += rows * tokens
            # half of the pairs within the chunk are masked
            held[len(parts) - 1].pairs -= rows * own / 2
        for context in work.decodes:
            for holder, tokens in zip(held, self._segments(context + 1), strict=False):
                holder.decode_rows += 1
                holder.decode_tokens += tokens
        return held

    def _segments(self, tokens: float) -> list[float]:
        """Returns the tokens of a sequence on each holder that has some."""
        count = self.num_holders(tokens)
        full = [self.segment_tokens] * (count - 1)
        return [*full, tokens - sum(full)]

    def _exchanges_s(self, work: GridWork) -> float:
        if self.grid.kvp == 1:
            return 0.0
        others = sum([held.num_rows for held in self._held(work)[1:]])
        if not others:
            return 0.0
        shape, link, shares = self.shape, self._exchange_link, self.efficiency
        partial = (shape.q_width + shape.num_heads) * _PARTIAL_BYTES / self.grid.tp
        moved = shares.rows * self.device.bytes_per_s
        merged_s = 2 * others * partial / moved
        return self.exchange_s + others * partial / (link.bytes_per_s * shares.network) + merged_s


def _stage_layers(num_layers: int, spp: int) -> list[int]:
    """Returns the layers of each stage; what is left over goes to the first stages, since the last
    one has the head."""
    least, more = divmod(num_layers, spp)
    return [least + (stage < more) for stage in range(spp)]


def _require_fitting(shape: Shape, device: Device, grid: Grid, server_devices: int) -> None:
    if grid.tp > server_devices:
        raise ConfigError(f"tp {grid.tp} is more than the {server_devices} devices of a server")
    if shape.num_kv_heads % grid.tp or shape.num_heads % grid.tp:
        heads = f"{shape.num_heads} heads, {shape.num_kv_heads} of K/V"
        raise ConfigError(f"tp {grid.tp} does not divide {heads}")
    if grid.spp > shape.num_layers:
        raise ConfigError(f"pp {grid.spp} is more than the {shape.num_layers} layers")
    if device.kind == "gpu":
        if grid.num_devices > 1 and device.peers is None:
            raise ConfigError(f"hardware has no peers for {device.name}")
        if grid.num_devices > server_devices and device.network is None:
            raise ConfigError(f"hardware has no network for {device.name}")
