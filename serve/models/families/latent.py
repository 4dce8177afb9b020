"""Families with multi-head latent attention: DeepSeek V2 and V3, GLM-4.7-Flash, Mistral Small 4."""

from __future__ import annotations

import math
from dataclasses import replace

from ops.backend import RouterKind
from serve.checkpoint_json import ConfigReader
from serve.models.families.dense import read_query_scaling, with_rope
from serve.models.families.fields import (
    MAX_HEADS,
    MAX_WIDTH,
    num_layers_of,
    read_activation,
    read_sizes,
    served_context,
)
from serve.models.families.layer_spec import LatentSpec, LayerSpec, MixtureSpec, MlpSpec
from serve.models.families.mixture_fields import (
    FUSED,
    MAX_EXPERTS,
    after_first_dense,
    read_counts,
    read_expert,
    read_mlp_types,
    read_sigmoid_mixture,
    with_mixture,
)
from serve.models.families.names import ExpertNames, Family, Fields, MtpNames, WeightNames
from serve.models.families.rope_spec import read_rope, rope_parameters

_INNER_EPS = 1e-6  # of the norms between the products of low rank, in all these families


def latent_fields(
    config: ConfigReader,
    *,
    v_dim: int,
    nope_dim: int,
    q_rank: int | None,
    kv_rank: int = 512,
    eps: float = 1e-6,
    has_rope: bool = True,
) -> Fields:
    """Reads a model whose layers all have latent attention and a dense MLP."""
    fields = read_sizes(config)
    rope_dim = config.integer("qk_rope_head_dim", 64, high=MAX_HEADS)
    nope = config.integer("qk_nope_head_dim", nope_dim, high=MAX_HEADS)
    # the part that rotates is a head of its own; partial_rotary_factor only repeats that
    plain = {"partial_rotary_factor": None}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(config.values.get(key), dict):
            plain[key] = config.values[key] | {"partial_rotary_factor": None}
    rope_config = ConfigReader(config.values | plain, config.source)
    rope = None
    if has_rope:
        is_interleaved = config.boolean("rope_interleave", True)
        rope = read_rope(rope_config, rope_dim, is_interleaved=is_interleaved)
    has_rank = config.values.get("q_lora_rank", q_rank) is not None
    attention = LatentSpec(
        num_heads=config.integer("num_attention_heads", high=MAX_HEADS),
        q_rank=config.integer("q_lora_rank", q_rank, high=MAX_WIDTH) if has_rank else None,
        kv_rank=config.integer("kv_lora_rank", kv_rank, high=MAX_WIDTH),
        nope_dim=nope,
        rope_dim=rope_dim,
        v_dim=config.integer("v_head_dim", v_dim, high=MAX_HEADS),
        scale=(nope + rope_dim) ** -0.5 * (_mscale(config) ** 2 if has_rope else 1.0),
        norm_eps=_INNER_EPS,
        rope=rope,
        has_bias=config.boolean("attention_bias", False),
        query_scaling=read_query_scaling(config),
    )
    mlp = MlpSpec(
        size=config.integer("intermediate_size", high=MAX_WIDTH * 8),
        activation=read_activation(config, "hidden_act", "silu"),
    )
    return fields | {
        "max_model_len": served_context(fields["max_model_len"], rope),
        "norm_eps": config.number("rms_norm_eps", eps, high=1.0),
        "layers": (LayerSpec(attention=attention, mlp=mlp),) * num_layers_of(config),
    }


def _mscale(config: ConfigReader) -> float:
    """Returns the factor of queries and keys that YaRN's mscale_all_dim asks for."""
    rope = rope_parameters(config, None)
    kind = rope.text("rope_type", rope.text("type", "default"))
    mscale = rope.number("mscale_all_dim", 0.0)
    if kind == "default" or not mscale:
        return 1.0
    factor = rope.number("factor", low=1e-3)
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0


def _deepseek_v2(config: ConfigReader) -> Fields:
    fields = latent_fields(config, v_dim=128, nope_dim=128, q_rank=1536)
    num_experts, top_k = read_counts(config, ("n_routed_experts",))
    method = config.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.fail("topk_method", f"{method!r} is not supported")
    groups = config.integer("n_group", 1) if method == "group_limited_greedy" else 1
    if num_experts % groups:
        raise config.fail("n_group", f"is {groups}; it does not divide {num_experts} experts")
    expert = read_expert(config)
    num_shared = config.integer("n_shared_experts", 2, low=0, high=MAX_EXPERTS)
    mixture = MixtureSpec(
        num_experts=num_experts,
        expert=expert,
        router=RouterKind(
            top_k=top_k,
            scale=config.number("routed_scaling_factor", 1.0),
            num_groups=groups,
            num_top_groups=min(groups, config.integer("topk_group", 1)),
        ),
        shared=replace(expert, size=num_shared * expert.size) if num_shared else None,
    )
    return with_mixture(fields, mixture, after_first_dense(config, 0))


def _deepseek_v3(config: ConfigReader) -> Fields:
    fields = latent_fields(config, v_dim=128, nope_dim=128, q_rank=1536)
    mixture = read_sigmoid_mixture(config, num_shared=1, scale=2.5, groups=8, top_groups=4)
    return with_mixture(fields, mixture, after_first_dense(config, 3))


def _glm4_moe_lite(config: ConfigReader) -> Fields:
    fields = latent_fields(config, v_dim=256, nope_dim=192, q_rank=768, eps=1e-5)
    is_sparse = read_mlp_types(config, after_first_dense(config, 1))
    return with_mixture(fields, read_sigmoid_mixture(config, num_shared=1, scale=1.8), is_sparse)


_MISTRAL4_ROPE: dict[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _mistral4(config: ConfigReader) -> Fields:
    config = with_rope(config, _MISTRAL4_ROPE)
    fields = latent_fields(config, v_dim=128, nope_dim=64, q_rank=1024, kv_rank=256)
    mixture = read_sigmoid_mixture(config, num_shared=1)
    mixture = replace(
        mixture, router=replace(mixture.router, score="softmax"), has_correction=False
    )
    return with_mixture(fields, mixture, after_first_dense(config, 0))


_NAMES = WeightNames(experts=(ExpertNames(), FUSED))
FAMILIES = {
    "deepseek_v2": Family(_deepseek_v2, _NAMES, "DeepSeek V2 and V2-Lite"),
    "deepseek_v3": Family(
        _deepseek_v3, _NAMES, "DeepSeek V3 and R1, Moonlight, Kimi K2", mtp=MtpNames()
    ),
    "glm4_moe_lite": Family(_glm4_moe_lite, _NAMES, "GLM-4.7-Flash", mtp=MtpNames()),
    "mistral4": Family(_mistral4, _NAMES, "Mistral Small 4"),
    "kimi_k2": Family(_deepseek_v3, _NAMES, "Kimi K2"),
}
