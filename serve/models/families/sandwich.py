"""Dense families with norms in other places than Llama, or with several kinds of layers."""

from __future__ import annotations

from dataclasses import replace

from serve.checkpoint_json import ConfigReader
from serve.models.families.fields import (
    FULL,
    SLIDING,
    full_every,
    llama_fields,
    num_layers_of,
    read_heads,
    read_layer_types,
    read_windows,
    served_context,
)
from serve.models.families.layer_spec import AFTER_NORM, SANDWICH_NORM, QKNorm
from serve.models.families.names import Family, Fields, WeightNames
from serve.models.families.rope_spec import RopeSpec, read_rope

_WHOLE = QKNorm(scope="all")


def _olmo2(config: ConfigReader) -> Fields:
    return llama_fields(
        config, mlp_bias=False, qk_norm=_WHOLE, norms=AFTER_NORM, eps=("rms_norm_eps", 1e-5)
    )


def _olmo3(config: ConfigReader) -> Fields:
    types = read_layer_types(config, full_every(config, 4))
    _, _, dim = read_heads(config)
    full = read_rope(config, dim, layer_type=FULL, theta=500000.0)
    # rope_scaling of older configurations is that of the layers with full attention
    plain = config.values | {"rope_scaling": None}
    sliding = read_rope(ConfigReader(plain, config.source), dim, layer_type=SLIDING, theta=500000.0)
    fields = llama_fields(
        config,
        mlp_bias=False,
        qk_norm=_WHOLE,
        norms=AFTER_NORM,
        windows=read_windows(config, types, 4096),
        ropes=[full if kind == FULL else sliding for kind in types],
        eps=("rms_norm_eps", 1e-5),
    )
    return fields | {"max_model_len": served_context(fields["max_model_len"], full)}


def _exaone4(config: ConfigReader) -> Fields:
    pattern = config.values.get("sliding_window_pattern", 4)
    has_window = config.values.get("sliding_window", 4096) is not None
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:
        num_layers = num_layers_of(config)
        default = [SLIDING if pattern[i % len(pattern)] == "L" else FULL for i in range(num_layers)]
        default[-1] = FULL
    else:
        is_whole = has_window and config.values.get("sliding_window_pattern", 4) is not None
        period = config.integer("sliding_window_pattern", 4, low=0) if is_whole else 0
        default = full_every(config, period)
    types = read_layer_types(config, default)
    _, _, dim = read_heads(config)
    rope = read_rope(config, dim)
    fields = llama_fields(
        config,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=QKNorm(),
        norms=AFTER_NORM,
        windows=read_windows(config, types, 4096),
        # layers with full attention have no positions beside layers with a window
        ropes=[rope if not has_window or kind == SLIDING else None for kind in types],
        eps=("rms_norm_eps", 1e-5),
    )
    return fields | {"max_model_len": served_context(fields["max_model_len"], rope)}


def _cohere2(config: ConfigReader) -> Fields:
    types = read_layer_types(
        config, full_every(config, config.integer("sliding_window_pattern", 4))
    )
    _, _, dim = read_heads(config)
    rope = read_rope(config, dim, is_interleaved=True)
    fields = llama_fields(
        config,
        is_tied=True,
        mlp_bias=False,
        windows=read_windows(config, types, 4096),
        ropes=[rope if kind == SLIDING else None for kind in types],
        norms=frozenset({"attn_in"}),
        eps=("layer_norm_eps", 1e-5),
    )
    return fields | {
        "norm": "layer",
        "logit_scale": config.number("logit_scale", 0.0625, high=1e4),
        "layers": tuple(replace(layer, is_parallel=True) for layer in fields["layers"]),
    }


def _glm(config: ConfigReader) -> Fields:
    _, _, dim = read_heads(config, kv_heads=2, head_dim=128)
    rope = read_rope(config, dim, partial=0.5, is_interleaved=True)
    return llama_fields(
        config,
        kv_heads=2,
        head_dim=128,
        qkv_bias=config.boolean("attention_bias", True),
        o_bias=False,
        mlp_bias=False,
        ropes=[rope] * num_layers_of(config),
        eps=("rms_norm_eps", 1.5625e-7),
    )


def _glm4(config: ConfigReader) -> Fields:
    fields = _glm(config)
    layers = tuple(replace(layer, norms=SANDWICH_NORM) for layer in fields["layers"])
    return fields | {"layers": layers}


def gemma_fields(
    config: ConfigReader,
    period: int,
    *,
    soft_cap: float,
    ropes: dict[str, float],
    has_qk_norm: bool,
    has_local_rope: bool,
) -> Fields:
    """Reads Gemma 2 and 3. ropes: the default theta of each kind of layer. has_local_rope: as in
    _gemma_rope."""
    if config.values.get("use_bidirectional_attention"):
        raise config.fail("use_bidirectional_attention", "is not supported")
    types = read_layer_types(
        config, full_every(config, config.integer("sliding_window_pattern", period))
    )
    _, _, dim = read_heads(config, kv_heads=4, head_dim=256)
    fields = llama_fields(
        config,
        is_tied=True,
        kv_heads=4,
        head_dim=256,
        mlp_bias=False,
        scale=config.number("query_pre_attn_scalar", 256.0, low=1e-3) ** -0.5,
        qk_norm=QKNorm() if has_qk_norm else None,
        windows=read_windows(config, types, 4096),
        ropes=[
            _gemma_rope(config, dim, kind, ropes[kind], has_local=has_local_rope) for kind in types
        ],
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        norms=SANDWICH_NORM,
        soft_cap=soft_cap,
    )
    return fields | {
        "norm_offset": 1.0,
        "embed_scale": fields["hidden_size"] ** 0.5,
        "logit_soft_cap": config.number("final_logit_softcapping", 0.0)
        if config.values.get("final_logit_softcapping")
        else 0.0,
    }


def _gemma_rope(
    config: ConfigReader, dim: int, kind: str, theta: float, *, has_local: bool
) -> RopeSpec:
    """Reads the RoPE of a kind of layer. has_local: without rope_parameters for each kind, SLIDING
    layers have rope_local_base_freq, and neither rope_theta nor rope_scaling applies to them."""
    given = config.values.get("rope_parameters")
    is_by_kind = isinstance(given, dict) and kind in given
    if kind == SLIDING and has_local and not is_by_kind:
        local = {"rope_theta": config.values.get("rope_local_base_freq")}
        local |= {"rope_scaling": None, "rope_parameters": None}
        config = ConfigReader(config.values | local, config.source)
    return read_rope(config, dim, layer_type=kind, theta=theta)


def _gemma2(config: ConfigReader) -> Fields:
    values = {"final_logit_softcapping": 30.0} | config.values
    config = ConfigReader(values, config.source)
    cap = config.values.get("attn_logit_softcapping", 50.0)
    soft_cap = config.number("attn_logit_softcapping", 50.0) if cap is not None else 0.0
    theta = {FULL: 10000.0, SLIDING: 10000.0}
    return gemma_fields(
        config, 2, soft_cap=soft_cap, ropes=theta, has_qk_norm=False, has_local_rope=False
    )


def _gemma3(config: ConfigReader) -> Fields:
    soft_cap = config.number("attn_logit_softcapping", 0.0)
    theta = {FULL: 1e6, SLIDING: 1e4}
    return gemma_fields(
        config, 6, soft_cap=soft_cap, ropes=theta, has_qk_norm=True, has_local_rope=True
    )


_AFTER = WeightNames(attn_out="post_attention_layernorm", mlp_out="post_feedforward_layernorm")
_GEMMA = WeightNames(
    attn_out="post_attention_layernorm",
    mlp_in="pre_feedforward_layernorm",
    mlp_out="post_feedforward_layernorm",
)
_GLM = WeightNames(up=("mlp.gate_up_proj",))

FAMILIES = {
    "olmo2": Family(_olmo2, _AFTER, "OLMo 2"),
    "olmo3": Family(_olmo3, _AFTER, "OLMo 3"),
    "exaone4": Family(_exaone4, _AFTER, "EXAONE 4"),
    "cohere2": Family(_cohere2, title="Command R7B, Command A"),
    "glm": Family(_glm, _GLM, "GLM-4 9B of 2024"),
    "glm4": Family(
        _glm4,
        replace(_GLM, attn_out="post_self_attn_layernorm", mlp_out="post_mlp_layernorm"),
        "GLM-4 of 2025",
    ),
    "gemma2": Family(_gemma2, _GEMMA, "Gemma 2"),
    "gemma3_text": Family(_gemma3, _GEMMA, "Gemma 3"),
}
