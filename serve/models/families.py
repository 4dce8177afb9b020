"""The table of architectures: model_type -> switches of the decoder, and tensor names.

A new architecture of this kind is one row: a function from config.json to the fields of ModelSpec,
and the names of its tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from serve.models.config_file import ConfigReader
from serve.models.rope import RopeSpec, read_rope

MAX_LAYERS = 4096
MAX_HEADS = 4096
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 24

Fields = dict[str, Any]

# Transformers' names of activations -> kinds of Backend.activation.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True, slots=True)
class WeightNames:
    """The names of a family's tensors.

    Names of a layer follow prefix + layer.format(index), others follow the prefix. A tuple lists
    parts that are concatenated along the output. Norms, projections and MLP names get ".weight" and
    ".bias". prefixes: the first that fits the checkpoint is used (with or without the head's
    model). is_transposed: weights are stored [in, out]. ignored: endings of tensors that older
    checkpoints have and the decoder does not need.
    """

    prefixes: tuple[str, ...] = ("model.", "")
    layer: str = "layers.{}."
    embed: str = "embed_tokens"
    positions: str = "embed_positions"
    project_in: str = "project_in"
    project_out: str = "project_out"
    final_norm: str = "norm"
    attn_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    o: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    head: str = "lm_head"
    is_transposed: bool = False
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table: the reader of config.json, and the tensors' names."""

    switches: Callable[[ConfigReader], Fields]
    names: WeightNames


def _sizes(
    config: ConfigReader,
    *,
    hidden: str = "hidden_size",
    layers: str = "num_hidden_layers",
    heads: str = "num_attention_heads",
    max_len: str = "max_position_embeddings",
    is_tied: bool,
) -> Fields:
    """Reads the sizes that all families have, under the family's keys."""
    hidden_size = config.integer(hidden, high=MAX_WIDTH)
    num_heads = config.integer(heads, high=MAX_HEADS)
    return {
        "vocab_size": config.integer("vocab_size", high=MAX_VOCAB),
        "hidden_size": hidden_size,
        "embed_size": hidden_size,
        "num_layers": config.integer(layers, high=MAX_LAYERS),
        "num_heads": num_heads,
        "max_model_len": config.integer(max_len, high=1 << 28),
        "is_tied": config.boolean("tie_word_embeddings", is_tied),
    }


def _activation(config: ConfigReader, key: str, default: str) -> str:
    name = config.text(key, default)
    if name not in ACTIVATIONS:
        known = ", ".join(ACTIVATIONS)
        raise config.fail(key, f"{name!r} is not supported; known: {known}")
    return ACTIVATIONS[name]


def _plain_head_dim(config: ConfigReader, fields: Fields) -> int:
    """Returns hidden_size / num_heads, which must be an integer."""
    hidden_size: int = fields["hidden_size"]
    num_heads: int = fields["num_heads"]
    if hidden_size % num_heads:
        raise config.fail(
            "num_attention_heads", f"is {num_heads}; it does not divide hidden_size {hidden_size}"
        )
    return hidden_size // num_heads


def _per_layer(fields: Fields, windows: list[int | None] | None = None) -> Fields:
    """Adds windows (none by default) and scales (1 / sqrt(head_dim)) of all layers."""
    num_layers: int = fields["num_layers"]
    fields["windows"] = tuple(windows if windows is not None else [None] * num_layers)
    fields["scales"] = (fields["head_dim"] ** -0.5,) * num_layers
    return fields


def _llama(config: ConfigReader, *, kv_heads: int | None = None) -> Fields:
    fields = _sizes(config, is_tied=False)
    if config.has("head_dim"):
        head_dim = config.integer("head_dim", high=MAX_HEADS)
    else:
        head_dim = _plain_head_dim(config, fields)
    has_bias = config.boolean("attention_bias", False)
    rope = read_rope(config, head_dim)
    fields |= {
        "num_kv_heads": config.integer(
            "num_key_value_heads", kv_heads or fields["num_heads"], high=MAX_HEADS
        ),
        "head_dim": head_dim,
        "intermediate_size": config.integer("intermediate_size", high=MAX_WIDTH * 8),
        "norm_eps": config.number("rms_norm_eps", 1e-6, high=1.0),
        "rope": rope,
        "max_model_len": _reach(fields["max_model_len"], rope),
        "has_qkv_bias": has_bias,
        "has_o_bias": has_bias,
        "has_mlp_bias": config.boolean("mlp_bias", False),
        "activation": _activation(config, "hidden_act", "silu"),
    }
    return _per_layer(fields)


def _reach(max_len: int, rope: RopeSpec) -> int:
    """Returns the context length; YaRN extends it beyond max_position_embeddings."""
    if rope.kind == "yarn":
        return max(max_len, int(rope.pretrained_len * rope.factor))
    return max_len


def _qwen2(config: ConfigReader) -> Fields:
    fields = _llama(config) | {"has_qkv_bias": True, "has_o_bias": False, "has_mlp_bias": False}
    return _per_layer(fields, _qwen_windows(config, fields["num_layers"]))


def _qwen3(config: ConfigReader) -> Fields:
    if not config.has("head_dim"):
        config = ConfigReader(config.values | {"head_dim": 128}, config.source)
    fields = _llama(config) | {"has_qk_norm": True, "has_mlp_bias": False}
    return _per_layer(fields, _qwen_windows(config, fields["num_layers"]))


def _mistral(config: ConfigReader) -> Fields:
    fields = _llama(config, kv_heads=8)
    fields |= {"has_qkv_bias": False, "has_o_bias": False, "has_mlp_bias": False}
    window = None
    if config.values.get("sliding_window", 4096) is not None:
        window = config.integer("sliding_window", 4096)
    return _per_layer(fields, [window] * fields["num_layers"])


def _qwen_windows(config: ConfigReader, num_layers: int) -> list[int | None]:
    """Returns the window of each layer, from `layer_types` or from max_window_layers on."""
    window = None
    if config.boolean("use_sliding_window", False) and config.values.get("sliding_window", 1):
        window = config.integer("sliding_window", 4096)
    layer_types = config.values.get("layer_types")
    if layer_types is None:
        first = config.integer("max_window_layers", 28, low=0)
        return [window if index >= first else None for index in range(num_layers)]
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise config.fail("layer_types", f"must list {num_layers} layers")
    windows: list[int | None] = []
    for kind in layer_types:
        if kind not in ("full_attention", "sliding_attention"):
            raise config.fail("layer_types", f"holds {kind!r}, which is not supported")
        if kind == "sliding_attention" and window is None:
            raise config.fail("sliding_window", "is missing, but layer_types has sliding layers")
        windows.append(window if kind == "sliding_attention" else None)
    return windows


def _opt(config: ConfigReader) -> Fields:
    fields = _sizes(config, is_tied=True)
    is_pre_norm = config.boolean("do_layer_norm_before", True)
    has_bias = config.boolean("enable_bias", True)
    has_affine = config.boolean("layer_norm_elementwise_affine", True)
    fields |= {
        "embed_size": config.integer("word_embed_proj_dim", fields["hidden_size"], high=MAX_WIDTH),
        "num_kv_heads": fields["num_heads"],
        "head_dim": _plain_head_dim(config, fields),
        "intermediate_size": config.integer("ffn_dim", high=MAX_WIDTH * 8),
        "norm_eps": 1e-5,
        "num_positions": fields["max_model_len"] + 2,
        "position_offset": 2,
        "norm": "layer",
        "has_norm_weight": has_affine,
        "has_norm_bias": has_affine,
        "is_post_norm": not is_pre_norm,
        "has_final_norm": is_pre_norm and not config.boolean("_remove_final_layer_norm", False),
        "has_qkv_bias": has_bias,
        "has_o_bias": has_bias,
        "has_mlp_bias": has_bias,
        "is_gated": False,
        # outlying activations: LLM.int8 (arXiv 2208.07339), SmoothQuant (arXiv 2211.10438)
        "tolerates_int8": False,
        "activation": _activation(config, "activation_function", "relu"),
    }
    return _per_layer(fields)


def _gpt2(config: ConfigReader) -> Fields:
    fields = _sizes(
        config,
        hidden="n_embd",
        layers="n_layer",
        heads="n_head",
        max_len="n_positions",
        is_tied=True,
    )
    if config.boolean("add_cross_attention", False):
        raise config.fail("add_cross_attention", "is not supported")
    fields |= {
        "num_kv_heads": fields["num_heads"],
        "head_dim": _plain_head_dim(config, fields),
        "intermediate_size": config.integer(
            "n_inner", 4 * fields["hidden_size"], high=MAX_WIDTH * 8
        ),
        "norm_eps": config.number("layer_norm_epsilon", 1e-5, high=1.0),
        "num_positions": fields["max_model_len"],
        "norm": "layer",
        "has_norm_bias": True,
        "has_qkv_bias": True,
        "has_o_bias": True,
        "has_mlp_bias": True,
        "is_gated": False,
        # outlying activations: LLM.int8 (arXiv 2208.07339), SmoothQuant (arXiv 2211.10438)
        "tolerates_int8": False,
        "activation": _activation(config, "activation_function", "gelu_new"),
    }
    _per_layer(fields)
    scale = fields["head_dim"] ** -0.5 if config.boolean("scale_attn_weights", True) else 1.0
    divides = config.boolean("scale_attn_by_inverse_layer_idx", False)
    fields["scales"] = tuple(
        scale / (index + 1) if divides else scale for index in range(fields["num_layers"])
    )
    return fields


LLAMA_NAMES = WeightNames()
OPT_NAMES = replace(
    LLAMA_NAMES,
    prefixes=("model.decoder.", "decoder."),
    final_norm="final_layer_norm",
    attn_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    o="self_attn.out_proj",
    up=("fc1",),
    down="fc2",
)
GPT2_NAMES = WeightNames(
    prefixes=("transformer.", ""),
    layer="h.{}.",
    embed="wte",
    positions="wpe",
    final_norm="ln_f",
    attn_norm="ln_1",
    mlp_norm="ln_2",
    qkv=("attn.c_attn",),
    o="attn.c_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    is_transposed=True,
    ignored=(".attn.bias", ".attn.masked_bias"),
)

FAMILIES: dict[str, Family] = {
    "llama": Family(_llama, LLAMA_NAMES),
    "qwen2": Family(_qwen2, LLAMA_NAMES),
    "qwen3": Family(_qwen3, LLAMA_NAMES),
    "mistral": Family(_mistral, LLAMA_NAMES),
    "opt": Family(_opt, OPT_NAMES),
    "gpt2": Family(_gpt2, GPT2_NAMES),
}
