"""What `serve plan` says of a model that does not fit into this machine's memory: how fast it is if
its weights are read from the disk in every step, as the server then does by itself."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.plan.capacity import kv_bytes
from bench.plan.cost import MachineCost
from bench.plan.hardware import HERE
from bench.plan.serving import decode_work
from bench.plan.shapes import Precision, Shape
from bench.plan.tables import gb_text, ms_text, rate_text
from serve.errors import ConfigError
from serve.loading.streaming.placement import (
    MIN_HEAD_BYTES,
    SHARE_OF_FREE,
    Mixtures,
    Needs,
    Placement,
    bytes_of_step,
    place,
)

_FILE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class BeyondMemory:
    """Decode steps with weights from the disk: (batch, bytes that are read, seconds)."""

    memory_bytes: int
    weight_bytes: int
    disk_bytes_per_s: float
    steps: list[tuple[int, float, float]]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def beyond_memory(
    cost: MachineCost,
    batches: Sequence[int],
    context: int,
    measure: Callable[[], float] | None = None,
) -> BeyondMemory | None:
    """Returns None if the weights fit, on other machines than this one, and if even the parts of a
    step do not fit. measure: returns the disk's bytes a second."""
    device = cost.machine.device
    if device.name != HERE or kv_bytes(cost) > 0:
        return None
    needs = needs_of(cost.shape, cost.precision)
    try:
        placement: Placement = place(needs, int(SHARE_OF_FREE * device.memory_bytes))
    except ConfigError:
        return None
    disk = (measure or _measured)()
    steps = []
    for batch in batches:
        read, _ = bytes_of_step(needs, placement, batch)
        seconds = max(read / disk, cost.seconds(decode_work(batch, context)))
        steps.append((batch, read, seconds))
    return BeyondMemory(placement.num_bytes, needs.total, disk, steps)


def needs_of(shape: Shape, precision: Precision) -> Needs:
    """Returns what a model is made of: layers as large as one another, and its experts."""
    block, head = shape.block_bytes(precision), shape.head_bytes(precision)
    bytes_each = precision.weight_bits / 8
    experts = shape.expert_parameters * bytes_each
    table = shape.weight_bytes(precision) - block - head - experts
    layers = [int(block / shape.num_layers)] * shape.num_layers
    part = max(MIN_HEAD_BYTES, layers[0])
    parts = max(1, round(head / part))
    mixtures: dict[tuple[int, float], list[int]] = {}
    for each in shape.mixtures:
        mixtures.setdefault((each.top_k, each.parameters), []).append(each.num_experts)
    return Needs(
        fixed_bytes=0,
        table_bytes=int(max(0, table)),
        row_bytes=0,
        units=(*layers, *[int(head / parts)] * parts),
        mixtures=tuple(
            Mixtures(tuple(counts), top_k, int(parameters * bytes_each))
            for (top_k, parameters), counts in mixtures.items()
        ),
    )


def _measured() -> float:
    """Measures the disk of the cache folder, where packed weights are by default. OSError."""
    from bench.common.checkpoints import cache_folder  # both import torch
    from serve.loading.streaming.speeds import disk_speed

    folder = cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(_FILE_BYTES >> 20):
            file.write(bytes(1 << 20))
        file.flush()
        os.fsync(file.fileno())
        return disk_speed(Path(file.name))


def print_beyond(found: BeyondMemory, console: Console) -> None:
    console.print(
        f"Weights beyond memory: {gb_text(found.memory_bytes)} of {gb_text(found.weight_bytes)}"
        f" stay, the disk gives {gb_text(found.disk_bytes_per_s)}/s (measured now)."
    )
    table = Table("batch", "read in a step", "step, ms", "tokens/s")
    for batch, read, seconds in found.steps:
        cells = gb_text(read), ms_text(seconds), rate_text(batch / seconds)
        table.add_row(str(batch), *cells)
    console.print(table)
