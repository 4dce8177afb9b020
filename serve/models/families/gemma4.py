"""Gemma 4, the text model: heads by kind of layer, K/V shared between layers, embeddings for each
layer, and a mixture beside an MLP in one size."""

from __future__ import annotations

from dataclasses import replace

from ops.backend import RouterKind
from serve.checkpoint_json import ConfigReader
from serve.models.families.fields import (
    FULL,
    MAX_HEADS,
    MAX_WIDTH,
    SLIDING,
    full_every,
    num_layers_of,
    read_activation,
    read_layer_types,
    read_sizes,
    read_windows,
)
from serve.models.families.layer_spec import (
    SANDWICH_NORM,
    AttentionSpec,
    LayerSpec,
    MixtureSpec,
    MlpSpec,
    QKNorm,
)
from serve.models.families.mixture_fields import one_by_one, read_counts
from serve.models.families.names import ExpertNames, Family, Fields, WeightNames
from serve.models.families.rope_spec import RopeSpec, read_rope

_ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def _gemma4(config: ConfigReader) -> Fields:
    if config.values.get("use_bidirectional_attention") == "all":
        raise config.fail("use_bidirectional_attention", "is not supported for text")
    fields = read_sizes(config, is_tied=True)
    num_layers = num_layers_of(config)
    types = read_layer_types(config, full_every(config, 6))
    types[-1] = FULL
    windows = read_windows(config, types, 512)
    if not config.has("rope_parameters"):
        config = ConfigReader(config.values | {"rope_parameters": _ROPES}, config.source)
    num_shared = config.integer("num_kv_shared_layers", 0, low=0)
    if num_shared >= num_layers:
        raise config.fail("num_kv_shared_layers", f"is {num_shared}, the model has {num_layers}")
    owners = _owners(config, types, num_layers - num_shared)
    is_mixture = config.boolean("enable_moe_block", False)
    is_wide = config.boolean("use_double_wide_mlp", False)
    size = config.integer("intermediate_size", high=MAX_WIDTH * 8)
    activation = read_activation(config, "hidden_activation", "gelu_pytorch_tanh")
    per_layer = config.integer("hidden_size_per_layer_input", 256, low=0, high=MAX_WIDTH)
    ropes: dict[tuple[str, int], RopeSpec] = {}
    layers = []
    for index, kind in enumerate(types):
        attention = _attention(config, index, kind, windows[index], ropes)
        is_double = is_wide and owners[index] is not None
        mlp = MlpSpec(size=2 * size if is_double else size, activation=activation)
        layers.append(
            LayerSpec(
                attention=replace(attention, shares=owners[index]),
                mlp=_mixture(config, mlp) if is_mixture else mlp,
                norms=SANDWICH_NORM,
                per_layer_input=per_layer,
                has_scalar=True,
            )
        )
    cap = config.values.get("final_logit_softcapping")
    vocab = config.integer("vocab_size_per_layer_input", 262144) if per_layer else 0
    return fields | {
        "norm_eps": config.number("rms_norm_eps", 1e-6, high=1.0),
        "layers": tuple(layers),
        "embed_scale": fields["hidden_size"] ** 0.5,
        "logit_soft_cap": config.number("final_logit_softcapping") if cap else 0.0,
        "per_layer_vocab": vocab,
    }


def _owners(config: ConfigReader, types: list[str], first_shared: int) -> list[int | None]:
    """Returns for each layer the one whose K/V it reads: the last of its kind that has its own."""
    owners: list[int | None] = [None] * first_shared
    for kind in types[first_shared:]:
        own = [index for index in range(first_shared) if types[index] == kind]
        if not own:
            raise config.fail("num_kv_shared_layers", f"leaves no {kind} layer with K/V of its own")
        owners.append(own[-1])
    return owners


def _attention(
    config: ConfigReader,
    index: int,
    kind: str,
    window: int | None,
    ropes: dict[tuple[str, int], RopeSpec],
) -> AttentionSpec:
    is_v_k = config.boolean("attention_k_eq_v", False) and kind == FULL
    head_dim = config.integer("head_dim", 256, high=MAX_HEADS)
    kv_heads = config.integer("num_key_value_heads", 4, high=MAX_HEADS)
    if kind == FULL:
        head_dim = config.integer("global_head_dim", 512, high=MAX_HEADS)
        if is_v_k and config.has("num_global_key_value_heads"):
            kv_heads = config.integer("num_global_key_value_heads", high=MAX_HEADS)
    # Transformers 5 writes what differs in a layer under its number
    overrides = config.values.get("per_layer_config") or {}
    if not isinstance(overrides, dict):
        raise config.fail("per_layer_config", "must be an object")
    width = len(str(config.integer("num_hidden_layers")))
    keys = (str(index), str(index).zfill(width), str(index).zfill(2))  # "5", or "05"
    own: object = next((overrides[key] for key in keys if key in overrides), {})
    if not isinstance(own, dict):
        raise config.fail("per_layer_config", f"must hold objects, not {own!r}")
    if config.has("per_layer_config"):  # an empty one, too: then all layers are alike
        reader = ConfigReader(own, f"{config.source}: per_layer_config.{index}")
        head_dim = reader.integer("head_dim", config.integer("head_dim", 256), high=MAX_HEADS)
        default = config.integer("num_key_value_heads", 4, high=MAX_HEADS)
        kv_heads = reader.integer("num_key_value_heads", default, high=MAX_HEADS)
    if (kind, head_dim) not in ropes:
        ropes[kind, head_dim] = read_rope(config, head_dim, layer_type=kind, partial=1.0)
    has_bias = config.boolean("attention_bias", False)
    return AttentionSpec(
        num_heads=config.integer("num_attention_heads", 8, high=MAX_HEADS),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=1.0,
        window=window,
        rope=ropes[kind, head_dim],
        qk_norm=QKNorm(),
        has_v_norm=True,
        is_v_k=is_v_k,
        has_qkv_bias=has_bias,
        has_o_bias=has_bias,
    )


def _mixture(config: ConfigReader, dense: MlpSpec) -> MixtureSpec:
    num_experts, top_k = read_counts(config, ("num_experts",), "top_k_experts")
    size = config.integer("moe_intermediate_size", high=MAX_WIDTH * 8)
    return MixtureSpec(
        num_experts=num_experts,
        expert=replace(dense, size=size),
        router=RouterKind(top_k=top_k, is_normalized=True),
        is_router_normed=True,
        dense=dense,
    )


_FUSED = ExpertNames(
    router="router.proj",
    up=("experts.gate_up_proj",),
    down="experts.down_proj",
    is_fused=True,
    bias="{}_bias",
)
_NAMES = WeightNames(
    attn_out="post_attention_layernorm",
    mlp_in="pre_feedforward_layernorm",
    mlp_out="post_feedforward_layernorm",
    experts=(_FUSED, one_by_one(_FUSED, "experts"), one_by_one(_FUSED, "moe.experts")),
)
FAMILIES = {"gemma4_text": Family(_gemma4, _NAMES, "Gemma 4, all sizes, text")}
