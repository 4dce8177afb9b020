"""Nemotron-H: each block is one mixer, one MLP or one mixture."""

from __future__ import annotations

from dataclasses import replace

from serve.checkpoint_json import ConfigReader
from serve.models.families.convolutions import MAX_CONV
from serve.models.families.delta_nets import LINEAR
from serve.models.families.fields import (
    FULL,
    MAX_HEADS,
    MAX_LAYERS,
    MAX_WIDTH,
    llama_fields,
    read_activation,
)
from serve.models.families.layer_spec import LayerSpec, MixtureSpec, MlpSpec
from serve.models.families.mamba import KINDS, mixer_names, read_groups
from serve.models.families.mixture_fields import read_sigmoid_mixture
from serve.models.families.names import ExpertNames, Family, Fields, WeightNames
from serve.models.families.state_spec import MambaSpec

_MOE, _MLP = "moe", "mlp"
_LETTERS = {"M": LINEAR, "*": FULL, "E": _MOE, "-": _MLP}


def _nemotron_kinds(config: ConfigReader) -> list[str]:
    """Returns the kind of each layer; published configurations have a letter for each."""
    for key in ("layers_block_type", "layer_types"):
        if config.has(key):
            return _known(config, key, config.values[key], KINDS | {_MOE: _MOE, _MLP: _MLP})
    key = "hybrid_override_pattern"
    if config.has(key):
        return _known(config, key, list(config.text(key)), _LETTERS)
    return [LINEAR, _MOE, FULL, _MLP]


def _known(config: ConfigReader, key: str, values: object, names: dict[str, str]) -> list[str]:
    if not isinstance(values, list) or not 0 < len(values) <= MAX_LAYERS:
        raise config.fail(key, f"must have between 1 and {MAX_LAYERS} layers")
    for value in values:
        if not isinstance(value, str) or value not in names:
            raise config.fail(key, f"holds {value!r}; known: {', '.join(names)}")
    return [names[value] for value in values]


def _nemotron_h(config: ConfigReader) -> Fields:
    kinds = _nemotron_kinds(config)
    sized = ConfigReader(config.values | {"num_hidden_layers": len(kinds)}, config.source)
    fields = llama_fields(
        sized,
        kv_heads=8,
        head_dim=config.integer("attention_head_dim", 128, high=MAX_HEADS),
        qkv_bias=False,
        o_bias=False,
        ropes=[None] * len(kinds),
        activation=("mlp_hidden_act", "relu2"),
        is_gated=False,
        eps=("layer_norm_epsilon", 1e-5),
    )
    plain = fields["layers"][0]
    first, second = frozenset({"attn_in"}), frozenset({"mlp_in"})
    made = {
        FULL: LayerSpec(attention=plain.attention, mlp=None, norms=first),
        _MLP: LayerSpec(attention=None, mlp=plain.mlp, norms=second),
    }
    if LINEAR in kinds:
        mamba = _read_nemotron_mixer(config, fields["norm_eps"])
        made[LINEAR] = LayerSpec(attention=None, mlp=None, state=mamba, norms=first)
    if _MOE in kinds:
        mixture = _read_nemotron_mixture(config, plain.mlp)
        made[_MOE] = LayerSpec(attention=None, mlp=mixture, norms=second)
    return fields | {"layers": tuple(made[kind] for kind in kinds)}


def _read_nemotron_mixer(config: ConfigReader, eps: float) -> MambaSpec:
    if read_activation(config, "mamba_hidden_act", "silu") != "silu":
        raise config.fail("mamba_hidden_act", "other than silu is not supported")
    heads = config.integer("mamba_num_heads", 128, high=MAX_HEADS)
    dim = config.integer("mamba_head_dim", 64, high=MAX_HEADS)
    groups = read_groups(config, "n_groups", 8, heads)
    has_bias = config.boolean("use_bias", False)
    return MambaSpec(
        num_heads=heads,
        head_dim=dim,
        state_size=config.integer("ssm_state_size", 128, high=MAX_WIDTH),
        num_groups=groups,
        width=config.integer("conv_kernel", 4, low=2, high=MAX_CONV),
        norm_eps=eps,
        norm_group=heads * dim // groups,
        has_bias=has_bias,
        has_out_bias=has_bias,
        has_conv_bias=config.boolean("use_conv_bias", True),
        # as in Transformers, which does not read time_step_limit
        dt_min=config.number("time_step_min", 0.001, high=1e6),
    )


def _read_nemotron_mixture(config: ConfigReader, mlp: MlpSpec) -> MixtureSpec:
    """mlp: that of a dense layer."""
    if config.integer("n_shared_experts", 1) != 1:
        raise config.fail("n_shared_experts", "other than 1 is not supported")
    mixture = read_sigmoid_mixture(config, num_shared=1)
    shared = config.integer("moe_shared_expert_intermediate_size", 7688, high=MAX_WIDTH * 8)
    latent = 0
    if config.has("moe_latent_size"):
        latent = config.integer("moe_latent_size", high=MAX_WIDTH)
        if mlp.has_bias:
            raise config.fail("mlp_bias", "is not supported with moe_latent_size")
    return replace(
        mixture,
        expert=replace(mlp, size=mixture.expert.size, has_bias=False),
        shared=replace(mlp, size=shared),
        latent_size=latent,
    )


_NEMOTRON = ExpertNames(
    router="mixer.gate",
    up=("mixer.experts.{}.up_proj",),
    down="mixer.experts.{}.down_proj",
    correction="mixer.gate.e_score_correction_bias",
    shared_up=("mixer.shared_experts.up_proj",),
    shared_down="mixer.shared_experts.down_proj",
    latent_in="mixer.fc1_latent_proj",
    latent_out="mixer.fc2_latent_proj",
)
_NEMOTRON_FUSED = replace(
    _NEMOTRON, up=("mixer.experts.up_proj",), down="mixer.experts.down_proj", is_fused=True
)
_NEMOTRON_NAMES = WeightNames(
    prefixes=("backbone.", *WeightNames().prefixes),
    embed="embeddings",
    final_norm="norm_f",
    attn_in="norm",
    mlp_in="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    o="mixer.o_proj",
    up=("mixer.up_proj",),
    down="mixer.down_proj",
    experts=(_NEMOTRON, _NEMOTRON_FUSED),
    state=mixer_names("mixer"),
)
FAMILIES = {
    "nemotron_h": Family(_nemotron_h, _NEMOTRON_NAMES, "Nemotron-H, Nemotron Nano 2 and 3"),
}
