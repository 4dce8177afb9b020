"""Families with Mamba-2 mixers beside attention and MLPs: Bamba, Granite 4, Falcon-H1."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from ops.backend import RouterKind
from serve.checkpoint_json import ConfigReader
from serve.models.families.convolutions import MAX_CONV
from serve.models.families.delta_nets import LINEAR
from serve.models.families.dense import granite_scales
from serve.models.families.fields import (
    FULL,
    MAX_HEADS,
    MAX_WIDTH,
    layer_numbers,
    llama_fields,
    num_layers_of,
    read_activation,
    read_heads,
    read_layer_types,
)
from serve.models.families.layer_spec import AttentionSpec, MixtureSpec, MlpSpec
from serve.models.families.mixture_fields import (
    MAX_EXPERTS,
    one_by_one,
    read_counts,
    read_expert,
)
from serve.models.families.mixtures import GRANITE_EXPERTS
from serve.models.families.names import Family, Fields, StateNames, WeightNames
from serve.models.families.rope_spec import read_rope
from serve.models.families.state_spec import MambaSpec

# Transformers 4 has other names of the kinds of layers
KINDS = {"mamba": LINEAR, "attention": FULL, LINEAR: LINEAR, FULL: FULL}


def _read_mamba(config: ConfigReader, inner: int, eps: float) -> MambaSpec:
    """Reads a mixer of `inner` channels, whose output has a norm for each group."""
    if read_activation(config, "hidden_act", "silu") != "silu":
        raise config.fail("hidden_act", "other than silu is not supported")
    heads, dim = _read_mamba_heads(config, inner)
    low, high = _read_limits(config)
    has_bias = config.boolean("mamba_proj_bias", False)
    groups = read_groups(config, "mamba_n_groups", 1, heads)
    return MambaSpec(
        num_heads=heads,
        head_dim=dim,
        state_size=config.integer("mamba_d_state", 256, high=MAX_WIDTH),
        num_groups=groups,
        width=config.integer("mamba_d_conv", 4, low=2, high=MAX_CONV),
        norm_eps=eps,
        norm_group=inner // groups,
        has_bias=has_bias,
        has_out_bias=has_bias,
        has_conv_bias=config.boolean("mamba_conv_bias", True),
        dt_min=low,
        dt_max=high,
    )


def _read_mamba_heads(config: ConfigReader, inner: int) -> tuple[int, int]:
    """Returns the heads of a mixer of `inner` channels, and their size."""
    heads = config.integer("mamba_n_heads", 128, high=MAX_HEADS)
    if inner % heads:
        raise config.fail("mamba_n_heads", f"is {heads}; it does not divide {inner} channels")
    dim = inner // heads
    if config.values.get("mamba_d_head") not in (None, "auto", dim):
        raise config.fail("mamba_d_head", f"must be {dim} for {heads} heads of {inner} channels")
    return heads, dim


def read_groups(config: ConfigReader, key: str, default: int, heads: int) -> int:
    groups = config.integer(key, default, high=MAX_HEADS)
    if heads % groups:
        raise config.fail(key, f"is {groups}; it does not divide {heads} heads of the mixer")
    return groups


def _read_limits(config: ConfigReader) -> tuple[float, float]:
    """Returns the limits of a mixer's steps."""
    key = "time_step_limit"
    limits = config.values.get(key)
    if limits is None:
        return 0.0, inf
    if not isinstance(limits, list) or len(limits) != 2:
        raise config.fail(key, "must list two numbers")
    # Transformers 5 writes infinity as an object
    found = [inf if limit == {"__float__": "Infinity"} else limit for limit in limits]
    low, high = _checked(config, key, found)
    if not 0 <= low <= high:
        raise config.fail(key, f"is {low:g} to {high:g}; it must be a range from 0 on")
    return low, high


def _checked(config: ConfigReader, key: str, values: list[object]) -> list[float]:
    """Returns numbers of a list."""
    found = []
    for value in values:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        # a whole number may be too large for a float, and NaN is in no range
        if not is_number or not (-1e300 <= value <= 1e300 or value == inf):  # type: ignore[operator]
            raise config.fail(key, f"holds {repr(value)[:40]}, which is not a number")
        found.append(float(value))  # type: ignore[arg-type]
    return found


def _read_expansion(config: ConfigReader) -> int:
    """Returns the channels of a mixer that widens the hidden state."""
    hidden = config.integer("hidden_size", high=MAX_WIDTH)
    return config.integer("mamba_expand", 2, high=64) * hidden


def _with_mixers(fields: Fields, kinds: list[str], mamba: MambaSpec) -> Fields:
    """Replaces the attention of the layers that are LINEAR."""
    layers = tuple(
        replace(layer, attention=None, state=mamba) if kind == LINEAR else layer
        for layer, kind in zip(fields["layers"], kinds, strict=True)
    )
    return fields | {"layers": layers}


def _read_kinds(config: ConfigReader, default: list[str]) -> list[str]:
    """Returns FULL or LINEAR for each layer."""
    return [KINDS[kind] for kind in read_layer_types(config, default, tuple(KINDS))]


def _bamba(config: ConfigReader) -> Fields:
    num_layers, full = num_layers_of(config), set[int]()
    listed = config.values.get("attn_layer_indices")
    if listed is not None:
        full = layer_numbers(config, "attn_layer_indices", listed)
    _, _, dim = read_heads(config, kv_heads=8)
    fields = llama_fields(
        config,
        kv_heads=8,
        ropes=[read_rope(config, dim, partial=0.5)] * num_layers,
        eps=("rms_norm_eps", 1e-5),
    )
    kinds = [FULL if index in full else LINEAR for index in range(num_layers)]
    mamba = _read_mamba(config, _read_expansion(config), fields["norm_eps"])
    return _with_mixers(fields, kinds, mamba)


def _granite_hybrid(config: ConfigReader) -> Fields:
    num_layers = num_layers_of(config)
    _, _, dim = read_heads(config)
    has_rope = config.text("position_embedding_type", "nope") == "rope"
    rope = read_rope(config, dim) if has_rope else None
    fields = llama_fields(
        config,
        mlp_bias=False,
        scale=config.number("attention_multiplier", 1.0, high=1e4),
        ropes=[rope] * num_layers,
    )
    kinds = _read_kinds(config, [LINEAR] * num_layers)
    if LINEAR in kinds:
        mamba = _read_mamba(config, _read_expansion(config), fields["norm_eps"])
        fields = _with_mixers(fields, kinds, mamba)
    expert = read_expert(config, "intermediate_size")
    size = config.integer("shared_intermediate_size", 1024, high=MAX_WIDTH * 8)
    shared = replace(expert, size=size)
    mlp: MlpSpec | MixtureSpec = shared
    if config.integer("num_local_experts", 8, low=0, high=MAX_EXPERTS):
        counts = {"num_local_experts": 8, "num_experts_per_tok": 2} | config.values
        num_experts, top_k = read_counts(
            ConfigReader(counts, config.source), ("num_local_experts",)
        )
        router = RouterKind(top_k=top_k, is_after_top_k=True)
        mlp = MixtureSpec(num_experts=num_experts, expert=expert, router=router, shared=shared)
    fields["layers"] = tuple(replace(layer, mlp=mlp) for layer in fields["layers"])
    return fields | granite_scales(config)


def _read_factor(config: ConfigReader, key: str) -> float:
    return config.number(key, 1.0, low=1e-9, high=1e6)


def _read_factors(config: ConfigReader, key: str, count: int) -> list[float]:
    values = config.values.get(key)
    if values is None:
        return [1.0] * count
    if not isinstance(values, list) or len(values) != count:
        raise config.fail(key, f"must list {count} numbers")
    found = _checked(config, key, values)
    for value in found:
        if not 1e-9 <= value <= 1e6:
            raise config.fail(key, f"holds {value:g}; its numbers must be between 1e-09 and 1e+06")
    return found


def _falcon_h1(config: ConfigReader) -> Fields:
    _, _, dim = read_heads(config, kv_heads=8)
    attention_in = _read_factor(config, "attention_in_multiplier")
    fields = llama_fields(
        config,
        kv_heads=8,
        # scores have the factors of queries and keys, and the output that of values
        scale=dim**-0.5 * attention_in**2 * _read_factor(config, "key_multiplier"),
        eps=("rms_norm_eps", 1e-5),
    )
    layer = fields["layers"][0]
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, AttentionSpec) and isinstance(mlp, MlpSpec)
    up, down = _read_factors(config, "mlp_multipliers", 2)
    if attention.has_qkv_bias and attention_in != 1.0:
        raise config.fail("attention_in_multiplier", "other than 1 is not supported with biases")
    if mlp.has_bias and up != 1.0:
        raise config.fail("mlp_multipliers", "other than 1 first is not supported with biases")
    out_scale = attention_in * _read_factor(config, "attention_out_multiplier")
    layer = replace(
        layer,
        attention=replace(attention, out_scale=out_scale),
        # the factor of the gate is in the whole product, and leaves the other half in the last
        mlp=replace(mlp, up_scale=up, out_scale=down / up),
        state=_read_falcon_mixer(config, fields["norm_eps"]),
    )
    return fields | {
        "layers": (layer,) * len(fields["layers"]),
        "embed_scale": _read_factor(config, "embedding_multiplier"),
        "logit_scale": _read_factor(config, "lm_head_multiplier"),
    }


def _read_falcon_mixer(config: ConfigReader, eps: float) -> MambaSpec:
    inner = _read_expansion(config)
    if "mamba_d_ssm" not in config.values or config.has("mamba_d_ssm"):
        inner = config.integer("mamba_d_ssm", 1024, high=MAX_WIDTH)
    mamba = _read_mamba(config, inner, eps)
    in_scale = _read_factor(config, "ssm_in_multiplier")
    if mamba.has_bias and in_scale != 1.0:
        raise config.fail("ssm_in_multiplier", "other than 1 is not supported with biases")
    has_norm = config.boolean("mamba_rms_norm", False)
    return replace(
        mamba,
        norm_group=mamba.norm_group if has_norm else 0,
        gates_first=not config.boolean("mamba_norm_before_gate", True),
        has_out_bias=config.boolean("projectors_bias", False),
        in_scale=in_scale,
        part_scales=tuple(_read_factors(config, "ssm_multipliers", 5)),
        out_scale=_read_factor(config, "ssm_out_multiplier"),
    )


def mixer_names(at: str) -> StateNames:
    return StateNames(
        inputs=(f"{at}.in_proj",),
        gates=(),
        convs=(f"{at}.conv1d",),
        rates=f"{at}.A_log",
        bias=f"{at}.dt_bias",
        skip=f"{at}.D",
        norm=f"{at}.norm",
        out=f"{at}.out_proj",
    )


_BAMBA = WeightNames(
    final_norm="final_layernorm",
    mlp_in="pre_ff_layernorm",
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    state=mixer_names("mamba"),
)
_GRANITE = replace(
    GRANITE_EXPERTS, shared_up=("shared_mlp.input_linear",), shared_down="shared_mlp.output_linear"
)
_GRANITE_NAMES = WeightNames(
    up=_GRANITE.shared_up,
    down=_GRANITE.shared_down,
    experts=(_GRANITE, one_by_one(_GRANITE, "block_sparse_moe.experts")),
    state=mixer_names("mamba"),
)
FAMILIES = {
    "bamba": Family(_bamba, _BAMBA, "Bamba"),
    "granitemoehybrid": Family(_granite_hybrid, _GRANITE_NAMES, "Granite 4"),
    "falcon_h1": Family(_falcon_h1, _BAMBA, "Falcon-H1"),
}
