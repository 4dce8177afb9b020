"""How K/V of a model's layers is stored: layouts and layer groups, before memory is reserved."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol

import torch

from memory.attention.grouped import group_layers
from memory.attention.layouts import Layout, make_layout
from memory.attention.seam import AttentionLayer, layers_in
from memory.attention.tiled import TILED_TYPES, TiledKVLayout, is_selectable
from memory.pages.layer_groups import LayerGroup, kept_bytes
from memory.policies.drop_schedule import layer_budgets
from memory.policies.selection import Selection, selection_of
from memory.policies.setting import parse_kv_policy
from ops.cpu import native_library
from quant.kv import RECENT_BLOCK
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.loading.kv_sizing import HasContext, page_bytes_of
from serve.loading.precision import Precision
from serve.models import ModelSpec

if TYPE_CHECKING:
    from memory.attention.cuda import CudaKVLayout
    from memory.states.layout import StateLayout

logger = logging.getLogger(__name__)

OFFLOAD = "kv_offload_bytes"

_MOST_GROUPS = 8  # of layers without windows
_PROMPT_TOKENS = 2048  # of the sequence for which their number is chosen, if its context allows


def kv_layout(
    config: EngineConfig, precision: Precision, layers: Sequence[AttentionLayer]
) -> Layout:
    has_bounds = selects(config) and precision.kv in TILED_TYPES
    return make_layout(layers, precision.kv, config.kv_group, has_bounds=has_bounds)


def selects(config: EngineConfig) -> bool:
    """Returns whether decoded rows read a part of the K/V."""
    return selection_of(parse_kv_policy(config.kv_policy)) is not None


def open_selection(
    config: EngineConfig,
    precision: Precision,
    layers: Sequence[AttentionLayer],
    *,
    is_trial: bool = False,
) -> Selection | None:
    """Returns what decoded rows read, as configured; None if it is everything. ConfigError names
    what cannot select. is_trial: nothing is loaded with it, and nothing is logged."""
    selection = selection_of(parse_kv_policy(config.kv_policy))
    if selection is None:
        return None
    name = f"kv_policy {selection.policy.name}"
    if precision.backend == "cpu" and precision.kv not in TILED_TYPES:
        raise ConfigError(f"{name} needs kv_dtype int8 or int4, not {precision.kv}")
    if precision.backend != "cpu" and config.memory_nodes:
        raise ConfigError(f"{name} with memory_nodes needs the cpu back end")
    count = sum(map(is_selectable, layers))
    if not count:
        raise ConfigError(
            f"{name} has nothing to select: all layers of this model have latents, a window, chunks"
            " or a state"
        )
    logger.log(
        logging.DEBUG if is_trial else logging.INFO,
        "%s: decoded tokens read %s of the K/V of %d of %d layers",
        name,
        selection.policy.amount,
        count,
        len(layers),
    )
    return selection


def check_policy(config: EngineConfig, precision: Precision, spec: ModelSpec) -> None:
    """Raises ConfigError for what cannot be used with kv_policy. Call it before the weights are
    read."""
    if config.policy is None:
        return
    from serve.eviction.start import check_eviction  # only policies need it

    check_eviction(config, spec, precision.backend, precision.kv)
    open_selection(config, precision, spec.attention_layers, is_trial=True)


class HasLayers(HasContext, Protocol):
    """What K/V beyond memory depends on of a model, such as a ModelSpec."""

    @property
    def model_type(self) -> str: ...

    @property
    def attention_layers(self) -> Sequence[AttentionLayer]: ...

    @property
    def state_layers(self) -> Sequence[object]: ...


def check_offload(config: EngineConfig, precision: Precision, spec: ModelSpec) -> None:
    """Raises ConfigError for what kv_offload_bytes cannot be used with. Call it before the weights
    are read."""
    if config.kv_offload_bytes is None:
        if config.kv_offload_dir is not None:
            raise ConfigError(f"kv_offload_dir needs {OFFLOAD}")
        return
    if precision.backend != "cpu" or not native_library.is_available():
        raise ConfigError(f"{OFFLOAD} needs the native kernels of the cpu back end")
    check_offloadable(config, precision, spec)


def check_offloadable(config: EngineConfig, precision: Precision, spec: HasLayers) -> None:
    """Raises ConfigError for settings and models with which K/V cannot be beyond memory, on
    whichever machine."""
    if precision.kv not in TILED_TYPES:
        raise ConfigError(
            f"{OFFLOAD} needs kv_dtype {' or '.join(TILED_TYPES)}, not {precision.kv}"
        )
    if config.policy is not None and config.policy.evicts:
        raise ConfigError(f"kv_policy {config.policy.name} cannot be used with {OFFLOAD}")
    if spec.state_layers:
        raise ConfigError(
            f"{OFFLOAD} cannot be used with {spec.model_type}, whose layers have states"
        )
    max_len = config.max_model_len or spec.max_model_len
    if max_len > config.kvp_segment_tokens:
        raise ConfigError(
            f"{OFFLOAD} needs a kvp_segment_tokens of at least max_model_len {max_len}"
        )
    _check_layers(spec.model_type, spec.attention_layers, max_len)


def _check_layers(model_type: str, layers: Sequence[AttentionLayer], max_len: int) -> None:
    problem = None
    if any(layer.value_dim is not None for layer in layers):
        problem = "latent K/V"
    elif any(layer.shares is not None for layer in layers):
        problem = "K/V shared by layers"
    elif any(layer.is_late for layer in layers):
        problem = "a head that drafts"
    elif len(group_layers(layers, max_len)) > 1 or group_layers(layers, max_len)[0][0] is not None:
        problem = "windows or chunks"
    if problem is not None:
        raise ConfigError(f"{OFFLOAD} cannot be used with {model_type}, which has {problem}")


def keeps_recent(
    config: EngineConfig, precision: Precision, layers: Sequence[AttentionLayer]
) -> bool:
    """Returns whether rows read the recent tokens of int4 K/V in int8.

    K/V on other machines has one store, so that there, and in this machine's memory beside it, all
    tokens are int4; so are they where chunks do not end with blocks.
    """
    if precision.kv != "int4" or config.memory_nodes or config.holders:
        return False
    return all(layer.chunk is None or layer.chunk % RECENT_BLOCK == 0 for layer in layers)


def recent_layout(
    config: EngineConfig, precision: Precision, layers: Sequence[AttentionLayer]
) -> TiledKVLayout | None:
    """Returns how the recent tokens of a model's layers, but late ones, are stored beside their
    int4 K/V; None if they are not."""
    if not keeps_recent(config, precision, layers):
        return None
    return TiledKVLayout([x for x in layers if not x.is_late], "int8", config.kv_group)


def recent_group(layout: TiledKVLayout) -> LayerGroup:
    """Returns the layer group, without padding, of recent tokens."""
    return LayerGroup(layout.token_bytes, layout.tile_tokens, RECENT_BLOCK, by_block=True)


def device_layout(
    config: EngineConfig, precision: Precision, layers: Sequence[AttentionLayer]
) -> CudaKVLayout:
    """Returns how a GPU stores layers of one group. ConfigError without kernels for them."""
    from memory.attention.cuda import CudaKVLayout  # needs Triton

    try:
        return CudaKVLayout(
            layers, getattr(torch, precision.kv), config.kv_group, has_bounds=selects(config)
        )
    except ValueError as error:
        raise ConfigError(f"backend cuda: {error}; use the cpu back end") from error


def stored_layers(
    config: EngineConfig, precision: Precision, layers: Sequence[AttentionLayer]
) -> Layout | CudaKVLayout:
    """Returns how the back end stores layers of one group."""
    make = device_layout if precision.backend == "cuda" else kv_layout
    return make(config, precision, layers)


def layer_groups(
    layouts: Sequence[Layout], windows: Sequence[int | None], max_tokens: int | None = None
) -> list[LayerGroup]:
    """Returns the layer groups, without padding, of layouts and the windows of their layers.
    max_tokens: the tokens of a sequence that layers without a window keep; None: all."""
    return [
        LayerGroup(
            layout.token_bytes,
            layout.tile_tokens,
            window,
            max_tokens=max_tokens if window is None else None,
        )
        for layout, window in zip(layouts, windows, strict=True)
    ]


def state_layout(
    config: EngineConfig,
    spec: ModelSpec,
    kv_groups: Sequence[LayerGroup],
    *,
    page_bytes: int = 1,
    has_drafts: bool = True,
) -> StateLayout | None:
    """Returns the layout of the states of a model's layers; None if no layer has one. kv_groups:
    the layer groups of the others. page_bytes: of the device's pages, of which a record takes whole
    ones. has_drafts: whether sequences may have drafts."""
    layers = spec.state_layers
    if not layers:
        return None
    from memory.states.layout import StateLayout, choose_interval  # only such models need it

    num_drafts = config.max_draft_tokens if has_drafts and config.speculation != "off" else 0
    record_bytes = StateLayout(layers, 1, num_drafts).record_bytes
    record_bytes = -(-record_bytes // page_bytes) * page_bytes
    interval = choose_interval(record_bytes, kept_bytes(kv_groups))
    return StateLayout(layers, interval, num_drafts)


def grouped_layers(
    config: EngineConfig, precision: Precision, layers: Sequence[AttentionLayer], max_len: int
) -> list[tuple[int | None, list[int]]]:
    """Returns the window and the layer numbers of each layer group: those of `group_layers`, or
    groups of neighbouring layers where kv_policy lets upper layers keep less."""
    groups = group_layers(layers, max_len)
    if config.policy is None or not config.policy.shrinks:
        return groups
    return [(None, numbers) for numbers in part_layers(config, precision, layers, max_len)]


def part_layers(
    config: EngineConfig, precision: Precision, layers: Sequence[AttentionLayer], max_len: int
) -> list[list[int]]:
    """Returns the layer numbers of each group of neighbouring layers: of as many groups as hold
    least.

    A group holds as many tokens as its first layer keeps, so more groups hold less. But the last
    page of each is half empty on average, so that rounding takes more than it gives beyond some
    number: about the square root of the pages of a sequence's budget.
    """
    policy = config.policy
    assert policy is not None, "a policy whose budgets differ"
    budgets = layer_budgets(policy, policy.budget(min(_PROMPT_TOKENS, max_len)), len(layers))

    def held_bytes(parts: Sequence[Sequence[int]]) -> int:
        """Returns the bytes that a sequence's groups hold on average."""
        layouts = [kv_layout(config, precision, layers_in(layers, numbers)) for numbers in parts]
        groups = layer_groups(layouts, [None] * len(parts))
        held = zip(groups, [budgets[numbers[0]] for numbers in parts], strict=True)
        rounding = len(parts) * page_bytes_of(config, groups, max_len) // 2
        return sum([group.token_bytes * count for group, count in held]) + rounding

    most = min(_MOST_GROUPS, len(layers))
    return min([_parts(len(layers), count) for count in range(1, most + 1)], key=held_bytes)


def _parts(num_layers: int, count: int) -> list[list[int]]:
    ends = [number * num_layers // count for number in range(count + 1)]
    return [[*range(first, end)] for first, end in pairwise(ends)]


def expected_groups(
    config: EngineConfig, precision: Precision, spec: ModelSpec
) -> list[LayerGroup]:
    """Returns the layer groups of a model that is not loaded."""
    layers = spec.attention_layers
    max_len = config.max_model_len or spec.max_model_len
    groups = grouped_layers(config, precision, layers, max_len)
    layouts = [kv_layout(config, precision, layers_in(layers, ids)) for _, ids in groups]
    most = config.kvp_segment_tokens if config.holders else None
    found = layer_groups(layouts, [window for window, _ in groups], most)
    recent = recent_layout(config, precision, layers)
    if recent is not None:
        found.append(recent_group(recent))
    states = state_layout(config, spec, found, has_drafts=precision.backend != "cuda")
    return found if states is None else [*found, states.group()]
