"""Families with delta nets beside attention: Qwen3-Next, Qwen3.5, OLMo Hybrid, Kimi Linear."""

from __future__ import annotations

from dataclasses import replace

from ops.backend import RouterKind
from serve.checkpoint_json import ConfigReader
from serve.models.families.convolutions import MAX_CONV
from serve.models.families.fields import (
    FULL,
    MAX_HEADS,
    MAX_WIDTH,
    layer_numbers,
    llama_fields,
    num_layers_of,
    read_heads,
    read_layer_types,
)
from serve.models.families.latent import latent_fields
from serve.models.families.layer_spec import AFTER_NORM, MixtureSpec, QKNorm
from serve.models.families.mixture_fields import (
    after_first_dense,
    mixture_names,
    read_counts,
    read_expert,
    read_mlp_types,
    read_sigmoid_mixture,
    with_mixture,
)
from serve.models.families.mixtures import QWEN2_SHARED, qwen_sparse
from serve.models.families.names import (
    ExpertNames,
    Family,
    Fields,
    MtpNames,
    StateNames,
    WeightNames,
)
from serve.models.families.rope_spec import DEFAULT_THETA, read_rope
from serve.models.families.state_spec import DeltaNetSpec

LINEAR = "linear_attention"
_OLMO_EPS = 1e-5  # of the norm behind OLMo Hybrid's delta nets, whatever the others have


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


def _qwen3_5(config: ConfigReader) -> Fields:
    return _qwen3_next(config, kv_heads=4)


def _qwen3_next(config: ConfigReader, kv_heads: int = 2) -> Fields:
    num_layers, head_dim = num_layers_of(config), config.integer("head_dim", 256, high=MAX_HEADS)
    rope = read_rope(config, head_dim, partial=0.25)
    fields = llama_fields(
        config,
        kv_heads=kv_heads,
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


def _olmo_hybrid(config: ConfigReader) -> Fields:
    num_layers = num_layers_of(config)
    heads, _, dim = read_heads(config)
    rope = read_rope(config, dim) if _has_theta(config) else None
    fields = llama_fields(
        config, mlp_bias=False, qk_norm=QKNorm(scope="all"), ropes=[rope] * num_layers
    )
    key_heads = config.integer("linear_num_key_heads", heads, high=MAX_HEADS)
    key_dim = int(0.75 * fields["hidden_size"] / key_heads)
    key_dim = config.integer("linear_key_head_dim", key_dim, high=MAX_HEADS)
    sizes = {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": config.integer("linear_num_value_heads", heads, high=MAX_HEADS),
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": config.integer("linear_value_head_dim", 2 * key_dim),
    }
    is_signed = config.boolean("linear_allow_neg_eigval", True)
    net = read_delta_net(
        ConfigReader(config.values | sizes, config.source),
        _OLMO_EPS,
        beta_scale=2.0 if is_signed else 1.0,
    )
    default = [FULL if index % 4 == 3 else LINEAR for index in range(num_layers)]
    if FULL not in default:
        default[-1] = FULL
    fields["layers"] = tuple(
        replace(layer, attention=None, state=net)
        if kind == LINEAR
        else replace(layer, norms=AFTER_NORM)
        for layer, kind in zip(
            fields["layers"], read_layer_types(config, default, (FULL, LINEAR)), strict=True
        )
    )
    return fields


def _has_theta(config: ConfigReader) -> bool:
    """Returns whether layers rotate: rope_theta is null where they do not."""
    rope = config.values.get("rope_parameters")
    if isinstance(rope, dict) and "rope_theta" in rope:
        return rope["rope_theta"] is not None
    return config.values.get("rope_theta", DEFAULT_THETA) is not None


# published configurations of Kimi Linear -> the names that DeepSeek-V3's have
_KIMI_KEYS = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "n_routed_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}


def _kimi_linear(config: ConfigReader) -> Fields:
    config = config.aliased(_KIMI_KEYS)
    for key, value in (("moe_router_activation_func", "sigmoid"), ("moe_layer_freq", 1)):
        if config.values.get(key, value) != value:
            raise config.fail(key, f"other than {value} is not supported")
    if not config.boolean("mla_use_nope", True):
        raise config.fail("mla_use_nope", "other than true is not supported")
    fields = latent_fields(config, v_dim=128, nope_dim=128, q_rank=None, eps=1e-5, has_rope=False)
    net, kinds = _read_kimi_net(config, fields["norm_eps"])
    fields["layers"] = tuple(
        replace(layer, attention=None, state=net) if kind == LINEAR else layer
        for layer, kind in zip(fields["layers"], kinds, strict=True)
    )
    mixture = read_sigmoid_mixture(config, num_shared=1, scale=2.446)
    return with_mixture(fields, mixture, read_mlp_types(config, after_first_dense(config, 1)))


def _read_kimi_net(config: ConfigReader, eps: float) -> tuple[DeltaNetSpec, list[str]]:
    """Returns the delta net, and the kind of each layer."""
    num_layers = num_layers_of(config)
    given = config.values.get("linear_attn_config") or {}
    if not isinstance(given, dict):
        raise config.fail("linear_attn_config", "must be an object")
    inner = ConfigReader(given, f"{config.source}: linear_attn_config")
    kinds = [FULL if index and index % 4 == 0 else LINEAR for index in range(num_layers)]
    if inner.has("full_attn_layers") and inner.has("kda_layers"):
        # layers are counted from 1 here
        full, nets = (
            layer_numbers(inner, key, given[key]) for key in ("full_attn_layers", "kda_layers")
        )
        if full & nets or full | nets != set(range(1, num_layers + 1)):
            raise inner.fail("kda_layers", f"and full_attn_layers must share {num_layers} layers")
        kinds = [FULL if index + 1 in full else LINEAR for index in range(num_layers)]
    heads, dim, width = (
        (inner, key) if inner.has(key) else (config, top)
        for key, top in (
            ("num_heads", "linear_num_heads"),
            ("head_dim", "linear_head_dim"),
            ("short_conv_kernel_size", "linear_conv_kernel_dim"),
        )
    )
    num_heads = heads[0].integer(heads[1], 32, high=MAX_HEADS)
    head_dim = dim[0].integer(dim[1], 128, high=MAX_HEADS)
    net = DeltaNetSpec(
        num_heads=num_heads,
        num_key_heads=num_heads,
        key_dim=head_dim,
        value_dim=head_dim,
        width=width[0].integer(width[1], 4, low=2, high=MAX_CONV),
        norm_eps=eps,
        has_channel_decay=True,
        gate="sigmoid",
        rank=head_dim,
    )
    return net, read_layer_types(config, kinds, (FULL, LINEAR))


_OLMO = WeightNames(
    state=StateNames(
        inputs=(
            "linear_attn.q_proj",
            "linear_attn.k_proj",
            "linear_attn.v_proj",
            "linear_attn.g_proj",
        ),
        gates=("linear_attn.b_proj", "linear_attn.a_proj"),
        convs=("linear_attn.q_conv1d", "linear_attn.k_conv1d", "linear_attn.v_conv1d"),
        joint_conv="linear_attn.conv1d",
        norm="linear_attn.o_norm",
        out="linear_attn.o_proj",
    ),
    renamed=(
        (".attention_layer_norm.", ".input_layernorm."),
        (".feedforward_layer_norm.", ".post_attention_layernorm."),
    ),
)
_MOE = "block_sparse_moe"
_KIMI_EXPERTS = ExpertNames(
    router=f"{_MOE}.gate",
    up=(f"{_MOE}.experts.{{}}.w1", f"{_MOE}.experts.{{}}.w3"),
    down=f"{_MOE}.experts.{{}}.w2",
    correction=f"{_MOE}.gate.e_score_correction_bias",
    shared_up=(f"{_MOE}.shared_experts.gate_proj", f"{_MOE}.shared_experts.up_proj"),
    shared_down=f"{_MOE}.shared_experts.down_proj",
)
_KIMI_FUSED = replace(
    _KIMI_EXPERTS,
    up=(f"{_MOE}.experts.gate_up_proj",),
    down=f"{_MOE}.experts.down_proj",
    is_fused=True,
)
_KIMI = WeightNames(
    experts=(_KIMI_EXPERTS, _KIMI_FUSED),
    state=StateNames(
        inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        gates=("self_attn.b_proj", "self_attn.f_a_proj", "self_attn.g_a_proj"),
        low_a="self_attn.f_b_proj",
        low_z="self_attn.g_b_proj",
        convs=("self_attn.q_conv1d", "self_attn.k_conv1d", "self_attn.v_conv1d"),
        joint_conv="self_attn.conv1d",
        rates="self_attn.A_log",
        bias="self_attn.dt_bias",
        norm="self_attn.o_norm",
        out="self_attn.o_proj",
    ),
    # Transformers' names, and those of dense layers that it writes
    renamed=(
        (".self_attn.forget_gate.", ".self_attn."),
        (".mlp.experts.", f".{_MOE}.experts."),
        (".mlp.gate.", f".{_MOE}.gate."),
        (".mlp.shared_experts.", f".{_MOE}.shared_experts."),
        *((f".{_MOE}.{name}_proj.", f".mlp.{name}_proj.") for name in ("gate", "up", "down")),
    ),
)
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
    "qwen3_5_text": Family(_qwen3_5, title="Qwen3.5, 3.6 and 3.8, text", mtp=_MTP),
    "qwen3_5_moe_text": Family(
        _qwen3_next_moe, mixture_names(**QWEN2_SHARED), "Qwen3.5 and 3.6, mixtures, text", mtp=_MTP
    ),
    "olmo_hybrid": Family(_olmo_hybrid, _OLMO, "OLMo Hybrid"),
    "kimi_linear": Family(_kimi_linear, _KIMI, "Kimi Linear 48B-A3B"),
}
