"""Invalid mixtures and latent models are refused with the key or tensor that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from serve.errors import ModelLoadError
from tests.support.engine.checkpoints import Json, checkpoint, edit_json
from tests.support.engine.decoders import copy_of, edit_tensors, load

pytestmark = pytest.mark.usefixtures("one_thread")

Tensors = dict[str, Tensor]


def refused(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(path)
    return str(caught.value)


CONFIG_ERRORS: list[tuple[str, str, Json, str]] = [
    ("mixtral", "base", {"num_local_experts": 0}, "num_local_experts is 0"),
    ("mixtral", "base", {"num_local_experts": 7}, "experts.6.w1.weight is missing"),
    ("mixtral", "base", {"num_local_experts": 5}, "gate.weight has shape [6, 64]"),
    ("mixtral", "base", {"num_experts_per_tok": 7}, "num_experts_per_tok is 7, but num_local_exp"),
    ("mixtral", "base", {"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
    ("mixtral", "base", {"num_local_experts": 10**6}, "num_local_experts is 1000000"),
    ("gpt_oss", "yarn", {"num_local_experts": 5}, "has shape [6, "),
    ("gpt_oss", "yarn", {"swiglu_limit": 5.0}, "swiglu_limit"),
    ("gemma4_text", "mixture", {"num_experts": 5}, "has shape [6, "),
    ("gemma4_text", "mixture", {"top_k_experts": 7}, "top_k_experts is 7"),
    ("gemma4_text", "shared", {"num_kv_shared_layers": 6}, "num_kv_shared_layers is 6"),
    ("glm4_moe", "groups", {"n_group": 3}, "n_group is 3; it does not divide 8 experts"),
    ("glm4_moe", "groups", {"n_group": 0}, "n_group is 0"),
    ("glm4_moe", "groups", {"topk_group": 0}, "topk_group is 0"),
    ("glm4_moe", "groups", {"n_shared_experts": 3}, "shared_experts."),
    ("glm4_moe", "groups", {"first_k_dense_replace": 0}, "layers.0.mlp."),
    ("deepseek_v2", "groups", {"n_group": 5}, "n_group is 5; it does not divide 8 experts"),
    ("deepseek_v2", "groups", {"topk_method": "noaux"}, "topk_method 'noaux'"),
    ("deepseek_v3", "yarn", {"kv_lora_rank": 33}, "has shape"),
    ("deepseek_v3", "yarn", {"q_lora_rank": None}, "q_proj"),
    ("llama4_text", "chunks", {"moe_layers": 5}, "moe_layers must list layers"),
    ("llama4_text", "chunks", {"no_rope_layers": [[1]] * 5}, "no_rope_layers must list"),
    ("smollm3", "nope", {"no_rope_layers": [{}] * 5}, "no_rope_layers must list"),
    ("glm4_moe_lite", "groups", {"mlp_layer_types": [[]] * 3}, "mlp_layer_types must list"),
    ("hunyuan_v1_moe", "base", {"moe_topk": [3, 2]}, "moe_topk must be the same"),
    ("qwen2_moe", "shared", {"shared_expert_intermediate_size": 57}, "shared_expert."),
    (
        "phi3",
        "beyond",
        {"rope_parameters": {"rope_type": "longrope"}, "sliding_window": None},
        "attention_factor is missing",
    ),
]


@pytest.mark.parametrize(("family", "shape", "change", "message"), CONFIG_ERRORS)
@pytest.mark.row("X6")
def test_bad_config(family: str, shape: str, change: Json, message: str, tmp_path: Path) -> None:
    path = copy_of(checkpoint(family, shape), tmp_path)
    edit_json(path / "config.json", lambda config: config.update(change))
    assert message in refused(path)


def without(tensors: Tensors, name: str) -> Tensors:
    return {key: tensor for key, tensor in tensors.items() if key != name}


def changed(tensors: Tensors, name: str, change: Callable[[Tensor], Tensor]) -> Tensors:
    return tensors | {name: change(tensors[name]).contiguous()}


def with_nan(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.view(-1)[-1] = float("nan")
    return tensor


def cut(tensor: Tensor) -> Tensor:
    return tensor[:-1].clone()


MIXTRAL = "model.layers.1.block_sparse_moe."
FUSED = "model.layers.1.mlp.experts."
MISSING = [
    ("mixtral", "base", f"{MIXTRAL}experts.5.w2.weight"),
    ("mixtral", "base", f"{MIXTRAL}experts.0.w3.weight"),
    ("mixtral", "base", f"{MIXTRAL}gate.weight"),
    ("gpt_oss", "yarn", f"{FUSED}gate_up_proj"),
    ("gpt_oss", "yarn", f"{FUSED}down_proj_bias"),
    ("gpt_oss", "yarn", "model.layers.1.self_attn.sinks"),
    ("glm4_moe", "groups", "model.layers.1.mlp.gate.e_score_correction_bias"),
    ("glm4_moe", "groups", "model.layers.1.mlp.shared_experts.down_proj.weight"),
    ("deepseek_v3", "yarn", "model.layers.1.self_attn.kv_b_proj.weight"),
    ("deepseek_v3", "yarn", "model.layers.1.self_attn.kv_a_layernorm.weight"),
    ("gemma4_text", "mixture", "model.layers.1.router.per_expert_scale"),
]


@pytest.mark.parametrize(("family", "shape", "name"), MISSING)
@pytest.mark.row("X4")
def test_a_missing_tensor(family: str, shape: str, name: str, tmp_path: Path) -> None:
    path = copy_of(checkpoint(family, shape), tmp_path)
    edit_tensors(path, lambda tensors: without(tensors, name))
    complaint = refused(path)
    assert name in complaint
    assert "is missing" in complaint


BAD_TENSORS: list[tuple[str, str, str, Callable[[Tensor], Tensor], str]] = [
    ("mixtral", "base", f"{MIXTRAL}gate.weight", with_nan, "holds NaN or infinity"),
    ("mixtral", "base", f"{MIXTRAL}gate.weight", cut, "has shape [5, 64]"),
    ("mixtral", "base", f"{MIXTRAL}experts.4.w1.weight", with_nan, "holds NaN or infinity"),
    ("mixtral", "base", f"{MIXTRAL}experts.4.w1.weight", cut, "has shape [95, 64]"),
    ("gpt_oss", "yarn", f"{FUSED}gate_up_proj", cut, "has shape [5, "),
    ("gpt_oss", "yarn", f"{FUSED}gate_up_proj", lambda t: t.transpose(1, 2), "has shape [6, "),
    ("gpt_oss", "yarn", f"{FUSED}gate_up_proj", with_nan, "holds NaN or infinity"),
    ("gpt_oss", "yarn", f"{FUSED}down_proj", lambda t: t[0], "has shape ["),
    ("gpt_oss", "yarn", "model.layers.1.self_attn.sinks", cut, "has shape [3]"),
    ("granitemoe", "multipliers", f"{MIXTRAL}input_linear.weight", cut, "has shape [5, "),
    (
        "glm4_moe",
        "groups",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        with_nan,
        "holds NaN or infinity",
    ),
    (
        "deepseek_v3",
        "yarn",
        "model.layers.1.self_attn.kv_b_proj.weight",
        with_nan,
        "holds NaN or infinity",
    ),
    ("deepseek_v3", "yarn", "model.layers.1.self_attn.kv_b_proj.weight", cut, "has shape ["),
]


@pytest.mark.parametrize(("family", "shape", "name", "change", "message"), BAD_TENSORS)
@pytest.mark.row("X4")
def test_a_bad_tensor(
    family: str,
    shape: str,
    name: str,
    change: Callable[[Tensor], Tensor],
    message: str,
    tmp_path: Path,
) -> None:
    path = copy_of(checkpoint(family, shape), tmp_path)
    edit_tensors(path, lambda tensors: changed(tensors, name, change))
    complaint = refused(path)
    assert name in complaint
    assert message in complaint


def test_an_expert_too_many(tmp_path: Path) -> None:
    """It is named; a mixture never serves with fewer experts than the checkpoint has."""
    path = copy_of(checkpoint("mixtral", "base"), tmp_path)
    router = f"{MIXTRAL}gate.weight"
    extra = f"{MIXTRAL}experts.6.w1.weight"

    def edit(tensors: Tensors) -> Tensors:
        return tensors | {extra: torch.ones(96, 64), router: torch.ones(7, 64)}

    edit_tensors(path, edit)
    assert router in refused(path)
