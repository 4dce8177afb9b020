"""Llama 4, the text model: layers with positions attend within chunks, others to everything."""

from __future__ import annotations

from dataclasses import replace

from ops.backend import RouterKind
from serve.checkpoint_json import ConfigReader
from serve.models.families.fields import (
    CHUNKED,
    FULL,
    MAX_WIDTH,
    layer_numbers,
    llama_fields,
    num_layers_of,
    read_heads,
    read_layer_types,
    read_rope_layers,
)
from serve.models.families.layer_spec import (
    AttentionSpec,
    LayerSpec,
    MixtureSpec,
    MlpSpec,
    QKNorm,
    QueryScaling,
)
from serve.models.families.mixture_fields import (
    one_by_one,
    read_counts,
    read_expert,
    with_mixture,
)
from serve.models.families.names import ExpertNames, Family, Fields, WeightNames
from serve.models.families.rope_spec import read_rope


def _llama4(config: ConfigReader) -> Fields:
    num_layers = num_layers_of(config)
    _, _, dim = read_heads(config, kv_heads=8, head_dim=128)
    rope = read_rope(config, dim, theta=500000.0, is_interleaved=True)
    uses_rope = read_rope_layers(config)
    chunks = _chunks(config, uses_rope)
    fields = llama_fields(
        config,
        kv_heads=8,
        head_dim=128,
        mlp_bias=False,
        ropes=[rope if uses else None for uses in uses_rope],
        eps=("rms_norm_eps", 1e-5),
    )
    has_norm = config.boolean("use_qk_norm", True)
    scaling = None
    tuning = config.values.get("attn_temperature_tuning", True)  # true, or a number as in Scout's
    if isinstance(tuning, bool) or config.integer("attn_temperature_tuning", low=0) == 0:
        has_tuning = config.boolean("attn_temperature_tuning", True) if tuning else False
    else:
        has_tuning = True
    if has_tuning:
        scaling = QueryScaling(
            beta=config.number("attn_scale", 0.1),
            length=config.integer("floor_scale", 8192),
            offset=1,
        )
    dense = config.integer("intermediate_size_mlp", 16384, high=MAX_WIDTH * 8)

    def with_own(layer: LayerSpec, chunk: int | None) -> LayerSpec:
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(attention, AttentionSpec)
        assert isinstance(mlp, MlpSpec)
        if attention.rope is None:
            attention = replace(attention, chunk=chunk, query_scaling=scaling)
        else:
            norm = QKNorm(has_weight=False) if has_norm else None
            attention = replace(attention, chunk=chunk, qk_norm=norm)
        return replace(layer, attention=attention, mlp=replace(mlp, size=dense))

    kinds = list(zip(fields["layers"], chunks, strict=True))
    layers = {kind: with_own(*kind) for kind in set(kinds)}
    fields["layers"] = tuple(layers[kind] for kind in kinds)
    num_experts, top_k = read_counts(config, ("num_local_experts",))
    expert = read_expert(config, "intermediate_size")
    mixture = MixtureSpec(
        num_experts=num_experts,
        expert=expert,
        # the choice is by logits, since the sigmoids of large ones are equal in fp32
        router=RouterKind(top_k=top_k, score="sigmoid", is_after_top_k=True),
        shared=expert,
        scales_input=True,
    )
    step = config.integer("interleave_moe_layer_step", 1)
    sparse = config.values.get("moe_layers")
    if sparse is None:
        sparse = list(range(step - 1, num_layers, step))
    numbers = layer_numbers(config, "moe_layers", sparse)
    return with_mixture(fields, mixture, [index in numbers for index in range(num_layers)])


def _chunks(config: ConfigReader, uses_rope: list[bool]) -> list[int | None]:
    """Returns each layer's chunk; by default layers with positions have one, unless
    attention_chunk_size is null."""
    chunk = None
    if config.values.get("attention_chunk_size", 8192) is not None:
        chunk = config.integer("attention_chunk_size", 8192)
    default = [CHUNKED if uses and chunk is not None else FULL for uses in uses_rope]
    types = read_layer_types(config, default, (FULL, CHUNKED))
    if CHUNKED in types and chunk is None:
        raise config.fail("attention_chunk_size", "is null, but layer_types has chunked_attention")
    return [chunk if kind == CHUNKED else None for kind in types]


_FUSED = ExpertNames(
    router="feed_forward.router",
    up=("feed_forward.experts.gate_up_proj",),
    down="feed_forward.experts.down_proj",
    is_fused=True,
    is_transposed=True,
    bias="{}_bias",
    shared_up=("feed_forward.shared_expert.gate_proj", "feed_forward.shared_expert.up_proj"),
    shared_down="feed_forward.shared_expert.down_proj",
)
_NAMES = WeightNames(
    up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    experts=(_FUSED, one_by_one(_FUSED, "feed_forward.experts")),
)
FAMILIES = {"llama4_text": Family(_llama4, _NAMES, "Llama 4 Scout and Maverick, text")}
