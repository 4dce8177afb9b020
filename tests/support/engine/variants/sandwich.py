"""Dense families with norms in other places than Llama or with several kinds of layers."""

from __future__ import annotations

from tests.support.engine.variants.variant import YARN, Json, Variant

FULL, SLIDING = "full_attention", "sliding_attention"
_THREE_HEADS: Json = {
    "hidden_size": 48,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}
_OLMO3_ROPES = {
    FULL: YARN | {"original_max_position_embeddings": 16},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}
_GEMMA3_ROPES = {
    FULL: {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}

VARIANTS = [
    Variant("olmo2", "base"),
    Variant(
        "olmo2", "three-heads", _THREE_HEADS | {"num_hidden_layers": 3, "attention_bias": True}
    ),
    Variant("olmo3", "window", {"num_hidden_layers": 5, "sliding_window": 8}),
    Variant(
        "olmo3",
        "yarn",
        _THREE_HEADS
        | {"num_hidden_layers": 4, "sliding_window": 23, "rope_parameters": _OLMO3_ROPES},
    ),
    Variant("exaone4", "window", {"num_hidden_layers": 5, "sliding_window": 8}),
    Variant(
        "exaone4",
        "no-window",
        _THREE_HEADS | {"sliding_window": None, "layer_types": [FULL, FULL], "head_dim": 20},
    ),
    Variant("cohere2", "window", {"num_hidden_layers": 5, "sliding_window": 8, "logit_scale": 0.5}),
    Variant(
        "cohere2",
        "biases",
        _THREE_HEADS
        | {
            "num_hidden_layers": 3,
            "sliding_window": 1,
            "layer_types": [SLIDING, FULL, SLIDING],
            "attention_bias": True,
            "logit_scale": 1.0,
            "tie_word_embeddings": True,
        },
    ),
    Variant("glm", "head-16", {"head_dim": 16}),
    Variant("glm", "no-bias", _THREE_HEADS | {"head_dim": 24, "attention_bias": False}),
    Variant("glm4", "head-24", {"head_dim": 24}),
    Variant("glm4", "deep", _THREE_HEADS | {"head_dim": 16, "num_hidden_layers": 6}),
    Variant(
        "gemma2",
        "head-24",
        {
            "num_hidden_layers": 3,
            "sliding_window": 8,
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 4.0,
        },
    ),
    Variant(
        "gemma2",
        "head-256",
        {
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 400,
            "sliding_window": 23,
            "tie_word_embeddings": True,
        },
    ),
    Variant(
        "gemma3_text",
        "head-24",
        {
            "num_hidden_layers": 7,
            "sliding_window": 8,
            "head_dim": 24,
            "query_pre_attn_scalar": 20,
        },
    ),
    Variant(
        "gemma3_text",
        "head-256",
        {
            "hidden_size": 32,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "query_pre_attn_scalar": 64,
            "num_hidden_layers": 3,
            "layer_types": [SLIDING, FULL, SLIDING],
            "sliding_window": 5,
            "rope_parameters": _GEMMA3_ROPES,
            "tie_word_embeddings": True,
        },
    ),
]
