"""Families whose layers are short convolutions beside attention: LFM2."""

from __future__ import annotations

from dataclasses import replace

from ops.backend import RouterKind
from serve.checkpoint_json import ConfigReader
from serve.models.families.fields import (
    FULL,
    MAX_WIDTH,
    layer_numbers,
    llama_fields,
    num_layers_of,
    read_heads,
    read_layer_types,
)
from serve.models.families.layer_spec import MixtureSpec, MlpSpec, QKNorm
from serve.models.families.mixture_fields import read_counts, with_mixture
from serve.models.families.names import ExpertNames, Family, Fields, StateNames, WeightNames
from serve.models.families.rope_spec import read_rope
from serve.models.families.state_spec import ShortConvSpec

CONV = "conv"
MAX_CONV = 8


def _lfm2_fields(config: ConfigReader, mlp_size: int) -> Fields:
    """Reads an LFM2 whose layers have MLPs of this size. intermediate_size of the configuration is
    not its size."""
    num_layers = num_layers_of(config)
    listed = config.values.get("full_attn_idxs")
    full = set(range(num_layers))
    if listed is not None:
        full = layer_numbers(config, "full_attn_idxs", listed)
    types = read_layer_types(
        config, [FULL if i in full else CONV for i in range(num_layers)], (FULL, CONV)
    )
    _, _, dim = read_heads(config, kv_heads=8)
    sized = ConfigReader(config.values | {"intermediate_size": mlp_size}, config.source)
    fields = llama_fields(
        sized,
        is_tied=config.boolean("tie_embedding", True),
        kv_heads=8,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=QKNorm(),
        ropes=[read_rope(config, dim, theta=1e6)] * num_layers,
        eps=("norm_eps", 1e-5),
    )
    conv = ShortConvSpec(
        channels=fields["hidden_size"],
        width=config.integer("conv_L_cache", 3, low=2, high=MAX_CONV),
        has_bias=config.boolean("conv_bias", False),
    )
    fields["layers"] = tuple(
        layer if kind == FULL else replace(layer, attention=None, state=conv)
        for layer, kind in zip(fields["layers"], types, strict=True)
    )
    return fields


def _lfm2(config: ConfigReader) -> Fields:
    key = "block_ff_dim" if config.has("block_ff_dim") else "intermediate_size"
    size = config.integer(key, high=MAX_WIDTH * 8)
    if config.boolean("block_auto_adjust_ff_dim", True):
        size = int(2 * size / 3)
        size = int(config.number("block_ffn_dim_multiplier", 1.0, high=1e3) * size)
        unit = config.integer("block_multiple_of", 256, high=MAX_WIDTH)
        size = -(-size // unit) * unit
    return _lfm2_fields(config, size)


def _lfm2_moe(config: ConfigReader) -> Fields:
    fields = _lfm2_fields(config, config.integer("intermediate_size", 7168, high=MAX_WIDTH * 8))
    num_experts, top_k = read_counts(config, ("num_experts",))
    mixture = MixtureSpec(
        num_experts=num_experts,
        expert=MlpSpec(size=config.integer("moe_intermediate_size", 1792, high=MAX_WIDTH * 8)),
        router=RouterKind(
            top_k=top_k,
            score="sigmoid",
            is_normalized=config.boolean("norm_topk_prob", True),
            sum_eps=1e-6,
            scale=config.number("routed_scaling_factor", 1.0),
        ),
        has_correction=config.boolean("use_expert_bias", True),
    )
    first = config.integer("num_dense_layers", 2, low=0)
    return with_mixture(fields, mixture, [i >= first for i in range(len(fields["layers"]))])


_FUSED = ExpertNames(
    router="feed_forward.gate",
    up=("feed_forward.experts.gate_up_proj",),
    down="feed_forward.experts.down_proj",
    is_fused=True,
    correction="feed_forward.expert_bias",
)
_ONE_BY_ONE = replace(
    _FUSED,
    up=("feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3"),
    down="feed_forward.experts.{}.w2",
    is_fused=False,
)
_NAMES = WeightNames(
    final_norm="embedding_norm",
    attn_in="operator_norm",
    mlp_in="ffn_norm",
    o="self_attn.out_proj",
    q_norm="self_attn.q_layernorm",
    k_norm="self_attn.k_layernorm",
    up=("feed_forward.w1", "feed_forward.w3"),
    down="feed_forward.w2",
    experts=(_ONE_BY_ONE, _FUSED),
    state=StateNames(inputs=("conv.in_proj",), convs=("conv.conv",), out="conv.out_proj"),
)
FAMILIES = {
    "lfm2": Family(_lfm2, _NAMES, "LFM2 350M to 2.6B"),
    "lfm2_moe": Family(_lfm2_moe, _NAMES, "LFM2 8B-A1B"),
}
