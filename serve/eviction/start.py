"""Makes the attention of sequences that drop K/V, and refuses what it does not support."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from memory.attention.evicting import EvictingAttention
from memory.attention.grouped import GroupedAttention
from memory.attention.layouts import Layout
from memory.attention.local import LocalAttention
from memory.attention.seam import AttentionLayer, PlannedAttention
from memory.attention.tiled import TiledKVLayout
from memory.attention.token_stores import (
    GroupedTokens,
    PlainTokens,
    TiledTokens,
    TokenStore,
)
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.models import ModelSpec

logger = logging.getLogger(__name__)


def check_eviction(config: EngineConfig, spec: ModelSpec, backend: str, kv_dtype: str) -> None:
    """Raises ConfigError that names what cannot be used with a kv_policy that drops K/V. Call it
    before the weights are read."""
    policy = config.policy
    if policy is None or not policy.evicts:
        return
    name = f"kv_policy {policy.name}"
    if backend != "cpu":
        raise ConfigError(f"{name} needs backend cpu, not {backend}")
    if kv_dtype == "int4":
        raise ConfigError(
            f"{name} cannot be used with kv_dtype int4; use int8, bfloat16 or float32"
        )
    max_len = config.max_model_len or spec.max_model_len
    if max_len > config.kvp_segment_tokens:
        raise ConfigError(
            f"max_model_len {max_len} cannot be used with {name}: kvp_segment_tokens is less"
        )
    if spec.state_layers:
        raise ConfigError(f"{name} cannot be used with {spec.model_type}, whose layers have states")
    check_layers(name, spec.model_type, spec.attention_layers, max_len)


def check_layers(
    name: str, model_type: str, layers: Sequence[AttentionLayer], max_len: int
) -> None:
    """Raises ConfigError for layers whose K/V cannot be dropped token by token."""
    for layer in layers:
        reach = layer.window or layer.chunk
        problem = None
        if reach is not None and reach < max_len:
            problem = "windows or chunks"
        elif layer.value_dim is not None:
            problem = "latent K/V"
        elif layer.shares is not None:
            problem = "K/V shared by layers"
        elif layer.sinks is not None:
            problem = "sinks"
        elif layer.num_kv_heads != layers[0].num_kv_heads:
            problem = "different numbers of K/V heads"
        if problem is not None:
            raise ConfigError(f"{name} cannot be used with {model_type}, which has {problem}")


def with_eviction(
    config: EngineConfig,
    spec: ModelSpec,
    inner: PlannedAttention,
    layouts: Sequence[Layout],
    addresses: Sequence[int],
) -> PlannedAttention:
    """Returns local attention that drops tokens, as the policy does. layouts, addresses: those of
    the K/V of each layer group."""
    policy = config.policy
    assert policy is not None and policy.evicts
    layers = [layer for layout in layouts for layer in layout.layers]
    max_len = config.max_model_len or spec.max_model_len
    check_layers(f"kv_policy {policy.name}", spec.model_type, layers, max_len)
    if isinstance(inner, GroupedAttention):
        parts = zip(inner.groups, layouts, addresses, strict=True)
        store: TokenStore = GroupedTokens([_store(*it) for it in parts], inner.layers_of)
    else:
        store = _store(inner, layouts[0], addresses[0])
    logger.info("kv_policy %s: K/V of sequences is dropped beyond the budget", config.kv_policy)
    return EvictingAttention(inner, layers, store, policy)


def _store(inner: PlannedAttention, layout: Layout, address: int) -> TokenStore:
    if isinstance(layout, TiledKVLayout):
        return TiledTokens(layout, address)
    assert isinstance(inner, LocalAttention)
    return PlainTokens(inner.cache)
