"""Mixtures of experts in quantized formats: fused tensors, and a product for each expert."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ops import get_backend
from ops.cpu import native_library
from ops.cpu.native_quantized_linear import NATIVE
from serve.errors import ModelLoadError
from serve.models import load_model
from tests.support.engine.checkpoints import edit_json
from tests.support.engine.decoders import run, token_ids
from tests.support.engine.format_writers import fp8_blocks, mxfp4_experts
from tests.support.engine.published_formats import PUBLISHED, native_fp8
from tests.support.engine.quantized import AWQ, GPTQ, Tensors, four_bits

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory) -> Path:
    from transformers import GptOssConfig, GptOssForCausalLM

    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}
    return saved(GptOssForCausalLM, GptOssConfig(**SIZES, **sizes), tmp_path_factory)


@pytest.fixture(scope="module")
def qwen3_moe(tmp_path_factory) -> Path:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    return saved(Qwen3MoeForCausalLM, Qwen3MoeConfig(**SIZES, **sizes), tmp_path_factory)


def saved(model_class, config, tmp_path_factory) -> Path:
    torch.manual_seed(7)
    path = tmp_path_factory.mktemp("mixture")
    model = model_class(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model.save_pretrained(path)
    return path


def copies(source: Path, path: Path, packed: Tensors, plain: Tensors, config: object) -> list[Path]:
    """Returns the quantized checkpoint and the plain one."""
    for name, tensors in (("packed", packed), ("plain", plain)):
        shutil.copytree(source, path / name)
        save_file(
            {k: t.contiguous() for k, t in tensors.items()}, path / name / "model.safetensors"
        )
    file = path / "packed" / "config.json"
    edit_json(file, lambda c: c.update(quantization_config=config))
    return [path / "packed", path / "plain"]


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def check_logits(packed: Path, plain: Path) -> None:
    ids, settings = token_ids(24), {"dtype": torch.float32, "backend": get_backend("cpu")}
    want = run(load_model(plain, **settings), ids)
    assert relative(run(load_model(packed, unpack=True, **settings), ids), want) < 1e-5
    got = run(load_model(packed, make_linear=NATIVE.int8, **settings), ids)
    int8 = run(load_model(plain, make_linear=NATIVE.int8, **settings), ids)
    assert relative(got, want) < max(0.05, 1.5 * relative(int8, want))


def mxfp4_of(source: Path) -> tuple[Tensors, Tensors]:
    """Returns the tensors of gpt-oss with experts in MXFP4, and plain ones of the same numbers."""
    plain = load_file(source / "model.safetensors")
    packed = dict(plain)
    for name, stored in list(plain.items()):
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            made, meant = mxfp4_experts(name, stored.float().transpose(1, 2))
            del packed[name]
            packed |= made
            plain[name] = meant.transpose(1, 2)
    return packed, plain


def test_gpt_oss_in_mxfp4(gpt_oss, tmp_path):
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    tensors, plain = mxfp4_of(gpt_oss)
    assert any(name.endswith("_blocks") for name in tensors)
    check_logits(*copies(gpt_oss, tmp_path, tensors, plain, config))


@pytest.mark.parametrize(
    ("ending", "change", "named"),
    [
        ("gate_up_proj_scales", lambda t: t[:, :-1], "gate_up_proj_scales has shape"),
        ("gate_up_proj_scales", None, "gate_up_proj_scales is missing"),
        ("down_proj_blocks", lambda t: t[:3], "down_proj_blocks has shape"),
        ("down_proj_scales", lambda t: torch.full_like(t, 255), "down_proj_scales holds NaN"),
        ("down_proj_scales", lambda t: torch.full_like(t, 200), "down_proj_scales holds a scale"),
        ("down_proj_blocks", lambda t: t.int(), "down_proj_blocks has type I32"),
    ],
)
def test_damaged_experts_of_gpt_oss_are_named(gpt_oss, ending, change, named, tmp_path):
    tensors, plain = mxfp4_of(gpt_oss)
    name = next(name for name in tensors if name.endswith(f"1.mlp.experts.{ending}"))
    if change is None:
        del tensors[name]
    else:
        tensors[name] = change(tensors[name])
    packed, _ = copies(gpt_oss, tmp_path, tensors, plain, {"quant_method": "mxfp4"})
    with pytest.raises(ModelLoadError, match=f"layers.1.mlp.experts.{named}"):
        load_model(packed, dtype=torch.float32, backend=get_backend("cpu"))


@pytest.mark.parametrize("case", ["gptq", "awq", "w4a16", "nvfp4", "bnb-nf4", "fp8-blocks", "hqq4"])
def test_products_of_each_expert(qwen3_moe, case, tmp_path):
    config, quantize = {
        "gptq": (GPTQ, four_bits(GPTQ)),
        "awq": (AWQ, four_bits(AWQ)),
        **PUBLISHED,
    }[case]
    plain = load_file(qwen3_moe / "model.safetensors")
    packed = dict(plain)
    names = [name for name in plain if ".experts." in name and name.endswith(".weight")]
    assert len(names) == 2 * 4 * 3
    for name in names:
        made, meant = quantize(name.removesuffix(".weight"), packed.pop(name).float())
        packed |= made
        plain[name] = meant
    check_logits(*copies(qwen3_moe, tmp_path, packed, plain, config))


@pytest.mark.parametrize("case", ["order", "several", "plain"])
def test_experts_that_cannot_be_grouped_are_told(qwen3_moe, case, tmp_path, caplog):
    """One call for each expert is several times slower than one for all."""
    packed = load_file(qwen3_moe / "model.safetensors")
    config = {"order": GPTQ | {"desc_act": True}}.get(case, GPTQ)
    for name in [n for n in packed if ".experts." in n and n.endswith(".weight")]:
        if case != "several" or ".experts.0." not in name:
            quantize = four_bits(config, has_order=case == "order")
            packed |= quantize(name.removesuffix(".weight"), packed.pop(name).float())[0]
    path, _ = copies(qwen3_moe, tmp_path, packed, {}, config)
    load_model(path, dtype=torch.float32, backend=get_backend("cpu"), make_linear=NATIVE.int8)
    told = "the experts of 2 layers are computed one by one" in caplog.text
    assert told == (case != "plain")


def test_fused_experts_of_fp8(qwen3_moe, tmp_path):
    """Transformers writes them so for mixtures without a mapping to single products."""
    plain = load_file(qwen3_moe / "model.safetensors")
    packed, quantize = dict(plain), fp8_blocks("weight_scale_inv", 128, 128)
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        for fused, products in (
            ("gate_up_proj", ("gate_proj", "up_proj")),
            ("down_proj", ("down_proj",)),
        ):
            codes, scales = [], []
            for expert in range(4):
                names = [f"{at}.{expert}.{product}.weight" for product in products]
                made, meant = quantize("e", torch.cat([packed.pop(name) for name in names]).float())
                codes.append(made["e.weight"].view(torch.uint8))
                scales.append(made["e.weight_scale_inv"])
                plain |= dict(zip(names, meant.chunk(len(names)), strict=True))
            packed[f"{at}.{fused}"] = torch.stack(codes).view(torch.float8_e4m3fn)
            packed[f"{at}.{fused}_scale_inv"] = torch.stack(scales)
    check_logits(*copies(qwen3_moe, tmp_path, packed, plain, native_fp8([128, 128])))


def test_the_configuration_of_published_gpt_oss_is_read():
    published = """{"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn",
    "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]}"""
    from quant.formats.read import read_format

    assert read_format(json.loads(published)).method == "mxfp4"
