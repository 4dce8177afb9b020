"""The families that were served first: Llama, Qwen 2 and 3, Mistral, OPT, GPT-2."""

from __future__ import annotations

from pathlib import Path

from tests.support.engine.variants.variant import (
    COMMON,
    LLAMA,
    LLAMA3,
    YARN,
    Json,
    Variant,
    edit_json,
)


def _old_config(path: Path) -> None:
    """Rewrites config.json as Transformers 4 wrote it."""

    def change(values: Json) -> None:
        rope = values.pop("rope_parameters")
        values["rope_theta"] = rope.pop("rope_theta")
        kind = rope.pop("rope_type")
        values["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
        values["torch_dtype"] = values.pop("dtype")
        values.pop("layer_types", None)

    edit_json(path / "config.json", change)


def _without_prefix(path: Path) -> None:
    """Removes the prefix of tensor names, as in a checkpoint saved without the head (gpt2)."""
    from safetensors.torch import load_file, save_file

    file = path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): t for name, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
_WINDOW = {"use_sliding_window": True, "sliding_window": 8}
_MIXED = ["full_attention", "sliding_attention"]

VARIANTS: list[Variant] = [
    Variant("llama", "base"),
    Variant("llama", "mha", {"num_key_value_heads": 4}),
    Variant("llama", "mqa", {"num_key_value_heads": 1}),
    Variant("llama", "gqa4", {"num_attention_heads": 8, "num_key_value_heads": 2}),
    Variant("llama", "tied", {"tie_word_embeddings": True, "num_hidden_layers": 3}),
    Variant("llama", "bias", {"attention_bias": True, "mlp_bias": True}),
    Variant("llama", "head-dim", {"hidden_size": 48, "head_dim": 20}),
    Variant("llama", "odd-vocab", {"vocab_size": 307, "intermediate_size": 75}),
    Variant("llama", "llama3", {"rope_parameters": LLAMA3}),
    Variant("llama", "linear", {"rope_parameters": _LINEAR}),
    Variant("llama", "yarn", {"rope_parameters": YARN}),
    Variant("llama", "dynamic", {"rope_parameters": _DYNAMIC}),
    Variant("llama", "old-config", {"rope_parameters": LLAMA3}, finish=_old_config),
    Variant("llama", "four", {"num_key_value_heads": 4, "num_hidden_layers": 4}),  # four ranks
    Variant("llama", "sharded", {"num_hidden_layers": 3}, max_shard_size="60KB"),
    Variant("qwen2", "base"),
    Variant("qwen2", "mha-tied", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    Variant("qwen2", "window", _WINDOW | {"layer_types": _MIXED}),
    Variant(
        "qwen2",
        "old-window",
        _WINDOW | {"max_window_layers": 1, "num_hidden_layers": 3},
        finish=_old_config,
    ),
    Variant("qwen3", "base"),
    Variant("qwen3", "tied", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    Variant("qwen3", "bias-window", _WINDOW | {"attention_bias": True, "layer_types": _MIXED}),
    Variant("mistral", "base"),
    Variant("mistral", "no-window", {"sliding_window": None, "num_key_value_heads": 1}),
    Variant("mistral", "head-dim", {"hidden_size": 48, "head_dim": 24, "sliding_window": 16}),
    Variant("opt", "base"),
    Variant("opt", "350m", {"do_layer_norm_before": False, "word_embed_proj_dim": 24}),
    Variant("opt", "no-bias", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    Variant("opt", "untied", {"tie_word_embeddings": False, "activation_function": "gelu"}),
    Variant("gpt2", "base"),
    Variant("gpt2", "scaled", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 80}),
    Variant("gpt2", "untied", {"tie_word_embeddings": False, "vocab_size": 307}),
    Variant("gpt2", "no-prefix", {}, finish=_without_prefix),
]

# Sequences span many windows, so that pages behind them are released. Not in VARIANTS, as
# references of that length are slow.
_LONG: Json = {"max_position_embeddings": 640, "sliding_window": 24}
LONG_VARIANTS = [
    Variant(
        "qwen2",
        "long-mixed",
        _LONG
        | {
            "use_sliding_window": True,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", *_MIXED, "sliding_attention"],
        },
    ),
    Variant("mistral", "long", _LONG),
]

BASES: dict[str, Json] = {
    "llama": LLAMA | {"rms_norm_eps": 1e-5},
    "qwen2": LLAMA,
    "qwen3": LLAMA | {"hidden_size": 48, "head_dim": 16},
    "mistral": LLAMA | {"sliding_window": 8},
    "opt": COMMON
    | {
        "hidden_size": 48,
        "ffn_dim": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    },
    "gpt2": COMMON | {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256},
}
