"""Searches the grids of up to a number of GPUs for one long prompt and the tokens after it.

A grid fits if the fullest device holds its layers, heads and segment of K/V beside its part of the
weights. Its time to the first token is that of the prompt alone, in dense chunks of MAX_CHUNK rows
through the stages (bench/plan/pipeline.py), on holders that join as the prompt grows; its time
between tokens is a pass of one row through all stages with the K/V of the whole prompt. Numbers of
stages that leave the largest stage as large as fewer stages do are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil, inf
from typing import Any

from bench.plan.capacity import sequence_bytes
from bench.plan.efficiency import Efficiency
from bench.plan.grid import SERVER_DEVICES, Grid, GridCost, GridWork, decode_work
from bench.plan.hardware import Device
from bench.plan.pipeline import adapted_chunks, estimated_prefill_s, fixed_chunks, prefill
from bench.plan.shapes import Precision, Shape
from serve.errors import ConfigError

MAX_CHUNK = 4096
LEAST_SEGMENT = 4096  # tokens; what a holder saves on fewer is less than an exchange
BOUNDS = ("memory", "ttft", "tbt")


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPrompt:
    """A prompt of `context` tokens, and limits in seconds to its first and between its further
    tokens; inf sets no limit."""

    context: int
    ttft_s: float = inf
    tbt_s: float = inf

    @property
    def is_limited(self) -> bool:
        return min(self.ttft_s, self.tbt_s) < inf


@dataclass(frozen=True, slots=True, kw_only=True)
class GridChoice:
    """A grid and its figures. memory_bytes is what the fullest device holds, room_bytes what it may
    hold. reason is the bound that it misses, one of BOUNDS, or None; ttft_s and tbt_s are inf if
    memory does not suffice. prompt_binds and decode_binds name what takes most of each time.
    shared_ttft_s is the time to the first token in chunks that keep tbt_s for the streams beside
    it; inf if no chunk does."""

    grid: Grid
    memory_bytes: float
    room_bytes: float
    ttft_s: float = inf
    tbt_s: float = inf
    prompt_binds: str = ""
    decode_binds: str = ""
    shared_ttft_s: float = inf
    reason: str | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns the figures; a time that is not known is None."""
        values = asdict(self) | {"num_gpus": self.grid.num_devices}
        return {name: None if value == inf else value for name, value in values.items()}


class GridSearch:
    """The grids of up to num_gpus devices of one kind."""

    def __init__(
        self,
        shape: Shape,
        precision: Precision,
        device: Device,
        efficiency: Efficiency,
        *,
        num_gpus: int,
        server_devices: int = SERVER_DEVICES,
    ) -> None:
        self.shape, self.precision, self.device = shape, precision, device
        self.efficiency, self.num_gpus = efficiency, num_gpus
        self.server_devices = server_devices

    def cost(self, grid: Grid, context: int) -> GridCost:
        """Returns the cost on a grid whose holders have equal segments of this context. Raises
        ConfigError as GridCost does."""
        return GridCost(
            self.shape,
            self.precision,
            self.device,
            grid,
            self.efficiency,
            segment_tokens=ceil(context / grid.kvp),
            server_devices=self.server_devices,
        )

    def grids(self, context: int) -> Iterator[Grid]:
        """Yields the grids that divide the model."""
        layers, heads, kv = self.shape.num_layers, self.shape.num_heads, self.shape.num_kv_heads
        numbers = {ceil(layers / spp): spp for spp in range(layers, 0, -1)}  # the fewest stages
        most_holders = max(1, context // LEAST_SEGMENT)
        for tp in range(1, min(self.server_devices, self.num_gpus) + 1):
            if heads % tp or kv % tp:
                continue
            for spp in sorted(numbers.values()):
                for kvp in range(1, min(self.num_gpus // (tp * spp), most_holders) + 1):
                    yield Grid(tp, spp, kvp)

    def choices(self, prompt: LongPrompt) -> list[GridChoice]:
        """Returns a choice for each grid. First come those that keep the limits, the fewest GPUs
        first, or the fastest if there is no limit; then those nearest to the limits; then those
        whose memory does not suffice. Raises ConfigError if the device has no links for any grid,
        or no such arithmetic."""
        found, refused = [], None
        for grid in self.grids(prompt.context):
            try:
                found.append(self._choice(grid, prompt))
            except ConfigError as error:
                refused = error
        if not found and refused is not None:
            raise refused
        return sorted(found, key=lambda choice: _order(choice, prompt))

    def _choice(self, grid: Grid, prompt: LongPrompt) -> GridChoice:
        cost, context = self.cost(grid, prompt.context), prompt.context
        choice = GridChoice(
            grid=grid,
            memory_bytes=device_bytes(cost, context),
            room_bytes=self.efficiency.memory * self.device.memory_bytes,
        )
        if choice.memory_bytes > choice.room_bytes:
            return replace(choice, reason="memory")
        ttft_s = estimated_prefill_s(cost, context, fixed_chunks(MAX_CHUNK))
        tbt_s = cost.pass_seconds(decode_work(context))
        rows = min(MAX_CHUNK, context)
        middle = GridWork(((rows, (context - rows) // 2),))
        return replace(
            choice,
            ttft_s=ttft_s,
            tbt_s=tbt_s,
            prompt_binds=_most(cost, middle),
            decode_binds=_most(cost, decode_work(context)),
            reason=_missed(ttft_s, tbt_s, prompt),
        )

    def best(
        self, choices: Sequence[GridChoice], prompt: LongPrompt, top: int
    ) -> tuple[list[GridChoice], bool]:
        """Returns the first `top` of `choices` as `exact` has them, and whether they keep the
        limits: of those that do, each has fewer GPUs, an earlier first token or less time between
        tokens than every other one. If none does, they are the nearest whose memory suffices."""
        served: list[GridChoice] = []
        for choice in _undominated([one for one in choices if one.reason is None]):
            found = self.exact(choice, prompt)
            if found.reason is None:
                served.append(found)
            if len(served) == top:
                break
        if served:
            return served, True
        fitting = [choice for choice in choices if choice.reason != "memory"]
        return [self.exact(choice, prompt) for choice in _undominated(fitting)[:top]], False

    def exact(self, choice: GridChoice, prompt: LongPrompt) -> GridChoice:
        """Returns a choice whose memory suffices with every chunk on every stage, and with
        shared_ttft_s if there is a limit between tokens."""
        cost, context = self.cost(choice.grid, prompt.context), prompt.context
        ttft_s = prefill(cost, context, fixed_chunks(MAX_CHUNK)).seconds
        shared_s = inf
        if prompt.tbt_s < inf:
            chunker = adapted_chunks(cost, prompt.tbt_s, MAX_CHUNK)
            rows = chunker(context)
            last = GridWork(((rows, max(0, context - rows)),))
            if cost.pass_seconds(last) <= prompt.tbt_s:
                shared_s = estimated_prefill_s(cost, context, chunker)
        missed = _missed(ttft_s, choice.tbt_s, prompt)
        return replace(choice, ttft_s=ttft_s, shared_ttft_s=shared_s, reason=missed)

    def least_ttft_s(self, context: int) -> float:
        """Returns the seconds below which no grid computes a prompt's attention, whatever its
        links: all operations on all GPUs at the share of the peak that kernels reach."""
        cost = GridCost(self.shape, self.precision, self.device, Grid(), self.efficiency)
        rows = min(MAX_CHUNK, context)
        middle = GridWork(((rows, (context - rows) // 2),))
        layer_s = cost.layer_seconds(middle)["attention"] * self.shape.num_layers
        return layer_s * context / rows / self.num_gpus


def device_bytes(cost: GridCost, context: int) -> float:
    """Returns the bytes of weights and K/V on the fullest device. The embedding is on the first
    stage and the last product on the last one; tensor-parallel devices divide both."""
    shape, precision, layers = cost.shape, cost.precision, cost.stage_layers
    head = shape.head_bytes(precision)
    embedded = shape.embedding_parameters * (4 if precision.weights == "float32" else 2)
    blocks = shape.block_bytes(precision) + 4 * shape.other_parameters
    blocks += shape.expert_parameters * precision.weight_bits / 8
    segment = min(context, cost.segment_tokens)
    layer = (blocks + sequence_bytes(shape, precision, segment)) / shape.num_layers
    stages = [count * layer for count in layers]
    stages[0] += embedded
    stages[-1] += head
    return max(stages) / cost.grid.tp


def kv_bytes_of(cost: GridCost) -> float:
    """Returns the bytes of K/V on all devices together when the fullest one has no room left;
    negative if the weights do not fit."""
    grid, layers = cost.grid, cost.shape.num_layers
    room = cost.efficiency.memory * cost.device.memory_bytes - device_bytes(cost, 0)
    return room * grid.tp * grid.kvp * layers / max(cost.stage_layers)


def _undominated(choices: Sequence[GridChoice]) -> list[GridChoice]:
    """Returns those to which no other one is equal or better in GPUs and both times."""
    kept: list[GridChoice] = []
    figures = [(one.grid.num_devices, one.ttft_s, one.tbt_s) for one in choices]
    for index, (choice, own) in enumerate(zip(choices, figures, strict=True)):
        others = (
            all(a <= b for a, b in zip(other, own, strict=True)) and (other != own or at < index)
            for at, other in enumerate(figures)
            if at != index
        )
        if not any(others):
            kept.append(choice)
    return kept


def _most(cost: GridCost, work: GridWork) -> str:
    """Returns what takes the most of a layer's time, or hops if these take more than layers do."""
    seconds = cost.layer_seconds(work)
    name = max(seconds, key=seconds.__getitem__)
    hops_s = (cost.grid.spp - 1) * cost.hop_seconds(work.num_rows)
    return name if seconds[name] * cost.shape.num_layers >= hops_s else "hops"


def _missed(ttft_s: float, tbt_s: float, prompt: LongPrompt) -> str | None:
    """Returns the limit that is missed by the larger factor."""
    excess = {"ttft": ttft_s / prompt.ttft_s, "tbt": tbt_s / prompt.tbt_s}
    name = max(excess, key=excess.__getitem__)
    return name if excess[name] > 1 else None


def _order(choice: GridChoice, prompt: LongPrompt) -> tuple[float, ...]:
    grid = choice.grid
    if choice.reason == "memory":
        return (2, choice.memory_bytes, grid.num_devices)
    if choice.reason is not None:
        excess = max(choice.ttft_s / prompt.ttft_s, choice.tbt_s / prompt.tbt_s)
        return (1, excess, grid.num_devices)
    if prompt.is_limited:
        return (0, grid.num_devices, choice.ttft_s)
    return (0, choice.ttft_s, grid.num_devices)
