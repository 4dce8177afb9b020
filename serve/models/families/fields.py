"""Readers of the keys that most families share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from serve.checkpoint_json import ConfigReader
from serve.models.families.layer_spec import PRE_NORM, AttentionSpec, LayerSpec, MlpSpec, QKNorm
from serve.models.families.names import Fields
from serve.models.families.rope_spec import RopeSpec, read_rope

MAX_LAYERS = 4096
MAX_HEADS = 4096
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 24
MAX_CONTEXT = 1 << 28

# Transformers' names of activations -> kinds of Backend.activation.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
    "xielu": "xielu",
}

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def read_sizes(
    config: ConfigReader,
    *,
    hidden: str = "hidden_size",
    max_len: str = "max_position_embeddings",
    is_tied: bool = False,
) -> Fields:
    """Reads the sizes that all models have, under the family's keys."""
    hidden_size = config.integer(hidden, high=MAX_WIDTH)
    return {
        "vocab_size": config.integer("vocab_size", high=MAX_VOCAB),
        "hidden_size": hidden_size,
        "embed_size": hidden_size,
        "max_model_len": config.integer(max_len, high=MAX_CONTEXT),
        "is_tied": config.boolean("tie_word_embeddings", is_tied),
    }


def read_activation(config: ConfigReader, key: str, default: str) -> str:
    name = config.text(key, default)
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise config.fail(key, f"{name!r} is not supported; known: {known}")
    return ACTIVATIONS[name]


def num_layers_of(config: ConfigReader, key: str = "num_hidden_layers") -> int:
    return config.integer(key, high=MAX_LAYERS)


def read_heads(
    config: ConfigReader, *, kv_heads: int | None = None, head_dim: int | None = None
) -> tuple[int, int, int]:
    """Returns (heads, K/V heads, head_dim).

    kv_heads, head_dim: the family's defaults; without them, as many K/V heads as heads, and
    hidden_size / heads, which must be an integer.
    """
    heads = config.integer("num_attention_heads", high=MAX_HEADS)
    kv = config.integer("num_key_value_heads", kv_heads or heads, high=MAX_HEADS)
    if config.has("head_dim") or head_dim is not None:
        return heads, kv, config.integer("head_dim", head_dim, high=MAX_HEADS)
    return heads, kv, plain_head_dim(config, config.integer("hidden_size", high=MAX_WIDTH), heads)


def plain_head_dim(config: ConfigReader, hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise config.fail(
            "num_attention_heads", f"is {num_heads}; it does not divide hidden_size {hidden_size}"
        )
    return hidden_size // num_heads


def read_layer_types(
    config: ConfigReader, default: Sequence[str], kinds: tuple[str, ...] = (FULL, SLIDING)
) -> list[str]:
    """Returns one of kinds for each layer; default has as many as the model has layers."""
    types = config.values.get("layer_types")
    if types is None:
        return list(default)
    if not isinstance(types, list) or len(types) != len(default):
        raise config.fail("layer_types", f"must list {len(default)} layers")
    for kind in types:
        if kind not in kinds:
            raise config.fail("layer_types", f"holds {kind!r}, which is not supported")
    return list(types)


def full_every(config: ConfigReader, period: int) -> list[str]:
    """Returns types of layers of which each period-th is FULL and the others are SLIDING; with a
    period of 0 all are FULL."""
    return [
        SLIDING if period and (index + 1) % period else FULL
        for index in range(num_layers_of(config))
    ]


def read_rope_layers(config: ConfigReader) -> list[bool]:
    """Returns whether each layer has positions; no_rope_layers lists 1 for those that have, for at
    least as many layers as there are."""
    num_layers = num_layers_of(config)
    interval = config.integer("no_rope_layer_interval", 4)
    uses = config.values.get("no_rope_layers") or [
        int((index + 1) % interval != 0) for index in range(num_layers)
    ]
    if (
        not isinstance(uses, list)
        or len(uses) < num_layers
        or not all(use in (0, 1) for use in uses)
    ):
        raise config.fail("no_rope_layers", f"must list 0 or 1 for {num_layers} layers")
    return [bool(use) for use in uses[:num_layers]]


def layer_numbers(config: ConfigReader, key: str, values: object) -> set[int]:
    """Returns the layers that a key lists by their numbers."""
    if not isinstance(values, list) or len(values) > MAX_LAYERS:
        raise config.fail(key, "must list layers")
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        raise config.fail(key, "must list whole numbers")
    return set(values)


def read_windows(
    config: ConfigReader, types: Sequence[str], default: int | None = None
) -> list[int | None]:
    """Returns each layer's window: `sliding_window` for SLIDING layers."""
    if SLIDING not in types:
        return [None] * len(types)
    window = config.integer("sliding_window", default)
    return [window if kind == SLIDING else None for kind in types]


def served_context(max_len: int, rope: RopeSpec | None) -> int:
    """Returns the context length; YaRN extends it beyond max_position_embeddings."""
    if rope is not None and rope.kind == "yarn":
        return min(MAX_CONTEXT, max(max_len, int(rope.pretrained_len * rope.factor)))
    return max_len


def llama_fields(
    config: ConfigReader,
    *,
    is_tied: bool = False,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    qkv_bias: bool | None = None,
    o_bias: bool | None = None,
    mlp_bias: bool | None = None,
    scale: float | None = None,
    qk_norm: QKNorm | None = None,
    windows: Sequence[int | None] | None = None,
    ropes: Sequence[RopeSpec | None] | None = None,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    is_gated: bool = True,
    norms: frozenset[str] = PRE_NORM,
    eps: tuple[str, float] = ("rms_norm_eps", 1e-6),
    soft_cap: float = 0.0,
) -> Fields:
    """Reads a model of Llama blocks that differ in what the arguments say.

    A bias of None is read: attention_bias for qkv and o, mlp_bias. activation, eps: key and
    default. windows, ropes: for each layer; by default none, and the model's one.
    """
    fields = read_sizes(config, is_tied=is_tied)
    num_layers = num_layers_of(config)
    heads, kv, dim = read_heads(config, kv_heads=kv_heads, head_dim=head_dim)
    has_bias = config.boolean("attention_bias", False)
    if ropes is None:
        rope = read_rope(config, dim)
        ropes = [rope] * num_layers
        fields["max_model_len"] = served_context(fields["max_model_len"], rope)
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv,
        head_dim=dim,
        scale=dim**-0.5 if scale is None else scale,
        qk_norm=qk_norm,
        has_qkv_bias=has_bias if qkv_bias is None else qkv_bias,
        has_o_bias=has_bias if o_bias is None else o_bias,
        soft_cap=soft_cap,
    )
    mlp = MlpSpec(
        size=config.integer("intermediate_size", high=MAX_WIDTH * 8),
        activation=read_activation(config, *activation),
        is_gated=is_gated,
        has_bias=config.boolean("mlp_bias", False) if mlp_bias is None else mlp_bias,
    )
    layer = LayerSpec(attention=attention, mlp=mlp, norms=norms)
    key, default = eps
    return fields | {
        "norm_eps": config.number(key, default, high=1.0),
        "layers": with_attention(layer, windows or [None] * num_layers, ropes),
    }


def with_attention(
    layer: LayerSpec, windows: Sequence[int | None], ropes: Sequence[RopeSpec | None]
) -> tuple[LayerSpec, ...]:
    """Returns the layer once for each window and rope; equal layers are one object."""
    made: dict[tuple[int | None, RopeSpec | None], LayerSpec] = {}
    for key in zip(windows, ropes, strict=True):
        if key not in made:
            assert isinstance(layer.attention, AttentionSpec)
            attention = replace(layer.attention, window=key[0], rope=key[1])
            made[key] = replace(layer, attention=attention)
    return tuple(made[key] for key in zip(windows, ropes, strict=True))
