"""What one rank of a group has on its device: a queue of work, K/V, attention, and buffers to pass
rows through the host's memory.

A rank on Triton's interpreter has the same parts in this machine's memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from memory.attention.cuda import CudaAttention, CudaKVLayout, step_arrays
from memory.attention.grouped import group_layers
from memory.attention.seam import Attention, AttentionLayer, AttentionStep, layers_in
from memory.pages.cuda_device import CudaUnavailableError
from memory.pages.cuda_vmm import CudaMemory
from memory.pages.linux_vmm import LinuxMemory
from memory.pages.virtual_memory import VirtualMemory
from ops.cuda.attention import StepArrays
from ops.kv_tiles import TILE_TOKENS
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.loading.cuda_runtime import (
    UNIT_BYTES,
    kv_layouts,
    make_step_device,
    step_bytes,
)
from serve.loading.kv_layouts import device_layout
from serve.loading.kv_sizing import reserving
from serve.loading.model_source import ModelSource
from serve.loading.precision import Precision
from serve.loading.rank_memory import RankGeometry, numbers_of_group
from serve.models import Decoder, ModelSpec
from serve.models.shard import Shard
from serve.runner.graph_shapes import StepShapes

_ALIGNMENT = 1024  # bytes of a tile, of 64 a token


class RankDevice:
    """The device of one rank. Only the rank's thread uses it."""

    def __init__(self, source: ModelSource, shard: Shard) -> None:
        """Call it before anything is on the device. ConfigError for layers without kernels."""
        config, spec, precision, backend, *_ = source
        own = shard.spec(spec)
        kv_layouts(config, precision, own.attention_layers, _max_len(config, spec))
        self.queue = make_step_device(backend.device)
        self.device = self.queue.device
        self.shapes = StepShapes(config.batched_tokens, config.max_num_seqs, captures=False)
        self._hidden = self._host_rows(config.batched_tokens, spec.hidden_size, precision.compute)

    def _host_rows(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        memory = self.queue.pinned(rows * columns * dtype.itemsize)
        return memory.view(dtype).view(rows, columns)

    @property
    def unit_bytes(self) -> int | None:
        """What the device maps at a time; None: this machine's pages."""
        return UNIT_BYTES if self.device.type == "cuda" else None

    def measure(self, model: Decoder) -> tuple[str, int, int]:
        """Returns the device's name, the same for all ranks on it, its free bytes and those that
        the largest step takes of them. The model's exchange needs no other rank meanwhile."""
        needed = step_bytes(model, self.queue, self.shapes)
        free = self.queue.free_bytes()
        if self.device.type != "cuda":
            return "the interpreter", free, needed
        return str(torch.cuda.get_device_properties(self.device).uuid), free, needed

    @torch.inference_mode()
    def warm_up(self, model: Decoder, source: ModelSource) -> None:
        """Computes steps of no sequence, so that no kernel is compiled while a request waits, nor
        while the other ranks wait at an exchange. The model's exchange needs none meanwhile."""
        config, spec, precision, *_ = source
        layers = model.attention_layers()
        geometry = _smallest_geometry(config, spec, precision, layers)
        memory = DeviceKV(config, spec, precision, layers, geometry, self)
        try:
            self._compute_nothing(model, memory)
        finally:
            memory.close()

    def _compute_nothing(self, model: Decoder, memory: DeviceKV) -> None:
        for shape in self.shapes.eager:
            attention = memory.view_of_nothing(shape.rows, shape.decodes)
            rows = torch.zeros(shape.rows, dtype=torch.int64, device=self.device)
            hidden = None
            if model.weights.embed is None:
                hidden = self.zero_rows(model, shape.rows)
            out = model.forward(rows, rows, attention, hidden)
            if model.weights.head is not None:
                model.logits(out[: self.shapes.max_sampled])
            self.queue.wait()

    def zero_rows(self, model: Decoder, rows: int) -> Tensor:
        size = model.spec.hidden_size
        return torch.zeros(rows, size, dtype=model.dtype, device=self.device)

    def to_host(self, hidden: Tensor) -> Tensor:
        """Returns the rows in page-locked memory, valid until the next call."""
        if self.device.type != "cuda":
            return hidden
        rows = self._hidden[: len(hidden)]
        rows.copy_(hidden, non_blocking=True)
        self.queue.wait()
        return rows

    def to_device(self, rows: Tensor) -> Tensor:
        return rows.to(self.device)


class DeviceKV:
    """Implements KVOfRank (rank_memory.py) on a rank's device."""

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        precision: Precision,
        layers: Sequence[AttentionLayer],
        geometry: RankGeometry,
        device: RankDevice,
    ) -> None:
        """spec: the whole model's; layers: those of this rank, with their sinks. ConfigError names
        the setting if there is no memory."""
        self.memory = _memory(geometry, device)
        try:
            with reserving(geometry.offsets[-1], "max_num_seqs and max_model_len"):
                address = self.memory.reserve(geometry.offsets[-1])
            layouts: list[CudaKVLayout] = []
            ids_of: list[list[int]] = []
            bases: list[int] = []
            for number, token_bytes in enumerate(geometry.token_bytes):
                ids = numbers_of_group(config, spec, layers, number)
                if not ids:
                    continue
                layout = device_layout(config, precision, layers_in(layers, ids))
                layout.pad(token_bytes * layout.tile_tokens)
                layouts.append(layout)
                ids_of.append(ids)
                bases.append(address + geometry.offsets[number])
            if not layouts:
                raise ConfigError("a rank without layers")
            self._arrays: StepArrays = step_arrays(
                layers,
                max_rows=device.shapes.max_rows,
                max_seqs=config.max_num_seqs,
                max_len=_max_len(config, spec),
                device=device.device,
            )
            self.attention = CudaAttention(layouts, ids_of, bases, self._arrays)
        except BaseException:
            self.memory.close()
            raise

    def view_of_nothing(self, rows: int, decodes: int) -> Attention:
        """Returns attention for rows that belong to no sequence."""
        host = torch.zeros(self._arrays.num_words, dtype=torch.int32)
        none = AttentionStep(0, [], [], [])
        self.attention.fill(host, none, rows, decodes, is_captured=False)
        self.attention.upload(host)
        return self.attention.view(rows, decodes, True)

    def close(self) -> None:
        del self.attention  # views of the reservation must go before it
        self.memory.close()


def _memory(geometry: RankGeometry, device: RankDevice) -> VirtualMemory:
    if device.device.type != "cuda":
        with reserving(geometry.page_bytes * geometry.num_pages, "kv_cache_bytes"):
            return LinuxMemory(geometry.page_bytes, geometry.num_pages)
    queue = device.queue
    try:
        return CudaMemory(
            geometry.page_bytes,
            geometry.num_pages,
            device=device.device.index or 0,
            settle=lambda first, end: queue.wait(),
            compute_stream=queue.stream,
        )
    except (CudaUnavailableError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _smallest_geometry(
    config: EngineConfig,
    spec: ModelSpec,
    precision: Precision,
    layers: Sequence[AttentionLayer],
) -> RankGeometry:
    """Returns a geometry of one page for steps that touch no K/V."""
    max_len = _max_len(config, spec)
    windows = tuple(window for window, _ in group_layers(spec.attention_layers, max_len))
    token_bytes = []
    for number in range(len(windows)):
        ids = numbers_of_group(config, spec, layers, number)
        layout = device_layout(config, precision, layers_in(layers, ids)) if ids else None
        tile_bytes = 0 if layout is None else layout.tile_bytes
        token_bytes.append(-(-tile_bytes // _ALIGNMENT) * _ALIGNMENT // TILE_TOKENS)
    offsets = tuple(UNIT_BYTES * number for number in range(len(windows) + 1))
    return RankGeometry(UNIT_BYTES, 1, max_len, windows, tuple(token_bytes), offsets)


def _max_len(config: EngineConfig, spec: ModelSpec) -> int:
    return config.max_model_len or spec.max_model_len
