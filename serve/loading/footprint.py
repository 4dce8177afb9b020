"""What a model takes in memory, a GPU's or this machine's, before it is loaded, and what fits.

Sizes follow from the description of the model and, for a quantized checkpoint, from the tensors in
its files and what they become.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from memory.pages.layer_groups import PageLayout, kept_bytes
from ops.cpu import native_library
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.loading.kv_layouts import expected_groups
from serve.loading.kv_sizing import size_kv
from serve.loading.precision import ROUNDED_TO_4_BITS, Precision, resolve_precision
from serve.machine import KV_SHARE_OF_FREE_MEMORY, available_memory
from serve.models import ModelSpec, ParameterCounts, count_parameters, expect_tensors
from serve.models.checkpoint import Checkpoint
from serve.models.open_checkpoint import has_files, open_checkpoint
from serve.units import format_memory

if TYPE_CHECKING:
    from serve.loading.host_weights.needs import PackedSizes

logger = logging.getLogger(__name__)

# bits of a weight of a product, without the scales of groups
_BITS = {"int8": 8.0, "fp8": 8.0, **dict.fromkeys(ROUNDED_TO_4_BITS, 4.0)}
_GROUP_SCALE_BITS = 16
_CHANNEL_BYTES = 4  # the scale of an output of a quantized product
_OTHER_BYTES = 4  # norms, biases and routers are fp32, or negligible
_SMALLER = ("bfloat16", "int8", "int4")
_PACKED = 1.02  # the file of packed weights, in the weights
_KV_SHARE_OF_DEVICE = 0.8  # of a GPU's memory beside the weights; steps and graphs take the rest


# of the native kernels: memory that parts are cut from (ops/csrc/buffer.cpp), and the rows that the
# experts of a mixture keep, each with one of its experts (ops/csrc/experts.inl)
_SLAB_BYTES, _MAX_PART_BYTES = 64 << 20, 8 << 20
_MAX_PAIRS = 8192


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """The bytes of a model's weights in memory, by the parts of ParameterCounts."""

    blocks: float = 0.0
    experts: float = 0.0
    head: float = 0.0
    tables: float = 0.0
    others: float = 0.0

    @property
    def total(self) -> int:
        return int(self.blocks + self.experts + self.head + self.tables + self.others)


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a model takes. kv_token_bytes: a token's K/V in all layers. state_bytes: a sequence's
    state in all layers that have one. max_tokens: the longest context that fits; max_sequences: how
    many of that length, one of them while it is computed; 0 if the weights do not fit."""

    weight_bytes: int
    kv_token_bytes: int
    max_tokens: int
    max_sequences: int
    state_bytes: int = 0


def weight_bytes(
    config: EngineConfig,
    spec: ModelSpec,
    precision: Precision,
    checkpoint: Checkpoint | None = None,
) -> WeightBytes:
    """Returns the bytes of all weights. checkpoint: needed for the sizes of quantized weights that
    stay as they are."""
    counts, packed = count_parameters(spec), ParameterCounts()
    if spec.packed is not None and precision.is_int8 and checkpoint is not None:
        has_superblocks = precision.backend == "cpu"
        expected = expect_tensors(spec, checkpoint, has_superblocks=has_superblocks)
        counts, packed = expected.counts, expected.packed_bytes
    return bytes_of(config, spec, precision, counts, packed)


def bytes_of(
    config: EngineConfig,
    spec: ModelSpec,
    precision: Precision,
    counts: ParameterCounts,
    packed: ParameterCounts,
) -> WeightBytes:
    """Returns the bytes of so many weights of a model. packed: bytes of those that stay as the
    checkpoint has them, which counts does not have."""
    plain_bits = 8.0 * precision.compute.itemsize
    bits = head_bits = _BITS.get(precision.weights, plain_bits)
    if bits == 4:
        bits, head_bits = bits + _GROUP_SCALE_BITS / config.weight_group, 8.0
    # a tied table is in memory twice: in the file's type, and packed for the last product
    looked_up = counts.tables + (counts.head if spec.is_tied else 0)
    return WeightBytes(
        packed.blocks + counts.blocks * bits / 8,
        packed.experts + counts.experts * bits / 8,
        packed.head + counts.head * head_bits / 8,
        looked_up * _table_bytes(spec),
        packed.others + counts.others * _OTHER_BYTES,
    )


def _table_bytes(spec: ModelSpec) -> int:
    """Returns the bytes of a number in the file, in whose type tables stay."""
    return 4 if spec.torch_dtype == "float32" else 2


def packed_sizes(config: EngineConfig, spec: ModelSpec, precision: Precision) -> PackedSizes:
    """Returns how large a model's products become on a device."""
    from serve.loading.host_weights.needs import PackedSizes  # only some models need it

    def size(counts: ParameterCounts, packed: ParameterCounts) -> tuple[float, float, float]:
        found = bytes_of(config, spec, precision, counts, packed)
        return found.blocks, found.experts, found.total - found.blocks - found.experts

    group = config.weight_group if precision.weights in ROUNDED_TO_4_BITS else None
    return PackedSizes(size, precision.is_int8, group)


def free_memory(precision: Precision) -> int:
    """Returns the free bytes of the memory into which a model is loaded."""
    if precision.backend != "cuda" or not torch.cuda.is_available():
        return available_memory()
    unused = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()  # torch's cache
    return int(torch.cuda.mem_get_info()[0]) + unused


def expert_scratch_bytes(
    config: EngineConfig, spec: ModelSpec, precision: Precision, weights: WeightBytes
) -> int:
    """Returns the most that mixtures take beside their weights on a CPU: the ends of slabs, into
    which the next part did not fit, and the memory of their rows, which is kept."""
    mixtures = spec.mixtures
    if precision.backend != "cpu" or not mixtures:
        return 0
    part = weights.experts / sum(each.num_experts for each in mixtures) * 2 / 3  # gate and up
    ends = weights.experts * part / _SLAB_BYTES if part <= _MAX_PART_BYTES else 0.0
    size = max(each.expert.size for each in mixtures)
    pairs = min(_MAX_PAIRS, config.batched_tokens * max(each.router.top_k for each in mixtures))
    # rows of 8 bits, and results of gate and up in bf16 before they are rounded
    row = spec.hidden_size + 3 * size
    return int(ends) + pairs * (row if precision.is_int8 else precision.compute.itemsize * row)


def footprint(
    config: EngineConfig, spec: ModelSpec, precision: Precision, weights: WeightBytes
) -> Footprint:
    """Returns what a model takes and what fits beside it into the memory that is free now."""
    groups = expected_groups(config, precision, spec)
    token_bytes = kept_bytes([group for group in groups if not group.is_state])
    state = sum(group.token_bytes * group.tile_tokens for group in groups if group.is_state)
    share = _KV_SHARE_OF_DEVICE if precision.backend == "cuda" else KV_SHARE_OF_FREE_MEMORY
    used = weights.total + expert_scratch_bytes(config, spec, precision, weights)
    free = int((free_memory(precision) - used) * share)
    tokens = sequences = 0
    if free > 0:
        many = replace(config, max_num_seqs=1 << 20)  # not what the setting allows: what fits
        try:
            sizes = size_kv(many, spec, groups, free_bytes=free, is_trial=True)
        except ConfigError:  # not one token
            return Footprint(weights.total, token_bytes, 0, 0, state)
        tokens = sizes.max_model_len
        layout = PageLayout(sizes.groups, sizes.page_bytes, tokens, config.chunk_tokens)
        beside = sizes.num_pages - layout.pages_for(tokens)
        sequences = 1 + beside // layout.pages_at(tokens)
    return Footprint(weights.total, token_bytes, tokens, sequences, state)


def check_weights_fit(
    config: EngineConfig, spec: ModelSpec, precision: Precision, num_devices: int = 1
) -> None:
    """Raises ConfigError if the weights do not fit the free memory, of so many devices as this.

    It names the dtypes that would fit, each with the context and the sequences that fit beside it.
    Weights that may be in a peer's memory are for `WeightPeers` to check.
    """
    if _may_be_shared(config):
        return
    free, checkpoint = free_memory(precision) * num_devices, None
    need = weight_bytes(config, spec, precision)
    if spec.packed is not None and precision.is_int8 and config.load_format != "random":
        # its exact size is read from the headers, where they matter
        if need.total * spec.packed.bits / 8 * 2 <= free:
            return
        if config.weights_from and not has_files(config.model_path):
            return  # a peer tells about the tensors later
        checkpoint = open_checkpoint(config.model_path, spec)
        need = weight_bytes(config, spec, precision, checkpoint)
    scratch = expert_scratch_bytes(config, spec, precision, need)
    if need.total + scratch <= free:
        return
    beside = f", working memory of the experts {format_memory(scratch)}" if scratch else ""
    raise ConfigError(
        f"the weights take {format_memory(need.total)} or more as {precision.weights_name}{beside},"
        f" and {format_memory(free)} of memory are free; {_advice(config, spec, precision, free)}"
    )


def check_unshared(config: EngineConfig, spec: ModelSpec, precision: Precision) -> None:
    """Checks what check_weights_fit has left to `WeightPeers`: weights that no peer shares."""
    if _may_be_shared(config):
        check_weights_fit(replace(config, weights_from=()), spec, precision)


def _may_be_shared(config: EngineConfig) -> bool:
    """Returns whether the weights may turn out to be in the memory of a replica on this machine."""
    return config.num_ranks == 1 and any(url.startswith("shm:") for url in config.weights_from)


def check_streaming(config: EngineConfig, precision: Precision) -> None:
    """Raises ConfigError if weight_memory_bytes or host_weight_bytes is set and something excludes
    it."""
    if config.host_weight_bytes is not None and precision.backend != "cuda":
        raise ConfigError(f"host_weight_bytes needs the cuda back end, not {precision.backend}")
    if config.weight_memory_bytes is not None:
        problem = _refusal(config, precision)
        if problem is not None:
            raise ConfigError(f"weight_memory_bytes: {problem}")


def weight_budget(config: EngineConfig, spec: ModelSpec, precision: Precision) -> int | None:
    """Returns the most memory of all weights; None: they are in memory. ConfigError if they do not
    fit and cannot be read from the disk in every step."""
    if config.weight_memory_bytes is not None:
        return min(config.weight_memory_bytes, free_memory(precision))
    try:
        check_weights_fit(config, spec, precision)
    except ConfigError as error:
        # only such models need it
        from serve.loading.streaming.placement import LEAST_SHARE, SHARE_OF_FREE

        budget = int(free_memory(precision) * SHARE_OF_FREE)
        if config.kv_cache_bytes is not None:
            budget = min(budget, free_memory(precision) - config.kv_cache_bytes)
        about = about_bytes(config, spec, precision)
        if _refusal(config, precision) is not None or budget < LEAST_SHARE * about:
            raise
        logger.warning(
            "the weights (%s) do not fit into memory: %s of them will, the rest is %s"
            " (weight_memory_bytes); %s",
            format_memory(about),
            format_memory(budget),
            "in host memory, or on the disk"
            if precision.backend == "cuda"
            else "read from the disk in every step",
            error,  # it says in which type they would fit
        )
        return budget
    return None


def about_bytes(config: EngineConfig, spec: ModelSpec, precision: Precision) -> int:
    """Returns about how many bytes the packed weights take."""
    return int(_PACKED * _by_headers(config, spec, precision).total)


def streamed_bytes(config: EngineConfig, spec: ModelSpec, precision: Precision) -> tuple[int, int]:
    """Returns about_bytes, and a number of bytes without which no weights can stream: the least of
    a model with layers of the mean size, without norms, biases and scales. What a model needs is
    known when it is packed, and is a little more."""
    from serve.loading.streaming.estimate import expected_needs  # only such models need it
    from serve.loading.streaming.placement import Mixtures, least_bytes

    found, layers = _by_headers(config, spec, precision), spec.num_layers
    mixtures = []
    if spec.mixtures:
        counts = tuple(each.num_experts for each in spec.mixtures)
        top_k = min(each.router.top_k for each in spec.mixtures)
        mixtures.append(Mixtures(counts, top_k, int(found.experts / sum(counts))))
    table = found.tables
    if precision.weights == "plain":  # in the type of rows, if that is smaller
        table *= min(1.0, precision.compute.itemsize / _table_bytes(spec))
    has_scales = precision.is_int8 and spec.packed is None
    needs = expected_needs(
        layers=[found.blocks / layers] * layers,
        head=found.head + has_scales * _CHANNEL_BYTES * spec.vocab_size,
        num_out=spec.vocab_size,
        table=table,
        num_rows=spec.vocab_size,
        mixtures=mixtures,
    )
    return int(_PACKED * found.total), least_bytes(needs)


def _by_headers(config: EngineConfig, spec: ModelSpec, precision: Precision) -> WeightBytes:
    checkpoint = None if spec.packed is None else open_checkpoint(config.model_path, spec)
    return weight_bytes(config, spec, precision, checkpoint)


def _refusal(config: EngineConfig, precision: Precision) -> str | None:
    """Returns why weights cannot stream, None if they can."""
    if precision.backend not in ("cpu", "cuda") or not native_library.is_available():
        return "only the native kernels, and a GPU beside them, compute weights beyond memory"
    excluded = {
        "tensor_parallel_size and pipeline_parallel_size": config.num_ranks > 1,
        "memory_nodes": bool(config.memory_nodes),
    }
    if precision.backend == "cpu":
        excluded |= {
            "converter": config.converter,
            "load_format random": config.load_format == "random",
            "weights_from": bool(config.weights_from),
            "weights_listen": config.weights_listen is not None,
            "packed_cache off": config.packed_cache == "off",
        }
    for name, is_set in excluded.items():
        if is_set:
            return f"it cannot be used with {name}"
    return None


def _advice(config: EngineConfig, spec: ModelSpec, precision: Precision, free: int) -> str:
    if spec.packed is not None and precision.is_int8:
        return "a smaller model is needed"
    fits = []
    for dtype in ("auto",) if spec.packed is not None else _SMALLER:
        try:
            smaller = resolve_precision(replace(config, dtype=dtype), spec, is_trial=True)
        except ConfigError:  # not on this machine
            continue
        checkpoint = None if spec.packed is None else open_checkpoint(config.model_path, spec)
        weights = weight_bytes(config, spec, smaller, checkpoint)
        scratch = expert_scratch_bytes(config, spec, smaller, weights)
        is_smaller = weights.total < weight_bytes(config, spec, precision).total
        if weights.total + scratch <= free and is_smaller:
            found = footprint(config, spec, smaller, weights)
            fits.append(f"{dtype} ({format_memory(weights.total)}{_beside(found)})")
    return f"dtype {' or '.join(fits)} would fit" if fits else "a smaller model is needed"


def _beside(found: Footprint) -> str:
    if not found.max_sequences:
        return ", with no room for K/V"
    sequences = f"{found.max_sequences:,} sequence{'s' * (found.max_sequences > 1)}"
    return f", with {sequences} of {found.max_tokens:,} tokens beside it"
