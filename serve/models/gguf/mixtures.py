"""Mixtures of experts in GGUF files. Mixtral has the name of Llama, among the dense ones."""

from __future__ import annotations

from serve.models.gguf.architecture import (
    MAX_MLP,
    SIGMOID,
    SOFTMAX,
    Architecture,
    Json,
    attention_bias,
    expert_size,
    has_biases,
    layer_types,
    llama_like,
    local_experts,
    partly_rotated,
    sizes,
)
from serve.models.gguf.dense import granite_scales
from serve.models.gguf.keys import Keys
from serve.models.gguf.rope import rope_values


def _experts(keys: Keys) -> Json:
    keys.expect("expert_gating_func", SOFTMAX)
    return {
        "num_experts": keys.num_experts,
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": expert_size(keys),
    }


def _qwen2_moe(keys: Keys) -> Json:
    rows = keys.rows("ffn_gate_shexp.weight")
    shared = keys.integer("expert_shared_feed_forward_length", rows, high=MAX_MLP)
    values = llama_like(keys, "qwen2_moe", norm_topk_prob=False)
    return values | _experts(keys) | {"shared_expert_intermediate_size": shared}


def _qwen3_moe(keys: Keys) -> Json:
    values = llama_like(keys, "qwen3_moe", attention_bias=attention_bias(keys))
    return values | _experts(keys) | {"norm_topk_prob": True}


def _olmoe(keys: Keys) -> Json:
    keys.expect("attention.clamp_kqv", 0.0)
    values = llama_like(keys, "olmoe", norm_topk_prob=False)
    found = _experts(keys)
    return values | found | {"intermediate_size": found["moe_intermediate_size"]}


def _granite_moe(keys: Keys) -> Json:
    keys.expect("expert_shared_feed_forward_length", 0)
    values = llama_like(keys, "granitemoe", attention_bias=attention_bias(keys))
    return values | granite_scales(keys) | local_experts(keys)


def _gpt_oss(keys: Keys) -> Json:
    size = expert_size(keys)
    values = llama_like(keys, "gpt_oss", attention_bias=attention_bias(keys))
    if values["rope_parameters"]["rope_type"] == "yarn":
        values["rope_parameters"]["truncate"] = False
    return values | {
        **local_experts(keys),
        "intermediate_size": size,
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": layer_types(keys, 2),
    }


def _glm4_moe(keys: Keys) -> Json:
    return (
        partly_rotated(keys)
        | _sigmoid_experts(keys)
        | {
            "model_type": "glm4_moe",
            "attention_bias": has_biases(keys, "attn_q", "attn_k", "attn_v"),
            "use_qk_norm": keys.has_tensor("attn_q_norm.weight"),
        }
    )


def _dots1(keys: Keys) -> Json:
    values = llama_like(keys, "dots1", attention_bias=attention_bias(keys))
    return values | _sigmoid_experts(keys) | {"sliding_window": None}


def _sigmoid_experts(keys: Keys) -> Json:
    keys.expect("expert_gating_func", SIGMOID)
    return {
        "n_routed_experts": keys.num_experts,
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "n_shared_experts": keys.integer("expert_shared_count", 0, low=0),
        "moe_intermediate_size": expert_size(keys),
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0, low=0),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
        "norm_topk_prob": keys.boolean("expert_weights_norm", False),
        "n_group": keys.integer("expert_group_count", 1),
        "topk_group": keys.integer("expert_group_used_count", 1),
    }


def _minimax_m2(keys: Keys) -> Json:
    keys.expect("expert_gating_func", SIGMOID)
    dim = keys.head_dim
    keys.has("feed_forward_length")  # of all MLPs, which are those of experts
    return sizes(keys) | {
        "model_type": "minimax_m2",
        "intermediate_size": expert_size(keys),
        "num_local_experts": keys.num_experts,
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "rope_parameters": rope_values(keys),
        "rotary_dim": keys.integer("rope.dimension_count", dim, low=2, high=dim),
    }


def _ernie4_5_moe(keys: Keys) -> Json:
    keys.expect("expert_gating_func", SOFTMAX)
    keys.has("expert_shared_feed_forward_length")  # the tensors of shared experts tell it
    return llama_like(keys, "ernie4_5_moe", use_bias=attention_bias(keys)) | {
        "moe_num_experts": keys.num_experts,
        "moe_k": keys.integer("expert_used_count"),
        "moe_intermediate_size": expert_size(keys),
        "moe_num_shared_experts": keys.integer("expert_shared_count", 0, low=0),
        "moe_layer_start_index": keys.integer("leading_dense_block_count", 0, low=0),
        "moe_layer_interval": keys.integer("interleave_moe_layer_step", 1),
    }


def _hunyuan_moe(keys: Keys) -> Json:
    keys.expect("expert_gating_func", SOFTMAX)
    keys.has("expert_shared_feed_forward_length")
    return llama_like(keys, "hunyuan_v1_moe", attention_bias=attention_bias(keys)) | {
        "num_experts": keys.num_experts,
        "moe_topk": keys.integer("expert_used_count"),
        "moe_intermediate_size": expert_size(keys),
        "num_shared_expert": keys.integer("expert_shared_count", 1),
    }


def _afmoe(keys: Keys) -> Json:
    """Reads Arcee Trinity, whose embeddings llama.cpp always multiplies."""
    keys.expect("expert_gating_func", SIGMOID)
    if not keys.boolean("expert_weights_norm", False):
        raise keys.fail("expert_weights_norm", "is not true, which is not supported")
    return llama_like(keys, "afmoe", attention_bias=attention_bias(keys)) | {
        "num_experts": keys.num_experts,
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "num_shared_experts": keys.integer("expert_shared_count", 0, low=0),
        "moe_intermediate_size": expert_size(keys),
        "num_dense_layers": keys.integer("leading_dense_block_count", 0, low=0),
        "route_scale": keys.number("expert_weights_scale", 1.0),
        "sliding_window": keys.integer("attention.sliding_window"),
        "layer_types": layer_types(keys, 4),
        "mup_enabled": True,
    }


_LLAMA4_CHUNK = 8192  # which its files do not say, and no more the other numbers of attention
_UNNORMALIZED = 128  # experts of the size whose queries and keys have no norms


def _llama4(keys: Keys) -> Json:
    """Reads the text model of Llama 4."""
    keys.expect("attention.sliding_window", _LLAMA4_CHUNK)
    values = llama_like(keys, "llama4_text", attention_bias=attention_bias(keys))
    return (
        values
        | local_experts(keys, SIGMOID)
        | {
            "intermediate_size": expert_size(keys),
            "intermediate_size_mlp": values["intermediate_size"],
            "interleave_moe_layer_step": keys.integer("interleave_moe_layer_step"),
            "no_rope_layer_interval": 4,
            "attention_chunk_size": _LLAMA4_CHUNK,
            "floor_scale": _LLAMA4_CHUNK,
            "attn_scale": 0.1,
            "use_qk_norm": keys.num_experts != _UNNORMALIZED,
        }
    )


_AFTER_ATTENTION = {"post_attention_norm": "mlp_in"}
_GATE = {"blk.{}.attn_gate.weight": "layers.{}.self_attn.gate_proj.weight"}
ARCHITECTURES = {
    "qwen2moe": Architecture(_qwen2_moe),
    "qwen3moe": Architecture(_qwen3_moe),
    "qwen3vlmoe": Architecture(_qwen3_moe),
    "olmoe": Architecture(_olmoe),
    "granitemoe": Architecture(_granite_moe, is_permuted=True),
    "gpt-oss": Architecture(_gpt_oss, modules=_AFTER_ATTENTION),
    "glm4moe": Architecture(_glm4_moe, modules=_AFTER_ATTENTION),
    "dots1": Architecture(_dots1),
    "minimax-m2": Architecture(_minimax_m2),
    "ernie4_5-moe": Architecture(_ernie4_5_moe),
    "hunyuan-moe": Architecture(_hunyuan_moe),
    "afmoe": Architecture(_afmoe, tensors=_GATE),
    "llama4": Architecture(_llama4),
}
