"""What `serve plan` says of K/V beyond memory (kv_offload_bytes): how many tokens memory and file
hold together, and how fast steps are that read what memory lacks from the file.

Of K/V that every step reads whole, as much is found in memory as memory holds. Heads of a policy
that selects choose tiles independently of one another and of the step before: a model with random
weights does so, and a trained one reads fewer tiles and finds more of them in memory. So what is
said of a policy is what it gives at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench.plan.capacity import kv_bytes
from bench.plan.cost import MachineCost
from bench.plan.hardware import HERE
from bench.plan.serving import decode_work
from bench.plan.shapes import Precision, Shape
from bench.plan.tables import gb_text, ms_text, rate_text
from memory.policies.setting import OFF, KVPolicy, parse_kv_policy
from quant.kv import RECENT_BLOCK
from serve.errors import ConfigError, reason
from serve.machine import local_kv_bytes
from serve.units import format_memory

NAME = "kv-offload-bytes"
_TILE_TOKENS = 16
_ROOM = 1.25  # of the longest sequence's layer, as serve.loading.kv_offload
_PAGE_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class KVOffload:
    """The options. memory_bytes: K/V in memory; None: as a server takes. disk_bytes_per_s: None
    measures in `folder`; None: the cache folder."""

    file_bytes: int
    memory_bytes: int | None = None
    policy: str = OFF
    disk_bytes_per_s: float | None = None
    folder: Path | None = None

    def parse_policy(self) -> KVPolicy | None:
        try:
            policy = parse_kv_policy(self.policy)
        except ValueError as error:
            raise ConfigError(f"kv-policy {error}") from None
        if policy is not None and policy.evicts:
            raise ConfigError(f"kv-policy {policy.name} cannot be used with {NAME}")
        return policy


class OffloadedStep(NamedTuple):
    """A decode step of `batch` sequences. kv_bytes: of all their K/V; held: the share of it that is
    in memory; read_bytes: what is read from the file."""

    batch: int
    context: int
    kv_bytes: float
    held: float
    read_bytes: float
    seconds: float


@dataclass(frozen=True, slots=True)
class KVBeyondMemory:
    """tokens: of all sequences, in memory and file together. recent_bytes: of the recent tokens of
    int4 K/V in memory, for as many sequences as the largest batch. steps: of those that fit."""

    policy: str
    memory_bytes: int
    bounds_bytes: int
    recent_bytes: int
    file_bytes: int
    token_bytes: int
    tokens: int
    disk_bytes_per_s: float
    is_measured: bool
    steps: list[OffloadedStep]

    def as_json(self) -> dict[str, Any]:
        steps = [step._asdict() for step in self.steps]
        return asdict(self) | {"steps": steps}


class _Sizes(NamedTuple):
    """Of a token in the file: all layers, and the bounds of its keys; of one layer of a tile."""

    token_bytes: float
    bounds_bytes: float
    unit_bytes: int


def kv_beyond_memory(
    cost: MachineCost, asked: KVOffload, batches: Sequence[int], contexts: Sequence[int]
) -> KVBeyondMemory:
    """Raises ConfigError that names the option."""
    policy = asked.parse_policy()
    _check(cost)
    is_here = cost.machine.device.name == HERE
    if asked.disk_bytes_per_s is None and not is_here:
        raise ConfigError(f"{NAME} needs disk-rate for a machine that is not here")
    memory = asked.memory_bytes or (local_kv_bytes() if is_here else int(max(0, kv_bytes(cost))))
    sizes = _sizes(cost.shape, cost.precision, has_bounds=policy is not None)
    recent = _recent_bytes(cost, max(batches))
    tokens = int((max(0, memory - recent) + asked.file_bytes) / sizes.token_bytes)
    bounds = int(tokens * sizes.bounds_bytes)
    resident = memory - bounds - recent
    least = _ROOM * min(contexts) / _TILE_TOKENS * sizes.unit_bytes
    if resident < least:
        raise ConfigError(
            f"kv-cache-bytes {memory} is too little for {NAME} {asked.file_bytes}: a layer of"
            f" {min(contexts)} tokens, the bounds of all keys and recent tokens take"
            f" {format_memory(int(least + bounds + recent))}"
        )
    disk = asked.disk_bytes_per_s or _measured(asked.folder, sizes.unit_bytes, policy)
    steps = [
        _step(cost, policy, (batch, context), sizes.token_bytes, resident, disk)
        for batch in batches
        for context in contexts
        if batch * (context + 1) <= tokens
        and resident >= _ROOM * context / _TILE_TOKENS * sizes.unit_bytes
    ]
    return KVBeyondMemory(
        asked.policy,
        memory,
        bounds,
        recent,
        asked.file_bytes,
        int(sizes.token_bytes),
        tokens,
        disk,
        asked.disk_bytes_per_s is None,
        steps,
    )


def _step(
    cost: MachineCost,
    policy: KVPolicy | None,
    load: tuple[int, int],
    token_bytes: float,
    resident: float,
    disk: float,
) -> OffloadedStep:
    batch, context = load
    whole = batch * context * token_bytes
    held = min(1.0, resident / whole)
    of_head = 1.0 if policy is None else min(1.0, policy.budget(context) / context)
    of_any = 1.0 - (1.0 - of_head) ** cost.shape.num_kv_heads
    read = whole * of_any * (1.0 - held)
    attended = context * min(1.0, of_head + (0.0 if policy is None else 1 / _TILE_TOKENS))
    seconds = cost.seconds(decode_work(batch, int(attended))) + read / disk
    return OffloadedStep(batch, context, whole, held, read, seconds)


def _check(cost: MachineCost) -> None:
    """Raises ConfigError where a server would refuse the setting."""
    shape = cost.shape
    if cost.machine.device.kind != "cpu" or cost.machine.num_devices > 1:
        raise ConfigError(f"{NAME} needs one machine that computes on its CPU")
    if cost.precision.kv not in ("int8", "int4"):
        raise ConfigError(f"{NAME} needs kv-dtype int8 or int4, not {cost.precision.kv}")
    problem = None
    if shape.state_bytes:
        problem = "states"
    for layer in shape.layer_attentions():
        if layer.value_dim is not None:
            problem = "latent K/V"
        elif layer.is_shared:
            problem = "K/V shared by layers"
        elif layer.window is not None and layer.window < shape.max_model_len:
            problem = "windows or chunks"
    if problem is not None:
        raise ConfigError(f"{NAME} cannot be used with {shape.name}, which has {problem}")


def _sizes(shape: Shape, precision: Precision, *, has_bounds: bool) -> _Sizes:
    from memory.attention.offloaded_layout import OffloadedKVLayout  # imports torch
    from memory.attention.seam import AttentionLayer

    layers = [
        AttentionLayer(layer.num_kv_heads, layer.num_kv_heads, layer.head_dim, 1.0)
        for layer, number in shape.layer_attentions().items()
        for _ in range(number)
    ]
    layout = OffloadedKVLayout(layers, precision.kv, precision.kv_group, has_bounds=has_bounds)
    layout.pad_bounds(max(1, _PAGE_BYTES // layout.tile_bytes))
    return _Sizes(
        layout.tile_bytes / _TILE_TOKENS,
        layout.bounds_tile_bytes / _TILE_TOKENS,
        max(layout.unit_bytes),
    )


def _recent_bytes(cost: MachineCost, num_sequences: int) -> int:
    """Returns the int8 K/V of recent tokens beside int4: two blocks of each sequence."""
    if cost.precision.kv != "int4":
        return 0
    token_bytes = cost.shape.kv_token_bytes(replace(cost.precision, kv="int8"))
    return int(2 * RECENT_BLOCK * num_sequences * token_bytes)


def _measured(folder: Path | None, unit_bytes: int, policy: KVPolicy | None) -> float:
    """Measures direct reads of units: one behind the other where steps read all of them, at random
    places where they select. What the system takes for a read is a part of it. ConfigError names
    the folder."""
    from bench.common.checkpoints import cache_folder  # both import torch
    from bench.common.random_reads import disk_rate

    chosen = cache_folder() if folder is None else folder
    try:
        if folder is None:
            chosen.mkdir(parents=True, exist_ok=True)
        return disk_rate(chosen, unit_bytes, in_order=policy is None)
    except OSError as error:
        raise ConfigError(f"kv-offload-dir {chosen}: {reason(error)}") from error


def print_kv_beyond(found: KVBeyondMemory, console: Console) -> None:
    how = "measured now" if found.is_measured else "given"
    parts = {"bounds": found.bounds_bytes, "recent tokens": found.recent_bytes}
    always = "".join(f", {gb_text(size)} of it {name}" for name, size in parts.items() if size)
    console.print(
        f"K/V beyond memory: {found.tokens:,} tokens of all sequences in"
        f" {gb_text(found.memory_bytes)} of memory{always}, and a file of"
        f" {gb_text(found.file_bytes)}; kv_policy {found.policy}; the disk gives"
        f" {gb_text(found.disk_bytes_per_s)}/s ({how})."
    )
    table = Table("batch", "context", "K/V", "in memory", "read in a step", "step, ms", "tokens/s")
    for step in found.steps:
        table.add_row(
            str(step.batch),
            f"{step.context:,}",
            gb_text(step.kv_bytes),
            f"{100 * step.held:.0f} %",
            gb_text(step.read_bytes),
            ms_text(step.seconds),
            rate_text(step.batch / step.seconds),
        )
    console.print(table if found.steps else "No batch of these fits.")
