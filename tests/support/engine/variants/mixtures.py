"""Mixtures of experts with attention over stored keys and values."""

from __future__ import annotations

from tests.support.engine.variants.variant import YARN, Json, Variant

_THREE_HEADS: Json = {
    "hidden_size": 48,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}
_EXPERTS: Json = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
_LOCAL: Json = {"num_local_experts": 6, "num_experts_per_tok": 3}
_MANY: Json = {"num_local_experts": 11, "num_experts_per_tok": 1, "intermediate_size": 24}
# as in DeepSeek-V3: groups of experts, shared ones, dense layers first
GROUPS: Json = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
}
_GPT_OSS_ROPE: Json = YARN | {
    "rope_theta": 150000.0,
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}

VARIANTS = [
    Variant("qwen3_moe", "head-24", _EXPERTS | {"head_dim": 24, "norm_topk_prob": True}),
    Variant(
        "qwen3_moe",
        "dense-between",
        _THREE_HEADS
        | _EXPERTS
        | {
            "head_dim": 80,
            "num_hidden_layers": 4,
            "mlp_only_layers": [2],
            "num_experts_per_tok": 6,
        },
    ),
    Variant(
        "qwen2_moe",
        "shared",
        _EXPERTS
        | {
            "shared_expert_intermediate_size": 56,
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
        },
    ),
    Variant(
        "qwen2_moe",
        "windows",
        _THREE_HEADS
        | _EXPERTS
        | {
            "shared_expert_intermediate_size": 24,
            "num_experts_per_tok": 1,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 2,
            "norm_topk_prob": True,
        },
    ),
    Variant("mixtral", "base", _LOCAL),
    Variant("mixtral", "window", _THREE_HEADS | _MANY | {"sliding_window": 8, "head_dim": 24}),
    Variant("olmoe", "base", {"num_experts": 6, "num_experts_per_tok": 3}),
    Variant(
        "olmoe",
        "normalized",
        _THREE_HEADS
        | {
            "num_experts": 11,
            "num_experts_per_tok": 2,
            "intermediate_size": 24,
            "norm_topk_prob": True,
            "attention_bias": True,
        },
    ),
    Variant(
        "granitemoe",
        "multipliers",
        _LOCAL
        | {
            "attention_multiplier": 0.1,
            "residual_multiplier": 0.4,
            "embedding_multiplier": 5.0,
            "logits_scaling": 2.0,
        },
    ),
    Variant(
        "granitemoe",
        "tied",
        _THREE_HEADS | _MANY | {"tie_word_embeddings": True, "attention_multiplier": 0.25},
    ),
    Variant(
        "gpt_oss",
        "yarn",
        _LOCAL
        | {
            "head_dim": 24,
            "sliding_window": 8,
            "num_hidden_layers": 2,
            "rope_parameters": _GPT_OSS_ROPE,
        },
    ),
    Variant(
        "gpt_oss",
        "one-layer",
        _THREE_HEADS
        | _LOCAL
        | {
            "num_experts_per_tok": 6,
            "head_dim": 64,
            "sliding_window": 23,
            "num_hidden_layers": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    Variant(
        "glm4_moe", "groups", GROUPS | {"head_dim": 24, "use_qk_norm": True, "attention_bias": True}
    ),
    Variant(
        "glm4_moe",
        "one-group",
        GROUPS
        | _THREE_HEADS
        | {"head_dim": 96, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    ),
    Variant(
        "dots1",
        "groups",
        GROUPS | {"norm_topk_prob": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    Variant(
        "dots1",
        "one-group",
        GROUPS
        | _THREE_HEADS
        | {
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 0,
            "num_hidden_layers": 2,
            "sliding_window": None,
            "norm_topk_prob": False,
        },
    ),
    Variant("minimax_m2", "partial", _LOCAL | {"head_dim": 24, "rotary_dim": 12}),
    Variant("minimax_m2", "whole", _THREE_HEADS | _MANY | {"head_dim": 80, "num_hidden_layers": 1}),
    Variant(
        "ernie4_5_moe",
        "shared",
        {
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 40,
            "moe_num_shared_experts": 2,
            "num_hidden_layers": 3,
        },
    ),
    Variant(
        "ernie4_5_moe",
        "intervals",
        _THREE_HEADS
        | {
            "moe_num_experts": 5,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_num_shared_experts": 0,
            "moe_layer_start_index": 0,
            "moe_layer_interval": 2,
            "num_hidden_layers": 4,
            "use_bias": False,
        },
    ),
    Variant(
        "hunyuan_v1_moe",
        "base",
        {"num_experts": 6, "moe_topk": 3, "head_dim": 16, "num_shared_expert": 1},
    ),
    Variant(
        "hunyuan_v1_moe",
        "one-of-eleven",
        _THREE_HEADS
        | {
            "num_experts": 11,
            "moe_topk": 1,
            "head_dim": 24,
            "intermediate_size": 24,
            "tie_word_embeddings": True,
        },
    ),
]
