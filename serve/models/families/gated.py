"""Families whose attention's output has gates: Arcee Trinity."""

from __future__ import annotations

from dataclasses import replace

from ops.backend import RouterKind
from serve.checkpoint_json import ConfigReader
from serve.models.families.fields import (
    SLIDING,
    full_every,
    llama_fields,
    num_layers_of,
    read_heads,
    read_layer_types,
    read_windows,
)
from serve.models.families.layer_spec import SANDWICH_NORM, MixtureSpec, QKNorm
from serve.models.families.mixture_fields import (
    MAX_EXPERTS,
    read_counts,
    read_expert,
    with_mixture,
)
from serve.models.families.names import ExpertNames, Family, Fields, WeightNames
from serve.models.families.rope_spec import read_rope


def _afmoe(config: ConfigReader) -> Fields:
    num_layers = num_layers_of(config)
    period = config.integer("global_attn_every_n_layers", 4)
    types = read_layer_types(config, full_every(config, period))
    _, _, dim = read_heads(config, head_dim=128)
    rope = read_rope(config, dim)
    fields = llama_fields(
        config,
        head_dim=128,
        mlp_bias=False,
        qk_norm=QKNorm(),
        windows=read_windows(config, types, 1024),
        ropes=[rope if kind == SLIDING else None for kind in types],
        norms=SANDWICH_NORM,
        eps=("rms_norm_eps", 1e-5),
    )
    fields["layers"] = tuple(
        replace(layer, attention=replace(layer.attention, has_gate=True))
        for layer in fields["layers"]
    )
    if config.boolean("mup_enabled", False):
        fields["embed_scale"] = fields["hidden_size"] ** 0.5
    num_experts, top_k = read_counts(config, ("num_experts",))
    expert = read_expert(config)
    num_shared = config.integer("num_shared_experts", 2, low=0, high=MAX_EXPERTS)
    mixture = MixtureSpec(
        num_experts=num_experts,
        expert=expert,
        router=RouterKind(
            top_k=top_k,
            score="sigmoid",
            is_normalized=True,
            sum_eps=1e-20,
            scale=config.number("route_scale", 1.0),
        ),
        has_correction=True,
        shared=replace(expert, size=num_shared * expert.size) if num_shared else None,
    )
    first = config.integer("num_dense_layers", 1, low=0)
    return with_mixture(fields, mixture, [index >= first for index in range(num_layers)])


_NAMES = WeightNames(
    attn_out="post_attention_layernorm",
    mlp_in="pre_mlp_layernorm",
    mlp_out="post_mlp_layernorm",
    experts=(ExpertNames(router="mlp.router.gate", correction="mlp.expert_bias"),),
)
FAMILIES = {"afmoe": Family(_afmoe, _NAMES, "Arcee Trinity")}
