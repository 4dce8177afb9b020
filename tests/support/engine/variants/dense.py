"""Dense families whose blocks normalize like Llama's, two odd shapes each."""

from __future__ import annotations

from tests.support.engine.variants.variant import LLAMA3, YARN, Json, Variant

_LONG_FACTORS = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5],
    "long_factor": [1.5, 2.0, 3.0, 4.0, 5.0, 6.0],
}
_MINISTRAL_ROPE: Json = YARN | {
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_ALPHA = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}
# 3 heads of 16
_THREE_HEADS: Json = {
    "hidden_size": 48,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}

VARIANTS = [
    Variant("smollm3", "nope", {"num_hidden_layers": 5, "no_rope_layer_interval": 2}),
    Variant(
        "smollm3",
        "windows",
        _THREE_HEADS
        | {
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 0, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 8,
            "attention_bias": True,
        },
    ),
    Variant(
        "granite",
        "multipliers",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.0,
        },
    ),
    Variant(
        "granite",
        "deep",
        _THREE_HEADS
        | {
            "num_hidden_layers": 9,
            "intermediate_size": 40,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
    Variant("seed_oss", "head-24", {"head_dim": 24}),
    Variant(
        "seed_oss",
        "head-80",
        _THREE_HEADS | {"head_dim": 80, "attention_out_bias": True, "rope_parameters": LLAMA3},
    ),
    Variant("arcee", "mqa", {"num_key_value_heads": 1}),
    Variant(
        "arcee", "yarn", _THREE_HEADS | {"rope_parameters": YARN, "mlp_bias": True, "head_dim": 20}
    ),
    Variant("internlm3", "head-16", {"head_dim": 16}),
    Variant(
        "internlm3",
        "biases",
        _THREE_HEADS | {"head_dim": 24, "attention_bias": True, "mlp_bias": True},
    ),
    Variant("ernie4_5", "head-20", {"head_dim": 20}),
    Variant(
        "ernie4_5",
        "head-96",
        _THREE_HEADS | {"head_dim": 96, "use_bias": True, "num_hidden_layers": 3},
    ),
    Variant("apertus", "base"),
    Variant(
        "apertus",
        "one-layer",
        _THREE_HEADS | {"num_hidden_layers": 1, "rope_parameters": LLAMA3},
    ),
    Variant("hunyuan_v1_dense", "alpha", {"head_dim": 16, "rope_parameters": _ALPHA}),
    Variant(
        "hunyuan_v1_dense",
        "three-heads",
        _THREE_HEADS | {"head_dim": 20, "num_hidden_layers": 3, "tie_word_embeddings": True},
    ),
    Variant("phi3", "window", {"sliding_window": 8, "original_max_position_embeddings": 256}),
    Variant(
        "phi3",
        "short",
        {"original_max_position_embeddings": 256, "rope_parameters": _LONG_FACTORS},
    ),
    # beyond the original length from the second token on
    Variant(
        "phi3",
        "beyond",
        {
            "original_max_position_embeddings": 1,
            "rope_parameters": _LONG_FACTORS | {"attention_factor": 1.2},
        },
    ),
    Variant(
        "phi3",
        "long",
        {"original_max_position_embeddings": 32, "rope_parameters": _LONG_FACTORS},
        is_steady=False,
    ),
    Variant("ministral3", "yarn", {"head_dim": 24, "rope_parameters": _MINISTRAL_ROPE}),
    Variant(
        "ministral3",
        "window",
        _THREE_HEADS
        | {
            "head_dim": 32,
            "sliding_window": 8,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e6,
                "llama_4_scaling_beta": 0.3,
                "original_max_position_embeddings": 8,
            },
        },
    ),
    Variant("stablelm", "base"),
    Variant(
        "stablelm",
        "parallel",
        {
            "use_parallel_residual": True,
            "qk_layernorm": True,
            "use_qkv_bias": True,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
        },
    ),
    Variant("starcoder2", "window", {"sliding_window": 8, "tie_word_embeddings": True}),
    Variant("starcoder2", "no-bias", _THREE_HEADS | {"use_bias": False}),
]
