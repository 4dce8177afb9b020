"""A model on a CUDA device whose K/V is on memory nodes: staging, attention and runner."""

from __future__ import annotations

import logging
from typing import NamedTuple

import torch

from memory.attention.cuda import CudaAttention, CudaKVLayout, step_arrays
from memory.nodes.attach import AttachRequest
from memory.nodes.cuda_attention import (
    CudaNewTokenAttention,
    CudaRemoteAttention,
    DeviceRows,
    own_rows,
)
from memory.nodes.prompt_tail_cache import PromptTailCache, TailPages
from memory.nodes.staging import Copier, DeviceStaging, HostCopier
from memory.nodes.wire_rows import float_type
from memory.pages.cuda_copies import CudaCopies
from memory.pages.cuda_device import CudaUnavailableError
from memory.pages.cuda_vmm import CudaMemory
from memory.pages.layer_groups import LayerGroup
from memory.pages.linux_vmm import LinuxMemory
from memory.pages.virtual_memory import VirtualMemory
from ops import get_backend
from ops.backend import Backend, Partial
from ops.cuda.device_sampler import DeviceSampler
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.loading.cuda_runtime import UNIT_BYTES, kv_bytes
from serve.loading.cuda_tuning import tune_products
from serve.loading.precision import Precision
from serve.loading.remote_memory import RemoteMemory, open_remote_memory
from serve.machine import local_kv_bytes
from serve.models import Decoder, ModelSpec
from serve.runner.cuda_lanes import open_lanes, reserved_bytes
from serve.runner.cuda_remote_runner import CudaRemoteRunner
from serve.runner.cuda_runner import CudaRunner
from serve.runner.graph_shapes import StepShapes
from serve.runner.step_device import StepDevice

logger = logging.getLogger(__name__)

_HOST_PAGE_BYTES = 64 << 10  # of prompts, where the device is the interpreter
_LINE_BYTES = 64


class FarParts(NamedTuple):
    """The parts of an engine over memory nodes. runner owns the memory and closes it."""

    remote: RemoteMemory
    runner: CudaRemoteRunner


def load_cuda_over_nodes(
    config: EngineConfig,
    spec: ModelSpec,
    precision: Precision,
    model: Decoder,
    device: StepDevice,
    backend: Backend,
    *,
    warms_up: bool = False,
) -> FarParts:
    """Connects to the nodes and makes a runner, which is warmed up on a GPU and with warms_up.
    ConfigError names the setting."""
    layers = model.attention_layers()
    shapes = StepShapes(config.batched_tokens, config.max_num_seqs, captures=False)
    sampler = DeviceSampler(spec.vocab_size, shapes.max_sampled, config.max_num_seqs, device.device)
    is_gpu = device.device.type == "cuda"
    if is_gpu:
        sampler.allocate_counts()  # before warm-up, because a new size recompiles kernels
        if config.tune:
            tune_products(model, shapes, device.device)
    free_bytes = kv_bytes(model, device, shapes, 0) - reserved_bytes(config, device)
    tail_bytes = min(config.kv_cache_bytes or free_bytes, free_bytes)
    share = CudaShare(config, precision, backend, device, tail_bytes)
    node_bytes = config.kv_cache_bytes or local_kv_bytes()
    try:
        remote = open_remote_memory(
            config, precision, spec, layers, get_backend("cpu"), node_bytes, share
        )
    except BaseException:
        share.staging.close()
        raise
    try:
        attention = CudaRemoteAttention(remote.attention, share.new)
        runner = CudaRunner(model, remote.kv, attention, sampler, device, shapes, memory=remote)
        if is_gpu or warms_up:
            runner.warm_up()
            share.warm_up(model.dtype, float_type(remote.attention.wire.kv))
    except BaseException:
        remote.close()
        raise
    return FarParts(remote, CudaRemoteRunner(runner, remote.attention.check_lanes))


class CudaShare:
    """The share of an engine on a CUDA device, or on Triton's interpreter."""

    new: CudaNewTokenAttention

    def __init__(
        self,
        config: EngineConfig,
        precision: Precision,
        backend: Backend,
        device: StepDevice,
        tail_bytes: int,
    ) -> None:
        """tail_bytes: the device memory for prompts that are being prefilled."""
        self.backend = backend
        self._config, self._device, self._tail_bytes = config, device, tail_bytes
        self._dtype: torch.dtype = getattr(torch, precision.kv)
        self._index = device.device.index or 0
        self._is_gpu = device.device.type == "cuda"
        self._layout: CudaKVLayout | None = None  # of the prompts
        self._merges: AttachRequest | None = None
        copier: Copier = HostCopier()
        if self._is_gpu:
            try:
                copier = CudaCopies(
                    device=device.device, compute_stream=device.stream, index=self._index
                )
            except CudaUnavailableError as error:
                raise ConfigError(str(error)) from error
        self.staging = DeviceStaging(copier)
        self.lanes = open_lanes(config, device)

    def tail_cache(self, template: AttachRequest, max_len: int) -> PromptTailCache:
        self._layout = layout = CudaKVLayout(template.layers, self._dtype, self._config.kv_group)
        layout.pad(-(-layout.tile_bytes // _LINE_BYTES) * _LINE_BYTES)
        page_bytes = UNIT_BYTES if self._is_gpu else _HOST_PAGE_BYTES
        most = template.num_ranges * (max_len * layout.token_bytes + page_bytes)
        num_pages = min(self._tail_bytes, most) // page_bytes
        memory: VirtualMemory
        if self._is_gpu:
            memory = CudaMemory(
                page_bytes,
                max(1, num_pages),
                device=self._index,
                settle=lambda first, end: self._device.wait(),
                compute_stream=self._device.stream,
            )
        else:
            memory = LinuxMemory(page_bytes, max(1, num_pages))
        group = LayerGroup(layout.token_bytes, layout.tile_tokens)
        pages = TailPages(memory, num_pages, group, None)
        self._max_len = max_len
        return PromptTailCache(template, max_len, self._tail_bytes, pages)

    def new_token_attention(
        self, template: AttachRequest, tail_cache: PromptTailCache | None
    ) -> CudaNewTokenAttention:
        layers, device = template.layers, self._device
        max_rows, max_seqs = self._config.batched_tokens, self._config.max_num_seqs
        tails = own = None
        if tail_cache is not None:
            assert self._layout is not None
            sizes = {"max_rows": max_rows, "max_seqs": max_seqs, "max_len": self._max_len}
            arrays = step_arrays(layers, **sizes, device=device.device)
            numbers = [list(range(len(layers)))]
            attention = CudaAttention([self._layout], numbers, [tail_cache.address], arrays)
            tails = DeviceRows(attention, device.pinned)
        if template.prefix_only:
            self._merges = template
            own = own_rows(
                layers,
                self._dtype,
                self._config.kv_group,
                max_rows=max_rows,
                max_seqs=max_seqs,
                device=device.device,
                pinned=device.pinned,
            )
        self.new = CudaNewTokenAttention(layers, own, tails)
        return self.new

    def warm_up(self, of_q: torch.dtype, of_k: torch.dtype) -> None:
        """Compiles the kernels that a step without sequences does not launch, for rows of these
        types."""
        self.new.warm_up(self._config.batched_tokens, of_q, of_k)
        self._device.wait()
        if self._merges is None:
            return
        device = self._device.device
        rows = torch.zeros(1, dtype=torch.int64, device=device)
        for heads, dim in {(x.num_heads, x.value_dim or x.head_dim) for x in self._merges.layers}:
            part = Partial(
                torch.zeros(1, heads, dim, device=device), torch.zeros(1, heads, device=device)
            )
            self.backend.merge_into(part, part)
            self.backend.merge_into(part, part, rows)
