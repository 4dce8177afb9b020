"""What configurations leave out has the value that Transformers' configuration classes give it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

from serve.models import read_spec
from serve.models.families import FAMILIES
from serve.models.spec import ModelSpec
from tests.support.engine.checkpoints import Json

# what a class leaves open or gives values that no model has
COMPLETIONS: dict[str, Json] = {
    "glm4_moe": {"head_dim": 128},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6},
    "deepseek_v2": {"num_experts_per_tok": 6},
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {"layer_types": [*["mamba"] * 5, "attention", *["mamba"] * 26]},
}
LEARNED = {"opt", "gpt2"}  # never the language model of another
WHOLE = {"qwen2_vl", "qwen2_5_vl"}  # also the model types of multimodal models
NESTED = {name for name in FAMILIES if name.endswith("_vl_text") or name == "qwen3_vl_moe_text"}
SIZES = {
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    "model_max_length",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "head_dim",
}
"""The keys that every file of its own has."""


def full_config(model_type: str) -> Json:
    """Returns all keys with the defaults of the family's class."""
    name = "deepseek_v3" if model_type == "kimi_k2" else model_type
    config = type(transformers.AutoConfig.for_model(name))()
    values = {key: value for key, value in config.to_dict().items() if "token_id" not in key}
    return values | COMPLETIONS.get(model_type, {}) | {"model_type": model_type}


def spec_of(directory: Path, values: Json) -> ModelSpec:
    (directory / "config.json").write_text(json.dumps(values))
    return read_spec(directory)


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - LEARNED - WHOLE - NESTED))
def test_only_sizes_are_given(model_type: str, tmp_path: Path) -> None:
    full = full_config(model_type)
    keys = SIZES | COMPLETIONS.get(model_type, {}).keys()
    given = {key: value for key, value in full.items() if key in keys}
    spec = spec_of(tmp_path, given | {"model_type": model_type})
    assert spec == spec_of(tmp_path, full)


@pytest.mark.parametrize("model_type", sorted(set(FAMILIES) - LEARNED - WHOLE))
def test_a_nested_configuration_may_be_empty(model_type: str, tmp_path: Path) -> None:
    inner = COMPLETIONS.get(model_type, {}) | {"model_type": model_type}
    spec = spec_of(tmp_path, {"model_type": "whole", "text_config": inner})
    assert spec.is_nested
    expected = spec_of(tmp_path, full_config(model_type))
    assert replace(spec, is_nested=False) == expected
