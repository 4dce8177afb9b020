"""Models with learned positions: OPT and GPT-2."""

from __future__ import annotations

from dataclasses import replace

from serve.checkpoint_json import ConfigReader
from serve.models.families.fields import (
    MAX_HEADS,
    MAX_WIDTH,
    num_layers_of,
    plain_head_dim,
    read_activation,
    read_sizes,
)
from serve.models.families.layer_spec import POST_NORM, PRE_NORM, AttentionSpec, LayerSpec, MlpSpec
from serve.models.families.names import Family, Fields, WeightNames


def _attention(config: ConfigReader, hidden: int, heads_key: str, has_bias: bool) -> AttentionSpec:
    heads = config.integer(heads_key, high=MAX_HEADS)
    dim = plain_head_dim(config, hidden, heads)
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=dim,
        scale=dim**-0.5,
        has_qkv_bias=has_bias,
        has_o_bias=has_bias,
    )


def _opt(config: ConfigReader) -> Fields:
    fields = read_sizes(config, is_tied=True)
    is_pre_norm = config.boolean("do_layer_norm_before", True)
    has_bias = config.boolean("enable_bias", True)
    has_affine = config.boolean("layer_norm_elementwise_affine", True)
    layer = LayerSpec(
        attention=_attention(config, fields["hidden_size"], "num_attention_heads", has_bias),
        mlp=MlpSpec(
            size=config.integer("ffn_dim", high=MAX_WIDTH * 8),
            activation=read_activation(config, "activation_function", "relu"),
            is_gated=False,
            has_bias=has_bias,
        ),
        norms=PRE_NORM if is_pre_norm else POST_NORM,
    )
    return fields | {
        "embed_size": config.integer("word_embed_proj_dim", fields["hidden_size"], high=MAX_WIDTH),
        "norm_eps": 1e-5,
        "num_positions": fields["max_model_len"] + 2,
        "position_offset": 2,
        "norm": "layer",
        "has_norm_weight": has_affine,
        "has_norm_bias": has_affine,
        "has_final_norm": is_pre_norm and not config.boolean("_remove_final_layer_norm", False),
        # outlying activations: LLM.int8 (arXiv 2208.07339), SmoothQuant (arXiv 2211.10438)
        "tolerates_int8": False,
        "layers": (layer,) * num_layers_of(config),
    }


def _gpt2(config: ConfigReader) -> Fields:
    fields = read_sizes(config, hidden="n_embd", max_len="n_positions", is_tied=True)
    if config.boolean("add_cross_attention", False):
        raise config.fail("add_cross_attention", "is not supported")
    attention = _attention(config, fields["hidden_size"], "n_head", has_bias=True)
    mlp = MlpSpec(
        size=config.integer("n_inner", 4 * fields["hidden_size"], high=MAX_WIDTH * 8),
        activation=read_activation(config, "activation_function", "gelu_new"),
        is_gated=False,
        has_bias=True,
    )
    scale = attention.scale if config.boolean("scale_attn_weights", True) else 1.0
    divides = config.boolean("scale_attn_by_inverse_layer_idx", False)
    return fields | {
        "norm_eps": config.number("layer_norm_epsilon", 1e-5, high=1.0),
        "num_positions": fields["max_model_len"],
        "norm": "layer",
        "has_norm_bias": True,
        # outlying activations: LLM.int8 (arXiv 2208.07339), SmoothQuant (arXiv 2211.10438)
        "tolerates_int8": False,
        "layers": tuple(
            LayerSpec(
                attention=replace(attention, scale=scale / (index + 1) if divides else scale),
                mlp=mlp,
            )
            for index in range(num_layers_of(config, "n_layer"))
        ),
    }


OPT_NAMES = WeightNames(
    prefixes=("model.decoder.", "decoder."),
    final_norm="final_layer_norm",
    attn_in="self_attn_layer_norm",
    mlp_in="final_layer_norm",
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
    attn_in="ln_1",
    mlp_in="ln_2",
    qkv=("attn.c_attn",),
    o="attn.c_proj",
    up=("mlp.c_fc",),
    down="mlp.c_proj",
    is_transposed=True,
    ignored=(".attn.bias", ".attn.masked_bias"),
)

FAMILIES = {
    "opt": Family(_opt, OPT_NAMES, "OPT"),
    "gpt2": Family(_gpt2, GPT2_NAMES, "GPT-2"),
}
