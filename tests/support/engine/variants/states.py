"""Models with short convolutions and gated delta nets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from tests.support.engine.variants.variant import Json, Variant, edit_json

# These models enlarge rounding: Transformers' fp32 logits are as far from its own fp64.
_ROUNDING = 2e-3
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
KIMI: Json = {
    "num_key_value_heads": 4,
    "linear_num_heads": 3,
    "linear_head_dim": 16,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 20,
    "v_head_dim": 12,
    "moe_intermediate_size": 40,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}


def _own_olmo_names(path: Path) -> None:
    """Gives tensors the names that they have in Transformers."""
    names = (
        ("attention_layer_norm", "input_layernorm"),
        ("feedforward_layer_norm", "post_attention_layernorm"),
    )
    _rename(path, names, "linear_attn")


def _own_kimi_names(path: Path) -> None:
    """Gives tensors the names and shapes that they have in Transformers, and writes the keys of
    published configurations."""
    names = [("block_sparse_moe", "mlp")]
    names += [
        (f"self_attn.{name}", f"self_attn.forget_gate.{name}")
        for name in ("f_a_proj", "f_b_proj", "dt_bias", "A_log")
    ]
    _rename(path, names, "self_attn")
    _fuse_experts(path)

    def change(values: Json) -> None:
        types = values.pop("layer_types")
        values["linear_attn_config"] = {
            "head_dim": values.pop("linear_head_dim"),
            "num_heads": values.pop("linear_num_heads"),
            "short_conv_kernel_size": values.pop("linear_conv_kernel_dim"),
            "full_attn_layers": [i + 1 for i, kind in enumerate(types) if kind[0] == "f"],
            "kda_layers": [i + 1 for i, kind in enumerate(types) if kind[0] == "l"],
        }

    edit_json(path / "config.json", change)


def _fuse_experts(path: Path) -> None:
    """Joins experts that are stored one by one."""
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    tensors = load_file(file)
    for first in [name for name in tensors if ".experts.0.w1." in name]:
        at = first.removesuffix("0.w1.weight")
        count = sum(name.startswith(at) for name in tensors) // 3
        gates, downs, ups = (
            [tensors.pop(f"{at}{index}.w{part}.weight") for index in range(count)]
            for part in (1, 2, 3)
        )
        tensors[f"{at}gate_up_proj"] = torch.cat((torch.stack(gates), torch.stack(ups)), dim=1)
        tensors[f"{at}down_proj"] = torch.stack(downs)
    save_file(tensors, file, metadata={"format": "pt"})


def _rename(path: Path, names: Sequence[tuple[str, str]], net: str) -> None:
    """Replaces parts of names and joins the convolutions of delta nets."""
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if f"{net}.q_conv1d" in name]:
        others = [name.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        tensors[name.replace("q_conv1d", "conv1d")] = torch.cat([tensors.pop(n) for n in others])
    renamed = {}
    for name, tensor in tensors.items():
        for before, after in names:
            name = name.replace(before, after)
        renamed[name] = tensor
    save_file(renamed, file, metadata={"format": "pt"})


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
    Variant("qwen3_5_text", "net", _NET, rounding=_ROUNDING),
    Variant("qwen3_5_text", "odd", _ODD_NET),
    Variant("qwen3_next", "net", _NET | _EXPERTS, rounding=_ROUNDING),
    Variant(
        "qwen3_next", "odd", _ODD_NET | _EXPERTS | {"mlp_only_layers": [1]}, rounding=_ROUNDING
    ),
    Variant("qwen3_5_moe_text", "net", _NET | _EXPERTS, rounding=_ROUNDING),
    Variant("qwen3_5_moe_text", "odd", _ODD_NET | _EXPERTS, rounding=_ROUNDING),
    Variant("olmo_hybrid", "net", {"num_hidden_layers": 4}),
    Variant(
        "olmo_hybrid",
        "no-rope",
        {
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "rope_parameters": {"rope_theta": None, "rope_type": "default"},
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 20,
            "linear_value_head_dim": 12,
            "linear_conv_kernel_dim": 3,
            "linear_allow_neg_eigval": False,
        },
        finish=_own_olmo_names,
    ),
    Variant(
        "kimi_linear",
        "latent",
        KIMI
        | {"num_hidden_layers": 4, "layer_types": [*["linear_attention"] * 3, "full_attention"]},
        rounding=_ROUNDING,
    ),
    Variant(
        "kimi_linear",
        "odd",
        KIMI
        | {
            "hidden_size": 48,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "linear_attention", "linear_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
            "linear_num_heads": 2,
            "linear_head_dim": 20,
            "linear_conv_kernel_dim": 3,
            "q_lora_rank": 24,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
        },
        finish=_own_kimi_names,
    ),
]
