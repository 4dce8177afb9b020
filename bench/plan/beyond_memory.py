"""What `serve plan` says of a model whose weights do not fit: how fast it is if they are read from
the disk in every step, as a server on CPUs does by itself, or beside a GPU from host memory and the
disk. What is where, and the seconds, are those of the server's own start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench.plan.capacity import kv_bytes
from bench.plan.cost import MachineCost
from bench.plan.efficiency import expected
from bench.plan.hardware import HERE, Device
from bench.plan.quantities import naming_options
from bench.plan.serving import decode_work
from bench.plan.shapes import Precision, Shape
from bench.plan.tables import gb_text, ms_text, rate_text
from serve.errors import ConfigError
from serve.loading.host_weights import placement as beside
from serve.loading.host_weights.placement import SHARE_OF_HOST, DeviceNeeds, LayerNeeds, LinkSpeeds
from serve.loading.streaming.placement import (
    LEAST_SHARE,
    SHARE_OF_FREE,
    Mixtures,
    Needs,
    bytes_of_step,
    place,
)
from serve.machine import total_memory
from serve.units import format_memory

DEFAULT_HOST = "ryzen-9950x"
_SCALE_BYTES = 4
_ASSUMED_LINK, _ASSUMED_DISK = 25e9, 5e9  # PCIe 4.0 x16 as it is reached, and one NVMe disk


@dataclass(frozen=True, slots=True)
class Beyond:
    """The options. weight_bytes: memory of weights, the GPU's beside one; host: the name of the
    CPU beside a GPU; host_bytes: its memory; link, disk: bytes a second. None: what a server takes,
    and rates that are measured here or assumed elsewhere."""

    weight_bytes: int | None = None
    host: str | None = None
    host_bytes: int | None = None
    link: float | None = None
    disk: float | None = None


class BeyondStep(NamedTuple):
    """A decode step. copied_bytes: through the link to a GPU; read_bytes: from the disk."""

    batch: int
    copied_bytes: float
    read_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class BeyondMemory:
    """Decode steps with weights beyond memory. memory_bytes: of weights on the device, which is the
    CPU itself if host is None; host_bytes: in the memory of a GPU's host; disk_bytes: in a file.
    on_cpu, in_ring, on_disk: layers whose experts the host computes, that are copied to the device,
    and those of them that are read from the disk."""

    weight_bytes: int
    memory_bytes: int
    host: str | None
    host_bytes: int
    disk_bytes: int
    on_cpu: int
    in_ring: int
    on_disk: int
    link_bytes_per_s: float | None
    disk_bytes_per_s: float
    disk_is: str
    steps: list[BeyondStep]

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"steps": [each._asdict() for each in self.steps]}


def beyond_memory(
    cost: MachineCost,
    batches: Sequence[int],
    context: int,
    devices: Mapping[str, Device],
    asked: Beyond,
    measure: Callable[[], float] | None = None,
    *,
    kv_cache_bytes: int | None = None,
) -> BeyondMemory | None:
    """Returns None if the weights fit and no weight_bytes were asked for. Where a server has no
    such way, or even the parts of a step do not fit: ConfigError if anything was asked for, else
    None. context: tokens of each sequence. measure: returns this disk's bytes a second.
    kv_cache_bytes: memory that K/V takes by its own setting."""
    device = cost.machine.device
    is_beside = device.kind == "gpu" and device.backend == "cuda"
    if not is_beside and (asked.host, asked.host_bytes, asked.link) != (None, None, None):
        raise ConfigError(
            f"host, host-memory and link-rate need a GPU with CUDA, not {device.name}"
        )
    if asked.weight_bytes is None and kv_bytes(cost) > 0:
        return None
    try:
        with naming_options():
            _check(cost, asked)
            budget = _budget(cost, asked.weight_bytes, kv_cache_bytes or 0)
            if is_beside:
                return _beside_gpu(cost, batches, context, devices, asked, budget)
            return _from_disk(cost, batches, context, asked, budget, measure)
    except ConfigError:
        if asked == Beyond():
            return None
        raise


def _check(cost: MachineCost, asked: Beyond) -> None:
    """Raises ConfigError if a server on this machine keeps all weights in memory."""
    machine, device = cost.machine, cost.machine.device
    if machine.num_devices > 1:
        raise ConfigError(f"weights beyond memory need one device, not {machine.name}")
    if device.kind == "gpu" and device.backend != "cuda":
        raise ConfigError(f"weights beyond memory need a CPU or CUDA, not {device.name}")
    if device.kind == "cpu" and device.name != HERE and asked.disk is None:
        raise ConfigError("weights beyond memory need disk-rate for a CPU that is not here")


def _budget(cost: MachineCost, asked: int | None, kv_cache_bytes: int) -> int:
    """Returns the memory of weights, as serve.loading.footprint.weight_budget. ConfigError if the
    machine has less."""
    device, about = cost.machine.device, cost.shape.weight_bytes(cost.precision)
    free = int(device.memory_bytes)
    if asked is not None:
        total = total_memory() if device.name == HERE else free
        if asked > total:
            raise ConfigError(
                f"weight_memory_bytes: {format_memory(asked)} asked for, but {device.name} has"
                f" {format_memory(total)}"
            )
        return min(asked, free)
    budget = min(int(SHARE_OF_FREE * free), free - kv_cache_bytes)
    if budget < LEAST_SHARE * about:
        raise ConfigError(f"the weights take {format_memory(about)}: too few of them would fit")
    return budget


def _from_disk(
    cost: MachineCost,
    batches: Sequence[int],
    context: int,
    asked: Beyond,
    budget: int,
    measure: Callable[[], float] | None,
) -> BeyondMemory:
    needs = needs_of(cost.shape, cost.precision)
    placement = place(needs, budget)
    disk = asked.disk or (measure or _measured)()
    steps = []
    for batch in batches:
        read, _ = bytes_of_step(needs, placement, batch)
        seconds = max(read / disk, cost.seconds(decode_work(batch, context)))
        steps.append(BeyondStep(batch, 0.0, read, seconds))
    return BeyondMemory(
        needs.total,
        placement.num_bytes,
        None,
        0,
        needs.total - placement.num_bytes,
        0,
        0,
        sum(not stays for stays in placement.is_resident),
        None,
        disk,
        "measured now" if asked.disk is None else "given",
        steps,
    )


def _beside_gpu(
    cost: MachineCost,
    batches: Sequence[int],
    context: int,
    devices: Mapping[str, Device],
    asked: Beyond,
    budget: int,
) -> BeyondMemory:
    name = asked.host or DEFAULT_HOST
    if name not in devices or devices[name].kind != "cpu":
        known = ", ".join(each for each, device in devices.items() if device.kind == "cpu")
        raise ConfigError(f"host {name!r} is none of: {known}")
    host, device = devices[name], cost.machine.device
    if asked.host_bytes is not None:
        host = replace(host, memory_bytes=float(asked.host_bytes))
    on_cpu = "bfloat16" if cost.precision.weights == "fp8" else cost.precision.weights
    speeds = LinkSpeeds(
        host.bytes_per_s * expected("cpu", Precision(on_cpu, cost.precision.kv)).weights,
        device.bytes_per_s * cost.efficiency.weights,
        asked.link or _ASSUMED_LINK,
        asked.disk or _ASSUMED_DISK,
    )
    needs = device_needs(cost.shape, cost.precision)
    limits = budget, int(SHARE_OF_HOST * host.memory_bytes), speeds
    placed = beside.with_room(needs, *limits, beside.place(needs, *limits))
    if placed.on_cpu and cost.precision.weights == "fp8":
        raise ConfigError("dtype fp8: CPUs have no such products for experts that do not fit")
    copied = float(sum(needs.layers[layer].products for layer in placed.ring_layers))
    steps = []
    for batch in batches:
        seconds = beside.expected_step_s(needs, placed, speeds, batch)
        seconds = max(seconds, cost.seconds(decode_work(batch, context)))
        read = beside.read_bytes(needs, placed, batch)
        steps.append(BeyondStep(batch, copied, read, seconds))
    return BeyondMemory(
        needs.total,
        placed.device_bytes,
        name,
        placed.host_bytes,
        placed.disk_bytes,
        len(placed.on_cpu),
        len(placed.ring_layers),
        len(placed.on_disk),
        speeds.link,
        speeds.disk,
        "assumed" if asked.disk is None else "given",
        steps,
    )


def device_needs(shape: Shape, precision: Precision) -> DeviceNeeds:
    """Returns what a model is made of beside a GPU: layers as large as one another, the last ones
    with experts."""
    block, experts = shape.block_bytes(precision), precision.weight_bits / 8
    products, dense = int(block / shape.num_layers), shape.num_layers - len(shape.mixtures)
    layers = [LayerNeeds(products)] * dense + [
        LayerNeeds(
            products,
            int(each.num_experts * each.parameters * experts),
            each.top_k / each.num_experts,
        )
        for each in shape.mixtures
    ]
    left = shape.weight_bytes(precision) - sum(each.products + each.experts for each in layers)
    return DeviceNeeds(int(left), tuple(layers))


def needs_of(shape: Shape, precision: Precision) -> Needs:
    """Returns what a model is made of: layers as large as one another, and its experts."""
    from serve.loading.streaming.estimate import expected_needs  # imports torch

    layer, head = shape.block_bytes(precision) / shape.num_layers, shape.head_bytes(precision)
    num_out = shape.head_parameters // shape.hidden
    if precision.is_quantized:  # each output has a scale
        layer += _SCALE_BYTES * shape.layer_outputs
        head += _SCALE_BYTES * num_out
    bytes_each = precision.weight_bits / 8
    mixtures: dict[tuple[int, float], list[int]] = {}
    for each in shape.mixtures:
        mixtures.setdefault((each.top_k, each.parameters), []).append(each.num_experts)
    number_bytes = 4 if precision.weights == "float32" else 2
    return expected_needs(
        layers=[layer] * shape.num_layers,
        head=head,
        num_out=num_out,
        table=shape.embedding_parameters * number_bytes,
        num_rows=num_out,
        fixed=shape.other_parameters * (4 if precision.is_quantized else number_bytes),
        mixtures=[
            Mixtures(tuple(counts), top_k, int(parameters * bytes_each))
            for (top_k, parameters), counts in mixtures.items()
        ],
    )


def _measured() -> float:
    """Measures the disk of the cache folder, where packed weights are by default. OSError."""
    from bench.common.checkpoints import cache_folder  # both import torch
    from serve.loading.streaming.speeds import folder_speed

    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    return folder_speed(folder)


def print_beyond(found: BeyondMemory, console: Console) -> None:
    disk = f"{gb_text(found.disk_bytes_per_s)}/s ({found.disk_is})"
    stay, total = gb_text(found.memory_bytes), gb_text(found.weight_bytes)
    if found.host is None:
        text = f"Weights beyond memory: {stay} of {total} stay, the disk gives {disk}."
    else:
        assert found.link_bytes_per_s is not None
        text = (
            f"Weights beyond the device, beside {found.host}: {stay} of {total} on the device,"
            f" {gb_text(found.host_bytes)} of host memory, {gb_text(found.disk_bytes)}"
            f" in a file. The CPU computes the experts of {found.on_cpu} layers; {found.in_ring}"
            f" layers are copied in every step, {found.on_disk} of them from the disk. The link"
            f" gives {gb_text(found.link_bytes_per_s)}/s, the disk {disk}. Steps are at"
            " least as long as this."
        )
    console.print(text, highlight=False)
    copied = [] if found.host is None else ["copied in a step"]
    table = Table("batch", *copied, "read in a step", "step, ms", "tokens/s")
    for step in found.steps:
        sizes = [gb_text(step.copied_bytes)] * len(copied) + [gb_text(step.read_bytes)]
        speed = rate_text(step.batch / step.seconds)
        table.add_row(str(step.batch), *sizes, ms_text(step.seconds), speed)
    console.print(table)
