"""Families with gated delta nets beside attention: Qwen3-Next, Qwen3.5."""

from __future__ import annotations

from dataclasses import replace

from ops.backend import RouterKind
from serve.checkpoint_json import ConfigReader
from serve.models.families.convolutions import MAX_CONV
from serve.models.families.fields import (
    FULL,
    MAX_HEADS,
    MAX_WIDTH,
    llama_fields,
    num_layers_of,
    read_layer_types,
)
from serve.models.families.layer_spec import MixtureSpec, QKNorm
from serve.models.families.mixture_fields import (
    mixture_names,
    read_counts,
    read_expert,
    with_mixture,
)
from serve.models.families.mixtures import QWEN2_SHARED, qwen_sparse
from serve.models.families.names import Family, Fields, MtpNames, StateNames
from serve.models.families.rope_spec import read_rope
from serve.models.families.state_spec import DeltaNetSpec

LINEAR = "linear_attention"


def read_linear_types(config: ConfigReader) -> list[str]:
    """Returns FULL or LINEAR for each layer; by default one layer of full_attention_interval is
    FULL."""
    interval = config.integer("full_attention_interval", 4)
    default = [LINEAR if (i + 1) % interval else FULL for i in range(num_layers_of(config))]
    return read_layer_types(config, default, (FULL, LINEAR))


def read_delta_net(config: ConfigReader, eps: float, **changes: object) -> DeltaNetSpec:
    """Reads the keys of a gated delta net."""
    heads = config.integer("linear_num_value_heads", 32, high=MAX_HEADS)
    keys = config.integer("linear_num_key_heads", 16, high=MAX_HEADS)
    if heads % keys:
        raise config.fail(
            "linear_num_value_heads", f"is {heads}, no multiple of linear_num_key_heads {keys}"
        )
    spec = DeltaNetSpec(
        num_heads=heads,
        num_key_heads=keys,
        key_dim=config.integer("linear_key_head_dim", 128, high=MAX_HEADS),
        value_dim=config.integer("linear_value_head_dim", 128, high=MAX_HEADS),
        width=config.integer("linear_conv_kernel_dim", 4, low=2, high=MAX_CONV),
        norm_eps=eps,
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


def _qwen3_next(config: ConfigReader) -> Fields:
    num_layers, head_dim = num_layers_of(config), config.integer("head_dim", 256, high=MAX_HEADS)
    rope = read_rope(config, head_dim, partial=0.25)
    fields = llama_fields(
        config,
        kv_heads=2,
        head_dim=256,
        mlp_bias=False,
        qk_norm=QKNorm(),
        ropes=[rope] * num_layers,
    )
    net = read_delta_net(config, fields["norm_eps"])
    fields["layers"] = tuple(
        replace(layer, attention=None, state=net)
        if kind == LINEAR
        else replace(layer, attention=replace(layer.attention, has_gate=True, is_gate_in_q=True))
        for layer, kind in zip(fields["layers"], read_linear_types(config), strict=True)
    )
    return fields | {"norm_offset": 1.0}


def _qwen3_next_moe(config: ConfigReader) -> Fields:
    size = config.integer("intermediate_size", 1, high=MAX_WIDTH * 8)  # mixtures do not have it
    sized = ConfigReader(config.values | {"intermediate_size": size}, config.source)
    fields = _qwen3_next(sized)
    num_experts, top_k = read_counts(config, ("num_experts",))
    expert = read_expert(config)
    shared = config.integer("shared_expert_intermediate_size", 512, high=MAX_WIDTH * 8)
    mixture = MixtureSpec(
        num_experts=num_experts,
        expert=expert,
        router=RouterKind(top_k=top_k, is_normalized=config.boolean("norm_topk_prob", True)),
        shared=replace(expert, size=shared),
        is_shared_gated=True,
    )
    return with_mixture(fields, mixture, qwen_sparse(config))


_GROUPED = StateNames(
    inputs=("linear_attn.in_proj_qkvz",), gates=("linear_attn.in_proj_ba",), is_grouped=True
)
_MTP = MtpNames(
    block="mtp.layers.0.",
    at="mtp.",
    join="fc",
    embed_norm="pre_fc_norm_embedding",
    state_norm="pre_fc_norm_hidden",
    final_norm="norm",
    key="mtp_num_hidden_layers",
    default=1,
)
FAMILIES = {
    "qwen3_next": Family(
        _qwen3_next_moe,
        replace(mixture_names(**QWEN2_SHARED), state=_GROUPED),
        "Qwen3-Next 80B-A3B",
        mtp=_MTP,
    ),
    "qwen3_5_text": Family(_qwen3_next, title="Qwen3.5, 3.6 and 3.8, text", mtp=_MTP),
    "qwen3_5_moe_text": Family(
        _qwen3_next_moe, mixture_names(**QWEN2_SHARED), "Qwen3.5 and 3.6, mixtures, text", mtp=_MTP
    ),
}
