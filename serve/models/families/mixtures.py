"""Mixtures of experts with attention over stored keys and values."""

from __future__ import annotations

from dataclasses import replace

from ops.backend import RouterKind
from serve.checkpoint_json import ConfigReader
from serve.models.families.dense import granite_scales, hunyuan_rope, with_rope
from serve.models.families.fields import (
    FULL,
    MAX_WIDTH,
    SLIDING,
    layer_numbers,
    llama_fields,
    num_layers_of,
    read_heads,
    read_layer_types,
    read_windows,
)
from serve.models.families.layer_spec import MixtureSpec, MlpSpec, QKNorm
from serve.models.families.llama import qwen_windows, uniform_windows
from serve.models.families.mixture_fields import (
    FUSED,
    MAX_EXPERTS,
    PER_EXPERT,
    mixture_names,
    one_by_one,
    read_counts,
    read_expert,
    with_mixture,
)
from serve.models.families.names import ExpertNames, Family, Fields, WeightNames
from serve.models.families.rope_spec import read_rope


def qwen_sparse(config: ConfigReader) -> list[bool]:
    """Returns whether each layer is a mixture."""
    step = config.integer("decoder_sparse_step", 1)
    dense = layer_numbers(config, "mlp_only_layers", config.values.get("mlp_only_layers") or [])
    return [
        index not in dense and (index + 1) % step == 0 for index in range(num_layers_of(config))
    ]


def _qwen3_moe(config: ConfigReader) -> Fields:
    num_experts, top_k = read_counts(config, ("num_experts", "num_local_experts"))
    window = config.boolean("use_sliding_window", False)
    fields = llama_fields(
        config,
        kv_heads=4,
        mlp_bias=False,
        qk_norm=QKNorm(),
        windows=uniform_windows(config, 4096) if window else None,
    )
    is_normalized = config.boolean("norm_topk_prob", False)
    mixture = MixtureSpec(
        num_experts=num_experts,
        expert=read_expert(config),
        router=RouterKind(top_k=top_k, is_normalized=is_normalized),
    )
    return with_mixture(fields, mixture, qwen_sparse(config))


def _qwen2_moe(config: ConfigReader) -> Fields:
    num_experts, top_k = read_counts(config, ("num_experts",))
    fields = llama_fields(
        config,
        qkv_bias=config.boolean("qkv_bias", True),
        o_bias=False,
        mlp_bias=False,
        windows=_qwen2_moe_windows(config),
    )
    shared = config.integer("shared_expert_intermediate_size", high=MAX_WIDTH * 8)
    expert = read_expert(config)
    mixture = MixtureSpec(
        num_experts=num_experts,
        expert=expert,
        router=RouterKind(top_k=top_k, is_normalized=config.boolean("norm_topk_prob", False)),
        shared=replace(expert, size=shared),
        is_shared_gated=True,
    )
    return with_mixture(fields, mixture, qwen_sparse(config))


def _qwen2_moe_windows(config: ConfigReader) -> list[int | None]:
    """Returns the windows; by default every other layer below max_window_layers has one."""
    if not config.boolean("use_sliding_window", False) or config.has("layer_types"):
        return qwen_windows(config)
    last = config.integer("max_window_layers", 28, low=0)
    types = [
        SLIDING if (index + 1) % 2 and index < last else FULL
        for index in range(num_layers_of(config))
    ]
    return read_windows(config, types, 4096)


def _mixtral(config: ConfigReader) -> Fields:
    num_experts, top_k = read_counts(config, ("num_local_experts",))
    _, _, dim = read_heads(config, kv_heads=8)
    rope = read_rope(config, dim, theta=1e6)
    fields = llama_fields(
        config,
        kv_heads=8,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        windows=uniform_windows(config),
        ropes=[rope] * num_layers_of(config),
        eps=("rms_norm_eps", 1e-5),
    )
    mixture = MixtureSpec(
        num_experts=num_experts,
        expert=read_expert(config, "intermediate_size"),
        router=RouterKind(top_k=top_k, is_normalized=True),
    )
    return with_mixture(fields, mixture, [True] * num_layers_of(config))


def _olmoe(config: ConfigReader) -> Fields:
    if config.has("clip_qkv"):
        raise config.fail("clip_qkv", "is not supported")
    num_experts, top_k = read_counts(config, ("num_experts",))
    fields = llama_fields(
        config, mlp_bias=False, qk_norm=QKNorm(scope="all"), eps=("rms_norm_eps", 1e-5)
    )
    mixture = MixtureSpec(
        num_experts=num_experts,
        expert=read_expert(config, "intermediate_size"),
        router=RouterKind(top_k=top_k, is_normalized=config.boolean("norm_topk_prob", False)),
    )
    return with_mixture(fields, mixture, [True] * num_layers_of(config))


def _granite_moe(config: ConfigReader) -> Fields:
    num_experts, top_k = read_counts(config, ("num_local_experts",))
    scale = config.number("attention_multiplier", 1.0, high=1e4)
    fields = llama_fields(config, mlp_bias=False, scale=scale) | granite_scales(config)
    mixture = MixtureSpec(
        num_experts=num_experts,
        expert=read_expert(config, "intermediate_size"),
        router=RouterKind(top_k=top_k, is_after_top_k=True),
    )
    return with_mixture(fields, mixture, [True] * num_layers_of(config))


_GPT_OSS_ROPE: dict[str, object] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _gpt_oss(config: ConfigReader) -> Fields:
    num_experts, top_k = read_counts(config, ("num_local_experts", "num_experts"))
    for key, value in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if config.number(key, value) != value:
            raise config.fail(key, f"other than {value} is not supported")
    config = with_rope(config, _GPT_OSS_ROPE)
    num_layers = num_layers_of(config)
    types = read_layer_types(config, [SLIDING if i % 2 == 0 else FULL for i in range(num_layers)])
    _, _, dim = read_heads(config, kv_heads=8, head_dim=64)
    rope = read_rope(config, dim, theta=150000.0)
    fields = llama_fields(
        config,
        kv_heads=8,
        head_dim=64,
        qkv_bias=config.boolean("attention_bias", True),
        o_bias=config.boolean("attention_bias", True),
        mlp_bias=False,
        windows=read_windows(config, types, 128),
        ropes=[rope] * num_layers,
        eps=("rms_norm_eps", 1e-5),
    )
    fields["layers"] = tuple(
        replace(layer, attention=replace(layer.attention, has_sinks=True))
        for layer in fields["layers"]
    )
    mixture = MixtureSpec(
        num_experts=num_experts,
        expert=MlpSpec(
            size=config.integer("intermediate_size", high=MAX_WIDTH * 8),
            activation="swiglu_oai",
            has_bias=True,
        ),
        router=RouterKind(top_k=top_k, is_after_top_k=True),
        has_router_bias=True,
    )
    return with_mixture(fields, mixture, [True] * num_layers)


def _minimax_m2(config: ConfigReader) -> Fields:
    num_experts, top_k = read_counts(config, ("num_local_experts",))
    _, _, dim = read_heads(config, kv_heads=8, head_dim=128)
    # published configurations give the number of rotated values
    partial = config.integer("rotary_dim", dim) / dim
    rope = read_rope(config, dim, theta=5e6, partial=partial)
    fields = llama_fields(
        config,
        kv_heads=8,
        head_dim=128,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=QKNorm(scope="all"),
        ropes=[rope] * num_layers_of(config),
    )
    mixture = MixtureSpec(
        num_experts=num_experts,
        expert=read_expert(config, "intermediate_size"),
        router=RouterKind(top_k=top_k, score="sigmoid", is_normalized=True),
        has_correction=True,
    )
    return with_mixture(fields, mixture, [True] * num_layers_of(config))


def _ernie_moe(config: ConfigReader) -> Fields:
    num_layers = num_layers_of(config)
    num_experts, top_k = read_counts(config, ("moe_num_experts",), "moe_k")
    has_bias = config.boolean("use_bias", False)
    _, _, dim = read_heads(config, kv_heads=4)
    rope = read_rope(config, dim, theta=500000.0, is_interleaved=True)
    fields = llama_fields(
        config,
        is_tied=True,
        kv_heads=4,
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=has_bias,
        ropes=[rope] * num_layers,
        eps=("rms_norm_eps", 1e-5),
    )
    expert = read_expert(config)
    num_shared = config.integer("moe_num_shared_experts", 2, low=0, high=MAX_EXPERTS)
    mixture = MixtureSpec(
        num_experts=num_experts,
        expert=expert,
        router=RouterKind(top_k=top_k, is_normalized=True),
        has_correction=True,
        shared=replace(expert, size=num_shared * expert.size, has_bias=has_bias)
        if num_shared
        else None,
    )
    first = config.integer("moe_layer_start_index", 1, low=0)
    last = config.integer("moe_layer_end_index", -1, low=-1)
    last = num_layers - 1 if last == -1 else last
    step = config.integer("moe_layer_interval", 1)
    is_sparse = [first <= index <= last and (index + 1) % step == 0 for index in range(num_layers)]
    return with_mixture(fields, mixture, is_sparse)


def _hunyuan_moe(config: ConfigReader) -> Fields:
    values = dict(config.values)
    for key in ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert"):
        found = values.get(key)
        if isinstance(found, list):  # one number for each layer, which must agree
            if not found or any(item != found[0] for item in found):
                raise config.fail(key, "must be the same for all layers")
            values[key] = found[0]
    config = ConfigReader(values, config.source)
    num_experts, top_k = read_counts(config, ("num_experts",), "moe_topk")
    fields = llama_fields(
        config,
        mlp_bias=False,
        qk_norm=QKNorm(follows_rope=True),
        ropes=[hunyuan_rope(config)] * num_layers_of(config),
        eps=("rms_norm_eps", 1e-5),
    )
    expert = read_expert(config, "intermediate_size")
    if config.has("moe_intermediate_size"):
        expert = read_expert(config)
    shared = config.integer("num_shared_expert", 1) * expert.size
    mixture = MixtureSpec(
        num_experts=num_experts,
        expert=expert,
        router=RouterKind(top_k=top_k, is_normalized=True),
        shared=replace(expert, size=shared),
    )
    return with_mixture(fields, mixture, [True] * num_layers_of(config))


QWEN2_SHARED = {
    "shared_up": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    "shared_down": "mlp.shared_expert.down_proj",
}
_MIXTRAL = ExpertNames(
    router="block_sparse_moe.gate",
    up=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    down="block_sparse_moe.experts.{}.w2",
    correction="block_sparse_moe.e_score_correction_bias",
)
GRANITE_EXPERTS = ExpertNames(
    router="block_sparse_moe.router.layer",
    up=("block_sparse_moe.input_linear.weight",),
    down="block_sparse_moe.output_linear.weight",
    is_fused=True,
)
_GPT_OSS = replace(FUSED, router="mlp.router", is_transposed=True, is_interleaved=True)
_GPT_OSS_WAYS = (
    _GPT_OSS,
    one_by_one(_GPT_OSS, "mlp.experts"),
    one_by_one(_GPT_OSS, "mlp.experts.experts"),
)
_ERNIE = {"correction": "mlp.moe_statics.e_score_correction_bias", "is_correction_row": True}
_HUNYUAN = {
    "router": "mlp.gate.wg",
    "shared_up": ("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
    "shared_down": "mlp.shared_mlp.down_proj",
}


FAMILIES = {
    "qwen3_moe": Family(_qwen3_moe, mixture_names(), "Qwen 3 30B-A3B, Coder, 235B-A22B"),
    "qwen3_vl_moe_text": Family(
        _qwen3_moe,
        WeightNames(experts=(replace(FUSED, is_transposed=True), FUSED, PER_EXPERT)),
        "Qwen3-VL 30B-A3B, text",
    ),
    "qwen2_moe": Family(_qwen2_moe, mixture_names(**QWEN2_SHARED), "Qwen 1.5 and 2, mixtures"),
    "mixtral": Family(_mixtral, WeightNames(experts=(_MIXTRAL,)), "Mixtral"),
    "olmoe": Family(_olmoe, mixture_names(), "OLMoE"),
    "granitemoe": Family(
        _granite_moe,
        WeightNames(
            experts=(GRANITE_EXPERTS, one_by_one(GRANITE_EXPERTS, "block_sparse_moe.experts"))
        ),
        "Granite 3, mixtures",
    ),
    "gpt_oss": Family(_gpt_oss, WeightNames(experts=_GPT_OSS_WAYS), "gpt-oss 20b and 120b"),
    "minimax_m2": Family(_minimax_m2, WeightNames(experts=(_MIXTRAL,)), "MiniMax-M2"),
    "ernie4_5_moe": Family(_ernie_moe, mixture_names(**_ERNIE), "ERNIE 4.5, mixtures"),
    "hunyuan_v1_moe": Family(
        _hunyuan_moe,
        replace(
            mixture_names(**_HUNYUAN),
            q_norm="self_attn.query_layernorm",
            k_norm="self_attn.key_layernorm",
        ),
        "Hunyuan A13B",
    ),
}
