"""The names of a family's tensors, and what a row of the table of families is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from serve.checkpoint_json import ConfigReader

Fields = dict[str, Any]
"""The fields of ModelSpec that a family reads."""


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of a mixture's tensors in one layer.

    up and down: modules of one expert with {} for its number, or with is_fused tensors of all
    experts, [E, out, in] (is_transposed: [E, in, out]); a fused up may hold gate and up one after
    the other or, with is_interleaved, row by row in turn. correction (is_correction_row: stored
    as [1, E]), router_scale, expert_scale: tensors. shared_up, shared_down, shared_gate, latent_in,
    latent_out: modules.
    The norms are those of a mixture beside a dense MLP.
    """

    router: str = "mlp.gate"
    up: tuple[str, ...] = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj")
    down: str = "mlp.experts.{}.down_proj"
    is_fused: bool = False
    is_transposed: bool = False
    is_interleaved: bool = False
    bias: str = "{}.bias"
    correction: str = "mlp.gate.e_score_correction_bias"
    is_correction_row: bool = False
    router_scale: str = "router.scale"
    expert_scale: str = "router.per_expert_scale"
    shared_up: tuple[str, ...] = (
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
    )
    shared_down: str = "mlp.shared_experts.down_proj"
    shared_gate: str = "mlp.shared_expert_gate"
    latent_in: str = ""
    latent_out: str = ""
    dense_out_norm: str = "post_feedforward_layernorm_1"
    in_norm: str = "pre_feedforward_layernorm_2"
    out_norm: str = "post_feedforward_layernorm_2"


@dataclass(frozen=True, slots=True)
class LatentNames:
    """The names of latent attention's tensors in one layer; q: the product of full rank."""

    q_down: str = "self_attn.q_a_proj"
    q_norm: str = "self_attn.q_a_layernorm"
    q_up: str = "self_attn.q_b_proj"
    q: str = "self_attn.q_proj"
    kv_down: str = "self_attn.kv_a_proj_with_mqa"
    kv_norm: str = "self_attn.kv_a_layernorm"
    kv_up: str = "self_attn.kv_b_proj"


@dataclass(frozen=True, slots=True)
class MtpNames:
    """The names of an MTP layer's tensors.

    block: what the names of its block begin with, and `at` those of the others; None: those of a
    layer behind the model's (DeepSeek-V3). key: the number of such layers in config.json, and
    default: what it is if it is missing.
    """

    block: str | None = None
    at: str | None = None
    join: str = "eh_proj"
    embed_norm: str = "enorm"
    state_norm: str = "hnorm"
    final_norm: str = "shared_head.norm"
    key: str = "num_nextn_predict_layers"
    default: int = 0


@dataclass(frozen=True, slots=True)
class StateNames:
    """The names of the tensors of a layer with a state.

    inputs: modules that give, one after the other, what the layer takes: q, k, v and z of a delta
    net; z, x, B, C and dt of Mamba-2; b, c and x of a short convolution. is_grouped: one module
    holds q, k, v and z of each key head side by side, and `gates` b and a likewise (Qwen3-Next).
    gates: modules of b and a, and where their products have a low rank of b and the first products.
    low_a, low_z: the second products of low rank. convs: modules of the convolution, of parts of
    its channels; joint_conv: the module of all, which some checkpoints have instead. rates, bias,
    skip: tensors.
    """

    inputs: tuple[str, ...] = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
    is_grouped: bool = False
    gates: tuple[str, ...] = ("linear_attn.in_proj_b", "linear_attn.in_proj_a")
    low_a: str = ""
    low_z: str = ""
    convs: tuple[str, ...] = ("linear_attn.conv1d",)
    joint_conv: str = ""
    rates: str = "linear_attn.A_log"
    bias: str = "linear_attn.dt_bias"
    skip: str = ""
    norm: str = "linear_attn.norm"
    out: str = "linear_attn.out_proj"


@dataclass(frozen=True, slots=True)
class WeightNames:
    """The names of a family's tensors.

    Names of a layer follow prefix + layer.format(index), others follow the prefix. A tuple lists
    parts that are concatenated along the output; one name instead of several is a tensor that holds
    all parts, one after the other. Norms, projections and MLP names get ".weight" and ".bias".
    prefixes, heads: the first that fits the checkpoint is used (with or without the head's model,
    alone or in a multimodal model). experts: the ways in which a mixture is stored. is_transposed:
    weights are stored [in, out]. ignored: endings of tensors that older checkpoints have and the
    decoder does not need. renamed: parts of names that some checkpoints have, and what stands in
    their place here. A name of a norm may be empty, where the family has none.
    """

    prefixes: tuple[str, ...] = (
        "model.",
        "",
        "model.language_model.",
        "language_model.model.",
        "language_model.",
    )
    heads: tuple[str, ...] = ("lm_head", "language_model.lm_head", "model.lm_head")
    layer: str = "layers.{}."
    embed: str = "embed_tokens"
    positions: str = "embed_positions"
    project_in: str = "project_in"
    project_out: str = "project_out"
    final_norm: str = "norm"
    attn_in: str = "input_layernorm"
    attn_out: str = "post_attention_layernorm"
    attn_sum: str = "self_attn_layer_norm"
    mlp_in: str = "post_attention_layernorm"
    mlp_out: str = "post_feedforward_layernorm"
    mlp_sum: str = "final_layer_norm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    gate: str = "self_attn.gate_proj"
    sinks: str = "self_attn.sinks"
    o: str = "self_attn.o_proj"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    experts: tuple[ExpertNames, ...] = (ExpertNames(),)
    latent: LatentNames = LatentNames()
    state: StateNames = StateNames()
    scalar: str = "layer_scalar"
    is_transposed: bool = False
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    renamed: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table.

    fields: reads config.json. names: the tensors' names. title: the models that people know it by.
    nested_defaults: values of keys that configurations of multimodal models leave out. mtp: how
    checkpoints name an MTP layer, if they may have one.
    """

    fields: Callable[[ConfigReader], Fields]
    names: WeightNames = WeightNames()
    title: str = ""
    nested_defaults: Mapping[str, object] = field(default_factory=dict)
    mtp: MtpNames | None = None
