"""What a model is loaded from, and loading its weights: back end, precision, threads, packing.

runtime.py adds K/V memory and attention for one rank, serve/group for several.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from memory.attention.seam import AttentionLayer
from memory.attention.tiled import TILED_TYPES
from ops import Backend, get_backend
from ops.cpu import native_library
from ops.cpu.heap import keep_freed_memory
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.loading.footprint import check_streaming, packed_sizes, streamed_bytes
from serve.loading.node_key import read_key_file
from serve.loading.precision import (
    Precision,
    choose_backend,
    packers,
    resolve_precision,
)
from serve.machine import usable_processors
from serve.models import (
    Decoder,
    ModelSpec,
    StageModel,
    StepModel,
    load_embedding,
    load_model,
    read_spec,
)
from serve.models.checkpoint import Checkpoint
from serve.models.checksums import check_manifest
from serve.models.loaded_tensors import LoadedTensors, TensorCache
from serve.models.open_checkpoint import files_of, has_files, stored_files
from serve.models.packed_cache.cache import DEFAULT_BYTES, PackedCache, wait_until_kept
from serve.models.progress import LoadProgress
from serve.models.shard import WHOLE, Shard
from serve.models.weights import joining
from serve.read_ahead import records_folder
from serve.setting_checks import DRAFT_HEADS

if TYPE_CHECKING:
    from serve.weight_peers.peers import WeightPeers

logger = logging.getLogger(__name__)

CUDA_PAGE_BYTES = 2 << 20
_FINGERPRINT_DIGITS = 32  # of the checkpoint's, which replicas compare


class ModelSource(NamedTuple):
    """A model that is about to be loaded: the settings with their back end, and what they mean.

    converter: what loads it, if the converter does. peers: replicas from which weights come, or to
    which they go. weight_budget: the most memory of the weights; None: all are in memory.
    """

    config: EngineConfig
    spec: ModelSpec
    precision: Precision
    backend: Backend
    converter: Converter | None = None
    peers: WeightPeers | None = None
    weight_budget: int | None = None


def read_source(config: EngineConfig, local_rank: int | None = None) -> ModelSource:
    """Reads the configuration, decides back end and precision, and sets the numbers of threads.

    local_rank: the number of this rank among those of its host, which have a GPU each, as far as
    there are enough; None: the model has one rank, on torch's current GPU.
    """
    keep_freed_memory()
    check_manifest(config.model_path)
    converter = Converter(config) if config.converter else None
    spec = read_spec(config.model_path) if converter is None else converter.spec
    config = replace(config, backend=choose_backend(config, spec))
    if config.speculation in DRAFT_HEADS:
        spec = _with_draft_head(config, spec)
    if config.backend == "cuda":
        _check_for_cuda(config)
        if local_rank is not None and torch.cuda.is_available():
            torch.cuda.set_device(local_rank % torch.cuda.device_count())
    _set_threads(config)
    try:
        backend = get_backend(config.backend)
    except ValueError as error:
        raise ConfigError(f"backend: {error}") from error
    precision = resolve_precision(config, spec)
    check_streaming(config, precision)
    if config.load_format == "random":
        logger.warning("load_format random: the weights are random, and so are the answers")
    elif not config.weights_from:
        files_of(config.model_path)  # a missing file is named before a lack of memory
    peers = None
    if config.weights_from or config.weights_listen is not None:
        peers = _weight_peers(config, spec, precision)
    return ModelSource(config, spec, precision, backend, converter, peers)


def _weight_peers(config: EngineConfig, spec: ModelSpec, precision: Precision) -> WeightPeers:
    """Returns the replicas of the settings; their modules are imported only here."""
    from serve.loading.footprint import check_unshared
    from serve.models.open_checkpoint import checkpoint_fingerprint
    from serve.weight_peers.peers import PeerSettings, WeightPeers
    from transport import check_scheme

    used = "weights_from" if config.weights_from else "weights_listen"
    if not _packs_natively(precision):
        raise ConfigError(f"{used} needs the native kernels of the cpu back end")
    key_file = config.weights_key_file or config.kv_peer_key_file
    if key_file is None:
        raise ConfigError(
            f"{used} needs a weights_key_file (or kv_peer_key_file), a secret that the replicas of"
            " this model share"
        )
    for url in (*config.weights_from, *filter(None, [config.weights_listen])):
        try:
            check_scheme(url)
        except ValueError as error:
            raise ConfigError(f"{used}: {error}") from error
    path = config.model_path
    settings = PeerSettings(
        path,
        config.weights_from,
        config.weights_listen,
        read_key_file(key_file, "weights_key_file"),
        config.weights_rate_bytes,
        has_files(path),
        lambda: checkpoint_fingerprint(path, with_times=False)[:_FINGERPRINT_DIGITS],
        lambda: check_unshared(config, spec, precision),
    )
    return WeightPeers(settings)


def _packs_natively(precision: Precision) -> bool:
    return precision.backend == "cpu" and native_library.is_available()


def _with_draft_head(config: EngineConfig, spec: ModelSpec) -> ModelSpec:
    """Adds what the settings draft with. ConfigError where it would not be computed."""
    if config.backend == "cuda" and config.num_ranks > 1:
        raise ConfigError(
            f"speculation {config.speculation} needs one GPU, not {config.num_ranks} ranks of them"
        )
    if config.speculation == "mtp":
        from serve.models.draft_heads.mtp import read_mtp

        return replace(spec, draft_head=read_mtp(config.model_path, spec))
    from serve.models.draft_heads.eagle3 import read_eagle3

    return replace(spec, draft_head=read_eagle3(_head_path(config), spec)[0])


def load_weights(source: ModelSource, progress: LoadProgress) -> StepModel:
    """Loads the weights."""
    return load_part(source, progress, WHOLE)


def load_part(
    source: ModelSource, progress: LoadProgress, shard: Shard, number: int = 0
) -> StageModel:
    """Loads the weights of a shard, by the converter if it serves the model. number: the rank's."""
    _, _, precision, backend, converter, peers, _ = source
    if peers is not None:
        peers.begin(number, progress)
    if converter is None:
        return load_shard(source, progress, shard)
    with _packing(precision):
        model = converter.load(precision, backend, progress, shard)
    _leave_cores_to_native(precision, model.attention_layers())
    return model


def load_shard(source: ModelSource, progress: LoadProgress, shard: Shard) -> Decoder:
    """Loads the weights of a shard of a decoder."""
    config, _, precision, *_ = source
    with _packing(precision):
        model = _load_model(source, progress, shard)
        if config.speculation == "eagle3":
            _add_eagle3(source, model)
    _leave_cores_to_native(precision, model.attention_layers())
    return model


@contextmanager
def _packing(precision: Precision) -> Iterator[None]:
    """Leaves the cores to the native kernels' threads, which pack weights."""
    num_threads = torch.get_num_threads()
    if precision.is_int8 and precision.backend != "cuda":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
        if precision.backend == "cuda":
            from ops.cuda.upload import free_uploaders  # only this back end has them

            free_uploaders()


def _check_for_cuda(config: EngineConfig) -> None:
    for setting in ("kvp", "borrow", "lend"):
        if getattr(config, setting):
            raise ConfigError(f"{setting} needs the cpu back end, not cuda")
    page = config.kv_page_bytes
    if page is not None and torch.cuda.is_available() and page % CUDA_PAGE_BYTES:
        raise ConfigError(f"kv_page_bytes {page}: a GPU maps multiples of {CUDA_PAGE_BYTES}")


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


def _leave_cores_to_native(precision: Precision, layers: list[AttentionLayer]) -> None:
    """Sets torch to one thread if native kernels do most of a step.

    Two thread teams on the same cores would wait for each other.
    """
    if not native_library.is_available() or precision.compute == torch.float16:
        return
    has_attention = native_library.instruction_set() != "portable" and all(
        layer.head_dim % 16 == 0 for layer in layers
    )
    if precision.kv in TILED_TYPES or has_attention:
        torch.set_num_threads(1)


class Converter:
    """Loads a model by serve.converter, which is imported only here."""

    def __init__(self, config: EngineConfig) -> None:
        from serve.converter import model

        if config.backend == "cuda":
            raise ConfigError("converter needs the cpu back end, not cuda")
        if any(file.suffix == ".gguf" for file in stored_files(config.model_path)):
            raise ConfigError("converter loads Hugging Face directories, no GGUF files")
        self._config, self._module = config, model
        # that of the products is known when the layers are
        likely = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
        self._exported = model.export(config.model_path, likely)

    @property
    def spec(self) -> ModelSpec:
        return self._exported.spec

    @property
    def stage_starts(self) -> list[int]:
        return self._exported.stage_starts

    def load(
        self, precision: Precision, backend: Backend, progress: LoadProgress, shard: Shard
    ) -> StageModel:
        if precision.compute != self._exported.dtype:
            self._exported = self._module.export(self._config.model_path, precision.compute)
        make_linear, make_head = packers(self._config, precision, backend) or (None, None)
        return self._module.load_converted(
            self._exported,
            backend=backend,
            make_linear=make_linear,
            make_head=make_head,
            keep_weight_dtype=precision.is_int8,
            is_random=self._config.load_format == "random",
            progress=progress,
            shard=shard,
        )


def _load_model(source: ModelSource, progress: LoadProgress, shard: Shard) -> Decoder:
    config, spec, precision, backend, *_ = source
    path = config.model_path
    q_first = bool(config.memory_nodes)  # nodes start as soon as they have q
    is_random = config.load_format == "random"
    make_linear, make_head = packers(config, precision, backend) or (None, None)
    return load_model(
        path,
        dtype=precision.compute,
        backend=backend,
        make_linear=make_linear,
        make_head=make_head,
        keep_weight_dtype=precision.is_int8,
        unpack=not precision.is_int8,
        q_first=q_first,
        is_random=is_random,
        max_model_len=config.max_model_len,
        progress=progress,
        shard=shard,
        packed_cache=_tensor_cache(source),
        draft_head=spec.draft_head if config.speculation == "mtp" else None,
    )


def _tensor_cache(source: ModelSource) -> TensorCache | None:
    config, spec, precision, *_ = source
    if source.weight_budget is None:
        is_random = config.load_format == "random"
        return None if is_random else _packed_cache(config, precision, source.peers)
    if precision.backend == "cuda":
        return _host_weights(source, source.weight_budget)
    packed = _packed_cache(config, precision, source.peers)
    from serve.loading.streaming.cache import StreamingCache  # only such models need it

    assert packed is not None, "check_streaming"
    about, least = streamed_bytes(config, spec, precision)
    if config.packed_cache_bytes is None:  # this model cannot do without its file
        packed.max_bytes = max(packed.max_bytes, about)
    return StreamingCache(packed, source.weight_budget, about, least_bytes=least)


def _host_weights(source: ModelSource, budget: int) -> TensorCache:
    """Returns what leaves weights in host memory beside a GPU; it is imported only here."""
    from serve.loading.host_weights.cache import HostWeightsCache

    config, spec, precision, backend, *_ = source
    cpu, is_fp8 = get_backend("cpu"), precision.weights == "fp8"
    pack = joining(cpu.pack_linear)
    if not is_fp8:  # CPUs have no such products, which the cache refuses
        pack, _ = packers(config, precision, cpu) or (pack, pack)
    sizes = packed_sizes(config, spec, precision)
    limits = budget, config.host_weight_bytes
    return HostWeightsCache(spec, sizes, *limits, pack, backend.device, is_fp8, config.packed_cache)


def _head_path(config: EngineConfig) -> Path:
    return Path(str(config.draft_model)).expanduser()


def _add_eagle3(source: ModelSource, model: Decoder) -> None:
    """Loads a head in the model's precision and adds it to the model."""
    from serve.models.draft_heads.eagle3 import load_eagle3, read_eagle3

    config, _, precision, backend, *_ = source
    plain = joining(backend.pack_linear)
    make_linear, make_head = packers(config, precision, backend) or (plain, plain)
    is_int8 = precision.is_int8

    def tensors(checkpoint: Checkpoint) -> LoadedTensors:
        return LoadedTensors(
            checkpoint,
            None,
            backend,
            precision.compute,
            make_linear,
            make_head,
            weight_dtype=None if is_int8 else precision.compute,
            unpack=not is_int8,
            is_transposed=False,
        )

    path, is_random = _head_path(config), config.load_format == "random"
    head, block = read_eagle3(path, model.spec)
    loaded = load_eagle3(path, head, block, model, tensors, is_random=is_random)
    if loaded.weights.embed is None and config.num_ranks > 1:  # a rank has some columns only
        loaded.weights.embed = load_embedding(config.model_path, backend, is_random=is_random)
    model.add_draft_head(loaded)


def wait_for_packed_weights() -> None:
    """Returns when no thread holds weights any more to keep them for the next start."""
    wait_until_kept()


def _packed_cache(
    config: EngineConfig, precision: Precision, peers: WeightPeers | None = None
) -> PackedCache | None:
    """Returns where packed weights are kept between starts, or come from; None: nowhere."""
    is_kept = config.packed_cache != "off"
    if not _packs_natively(precision) or (not is_kept and peers is None):
        return None
    folder = None if config.packed_cache in ("auto", "off") else Path(config.packed_cache)
    settings = f"{precision.weights} {config.weight_group}"
    records = records_folder(config.packed_cache) if config.num_ranks == 1 else None
    most = config.packed_cache_bytes or DEFAULT_BYTES
    return PackedCache(settings, folder, most, records=records, has_files=is_kept, peers=peers)
