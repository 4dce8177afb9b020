"""Dense families whose blocks normalize like Llama's."""

from __future__ import annotations

from dataclasses import replace

from serve.checkpoint_json import ConfigReader
from serve.models.families.fields import (
    FULL,
    SLIDING,
    llama_fields,
    num_layers_of,
    read_heads,
    read_layer_types,
    read_rope_layers,
    read_windows,
)
from serve.models.families.layer_spec import QKNorm, QueryScaling
from serve.models.families.llama import uniform_windows
from serve.models.families.names import Family, Fields, WeightNames
from serve.models.families.rope_spec import RopeSpec, read_rope


def _smollm3(config: ConfigReader) -> Fields:
    _, _, dim = read_heads(config, kv_heads=4)
    uses = read_rope_layers(config)
    rope = read_rope(config, dim, theta=2e6)
    is_windowed = config.boolean("use_sliding_window", False) and config.has("sliding_window")
    types = read_layer_types(config, [SLIDING if is_windowed and not use else FULL for use in uses])
    return llama_fields(
        config,
        is_tied=True,
        kv_heads=4,
        windows=read_windows(config, types) if is_windowed else None,
        ropes=[rope if use else None for use in uses],
    )


def _granite(config: ConfigReader) -> Fields:
    fields = llama_fields(config, scale=config.number("attention_multiplier", 1.0, high=1e4))
    return fields | granite_scales(config)


def granite_scales(config: ConfigReader) -> Fields:
    """Returns Granite's multipliers of embeddings, residuals and logits."""
    return {
        "embed_scale": config.number("embedding_multiplier", 1.0, high=1e4),
        "residual_scale": config.number("residual_multiplier", 1.0, high=1e4),
        "logit_scale": 1.0 / config.number("logits_scaling", 1.0, low=1e-6),
    }


def _seed_oss(config: ConfigReader) -> Fields:
    return llama_fields(
        config,
        kv_heads=8,
        head_dim=128,
        qkv_bias=config.boolean("attention_bias", True),
        o_bias=config.boolean("attention_out_bias", False),
    )


def _arcee(config: ConfigReader) -> Fields:
    return llama_fields(
        config, activation=("hidden_act", "relu2"), is_gated=False, eps=("rms_norm_eps", 1e-5)
    )


def _internlm3(config: ConfigReader) -> Fields:
    # published configurations say qkv_bias and bias (of o and the MLP)
    bias = config.boolean("bias", config.boolean("mlp_bias", False))
    has_qkv_bias = config.boolean("qkv_bias", config.boolean("attention_bias", False))
    return llama_fields(
        config,
        kv_heads=2,
        head_dim=128,
        qkv_bias=has_qkv_bias,
        o_bias=bias if config.has("bias") else has_qkv_bias,
        mlp_bias=bias,
        eps=("rms_norm_eps", 1e-5),
    )


def _ernie(config: ConfigReader) -> Fields:
    has_bias = config.boolean("use_bias", False)
    _, _, dim = read_heads(config, kv_heads=2, head_dim=128)
    rope = read_rope(config, dim, theta=500000.0, is_interleaved=True)
    return llama_fields(
        config,
        is_tied=True,
        kv_heads=2,
        head_dim=128,
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=has_bias,
        ropes=[rope] * num_layers_of(config),
        eps=("rms_norm_eps", 1e-5),
    )


_APERTUS_ROPE: dict[str, object] = {
    "rope_type": "llama3",
    "rope_theta": 12e6,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def _apertus(config: ConfigReader) -> Fields:
    return llama_fields(
        with_rope(config, _APERTUS_ROPE),
        mlp_bias=False,
        qk_norm=QKNorm(),
        activation=("hidden_act", "xielu"),
        is_gated=False,
        eps=("rms_norm_eps", 1e-5),
    )


def _hunyuan(config: ConfigReader) -> Fields:
    rope = hunyuan_rope(config)
    return llama_fields(
        config,
        mlp_bias=False,
        qk_norm=QKNorm(follows_rope=True),
        ropes=[rope] * num_layers_of(config),
        eps=("rms_norm_eps", 1e-5),
    )


def hunyuan_rope(config: ConfigReader) -> RopeSpec:
    """Reads a RoPE of kind "dynamic" with a fixed alpha, which stretches the base."""
    _, _, dim = read_heads(config)
    rope = read_rope(config, dim)
    key = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    raw = config.values.get(key) or {}
    if isinstance(raw, dict) and raw.get("alpha") and rope.kind == "default":
        if dim <= 2:
            raise config.fail("head_dim", f"is {dim}; alpha needs more than 2")
        alpha = ConfigReader(raw, f"{config.source}: {key}").number("alpha", low=1e-6)
        rope = replace(rope, theta=rope.theta * alpha ** (dim / (dim - 2)))
    return rope


def _phi3(config: ConfigReader) -> Fields:
    _, _, dim = read_heads(config)
    raw = config.values.get("rope_scaling") or config.values.get("rope_parameters")
    if isinstance(raw, dict) and raw.get("type", raw.get("rope_type")) == "yarn":
        # the first files of Phi-3 call LongRoPE so
        raw = raw | {"rope_type": "longrope", "type": "longrope"}
        config = ConfigReader(config.values | {"rope_scaling": raw}, config.source)
    rope = read_rope(config, dim, partial=1.0)
    return llama_fields(
        config,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        windows=uniform_windows(config),
        ropes=[rope] * num_layers_of(config),
        eps=("rms_norm_eps", 1e-5),
    )


_MINISTRAL3_ROPE: dict[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def with_rope(config: ConfigReader, default: dict[str, object]) -> ConfigReader:
    """Returns the configuration with the family's own RoPE if it names none."""
    if config.has("rope_parameters") or config.has("rope_scaling"):
        return config
    return ConfigReader(config.values | {"rope_parameters": default}, config.source)


def _ministral3(config: ConfigReader) -> Fields:
    config = with_rope(config, _MINISTRAL3_ROPE)
    fields = llama_fields(
        config,
        kv_heads=8,
        head_dim=128,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        windows=uniform_windows(config),
        eps=("rms_norm_eps", 1e-5),
    )
    scaling = read_query_scaling(config)
    return fields | {
        "layers": tuple(
            replace(layer, attention=replace(layer.attention, query_scaling=scaling))
            for layer in fields["layers"]
        )
    }


def read_query_scaling(config: ConfigReader) -> QueryScaling | None:
    """Reads llama_4_scaling_beta of rope_parameters (Ministral 3, Mistral Small 4)."""
    raw = config.values.get("rope_parameters") or config.values.get("rope_scaling")
    if not isinstance(raw, dict) or raw.get("llama_4_scaling_beta") is None:
        return None
    rope = ConfigReader(raw, f"{config.source}: rope_parameters")
    return QueryScaling(
        beta=rope.number("llama_4_scaling_beta"),
        length=rope.integer("original_max_position_embeddings"),
    )


def _stablelm(config: ConfigReader) -> Fields:
    _, _, dim = read_heads(config)
    rope = read_rope(config, dim, partial=0.25)
    has_norm = config.boolean("qk_layernorm", False)
    is_parallel = config.boolean("use_parallel_residual", False)
    fields = llama_fields(
        config,
        qkv_bias=config.boolean("use_qkv_bias", False),
        o_bias=False,
        mlp_bias=False,
        qk_norm=QKNorm(kind="layer", scope="each") if has_norm else None,
        ropes=[rope] * num_layers_of(config),
        norms=frozenset({"attn_in"}) if is_parallel else frozenset({"attn_in", "mlp_in"}),
        eps=("layer_norm_eps", 1e-5),
    )
    layers = tuple(replace(layer, is_parallel=is_parallel) for layer in fields["layers"])
    return fields | {"norm": "layer", "has_norm_bias": True, "layers": layers}


def _starcoder2(config: ConfigReader) -> Fields:
    has_bias = config.boolean("use_bias", True)
    fields = llama_fields(
        config,
        is_tied=True,
        kv_heads=2,
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=has_bias,
        windows=uniform_windows(config),
        activation=("hidden_act", "gelu_pytorch_tanh"),
        is_gated=False,
        eps=("norm_epsilon", 1e-5),
    )
    return fields | {"norm": "layer", "has_norm_bias": True}


_UNGATED = ("mlp.up_proj",)
FAMILIES = {
    "smollm3": Family(_smollm3, title="SmolLM3"),
    "granite": Family(_granite, title="Granite 3 and 4.1, dense"),
    "seed_oss": Family(_seed_oss, title="Seed-OSS"),
    "arcee": Family(_arcee, WeightNames(up=_UNGATED), "Arcee AFM"),
    "internlm3": Family(_internlm3, title="InternLM3"),
    "ernie4_5": Family(_ernie, title="ERNIE 4.5, dense"),
    "apertus": Family(
        _apertus,
        WeightNames(attn_in="attention_layernorm", mlp_in="feedforward_layernorm", up=_UNGATED),
        "Apertus",
    ),
    "hunyuan_v1_dense": Family(
        _hunyuan,
        WeightNames(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"),
        "Hunyuan, dense",
    ),
    "phi3": Family(
        _phi3,
        WeightNames(qkv=("self_attn.qkv_proj",), up=("mlp.gate_up_proj",)),
        "Phi-3, Phi-3.5, Phi-4, Phi-4-mini",
    ),
    "ministral3": Family(_ministral3, title="Ministral 3"),
    "stablelm": Family(
        _stablelm,
        WeightNames(q_norm="self_attn.q_layernorm", k_norm="self_attn.k_layernorm"),
        "StableLM",
    ),
    "starcoder2": Family(
        _starcoder2, WeightNames(up=("mlp.c_fc",), down="mlp.c_proj"), "StarCoder 2"
    ),
}
