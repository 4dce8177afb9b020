"""Arcee Trinity, whose attention has a gate."""

from __future__ import annotations

from tests.support.engine.variants.variant import Json, Variant

_EXPERTS: Json = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}

VARIANTS = [
    Variant(
        "afmoe",
        "window",
        _EXPERTS
        | {
            "head_dim": 24,
            "num_hidden_layers": 5,
            "sliding_window": 8,
            "num_shared_experts": 1,
            "route_scale": 1.5,
        },
    ),
    Variant(
        "afmoe",
        "three-heads",
        _EXPERTS
        | {
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 80,
            "num_hidden_layers": 2,
            "num_dense_layers": 0,
            "sliding_window": 23,
            "mup_enabled": True,
        },
    ),
]
