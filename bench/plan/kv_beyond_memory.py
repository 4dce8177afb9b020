"""What `serve plan` says of K/V beyond memory (kv_offload_bytes): how many tokens memory and file
hold together, and how fast steps are that read what memory lacks from the file.

What is refused, and the pages, bounds and tokens are those of a server with the same options, by
its own functions.

Of K/V that every step reads whole, as much is found in memory as memory holds. Heads of a policy
that selects choose tiles independently of one another and of the step before: a model with random
weights does so, and a trained one reads fewer tiles and finds more of them in memory. So what is
said of a policy is what it gives at least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console
from rich.table import Table

from bench.plan.beyond_memory import BeyondMemory
from bench.plan.cost import MachineCost
from bench.plan.hardware import HERE
from bench.plan.quantities import naming_options
from bench.plan.serving import decode_work
from bench.plan.shapes import Shape
from bench.plan.tables import gb_text, ms_text, rate_text
from memory.pages.layer_groups import PageLayout
from memory.policies.setting import OFF, KVPolicy
from quant.kv import TILE_TOKENS
from serve.config import EngineConfig
from serve.errors import ConfigError, reason
from serve.machine import KV_SHARE_OF_FREE_MEMORY, local_kv_bytes, total_memory
from serve.units import format_memory

if TYPE_CHECKING:
    from memory.attention.seam import AttentionLayer
    from serve.loading.kv_offload import OffloadSizes

NAME = "kv-offload-bytes"


@dataclass(frozen=True, slots=True)
class KVOffload:
    """The options. memory_bytes: K/V in memory; None: as a server takes. disk_bytes_per_s: None
    measures in `folder`; None: the cache folder. max_num_seqs, max_model_len: the server's; None:
    its own, and at least as many sequences as the largest batch."""

    file_bytes: int
    memory_bytes: int | None = None
    policy: str = OFF
    disk_bytes_per_s: float | None = None
    folder: Path | None = None
    max_num_seqs: int | None = None
    max_model_len: int | None = None

    def config(self, cost: MachineCost, batches: Sequence[int], memory_bytes: int) -> EngineConfig:
        """Returns the settings of the server. ConfigError."""
        most = max(EngineConfig().max_num_seqs, *batches)
        return EngineConfig(
            kv_group=cost.precision.kv_group,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs or most,
            kv_cache_bytes=memory_bytes,
            kv_offload_bytes=self.file_bytes,
            kv_policy=self.policy,
        )


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
    int4 K/V in memory, for max_num_seqs sequences. steps: of those that fit. weights_are_read:
    whether the steps include reading weights."""

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
    weights_are_read: bool

    def as_json(self) -> dict[str, Any]:
        steps = [step._asdict() for step in self.steps]
        return asdict(self) | {"steps": steps}


class _Model(NamedTuple):
    """What a server's sizes depend on of a model."""

    model_type: str
    max_model_len: int
    attention_layers: list[AttentionLayer]
    state_layers: range


class _Sized(NamedTuple):
    """K/V as a server has it. unit_bytes: of a layer in a tile."""

    config: EngineConfig
    sizes: OffloadSizes
    unit_bytes: int

    def fits(self, batch: int, context: int) -> bool:
        """Returns whether so many sequences can have so many tokens, and one more."""
        pages, most = self.sizes.pages, self.config.max_num_seqs
        if batch > most or context >= pages.max_model_len:
            return False
        layout = PageLayout(
            pages.groups, pages.page_bytes, pages.max_model_len, self.config.chunk_tokens
        )
        return batch * layout.pages_for(context + 1) <= pages.num_pages


def kv_beyond_memory(
    cost: MachineCost,
    asked: KVOffload,
    batches: Sequence[int],
    contexts: Sequence[int],
    weights: BeyondMemory | None = None,
) -> KVBeyondMemory:
    """weights: those that are beyond memory, too. Raises ConfigError that names the option."""
    device = cost.machine.device
    is_here = device.name == HERE
    if device.kind != "cpu" or cost.machine.num_devices > 1:
        raise ConfigError(f"{NAME} needs one machine that computes on its CPU")
    if asked.disk_bytes_per_s is None and not is_here:
        raise ConfigError(f"{NAME} needs disk-rate for a machine that is not here")
    with naming_options():
        memory = _memory_bytes(cost, asked, weights)
        config = asked.config(cost, batches, memory)
        sized = _sized(cost, config)
        folder = _folder(asked.folder)
    policy, sizes = config.policy, sized.sizes
    token_bytes = sizes.pages.groups[0].token_bytes
    disk = asked.disk_bytes_per_s or _measured(folder, sized.unit_bytes, policy)
    read_s = {}
    if weights is not None:
        read_s = {step.batch: step.read_bytes / weights.disk_bytes_per_s for step in weights.steps}
    steps = [
        _step(cost, policy, (batch, context), token_bytes, sizes.resident_bytes, disk, read_s)
        for batch in batches
        for context in contexts
        if sized.fits(batch, context)
    ]
    return KVBeyondMemory(
        asked.policy,
        memory,
        sizes.bounds_bytes,
        sizes.recent_bytes,
        asked.file_bytes,
        token_bytes,
        sizes.pool_bytes // token_bytes,
        disk,
        asked.disk_bytes_per_s is None,
        steps,
        any(read_s.values()),
    )


def _step(
    cost: MachineCost,
    policy: KVPolicy | None,
    load: tuple[int, int],
    token_bytes: float,
    resident: float,
    disk: float,
    weights_s: Mapping[int, float],
) -> OffloadedStep:
    """weights_s: the least seconds of a step of each batch, where weights are read in it. The same
    disk gives both."""
    batch, context = load
    whole = batch * context * token_bytes
    held = min(1.0, resident / whole)
    of_head = 1.0 if policy is None else min(1.0, policy.budget(context) / context)
    of_any = 1.0 - (1.0 - of_head) ** cost.shape.num_kv_heads
    read = whole * of_any * (1.0 - held)
    attended = context * min(1.0, of_head + (0.0 if policy is None else 1 / TILE_TOKENS))
    seconds = max(cost.seconds(decode_work(batch, int(attended))), weights_s.get(batch, 0.0))
    seconds += read / disk
    return OffloadedStep(batch, context, whole, held, read, seconds)


def _memory_bytes(cost: MachineCost, asked: KVOffload, weights: BeyondMemory | None) -> int:
    """Returns the bytes of K/V in memory: those asked for, or as a server takes them beside its
    weights. ConfigError if the machine has no memory for both."""
    device = cost.machine.device
    is_here = device.name == HERE
    beside = cost.shape.weight_bytes(cost.precision) if weights is None else weights.memory_bytes
    if asked.memory_bytes is None:
        if is_here:
            return max(1, local_kv_bytes(int(beside)))
        return max(1, int(KV_SHARE_OF_FREE_MEMORY * (device.memory_bytes - beside)))
    total = total_memory() if is_here else device.memory_bytes
    if asked.memory_bytes <= total < asked.memory_bytes + beside:
        raise ConfigError(
            f"kv_cache_bytes {format_memory(asked.memory_bytes)} beside weights of"
            f" {format_memory(beside)}: the machine has {format_memory(total)}"
        )
    return asked.memory_bytes


def _sized(cost: MachineCost, config: EngineConfig) -> _Sized:
    """Returns the K/V of a server with these settings, by its own functions. ConfigError."""
    import torch

    from serve.loading.kv_layouts import check_offloadable, open_selection, recent_layout
    from serve.loading.kv_offload import offloaded_layout, size_offload
    from serve.loading.precision import Precision

    shape, device = cost.shape, cost.machine.device
    layers = _layers(shape)
    model = _Model(shape.name, shape.max_model_len, layers, range(bool(shape.state_bytes)))
    precision = Precision(torch.float32, cost.precision.weights, cost.precision.kv)
    check_offloadable(config, precision, model)
    selection = open_selection(config, precision, layers, is_trial=True)
    layout = offloaded_layout(config, precision, layers, selection)
    total = None if device.name == HERE else int(device.memory_bytes)
    recent = recent_layout(config, precision, layers)
    sizes = size_offload(config, model, layout, recent, total_bytes=total, is_trial=True)
    return _Sized(config, sizes, max(layout.unit_bytes))


def _layers(shape: Shape) -> list[AttentionLayer]:
    """Returns the layers of a shape, one way of attention after another."""
    from memory.attention.seam import AttentionLayer  # imports torch

    found: list[AttentionLayer] = []
    for layer, number in shape.layer_attentions().items():
        one = AttentionLayer(
            layer.num_kv_heads,
            layer.num_kv_heads,
            layer.head_dim,
            1.0,
            layer.window,
            shares=0 if layer.is_shared else None,
            value_dim=layer.value_dim,
        )
        found += [one] * number
    return found


def _folder(named: Path | None) -> Path:
    """Returns where the disk of the K/V file is measured. ConfigError for what a server refuses."""
    from bench.common.checkpoints import cache_folder  # both import torch
    from serve.loading.kv_offload import folder_of

    return cache_folder() if named is None else folder_of(named.expanduser())


def _measured(folder: Path, unit_bytes: int, policy: KVPolicy | None) -> float:
    """Measures direct reads of units: one behind the other where steps read all of them, at random
    places where they select. What the system takes for a read is a part of it. ConfigError names
    the folder."""
    from bench.common.random_reads import disk_rate  # imports torch

    try:
        folder.mkdir(parents=True, exist_ok=True)  # the cache folder; others are there
        return disk_rate(folder, unit_bytes, in_order=policy is None)
    except OSError as error:
        raise ConfigError(f"kv-offload-dir {folder}: {reason(error)}") from error


def print_kv_beyond(found: KVBeyondMemory, console: Console) -> None:
    how = "measured now" if found.is_measured else "given"
    parts = {"bounds": found.bounds_bytes, "recent tokens": found.recent_bytes}
    always = "".join(f", {gb_text(size)} of it {name}" for name, size in parts.items() if size)
    console.print(
        f"K/V beyond memory: {found.tokens:,} tokens of all sequences in"
        f" {gb_text(found.memory_bytes)} of memory{always}, and a file of"
        f" {gb_text(found.file_bytes)}; kv_policy {found.policy}; the disk gives"
        f" {gb_text(found.disk_bytes_per_s)}/s ({how})."
        + " Steps read weights, too."
        * found.weights_are_read
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
