"""Llama 4 and Gemma 4, the text models: layers of several kinds."""

from __future__ import annotations

from tests.support.engine.variants.variant import LLAMA3, Json, Variant

_NO_TABLE: Json = {"hidden_size_per_layer_input": 0}

VARIANTS = [
    Variant(
        "llama4_text",
        "chunks",
        {
            "num_hidden_layers": 5,
            "head_dim": 16,
            "attention_chunk_size": 16,
            "num_local_experts": 4,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 80,
            "floor_scale": 8,
            "attn_scale": 0.3,
        },
    ),
    Variant(
        "llama4_text",
        "three-heads",
        {
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "num_hidden_layers": 3,
            "head_dim": 20,
            "no_rope_layers": [1, 0, 1],
            "attention_chunk_size": 7,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size_mlp": 80,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
            "rope_parameters": LLAMA3,
        },
    ),
    Variant(
        "gemma4_text",
        "shared",
        {
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
            "head_dim": 16,
            "global_head_dim": 24,
            "sliding_window": 8,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 320,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "final_logit_softcapping": 3.0,
        },
    ),
    Variant(
        "gemma4_text",
        "mixture",
        _NO_TABLE
        | {
            "num_hidden_layers": 6,
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 8,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
        },
    ),
    Variant(
        "gemma4_text",
        "heads-256-and-512",
        _NO_TABLE
        | {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "head_dim": 256,
            "global_head_dim": 512,
            "sliding_window": 9,
        },
    ),
]
