"""The architectures of GGUF files that are served: what their keys are in a config.json, and what
llama.cpp's conversion changes in their tensors.

Each row has a test that writes a small model as the conversion does and compares its tokens with
those of Transformers (tests/whole/test_gguf.py). Nothing is guessed: other architectures are
refused, and so is a key that a row does not read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from serve.models.families.fields import FULL, MAX_CONTEXT, MAX_WIDTH, SLIDING
from serve.models.gguf.keys import Keys
from serve.models.gguf.rope import base_of, check_rotated, rope_values

Json = dict[str, Any]
_MAX_MLP = MAX_WIDTH * 8


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the table.

    values: makes the values of config.json, with its model_type. is_permuted: the rows of q and k
    are those of an interleaved rotary embedding. norm_offset: what the conversion adds to the
    weights of norms. modules: the names of tensors that differ from `names.py`, by their fields in
    WeightNames.
    """

    values: Callable[[Keys], Json]
    is_permuted: bool = False
    norm_offset: float = 0.0
    modules: Mapping[str, str] = field(default_factory=dict)


def _sizes(keys: Keys, *, eps: str = "rms_norm_eps") -> Json:
    """Returns what all models have, but for the rotary embedding."""
    if not keys.num_experts:
        keys.expect("expert_used_count", 0)
    ending = "layer_norm_rms_epsilon" if eps == "rms_norm_eps" else "layer_norm_epsilon"
    return {
        "vocab_size": keys.vocab_size,
        "hidden_size": keys.hidden_size,
        "num_hidden_layers": keys.num_layers,
        "num_attention_heads": keys.num_heads,
        "num_key_value_heads": keys.num_kv_heads,
        "head_dim": keys.head_dim,
        "max_position_embeddings": keys.integer("context_length", high=MAX_CONTEXT),
        eps: keys.number(f"attention.{ending}", high=1.0),
        "tie_word_embeddings": "output.weight" not in keys.tensors,
    }


def _llama_like(keys: Keys, model_type: str, **more: Any) -> Json:
    """Returns the values of a model whose heads rotate whole."""
    check_rotated(keys, keys.head_dim)
    return (
        _sizes(keys)
        | {
            "model_type": model_type,
            "intermediate_size": keys.per_layer("feed_forward_length", high=_MAX_MLP),
            "rope_parameters": rope_values(keys),
        }
        | more
    )


def _has_biases(keys: Keys, *stems: str) -> bool:
    """Returns whether the products have biases: all of them or none."""
    found = {keys.has_tensor(f"{stem}.bias") for stem in stems}
    if len(found) > 1:
        raise keys.fail("block_count", f"some of {', '.join(stems)} have a bias, and others none")
    return found.pop()


def _llama(keys: Keys) -> Json:
    values = _llama_like(keys, "llama")
    if keys.num_experts:
        return values | {"model_type": "mixtral", "sliding_window": None} | _local_experts(keys)
    return values | {
        "attention_bias": _has_biases(keys, "attn_q", "attn_k", "attn_v", "attn_output"),
        "mlp_bias": _has_biases(keys, "ffn_gate", "ffn_up", "ffn_down"),
    }


def _local_experts(keys: Keys) -> Json:
    keys.expect("expert_gating_func", 1)  # softmax
    return {
        "num_local_experts": keys.num_experts,
        "num_experts_per_tok": keys.integer("expert_used_count"),
    }


def _experts(keys: Keys) -> Json:
    keys.expect("expert_gating_func", 1)
    rows = keys.rows("ffn_gate_exps.weight")
    return {
        "num_experts": keys.num_experts,
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", rows, high=_MAX_MLP),
    }


def _qwen2(keys: Keys) -> Json:
    return _llama_like(keys, "qwen2")


def _qwen3(keys: Keys) -> Json:
    return _llama_like(keys, "qwen3", attention_bias=_attention_bias(keys))


def _attention_bias(keys: Keys) -> bool:
    return _has_biases(keys, "attn_q", "attn_k", "attn_v", "attn_output")


def _qwen2_moe(keys: Keys) -> Json:
    rows = keys.rows("ffn_gate_shexp.weight")
    shared = keys.integer("expert_shared_feed_forward_length", rows, high=_MAX_MLP)
    values = _llama_like(keys, "qwen2_moe", norm_topk_prob=False)
    return values | _experts(keys) | {"shared_expert_intermediate_size": shared}


def _qwen3_moe(keys: Keys) -> Json:
    values = _llama_like(keys, "qwen3_moe", attention_bias=_attention_bias(keys))
    return values | _experts(keys) | {"norm_topk_prob": True}


def _olmoe(keys: Keys) -> Json:
    keys.expect("attention.clamp_kqv", 0.0)
    values = _llama_like(keys, "olmoe", norm_topk_prob=False)
    found = _experts(keys)
    return values | found | {"intermediate_size": found["moe_intermediate_size"]}


def _gemma2(keys: Keys) -> Json:
    return _gemma(keys, "gemma2", period=2, large=46) | {
        "rope_parameters": rope_values(keys),
        "sliding_window": keys.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: Keys) -> Json:
    local = keys.number("rope.freq_base_swa", 10000.0, low=1.0, high=1e15)
    return _gemma(keys, "gemma3_text", period=6, large=62) | {
        "rope_parameters": {
            FULL: rope_values(keys),
            SLIDING: {"rope_type": "default", "rope_theta": local},
        },
        "sliding_window": keys.integer("attention.sliding_window"),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0),
    }


def _gemma(keys: Keys, model_type: str, *, period: int, large: int) -> Json:
    """large: the layers of the largest model, whose queries are scaled by the width of a head's
    part of the hidden state and not by that of its values."""
    check_rotated(keys, keys.head_dim)
    scaled_by = keys.head_dim
    if keys.num_layers == large:
        scaled_by = keys.hidden_size // keys.num_heads
    return _sizes(keys) | {
        "model_type": model_type,
        "intermediate_size": keys.per_layer("feed_forward_length", high=_MAX_MLP),
        "query_pre_attn_scalar": scaled_by,
        "layer_types": _layer_types(keys, period),
    }


def _layer_types(keys: Keys, period: int) -> list[str]:
    """Returns the kind of each layer: from a key, or all but each period-th have a window."""
    key = "attention.sliding_window_pattern"
    count = keys.num_layers
    if keys.has(key) and isinstance(keys.values[key], list):
        given = keys.values[key]
        if len(given) < count or not all(isinstance(item, bool) for item in given):
            raise keys.fail(key, f"must say true or false for each of {count} layers")
        return [SLIDING if item else FULL for item in given[:count]]
    period = keys.integer(key, period, low=1)
    return [SLIDING if (number + 1) % period else FULL for number in range(count)]


def _phi3(keys: Keys) -> Json:
    dim = keys.head_dim
    rotated = keys.integer("rope.dimension_count", dim, low=2, high=dim)
    window = keys.integer("attention.sliding_window", 0, low=0)
    return _sizes(keys) | {
        "model_type": "phi3",
        "intermediate_size": keys.per_layer("feed_forward_length", high=_MAX_MLP),
        "rope_parameters": rope_values(keys) | {"partial_rotary_factor": rotated / dim},
        "sliding_window": window or None,
    }


def _olmo2(keys: Keys) -> Json:
    window = keys.integer("attention.sliding_window", 0, low=0)
    values = _llama_like(keys, "olmo2", attention_bias=_attention_bias(keys))
    if not window:
        return values
    plain = {"rope_type": "default", "rope_theta": base_of(keys)}
    return values | {
        "model_type": "olmo3",
        "sliding_window": window,
        "layer_types": _layer_types(keys, 4),
        "rope_parameters": {FULL: rope_values(keys), SLIDING: plain},
    }


def _granite(keys: Keys) -> Json:
    return _llama_like(keys, "granite", attention_bias=_attention_bias(keys)) | _scales(keys)


def _granite_moe(keys: Keys) -> Json:
    keys.expect("expert_shared_feed_forward_length", 0)
    values = _llama_like(keys, "granitemoe", attention_bias=_attention_bias(keys))
    return values | _scales(keys) | _local_experts(keys)


def _scales(keys: Keys) -> Json:
    keys.expect("rope.scaling.finetuned", True)  # false stands for no rotary embedding
    return {
        "embedding_multiplier": keys.number("embedding_scale", 1.0, high=1e4),
        "residual_multiplier": keys.number("residual_scale", 1.0, high=1e4),
        "attention_multiplier": keys.number("attention.scale", high=1e4),
        "logits_scaling": keys.number("logit_scale", 1.0, low=1e-6),
    }


def _gpt_oss(keys: Keys) -> Json:
    rows = keys.rows("ffn_gate_exps.weight")
    size = keys.integer("expert_feed_forward_length", rows, high=_MAX_MLP)
    values = _llama_like(keys, "gpt_oss", attention_bias=_attention_bias(keys))
    if values["rope_parameters"]["rope_type"] == "yarn":
        values["rope_parameters"]["truncate"] = False
    return values | {
        **_local_experts(keys),
        "intermediate_size": size,
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": _layer_types(keys, 2),
    }


def _glm4(keys: Keys) -> Json:
    values = _partly_rotated(keys) | {"model_type": "glm4"}
    return values | {"attention_bias": _has_biases(keys, "attn_q", "attn_k", "attn_v")}


def _partly_rotated(keys: Keys) -> Json:
    dim = keys.head_dim
    rotated = keys.integer("rope.dimension_count", low=2, high=dim)
    return _sizes(keys) | {
        "intermediate_size": keys.per_layer("feed_forward_length", high=_MAX_MLP),
        "rope_parameters": rope_values(keys) | {"partial_rotary_factor": rotated / dim},
    }


def _glm4_moe(keys: Keys) -> Json:
    keys.expect("expert_gating_func", 2)  # sigmoid
    rows = keys.rows("ffn_gate_exps.weight")
    return _partly_rotated(keys) | {
        "model_type": "glm4_moe",
        "attention_bias": _has_biases(keys, "attn_q", "attn_k", "attn_v"),
        "use_qk_norm": keys.has_tensor("attn_q_norm.weight"),
        "n_routed_experts": keys.num_experts,
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "n_shared_experts": keys.integer("expert_shared_count", 0, low=0),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length", rows, high=_MAX_MLP),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0, low=0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.boolean("expert_weights_norm", False),
        "n_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
    }


def _smollm3(keys: Keys) -> Json:
    return _llama_like(
        keys,
        "smollm3",
        no_rope_layer_interval=4,
        attention_bias=_attention_bias(keys),
        mlp_bias=_has_biases(keys, "ffn_gate", "ffn_up", "ffn_down"),
    )


def _cohere2(keys: Keys) -> Json:
    check_rotated(keys, keys.head_dim)
    return _sizes(keys, eps="layer_norm_eps") | {
        "model_type": "cohere2",
        "intermediate_size": keys.per_layer("feed_forward_length", high=_MAX_MLP),
        "rope_parameters": rope_values(keys),
        "logit_scale": keys.number("logit_scale", high=1e4),
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": _layer_types(keys, 4),
    }


def _starcoder2(keys: Keys) -> Json:
    check_rotated(keys, keys.head_dim)
    products = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down")
    return _sizes(keys, eps="norm_epsilon") | {
        "model_type": "starcoder2",
        "intermediate_size": keys.per_layer("feed_forward_length", high=_MAX_MLP),
        "rope_parameters": rope_values(keys),
        "use_bias": _has_biases(keys, *products),
        "sliding_window": None,
    }


def _seed_oss(keys: Keys) -> Json:
    return _llama_like(
        keys,
        "seed_oss",
        attention_bias=_has_biases(keys, "attn_q", "attn_k", "attn_v"),
        attention_out_bias=keys.has_tensor("attn_output.bias"),
    )


def _arcee(keys: Keys) -> Json:
    return _llama_like(
        keys,
        "arcee",
        attention_bias=_attention_bias(keys),
        mlp_bias=_has_biases(keys, "ffn_up", "ffn_down"),
    )


def _exaone4(keys: Keys) -> Json:
    window = keys.integer("attention.sliding_window", 0, low=0)
    values = _llama_like(keys, "exaone4", sliding_window=window or None)
    types = _layer_types(keys, 4) if window else [FULL] * keys.num_layers
    return values | {"layer_types": types}


def _ernie4_5(keys: Keys) -> Json:
    products = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    return _llama_like(keys, "ernie4_5", use_bias=_has_biases(keys, *products))


_AFTER_ATTENTION = {"post_attention_norm": "mlp_in"}

ARCHITECTURES = {
    "llama": Architecture(_llama, is_permuted=True),
    "qwen2": Architecture(_qwen2),
    "qwen3": Architecture(_qwen3),
    "qwen2vl": Architecture(_qwen2),
    "qwen3vl": Architecture(_qwen3),
    "qwen2moe": Architecture(_qwen2_moe),
    "qwen3moe": Architecture(_qwen3_moe),
    "olmo2": Architecture(_olmo2),
    "olmoe": Architecture(_olmoe),
    "gemma2": Architecture(_gemma2, norm_offset=1.0),
    "gemma3": Architecture(_gemma3, norm_offset=1.0),
    "phi3": Architecture(_phi3),
    "granite": Architecture(_granite, is_permuted=True),
    "granitemoe": Architecture(_granite_moe, is_permuted=True),
    "gpt-oss": Architecture(_gpt_oss, modules=_AFTER_ATTENTION),
    "glm4": Architecture(_glm4),
    "glm4moe": Architecture(_glm4_moe, modules=_AFTER_ATTENTION),
    "smollm3": Architecture(_smollm3, is_permuted=True),
    "cohere2": Architecture(_cohere2),
    "starcoder2": Architecture(_starcoder2),
    "seed_oss": Architecture(_seed_oss, modules=_AFTER_ATTENTION),
    "arcee": Architecture(_arcee, is_permuted=True),
    "exaone4": Architecture(_exaone4),
    "ernie4_5": Architecture(_ernie4_5),
}


def find_architecture(keys: Keys) -> Architecture:
    """Returns the row of a file. ModelLoadError names those that are served."""
    found = ARCHITECTURES.get(keys.architecture)
    if found is None:
        raise keys.fail(
            "general.architecture",
            f"{keys.architecture!r:.60} is not supported; known: {', '.join(ARCHITECTURES)}",
        )
    return found
