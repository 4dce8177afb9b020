"""Families with multi-head latent attention, with and without a rank of the queries."""

from __future__ import annotations

from pathlib import Path

from tests.support.engine.variants.mixtures import GROUPS
from tests.support.engine.variants.variant import YARN, Json, Variant, edit_json


def _as_kimi(path: Path) -> None:
    edit_json(path / "config.json", lambda values: values.update(model_type="kimi_k2"))


_LATENT: Json = GROUPS | {
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 20,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
_ODD: Json = _LATENT | {
    "hidden_size": 48,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 4,
    "v_head_dim": 20,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_hidden_layers": 2,
}
_YARN: Json = YARN | {
    "factor": 40.0,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 16,
    "beta_fast": 32,
    "beta_slow": 1,
}
_MISTRAL4_ROPE: Json = YARN | {
    "type": "yarn",
    "factor": 128.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_ONE_GROUP = {"n_group": 1, "topk_group": 1}

VARIANTS = [
    Variant(
        "deepseek_v2",
        "no-rank",
        _LATENT | {"q_lora_rank": None, "n_group": None} | {"topk_group": 1},
    ),
    Variant(
        "deepseek_v2",
        "groups",
        _LATENT
        | {"q_lora_rank": 24, "topk_method": "group_limited_greedy", "rope_parameters": _YARN},
    ),
    Variant("deepseek_v3", "yarn", _LATENT | {"q_lora_rank": 24, "rope_parameters": _YARN}),
    Variant("deepseek_v3", "no-rank", _ODD | {"q_lora_rank": None, "first_k_dense_replace": 0}),
    Variant("glm4_moe_lite", "groups", _LATENT | {"q_lora_rank": 24}),
    Variant("glm4_moe_lite", "three-heads", _ODD | {"q_lora_rank": 20}),
    Variant(
        "mistral4",
        "yarn",
        _LATENT
        | _ONE_GROUP
        | {"q_lora_rank": 24, "first_k_dense_replace": 0, "rope_parameters": _MISTRAL4_ROPE},
    ),
    Variant(
        "mistral4",
        "first-dense",
        _ODD
        | {
            "q_lora_rank": 20,
            "rope_parameters": _MISTRAL4_ROPE | {"factor": 2.0},
        },
    ),
    Variant(
        "kimi_k2",
        "one-group",
        _LATENT | _ONE_GROUP | {"q_lora_rank": 24, "rope_parameters": _YARN},
        finish=_as_kimi,
    ),
    Variant("kimi_k2", "three-heads", _ODD | {"q_lora_rank": 20}, finish=_as_kimi),
]
