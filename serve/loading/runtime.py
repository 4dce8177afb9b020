"""A loaded model: weights, K/V memory and attention.

This module knows precisions and sizes but no requests. The engine's loader and the evaluation call
it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial

import torch

from memory.attention.chunked import ChunkedAttention
from memory.attention.grouped import GroupedAttention, group_layers
from memory.attention.int8 import Int8KVLayout, Int8LocalAttention
from memory.attention.kv_layout import KVCache, KVLayout
from memory.attention.local import LocalAttention
from memory.attention.seam import AttentionLayer, PlannedAttention, layers_in
from memory.kv_manager import KVManager
from memory.kv_memory import KVMemory
from memory.nodes.node_set import NodeSet
from memory.pages.linux_vmm import LinuxMemory
from ops import Backend, get_backend
from ops.cpu import native_library
from ops.cpu.heap import keep_freed_memory
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.loading.disk_store import open_kv_store
from serve.loading.footprint import check_weights_fit
from serve.loading.kv_layouts import kv_layout, layer_groups
from serve.loading.kv_sizing import reserving, size_kv
from serve.loading.precision import Precision, choose_backend, resolve_precision
from serve.loading.remote_memory import open_remote_memory
from serve.machine import local_kv_bytes, usable_processors
from serve.models import Decoder, ModelSpec, StepModel, load_model, read_spec
from serve.models.checkpoint import weight_files
from serve.models.checksums import check_manifest
from serve.models.progress import LoadProgress
from serve.models.tensors import MakeLinear
from serve.runner.runner import Closable, Runner

logger = logging.getLogger(__name__)

CUDA_PAGE_BYTES = 2 << 20


@dataclass(slots=True)
class Runtime:
    """A loaded model. `memory` holds the K/V that `attention` reads; close it last."""

    spec: ModelSpec
    precision: Precision
    model: StepModel
    attention: PlannedAttention
    kv: KVMemory
    memory: Closable
    prefix_secret: bytes | None = None  # the secret of page keys on disk
    nodes: NodeSet | None = None
    runner: Runner | None = None  # set on devices with a runner of their own


def load_runtime(config: EngineConfig, progress: LoadProgress | None = None) -> Runtime:
    """Loads the weights and reserves the K/V. Call it in the compute thread."""
    progress = progress or LoadProgress()
    keep_freed_memory()
    check_manifest(config.model_path)
    converted = _Converter(config) if config.converter else None
    spec = read_spec(config.model_path) if converted is None else converted.spec
    config = replace(config, backend=choose_backend(config, spec))
    if config.backend == "cuda":
        _check_for_cuda(config)
    _set_threads(config)
    try:
        backend = get_backend(config.backend)
    except ValueError as error:
        raise ConfigError(f"backend: {error}") from error
    precision = resolve_precision(config, spec)
    if config.load_format != "random":
        weight_files(config.model_path)  # a missing file is named before a lack of memory
    check_weights_fit(config, spec, precision)
    if config.load_format == "random":
        logger.warning("load_format random: the weights are random, and so are the answers")
    if precision.backend == "cuda":
        return _load_cuda(config, spec, precision, backend, progress)
    num_threads = torch.get_num_threads()
    if precision.is_int8:
        torch.set_num_threads(1)  # weights are packed by the native kernels' threads
    try:
        model: StepModel
        if converted is None:
            model = _load_model(config, precision, backend, progress)
        else:
            model = converted.load(precision, backend, progress)
    finally:
        torch.set_num_threads(num_threads)
    layers = model.attention_layers()
    _leave_cores_to_native(precision, layers)
    if config.memory_nodes:
        local_bytes = config.kv_cache_bytes or local_kv_bytes()
        remote = open_remote_memory(config, precision, spec, layers, backend, local_bytes)
        return Runtime(
            spec, precision, model, remote.attention, remote.kv, remote, nodes=remote.nodes
        )
    return _load_local(config, spec, precision, model, backend)


def _check_for_cuda(config: EngineConfig) -> None:
    if config.memory_nodes:
        raise ConfigError("memory_nodes need the cpu back end, not cuda")
    page = config.kv_page_bytes
    if page is not None and torch.cuda.is_available() and page % CUDA_PAGE_BYTES:
        raise ConfigError(f"kv_page_bytes {page}: a GPU maps multiples of {CUDA_PAGE_BYTES}")


def _load_cuda(
    config: EngineConfig,
    spec: ModelSpec,
    precision: Precision,
    backend: Backend,
    progress: LoadProgress,
) -> Runtime:
    """Loads everything on a GPU; the GPU's modules are imported only here."""
    from serve.loading import cuda_runtime

    max_len = config.max_model_len or spec.max_model_len
    # refuses what the kernels do not have before the weights are read
    cuda_runtime.kv_layouts(config, precision, spec.attention_layers, max_len)
    device = cuda_runtime.make_step_device(backend.device)
    model = _load_model(config, precision, backend, progress)
    parts = cuda_runtime.load_cuda(config, spec, precision, model, device)
    _log_sizes(config, precision, parts.kv)
    return Runtime(
        spec,
        precision,
        model,
        parts.attention,
        parts.kv,
        parts.memory,
        parts.secret,
        runner=parts.runner,
    )


def _load_local(
    config: EngineConfig, spec: ModelSpec, precision: Precision, model: StepModel, backend: Backend
) -> Runtime:
    """Makes K/V and attention in this machine's memory."""
    layers = model.attention_layers()
    groups = group_layers(layers, config.max_model_len or spec.max_model_len)
    layouts = [kv_layout(config, precision, layers_in(layers, ids)) for _, ids in groups]
    windows = [window for window, _ in groups]
    sizes = size_kv(
        config,
        spec,
        layer_groups(layouts, windows),
    )
    for layout, padded in zip(layouts, sizes.groups, strict=True):
        layout.pad(padded.token_bytes * padded.tile_tokens)
    with reserving(sizes.page_bytes * sizes.num_pages, "kv_cache_bytes"):
        memory = LinuxMemory(sizes.page_bytes, sizes.num_pages)
    try:
        kv = KVManager(
            memory,
            num_pages=sizes.num_pages,
            num_ranges=config.max_num_seqs,
            max_model_len=sizes.max_model_len,
            groups=sizes.groups,
            max_rows=config.chunk_tokens,
            in_background=_has_idle_core(config),
        )
        with reserving(kv.total_bytes, "max_num_seqs and max_model_len"):
            address = memory.reserve(kv.total_bytes)
        attention = _attention(kv, layouts, groups, address, backend)
        secret = None
        if config.kv_cache_dir is not None:
            store, secret = open_kv_store(
                config,
                precision,
                # a converted model's rotated keys may have another order
                backend=f"converter {backend.name}" if config.converter else backend.name,
                groups=sizes.groups,
                page_bytes=sizes.page_bytes,
            )
            kv.prefixes.use_store(store, memory.page_address, memory.keep_pages)
    except BaseException:
        memory.close()
        raise
    _log_sizes(config, precision, kv)
    return Runtime(spec, precision, model, attention, kv, memory, secret)


def _log_sizes(config: EngineConfig, precision: Precision, kv: KVManager) -> None:
    logger.info(
        "%s: %s, context %d, %d K/V pages of %d KiB or %d tokens (%s bytes a token)",
        config.model_name,
        precision,
        kv.max_model_len,
        kv.num_pages,
        kv.page_bytes >> 10,
        kv.layout.groups[0].tokens_in(1),
        " + ".join(str(group.layers) for group in kv.layout.groups),
    )


def _set_threads(config: EngineConfig) -> None:
    """Sets the thread counts of torch and of the native kernels."""
    # torch's own count may have been lowered by an engine in this process
    processors = usable_processors()
    count = min(config.compute_threads or processors, processors)
    torch.set_num_threads(count)
    if not native_library.is_available():
        return
    # one thread team serves all engines of the process; only an explicit setting reduces it
    native_library.set_num_threads(count)
    logger.info(
        "native kernels: %s, %d threads",
        native_library.instruction_set(),
        native_library.num_threads(),
    )


def _has_idle_core(config: EngineConfig) -> bool:
    """Returns whether a core is free for a thread that maps pages ahead.

    If every core computes, that thread delays one that the others wait for, which costs more than
    mapping in the step.
    """
    processors = usable_processors()
    return min(config.compute_threads or processors, processors) < processors


def _leave_cores_to_native(precision: Precision, layers: list[AttentionLayer]) -> None:
    """Sets torch to one thread if native kernels do most of a step.

    Two thread teams on the same cores would wait for each other.
    """
    if not native_library.is_available() or precision.compute == torch.float16:
        return
    has_attention = native_library.instruction_set() != "portable" and all(
        layer.head_dim % 16 == 0 for layer in layers
    )
    if precision.kv == "int8" or has_attention:
        torch.set_num_threads(1)


class _Converter:
    """Loads a model by serve.converter, which is imported only here."""

    def __init__(self, config: EngineConfig) -> None:
        from serve.converter import model

        if config.backend == "cuda":
            raise ConfigError("converter needs the cpu back end, not cuda")
        self._config, self._module = config, model
        # that of the products is known when the layers are
        likely = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self._exported = model.export(config.model_path, likely)

    @property
    def spec(self) -> ModelSpec:
        return self._exported.spec

    def load(self, precision: Precision, backend: Backend, progress: LoadProgress) -> StepModel:
        if precision.compute != self._exported.dtype:
            self._exported = self._module.export(self._config.model_path, precision.compute)
        make_linear, make_head = _packers(self._config, precision, backend) or (None, None)
        return self._module.load_converted(
            self._exported,
            backend=backend,
            make_linear=make_linear,
            make_head=make_head,
            keep_weight_dtype=precision.is_int8,
            is_random=self._config.load_format == "random",
            progress=progress,
        )


def _load_model(
    config: EngineConfig, precision: Precision, backend: Backend, progress: LoadProgress
) -> Decoder:
    path = config.model_path
    q_first = bool(config.memory_nodes)  # nodes start as soon as they have q
    is_random = config.load_format == "random"
    packers = _packers(config, precision, backend)
    if packers is None:
        return load_model(
            path,
            dtype=precision.compute,
            backend=backend,
            unpack=True,
            q_first=q_first,
            is_random=is_random,
            max_model_len=config.max_model_len,
            progress=progress,
        )
    return load_model(
        path,
        dtype=precision.compute,
        backend=backend,
        make_linear=packers[0],
        make_head=packers[1],
        keep_weight_dtype=True,
        q_first=q_first,
        is_random=is_random,
        max_model_len=config.max_model_len,
        progress=progress,
    )


def _packers(
    config: EngineConfig, precision: Precision, backend: Backend
) -> tuple[MakeLinear, MakeLinear] | None:
    """Returns what packs products and the last one into 8 bits or fewer; None: they stay plain."""
    if not precision.is_int8:
        return None
    linears = backend.quantized
    assert linears is not None, "resolve_precision checks this"
    make_linear: MakeLinear = linears.int8
    if precision.weights == "fp8":
        make_linear = linears.fp8
    elif precision.weights in ("int4", "nf4"):
        is_nf4 = precision.weights == "nf4"
        make_linear = partial(linears.rounded4, group=config.weight_group, is_nf4=is_nf4)
    return make_linear, partial(linears.int8, is_head=True)


def _attention(
    kv: KVManager,
    layouts: list[KVLayout | Int8KVLayout],
    groups: list[tuple[int | None, list[int]]],
    address: int,
    backend: Backend,
) -> PlannedAttention:
    """Makes attention over the reservation at `address`; groups: window and layer numbers of each
    layout."""
    parts: list[PlannedAttention] = []
    for number, layout in enumerate(layouts):
        start, end = (address + kv.group_offset(i) for i in (number, number + 1))
        if isinstance(layout, Int8KVLayout):
            parts.append(Int8LocalAttention(layout, start))
        else:
            cache = KVCache(layout, start, end - start)
            parts.append(LocalAttention(layout.layers, cache, backend))
        chunk, (window, _) = layout.layers[0].chunk, groups[number]
        if chunk is not None and window is not None:
            if chunk % layout.tile_tokens:
                raise ConfigError(
                    f"attention_chunk_size is {chunk}; K/V in {layout.tile_tokens} tokens a tile "
                    "needs a multiple of them: use kv_dtype bfloat16 or float32"
                )
            parts[-1] = ChunkedAttention(parts[-1], chunk)
    return parts[0] if len(parts) == 1 else GroupedAttention(parts, [ids for _, ids in groups])
