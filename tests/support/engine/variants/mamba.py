"""Models with Mamba-2 mixers."""

from __future__ import annotations

from tests.support.engine.variants.variant import Json, Variant

_MIXER: Json = {
    "num_hidden_layers": 4,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 32,
}
_ODD: Json = {
    "hidden_size": 48,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
    "mamba_n_heads": 6,
    "mamba_n_groups": 3,
    "mamba_d_state": 20,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 16,
}
_SCALES: Json = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.0,
}
_FACTORS: Json = {
    "embedding_multiplier": 2.5,
    "lm_head_multiplier": 0.3,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.6,
    "ssm_multipliers": [0.7, 1.4, 0.9, 1.1, 0.6],
    "mlp_multipliers": [0.7, 0.4],
}
FALCON: Json = _MIXER | _FACTORS | {"mamba_d_ssm": 96}
NEMOTRON: Json = {
    "head_dim": 20,
    "mamba_num_heads": 6,
    "mamba_head_dim": 12,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 32,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 24,
}

VARIANTS = [
    Variant("bamba", "mixer", _MIXER | {"attn_layer_indices": [1]}),
    Variant(
        "bamba",
        "odd",
        _ODD
        | {
            "attn_layer_indices": [0, 2],
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "time_step_limit": [0.2, 0.9],
            "attention_bias": True,
        },
    ),
    Variant(
        "granitemoehybrid",
        "experts",
        _MIXER
        | _SCALES
        | {
            "layer_types": ["mamba", "attention", "mamba", "mamba"],
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 40,
        },
    ),
    Variant(
        "granitemoehybrid",
        "dense",
        _ODD
        | _SCALES
        | {
            "layer_types": ["mamba", "mamba", "attention"],
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 56,
            "tie_word_embeddings": True,
        },
    ),
    Variant(
        "granitemoehybrid",
        "rope",
        {
            "layer_types": ["attention", "attention"],
            "position_embedding_type": "rope",
            "num_local_experts": 0,
            "attention_multiplier": 0.2,
            "shared_intermediate_size": 72,
        },
    ),
    Variant("falcon_h1", "gate", FALCON | {"num_hidden_layers": 3}),
    Variant(
        "falcon_h1",
        "norm",
        _ODD
        | _FACTORS
        | {
            "head_dim": 20,
            "mamba_d_ssm": 72,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "projectors_bias": True,
        },
    ),
    Variant(
        "falcon_h1",
        "norm-first",
        _MIXER | {"mamba_d_ssm": None, "mamba_rms_norm": True, "num_hidden_layers": 2},
    ),
    Variant("nemotron_h", "experts", NEMOTRON | {"hybrid_override_pattern": "MEM*E-M"}),
    Variant(
        "nemotron_h",
        "latent",
        NEMOTRON
        | {
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "layers_block_type": ["moe", "mamba", "attention", "moe", "mlp"],
            "moe_latent_size": 32,
            "n_groups": 3,
            "conv_kernel": 3,
            "use_bias": True,
            "use_conv_bias": False,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": False,
            "time_step_min": 0.3,
        },
    ),
]
