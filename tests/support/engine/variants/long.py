"""Checkpoints of each kind of layer for sequences of many pages, chunks and windows.

Sizes are those that int8 K/V has. Not in VARIANTS, as references of that length are slow.
"""

from __future__ import annotations

from tests.support.engine.variants.mamba import FALCON, NEMOTRON
from tests.support.engine.variants.mixtures import GROUPS
from tests.support.engine.variants.states import KIMI
from tests.support.engine.variants.variant import YARN, Json, Variant

_LONG: Json = {"max_position_embeddings": 640}
_EXPERTS: Json = _LONG | {"num_experts_per_tok": 3, "head_dim": 32}
_LATENT: Json = (
    _LONG
    | GROUPS
    | {
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 20,
        "v_head_dim": 12,
        "num_key_value_heads": 4,
    }
)
# the context that the rope was made for ends within the tests' prompts
_YARN: Json = YARN | {
    "factor": 16.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 48,
}
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"

VARIANTS = [
    Variant("llama", "long", _LONG | {"head_dim": 32}),
    Variant("qwen3_moe", "long", _EXPERTS | {"num_experts": 6, "moe_intermediate_size": 40}),
    Variant(
        "gpt_oss",
        "long",
        _EXPERTS
        | {
            "num_local_experts": 6,
            "sliding_window": 24,
            "num_hidden_layers": 4,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    Variant("deepseek_v2", "long", _LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    Variant("deepseek_v3", "long", _LATENT | {"q_lora_rank": 24, "rope_parameters": _YARN}),
    Variant(
        "gemma4_text",
        "long",
        _LONG
        | {
            "num_hidden_layers": 6,
            "layer_types": [SLIDING, FULL] * 3,
            "head_dim": 32,
            "global_head_dim": 48,
            "sliding_window": 24,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 320,
            "num_kv_shared_layers": 2,
        },
    ),
    Variant(
        "llama4_text",
        "long",
        _LONG
        | {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "attention_chunk_size": 32,
            "num_local_experts": 4,
            "intermediate_size_mlp": 80,
            "floor_scale": 64,
        },
    ),
    Variant(
        "lfm2",
        "long",
        _LONG
        | {
            "num_hidden_layers": 4,
            "layer_types": ["conv", FULL, "conv", FULL],
            "block_multiple_of": 16,
            "head_dim": 32,
        },
    ),
    Variant(
        "qwen3_5_text",
        "long",
        _LONG
        | {
            "head_dim": 32,
            "num_hidden_layers": 4,
            "layer_types": [LINEAR, FULL, LINEAR, FULL],
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
    Variant(
        "falcon_h1",
        "long",
        _LONG
        | FALCON
        | {
            "head_dim": 32,
            "num_hidden_layers": 3,
            # what int8 K/V changes has to be seen in the logits
            "lm_head_multiplier": 2.0,
            "key_multiplier": 3.0,
            "attention_out_multiplier": 3.0,
        },
    ),
    Variant(
        "nemotron_h",
        "long",
        _LONG
        | NEMOTRON
        | {"head_dim": 32, "num_attention_heads": 4, "hybrid_override_pattern": "M*E-M*"},
    ),
    Variant(
        "kimi_linear",
        "long",
        _LONG
        | KIMI
        | {
            "qk_rope_head_dim": 16,
            "linear_num_heads": 2,
            "num_hidden_layers": 3,
            "layer_types": [LINEAR, FULL, FULL],
        },
    ),
]
