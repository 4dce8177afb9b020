"""Quantizers store experts one by one where the model's own files have them fused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ops.cpu import native_library
from tests.quant.formats.test_expert_checkpoints import SIZES, check_logits, copies, saved
from tests.support.engine.published_formats import PUBLISHED, modelopt
from tests.support.engine.quantized import Tensors

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)


class Layout(NamedTuple):
    """is_transposed: the model's own files have [experts, in, out]. is_in_turn: rows of gate and
    up take turns there. place: what a quantizer has instead of "experts."."""

    family: str
    is_transposed: bool = False
    is_in_turn: bool = False
    place: str = "experts."

    def split(self, rows: Tensor) -> Sequence[Tensor]:
        return (rows[0::2], rows[1::2]) if self.is_in_turn else rows.chunk(2)


LAYOUTS = {
    "gemma4": Layout("gemma4"),
    "gemma4-moe": Layout("gemma4", place="moe.experts."),
    "llama4": Layout("llama4", is_transposed=True),
    "gpt-oss": Layout("gpt-oss", is_transposed=True, is_in_turn=True),
    "gpt-oss-nested": Layout("gpt-oss", True, True, "experts.experts."),
}
FORMATS = {
    name: PUBLISHED[name] for name in ("nvfp4", "nvfp4-modelopt", "fp8-small-blocks", "w4a16")
}


def unfused(stored: Tensors, layout: Layout) -> Tensors:
    """Returns the tensors with experts one by one."""
    out = dict(stored)
    for name, tensor in stored.items():
        start, _, product = name.rpartition("experts.")
        if not product.startswith(("gate_up_proj", "down_proj")):
            continue
        del out[name]
        ending = "bias" if product.endswith("_bias") else "weight"
        for index, one in enumerate(tensor):
            rows = one.t() if layout.is_transposed and ending == "weight" else one
            parts = {"down_proj": rows}
            if product.startswith("gate_up"):
                parts = dict(zip(("gate_proj", "up_proj"), layout.split(rows), strict=True))
            for module, part in parts.items():
                out[f"{start}{layout.place}{index}.{module}.{ending}"] = part.contiguous()
    return out


def fused_again(meant: Tensors, stored: Tensors, layout: Layout) -> Tensors:
    """Returns the model's own tensors with the numbers of the single products."""
    out = {name: tensor.clone() for name, tensor in stored.items()}
    for name, numbers in meant.items():
        start, _, rest = name.rpartition(layout.place)
        index, module, _ = rest.split(".")
        is_down = module == "down_proj"
        rows = out[f"{start}experts.{module if is_down else 'gate_up_proj'}"][int(index)]
        rows = rows.t() if layout.is_transposed else rows
        (rows if is_down else layout.split(rows)[module == "up_proj"]).copy_(numbers)
    return out


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Returns a model of each family, with experts of sizes that all formats have."""
    from transformers import (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        GptOssConfig,
        GptOssForCausalLM,
        Llama4ForCausalLM,
        Llama4TextConfig,
    )

    local = SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}
    gemma = SIZES | {
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 16,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 96,
    }
    llama = local | {"num_experts_per_tok": 1, "intermediate_size_mlp": 96}
    return {
        "gemma4": saved(Gemma4ForCausalLM, Gemma4TextConfig(**gemma), tmp_path_factory),
        "llama4": saved(Llama4ForCausalLM, Llama4TextConfig(**llama), tmp_path_factory),
        "gpt-oss": saved(GptOssForCausalLM, GptOssConfig(**local), tmp_path_factory),
    }


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_that_a_quantizer_stores_one_by_one(sources, layout, form, tmp_path):
    """They were missing: these families had names of fused experts only."""
    config, quantize = FORMATS[form]
    stored = load_file(sources[LAYOUTS[layout].family] / "model.safetensors")
    packed, meant = unfused(stored, LAYOUTS[layout]), {}
    for name in packed.keys() - stored.keys():
        if name.endswith(".weight"):
            made, meant[name] = quantize(name.removesuffix(".weight"), packed[name].float())
            del packed[name]
            packed |= made
    assert len(meant) == 2 * 4 * 3
    plain = fused_again(meant, stored, LAYOUTS[layout])
    check_logits(*copies(sources[LAYOUTS[layout].family], tmp_path, packed, plain, config))


@pytest.mark.parametrize("case", ["modelopt", "one-for-all", "fbgemm"])
def test_fused_experts_with_other_names_of_scales(sources, case, tmp_path, caplog):
    """Their scales were not found, so that e4m3 was refused as a type of plain weights."""
    plain = load_file(sources["llama4"] / "model.safetensors")
    packed = dict(plain)
    for name, stored in plain.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        largest = stored.abs().amax(1, keepdim=True)  # [experts, 1, out]
        if case != "fbgemm":
            largest = largest.amax(None if case == "one-for-all" else (1, 2))
        scales = (largest / 448).reshape(-1, 1, largest.shape[-1] if case == "fbgemm" else 1)
        packed[name] = (stored / scales).to(torch.float8_e4m3fn)
        plain[name] = packed[name].float() * scales
        if case == "fbgemm":
            is_down = "down" in name
            packed[f"{name}_scale"] = scales.transpose(1, 2) if is_down else scales
        else:
            packed[f"{name}_weight_scale"] = scales.squeeze()
            packed[f"{name}_input_scale"] = torch.ones(4)
    config = {"quant_method": "fbgemm_fp8"} if case == "fbgemm" else modelopt("FP8")
    check_logits(*copies(sources["llama4"], tmp_path, packed, plain, config))
    assert "not used" not in caplog.text
