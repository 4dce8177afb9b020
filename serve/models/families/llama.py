"""Llama and its nearest relatives: Llama 1 to 3, Qwen 2 to 3, Mistral."""

from __future__ import annotations

from serve.checkpoint_json import ConfigReader
from serve.models.families.fields import (
    FULL,
    SLIDING,
    llama_fields,
    num_layers_of,
    read_layer_types,
    read_windows,
)
from serve.models.families.layer_spec import QKNorm
from serve.models.families.names import Family, Fields


def _llama(config: ConfigReader) -> Fields:
    return llama_fields(config)


def _qwen2(config: ConfigReader) -> Fields:
    return llama_fields(
        config, qkv_bias=True, o_bias=False, mlp_bias=False, windows=qwen_windows(config)
    )


def _qwen3(config: ConfigReader) -> Fields:
    return llama_fields(
        config, head_dim=128, mlp_bias=False, qk_norm=QKNorm(), windows=qwen_windows(config)
    )


def _mistral(config: ConfigReader) -> Fields:
    return llama_fields(
        config,
        kv_heads=8,
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        windows=uniform_windows(config, 4096),
    )


def uniform_windows(config: ConfigReader, default: int | None = None) -> list[int | None]:
    """Returns the window that all layers have; null means none."""
    window = None
    if config.values.get("sliding_window", default) is not None:
        window = config.integer("sliding_window", default)
    return [window] * num_layers_of(config)


def qwen_windows(config: ConfigReader) -> list[int | None]:
    """Returns the window of each layer, from `layer_types` or from max_window_layers on."""
    num_layers = num_layers_of(config)
    first = config.integer("max_window_layers", 28, low=0)
    if not config.boolean("use_sliding_window", False) or not config.values.get(
        "sliding_window", 1
    ):
        if SLIDING in read_layer_types(config, [FULL] * num_layers):
            raise config.fail("sliding_window", "is missing, but layer_types has sliding layers")
        return [None] * num_layers
    types = [SLIDING if index >= first else FULL for index in range(num_layers)]
    return read_windows(config, read_layer_types(config, types), 4096)


FAMILIES = {
    "llama": Family(_llama, title="Llama 1 to 3, Yi, TinyLlama, SmolLM 1 and 2, Falcon 3"),
    "qwen2": Family(_qwen2, title="Qwen 2 and 2.5, QwQ"),
    "qwen3": Family(_qwen3, title="Qwen 3"),
    # the text models of Qwen's vision models; the three positions of their RoPE are equal in text
    "qwen2_vl": Family(_qwen2, title="Qwen2-VL, text"),
    "qwen2_vl_text": Family(_qwen2, title="Qwen2-VL, text"),
    "qwen2_5_vl": Family(_qwen2, title="Qwen2.5-VL, text"),
    "qwen2_5_vl_text": Family(_qwen2, title="Qwen2.5-VL, text"),
    "qwen3_vl_text": Family(_qwen3, title="Qwen3-VL, text"),
    "mistral": Family(_mistral, title="Mistral 7B, Nemo, Small 3"),
}
