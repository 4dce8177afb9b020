"""Gemma 4 in GGUF files: layers that differ in their heads, embeddings for each layer, K/V that
layers share, and a mixture beside an MLP."""

from __future__ import annotations

import math

from serve.errors import ModelLoadError
from serve.models.families.fields import (
    FULL,
    MAX_CONTEXT,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    SLIDING,
)
from serve.models.gguf.architecture import (
    JOINED_QKV,
    MAX_MLP,
    SOFTMAX,
    Architecture,
    Json,
    attention_bias,
    layer_types,
)
from serve.models.gguf.keys import Keys
from serve.models.gguf.rope import FREQUENCIES, base_of

_TABLE = "per_layer_token_embd.weight"
_TENSORS = {
    _TABLE: "embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "per_layer_projection_norm.weight",
} | {
    f"blk.{{}}.{stored}": f"layers.{{}}.{name}"
    for stored, name in {
        "layer_output_scale.weight": "layer_scalar",
        "inp_gate.weight": "per_layer_input_gate.weight",
        "proj.weight": "per_layer_projection.weight",
        "post_norm.weight": "post_per_layer_input_norm.weight",
        "ffn_gate_inp.scale": "router.scale",
        "ffn_down_exps.scale": "router.per_expert_scale",
        "pre_ffw_norm_2.weight": "pre_feedforward_layernorm_2.weight",
        "post_ffw_norm_1.weight": "post_feedforward_layernorm_1.weight",
        "post_ffw_norm_2.weight": "post_feedforward_layernorm_2.weight",
    }.items()
}
_UNSCALED, _NEVER = 1.0, 1e30  # divisors of frequencies: of pairs that rotate, and of others


def _gemma4(keys: Keys) -> Json:
    types = layer_types(keys, 6)
    shared = _num_shared(keys)
    width = keys.integer("embedding_length_per_layer_input", 0, low=0, high=MAX_WIDTH)
    return {
        "model_type": "gemma4_text",
        "vocab_size": keys.vocab_size,
        "hidden_size": keys.hidden_size,
        "num_hidden_layers": keys.num_layers,
        "max_position_embeddings": keys.integer("context_length", high=MAX_CONTEXT),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon", high=1.0),
        "tie_word_embeddings": "output.weight" not in keys.tensors,
        "layer_types": types,
        "sliding_window": keys.integer("attention.sliding_window"),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": width,
        "vocab_size_per_layer_input": _table_rows(keys) if width else 0,
        "attention_bias": attention_bias(keys),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0),
        **_heads(keys, types),
        **_mlps(keys, keys.num_layers - shared),
    }


def _num_shared(keys: Keys) -> int:
    return keys.integer("attention.shared_kv_layers", 0, low=0, high=MAX_LAYERS)


def _table_rows(keys: Keys) -> int:
    table = keys.tensors.get(_TABLE)
    if table is None or len(table.shape) != 2:
        raise ModelLoadError(f"{keys.source}: tensor {_TABLE} is missing")
    return table.shape[0]


def _heads(keys: Keys, types: list[str]) -> Json:
    """Returns the heads of both kinds of layers, and their rotary embeddings."""
    dim = keys.head_dim
    local = keys.integer("attention.key_length_swa", dim, high=MAX_HEADS)
    for key, size in (
        ("attention.value_length_swa", local),
        ("rope.dimension_count", dim),
        ("rope.dimension_count_swa", local),
    ):
        keys.expect(key, size)
    counts = {kind: keys.of_layers("attention.head_count_kv", types, kind) for kind in set(types)}
    is_k_v = not any(
        f"blk.{layer}.{stem}.weight" in keys.tensors
        for layer, kind in enumerate(types)
        for stem in ("attn_v", JOINED_QKV)
        if kind == FULL
    )
    whole, windowed = counts.get(FULL), counts.get(SLIDING, counts.get(FULL))
    if whole is not None and whole != windowed and not is_k_v:
        raise keys.fail("attention.head_count_kv", "differs between layers that all have values")
    return {
        "num_attention_heads": keys.num_heads,
        "head_dim": local,
        "global_head_dim": dim,
        "num_key_value_heads": windowed,
        "num_global_key_value_heads": whole,
        "attention_k_eq_v": is_k_v,
        "rope_parameters": {
            SLIDING: {
                "rope_type": "default",
                "rope_theta": keys.number("rope.freq_base_swa", 1e4, low=1.0, high=1e15),
            },
            FULL: {
                "rope_type": "proportional",
                "rope_theta": base_of(keys),
                "partial_rotary_factor": _rotated_part(keys, dim),
            },
        },
    }


def _rotated_part(keys: Keys, dim: int) -> float:
    """Returns the part of a head's values that rotates, of which the file has each pair's divisor.
    ModelLoadError for other divisors."""
    divisors = keys.factors(FREQUENCIES, high=_NEVER * 1.001)
    if divisors is None:
        raise ModelLoadError(f"{keys.source}: tensor {FREQUENCIES} is missing")
    rotated = divisors.count(_UNSCALED)
    others = divisors[rotated:]
    if len(divisors) != dim // 2 or any(value < _NEVER * 0.999 for value in others):
        raise ModelLoadError(
            f"{keys.source}: tensor {FREQUENCIES} must hold 1 for the pairs that rotate, and "
            f"{_NEVER:g} for the rest of {dim // 2}"
        )
    part = 2 * rotated / dim
    return part if int(part * dim // 2) == rotated else math.nextafter(part, 1.0)


def _mlps(keys: Keys, first_shared: int) -> Json:
    """Returns the sizes of MLPs, which layers that share K/V may have twice as large."""
    sizes = keys.values.get("feed_forward_length")
    values: Json = {"use_double_wide_mlp": False, "enable_moe_block": keys.num_experts > 0}
    if isinstance(sizes, list) and sizes and first_shared < keys.num_layers:
        keys.has("feed_forward_length")
        size = sizes[0]
        double = [size] * first_shared + [2 * size] * (keys.num_layers - first_shared)
        values["use_double_wide_mlp"] = sizes == double
    if values["use_double_wide_mlp"]:
        values["intermediate_size"] = size
    else:
        values["intermediate_size"] = keys.per_layer("feed_forward_length", high=MAX_MLP)
    if not keys.num_experts:
        keys.has("expert_feed_forward_length")
        return values
    keys.expect("expert_gating_func", SOFTMAX)
    return values | {
        "num_experts": keys.num_experts,
        "top_k_experts": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", high=MAX_MLP),
    }


def _unused(keys: Keys) -> list[str]:
    """Returns the K/V products of layers that read another layer's."""
    first = keys.num_layers - _num_shared(keys)
    return [
        f"blk.{layer}.{stem}.weight"
        for layer in range(max(0, first), keys.num_layers)
        for stem in ("attn_k", "attn_v", "attn_k_norm")
    ]


ARCHITECTURES = {"gemma4": Architecture(_gemma4, tensors=_TENSORS, unused=_unused)}
