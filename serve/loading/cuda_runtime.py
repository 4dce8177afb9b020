"""A model on a CUDA device: memory measurement, K/V, attention and runner.

The weights are loaded first. Then the largest step runs once without K/V; its peak and a reserve
stay free. K/V may use the rest, and only pages in use are allocated on the device.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from memory.attention.cuda import (
    CudaAttention,
    CudaKVLayout,
    SelectedRows,
    padded_dim,
    selected_rows,
    step_arrays,
)
from memory.attention.grouped import group_layers
from memory.attention.seam import AttentionLayer, Finished, Rotation, Ticket, layers_in
from memory.kv_manager import KVManager
from memory.pages.cuda_device import CudaUnavailableError
from memory.pages.cuda_vmm import CudaMemory, torch_view
from memory.pages.layer_groups import LayerGroup
from memory.pages.linux_vmm import LinuxMemory
from memory.policies.selection import Selection
from memory.tiers.cuda_copy import CudaCopier
from memory.tiers.host_tier import HostTier
from ops.cuda.attention import StepArrays
from ops.cuda.device_sampler import DeviceSampler
from ops.cuda.prefill import LibraryPrefill, installed
from ops.cuda.selection import MAX_TOKENS as MAX_SELECTED_TOKENS
from ops.kv_tiles import KVTiles
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.loading.cuda_tuning import tune_products
from serve.loading.disk_store import open_kv_store
from serve.loading.kv_layouts import device_layout, open_selection, selects, state_layout
from serve.loading.kv_sizing import KVSizes, refuse_chunks, size_kv
from serve.loading.precision import Precision
from serve.machine import available_memory
from serve.models import Decoder, ModelSpec
from serve.runner.cuda_runner import CudaRunner
from serve.runner.graph_shapes import StepShapes
from serve.runner.step_device import CudaStepDevice, HostStepDevice, StepDevice

if TYPE_CHECKING:
    from memory.states.cuda import CudaStatefulAttention
    from memory.states.layout import StateLayout
    from memory.states.records import RecordStates

logger = logging.getLogger(__name__)

UNIT_BYTES = 2 << 20  # the page size of CUDA devices
_RESERVE_BYTES = 512 << 20  # for graphs, libraries and what torch cannot give back
_STEP_RESERVE = 0.25  # of the largest step, for fragmentation
_HOST_SHARE = 0.1  # of this machine's memory, for pages between device and disk


class CudaParts(NamedTuple):
    """The parts of an engine on a CUDA device. runner owns the memory and closes it."""

    attention: CudaAttention | CudaStatefulAttention
    kv: KVManager
    memory: CudaMemory | LinuxMemory
    runner: CudaRunner
    secret: bytes | None
    selection: Selection | None


def make_step_device(device: torch.device) -> StepDevice:
    """Returns the step device. Call it in the compute thread, before anything is on the device."""
    return CudaStepDevice(device) if device.type == "cuda" else HostStepDevice()


def load_cuda(
    config: EngineConfig,
    spec: ModelSpec,
    precision: Precision,
    model: Decoder,
    device: StepDevice,
    *,
    captures: bool = True,
    kv_share: float = 1.0,
) -> CudaParts:
    """Makes K/V memory, attention and a warmed-up runner. kv_share: the part of the device's K/V
    memory that is the model's; the rest is a draft model's. ConfigError names the setting."""
    shapes = StepShapes(config.batched_tokens, config.max_num_seqs, captures=captures)
    found = described_kv(config, spec, precision, model, device, shapes)
    selection = None if found.selected is None else found.selected.selection
    sampler = DeviceSampler(spec.vocab_size, shapes.max_sampled, config.max_num_seqs, device.device)
    if device.device.type == "cuda":
        sampler.allocate_counts()  # before warm-up, because a new size recompiles kernels
        if config.tune:
            tune_products(model, shapes, device.device)
    library = _library(found.layouts, device, precision)
    gathered = 0
    if library is not None:
        gathered = _gathered_bytes(model.attention_layers(), found.max_len)
    free_bytes = int(kv_bytes(model, device, shapes, gathered) * kv_share)
    made = make_kv(config, spec, found, device, free_bytes)
    try:
        attention = made.attention(found, library)
        runner = CudaRunner(
            model,
            made.kv,
            attention,
            sampler,
            device,
            shapes,
            memory=made.memory,
            selects=selection is not None,
        )
        made.settle = runner.settle
        secret = made.use_disk(precision)
        if device.device.type == "cuda":
            runner.warm_up()
    except BaseException:
        made.memory.close()
        raise
    return CudaParts(attention, made.kv, made.memory, runner, secret, selection)


class DescribedKV(NamedTuple):
    """How a device stores a model's K/V. groups: window and layer numbers of each layout. arrays:
    the buffers of a step. states: those of other layers, whose group is the last one. selected:
    the decode rows that read a part of the K/V."""

    max_len: int
    groups: list[tuple[int | None, list[int]]]
    layouts: list[CudaKVLayout]
    arrays: StepArrays
    states: StateLayout | None
    selected: SelectedRows | None

    @property
    def layer_groups(self) -> list[LayerGroup]:
        """The groups of layers, without padding."""
        found = [
            LayerGroup(layout.token_bytes, layout.tile_tokens, window)
            for layout, (window, _) in zip(self.layouts, self.groups, strict=True)
        ]
        return found if self.states is None else [*found, self.states.group()]

    def pad(self, sizes: KVSizes) -> None:
        """Pads the layouts as the groups are."""
        for layout, padded in zip(self.layouts, sizes.groups, strict=False):
            layout.pad(padded.token_bytes * padded.tile_tokens)
        if self.states is not None:
            self.states.pad(sizes.groups[-1].token_bytes * self.states.interval)


def described_kv(
    config: EngineConfig,
    spec: ModelSpec,
    precision: Precision,
    model: Decoder,
    device: StepDevice,
    shapes: StepShapes,
) -> DescribedKV:
    """Describes the K/V, before memory is taken. ConfigError if the kernels do not have it."""
    layers, max_len = model.attention_layers(), config.max_model_len or spec.max_model_len
    arrays = step_arrays(
        layers,
        max_rows=shapes.max_rows,
        max_seqs=config.max_num_seqs,
        max_len=max_len,
        device=device.device,
    )
    layouts = kv_layouts(config, precision, layers, max_len)
    selected = selected_rows(open_selection(config, precision, layers), layouts, arrays)
    found = DescribedKV(max_len, group_layers(layers, max_len), layouts, arrays, None, selected)
    page_bytes = _unit_bytes(device) or 1
    states = state_layout(config, spec, found.layer_groups, page_bytes=page_bytes, has_drafts=False)
    return found._replace(states=states)


def _unit_bytes(device: StepDevice) -> int | None:
    """Returns what the device maps at a time; None: this machine's pages."""
    return UNIT_BYTES if device.device.type == "cuda" else None


def make_kv(
    config: EngineConfig, spec: ModelSpec, found: DescribedKV, device: StepDevice, free_bytes: int
) -> DeviceMemory:
    """Takes memory for K/V. free_bytes: see size_kv. ConfigError names the setting."""
    sizes = size_kv(
        config,
        spec,
        found.layer_groups,
        free_bytes=free_bytes,
        unit_bytes=_unit_bytes(device),
    )
    found.pad(sizes)
    return DeviceMemory(config, device, sizes)


def kv_layouts(
    config: EngineConfig, precision: Precision, layers: Sequence[AttentionLayer], max_len: int
) -> list[CudaKVLayout]:
    """Returns the layout of each layer group. ConfigError if the kernels do not have one."""
    refuse_chunks(layers, max_len, "on a GPU")
    if selects(config) and max_len > MAX_SELECTED_TOKENS:
        raise ConfigError(
            f"kv_policy on a GPU needs a max_model_len of at most {MAX_SELECTED_TOKENS}"
        )
    groups = group_layers(layers, max_len)
    return [device_layout(config, precision, layers_in(layers, ids)) for _, ids in groups]


def _gathered_bytes(layers: Sequence[AttentionLayer], max_len: int) -> int:
    """Returns the bytes of one layer's bf16 K/V of the longest sequence, as a library reads it."""
    return max(4 * max_len * x.num_kv_heads * padded_dim(x.head_dim) for x in layers)


def kv_bytes(model: Decoder, device: StepDevice, shapes: StepShapes, gathered: int) -> int:
    """Returns the bytes left for K/V beside the largest step and its gathered K/V."""
    peak = _peak_bytes(model, device, shapes) + gathered
    free = device.free_bytes()
    left = free - _with_reserve(peak)
    logger.info(
        "device memory: %.2f GiB free beside the weights, %.2f GiB for the largest step",
        free / 2**30,
        peak / 2**30,
    )
    if left <= 0:
        raise ConfigError(
            f"the device has {free >> 20} MiB left beside the weights, and a step of "
            f"{shapes.max_rows} rows takes {peak >> 20} MiB; lower max_num_batched_tokens or "
            "use a smaller dtype"
        )
    return left


def step_bytes(model: Decoder, device: StepDevice, shapes: StepShapes) -> int:
    """Returns the bytes that the largest step takes beside the weights and K/V, with a reserve."""
    return _with_reserve(_peak_bytes(model, device, shapes))


def _with_reserve(peak: int) -> int:
    return peak + int(_STEP_RESERVE * peak) + _RESERVE_BYTES * (peak > 0)


def _peak_bytes(model: Decoder, device: StepDevice, shapes: StepShapes) -> int:
    """Returns the bytes that the largest step takes; of a stage without embedding or head, its
    part."""
    rows = torch.zeros(shapes.max_rows, dtype=torch.int64, device=device.device)
    before = None
    if model.weights.embed is None:
        size = model.spec.hidden_size
        before = torch.zeros(shapes.max_rows, size, dtype=model.dtype, device=device.device)

    @torch.inference_mode()
    def largest_step() -> None:
        hidden = model.forward(rows, rows, _NoAttention(model, rows), before)
        if model.weights.head is not None:
            model.logits(hidden[: shapes.max_sampled]).clone()  # as log-probabilities need them

    return device.peak_bytes(largest_step)


class _NoAttention:
    """Attention without K/V, to measure the memory of everything else. rows: those of the step."""

    def __init__(self, model: Decoder, rows: Tensor) -> None:
        self._model, self._layers, self._rows = model, model.attention_layers(), rows

    @cached_property
    def states(self) -> RecordStates:
        from memory.states.records import unkept_states  # only models with states need it

        layers = self._model.spec.state_layers
        return unkept_states(layers, len(self._rows), self._rows.device)

    def begin(self, layer: int, q: Tensor) -> Ticket:
        return Ticket(layer, q)

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> Finished:
        value_dim = self._layers[ticket.layer].value_dim
        return Finished(ticket.q if value_dim is None else ticket.q[..., :value_dim])


class DeviceMemory:
    """The reserved address space and the K/V accounting over it."""

    def __init__(self, config: EngineConfig, device: StepDevice, sizes: KVSizes) -> None:
        self.settle: Callable[[int, int], None] = lambda first, end: device.wait()
        self._config, self._device, self._sizes = config, device, sizes
        self.memory: CudaMemory | LinuxMemory
        if device.device.type == "cuda":
            try:
                self.memory = CudaMemory(
                    sizes.page_bytes,
                    sizes.num_pages,
                    device=device.device.index or 0,
                    settle=lambda first, end: self.settle(first, end),
                    compute_stream=device.stream,
                )
            except (CudaUnavailableError, ValueError) as error:
                raise ConfigError(str(error)) from error
        else:
            self.memory = LinuxMemory(sizes.page_bytes, sizes.num_pages)
        try:
            self.kv = KVManager(
                self.memory,
                num_pages=sizes.num_pages,
                num_ranges=config.max_num_seqs,
                max_model_len=sizes.max_model_len,
                groups=sizes.groups,
                max_rows=config.chunk_tokens,
                in_background=device.device.type == "cuda",
                max_mappings=2 * sizes.num_pages + config.max_num_seqs,
                most_mappings=2 * sizes.num_pages + config.max_num_seqs,
            )
            self._address = self.memory.reserve(self.kv.total_bytes)
        except BaseException:
            self.memory.close()
            raise

    def attention(
        self, found: DescribedKV, library: LibraryPrefill | None = None
    ) -> CudaAttention | CudaStatefulAttention:
        """Returns attention over the K/V, and the states. library: computes long chunks."""
        bases = [self._address + self.kv.group_offset(i) for i in range(len(found.groups))]
        layers_of = [ids for _, ids in found.groups]
        attention = CudaAttention(
            found.layouts, layers_of, bases, found.arrays, library, found.selected
        )
        if found.states is None:
            return attention
        from memory.states.cuda import CudaStatefulAttention, CudaStates

        states = CudaStates(
            found.states,
            self._values(len(found.groups)),
            max_rows=found.arrays.max_rows,
            max_seqs=found.arrays.max_seqs,
        )
        return CudaStatefulAttention(attention, states)

    def _values(self, group: int) -> Tensor:
        """Returns the addresses of a layer group's ranges as fp32 values; most are not mapped."""
        first, end = (self.kv.group_offset(number) for number in (group, group + 1))
        if isinstance(self.memory, CudaMemory):
            return torch_view(self.memory)[first:end].view(torch.float32)
        buffer = (ctypes.c_char * (end - first)).from_address(self._address + first)
        return torch.frombuffer(buffer, dtype=torch.float32)

    def use_disk(self, precision: Precision) -> bytes | None:
        """Attaches the disk tier, if it is configured, and returns its secret.

        Pages of a device reach the disk through host memory.
        """
        config, memory = self._config, self.memory
        if config.kv_cache_dir is None:
            return None
        store, secret = open_kv_store(
            config,
            precision,
            backend="cuda",
            groups=self._sizes.groups,
            page_bytes=self._sizes.page_bytes,
        )
        if isinstance(memory, LinuxMemory):
            self.kv.prefixes.use_store(store, memory.page_address, memory.keep_pages)
            return secret
        host_bytes = max(int(available_memory() * _HOST_SHARE), 4 * self._sizes.page_bytes)
        copier = CudaCopier(device=memory.device, compute_stream=self._device.stream)
        tier = HostTier(self._sizes.page_bytes, host_bytes, copier, store)
        self.kv.prefixes.use_store(tier, memory.page_address, memory.keep_pages)
        return secret


def _library(
    layouts: Sequence[CudaKVLayout], device: StepDevice, precision: Precision
) -> LibraryPrefill | None:
    """Returns a library's kernel for long prefill chunks (bf16), if one is installed and fits."""
    is_wide = precision.kv == "float32" or (
        not precision.is_int8 and precision.compute == torch.float32
    )
    if device.device.type != "cuda" or is_wide:
        return None
    every = [layout.tiles(i) for layout in layouts for i in range(len(layout.layers))]
    tiles = [x for x in every if isinstance(x, KVTiles)]
    if len(tiles) < len(every):
        return None  # no library reads latents, and all layers have the same chunks
    library = LibraryPrefill(installed(), device.device)
    has_sinks = any(layer.sinks for layout in layouts for layer in layout.layers)
    return library if not has_sinks and library.prepare(tiles) else None
