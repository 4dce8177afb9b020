"""Families with mixtures like DeepSeek-V3's and plain attention."""

from __future__ import annotations

from serve.checkpoint_json import ConfigReader
from serve.models.families.fields import (
    FULL,
    SLIDING,
    llama_fields,
    num_layers_of,
    read_heads,
    read_layer_types,
    read_windows,
)
from serve.models.families.layer_spec import QKNorm
from serve.models.families.mixture_fields import (
    after_first_dense,
    mixture_names,
    read_sigmoid_mixture,
    with_mixture,
)
from serve.models.families.names import Family, Fields, MtpNames
from serve.models.families.rope_spec import read_rope


def _glm4_moe(config: ConfigReader) -> Fields:
    _, _, dim = read_heads(config, kv_heads=8)
    rope = read_rope(config, dim, partial=0.5)
    fields = llama_fields(
        config,
        kv_heads=8,
        o_bias=False,
        mlp_bias=False,
        qk_norm=QKNorm() if config.boolean("use_qk_norm", False) else None,
        ropes=[rope] * num_layers_of(config),
        eps=("rms_norm_eps", 1e-5),
    )
    return with_mixture(
        fields, read_sigmoid_mixture(config, num_shared=1), after_first_dense(config, 1)
    )


def _dots1(config: ConfigReader) -> Fields:
    num_layers = num_layers_of(config)
    last = config.integer("max_window_layers", 62, low=0)
    has_window = config.values.get("sliding_window", 4096) is not None
    default = [SLIDING if has_window and index >= last else FULL for index in range(num_layers)]
    types = read_layer_types(config, default)
    fields = llama_fields(
        config, mlp_bias=False, qk_norm=QKNorm(), windows=read_windows(config, types, 4096)
    )
    values = {"norm_topk_prob": False} | config.values
    mixture = read_sigmoid_mixture(ConfigReader(values, config.source))
    return with_mixture(fields, mixture, after_first_dense(config, 0))


FAMILIES = {
    "glm4_moe": Family(_glm4_moe, mixture_names(), "GLM-4.5 to 4.7, GLM-4.5-Air", mtp=MtpNames()),
    "dots1": Family(_dots1, mixture_names(), "dots.llm1"),
}
