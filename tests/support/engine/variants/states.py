"""Models with short convolutions and gated delta nets."""

from __future__ import annotations

from tests.support.engine.variants.variant import Json, Variant

_NET: Json = {
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "num_hidden_layers": 4,
}
_ODD_NET: Json = {
    "hidden_size": 48,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 40,
    "partial_rotary_factor": 0.25,
    "linear_key_head_dim": 20,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 3,
    "linear_conv_kernel_dim": 3,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_EXPERTS: Json = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24,
}

VARIANTS = [
    Variant(
        "lfm2",
        "convs",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "block_multiple_of": 16,
        },
    ),
    Variant(
        "lfm2",
        "bias",
        {
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "num_hidden_layers": 3,
            "full_attn_idxs": [1],
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    Variant(
        "lfm2_moe",
        "experts",
        {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
        },
    ),
    Variant(
        "lfm2_moe",
        "three-heads",
        {
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "conv", "full_attention"],
            "num_dense_layers": 0,
            "num_experts": 5,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "use_expert_bias": False,
            "norm_topk_prob": False,
        },
    ),
    Variant("qwen3_5_text", "net", _NET),
    Variant("qwen3_5_text", "odd", _ODD_NET),
    Variant("qwen3_next", "net", _NET | _EXPERTS),
    Variant("qwen3_next", "odd", _ODD_NET | _EXPERTS | {"mlp_only_layers": [1]}),
    Variant("qwen3_5_moe_text", "net", _NET | _EXPERTS),
    Variant("qwen3_5_moe_text", "odd", _ODD_NET | _EXPERTS),
]
