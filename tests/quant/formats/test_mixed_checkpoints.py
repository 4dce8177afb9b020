"""Checkpoints whose products differ: plain beside quantized, several formats, scales of K/V."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ops import get_backend
from ops.cpu import native_library
from ops.cpu.native_quantized_linear import NATIVE
from serve.models import Decoder, expect_tensors, load_model, read_spec
from serve.models.checkpoint import Checkpoint
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.decoders import copy_of, edit_tensors, run, token_ids
from tests.support.engine.published_formats import PUBLISHED, modelopt, packed_config
from tests.support.engine.quantized import CASES, GPTQ, Quantize, Tensors, four_bits, write

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def load(path: Path, *, is_int8: bool = True) -> Decoder:
    settings = {"dtype": torch.float32, "backend": get_backend("cpu")}
    if is_int8:
        return load_model(path, make_linear=NATIVE.int8, **settings)
    return load_model(path, unpack=True, **settings)


def check_logits(packed: Path, plain: Path) -> None:
    ids = token_ids(24)
    want = run(load(plain, is_int8=False), ids)
    assert relative(run(load(packed, is_int8=False), ids), want) < 1e-5
    int8 = relative(run(load(plain), ids), want)
    assert relative(run(load(packed), ids), want) < max(0.05, 1.5 * int8)


def one_of(*quantizers: tuple[str, Quantize | None]) -> Quantize:
    """Returns a writer that takes the first whose name is in that of the product; None: plain."""

    def quantize(name: str, weight: Tensor) -> tuple[Tensors, Tensor]:
        chosen = next(each for part, each in quantizers if part in name)
        return ({f"{name}.weight": weight}, weight) if chosen is None else chosen(name, weight)

    return quantize


def test_plain_products_of_a_quantized_checkpoint_are_counted(tmp_path, caplog):
    """They become int8, which is a loss as that of any format."""
    config, quantize = CASES["awq"]
    packed, _ = write(tmp_path, config, one_of(("down_proj", None), ("", quantize)))
    with caplog.at_level(logging.WARNING):
        load(packed)
    assert "the checkpoint's plain products (3) become int8" in caplog.text
    assert "dtype bfloat16" in caplog.text
    caplog.clear()
    load(packed, is_int8=False)
    load(checkpoint("llama"))  # its dtype was asked for
    assert not caplog.text


W4, W8 = PUBLISHED["w4a16"][1], PUBLISHED["w8a16-channel"][1]
TWO_GROUPS = packed_config(4, 32)
TWO_GROUPS["config_groups"]["group_1"] = packed_config(8, -1)["config_groups"]["group_0"]
MIXED = {
    "value-in-8-bits": (TWO_GROUPS, one_of(("v_proj", W8), ("", W4))),
    "plain-key": (CASES["gptq"][0], one_of(("k_proj", None), ("", four_bits(GPTQ)))),
    "plain-gate": (CASES["awq"][0], one_of(("gate_proj", None), ("", CASES["awq"][1]))),
    "modelopt": (
        modelopt("MIXED_PRECISION"),
        one_of(
            ("gate_proj", PUBLISHED["modelopt-fp8"][1]),
            ("", PUBLISHED["nvfp4-modelopt"][1]),
        ),
    ),
}


@pytest.mark.parametrize("variant", ["base", "bias"])
@pytest.mark.parametrize("case", MIXED)
def test_parts_in_different_formats(case, variant, tmp_path, caplog):
    """Recipes by module give q, k and v, or gate and up, formats of their own."""
    packed, plain = write(tmp_path, *MIXED[case], variant=variant)
    with caplog.at_level(logging.WARNING):
        check_logits(packed, plain)
    assert "products whose parts have different formats (2, " in caplog.text


def test_scales_of_kv_are_not_needed(tmp_path, caplog):
    """Without quantized products they were tensors for which the model has no use."""
    path = copy_of(checkpoint("llama"), tmp_path)
    quantization = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    (path / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    names = [f"model.layers.0.self_attn.{ending}" for ending in ("k_proj.k_scale", "v_scale")]
    edit_tensors(path, lambda tensors: tensors | {n: torch.ones(1) for n in names})
    with caplog.at_level(logging.INFO):
        got = run(load(path, is_int8=False), token_ids(8))
    assert "2 scales of K/V are not used" in caplog.text
    assert "such as" not in caplog.text
    assert torch.equal(got, run(load(checkpoint("llama"), is_int8=False), token_ids(8)))


@pytest.mark.parametrize("case", ["nvfp4-modelopt", "w8a8"])
def test_scales_of_kv_beside_quantized_and_plain_products(case, tmp_path):
    config, quantize = {**PUBLISHED, **CASES}[case]
    packed, plain = write(tmp_path, config, one_of(("k_proj", None), ("", quantize)))
    for module in ("self_attn.k_proj", "self_attn.v_proj"):
        name = f"model.layers.1.{module}.{module[10]}_scale"
        edit_tensors(packed, lambda tensors, name=name: tensors | {name: torch.ones(1)})
    check_logits(packed, plain)


def test_the_expansion_of_a_latent_becomes_int8(tmp_path, caplog):
    """It is rounded again for each head, and takes a byte a weight."""
    path = copy_of(checkpoint("deepseek_v2", "no-rank"), tmp_path)
    tensors = load_file(path / "model.safetensors")
    names = [name for name in tensors if name.endswith("kv_b_proj.weight")]
    num_weights = sum(tensors[name].numel() for name in names)
    for name in names:
        tensors |= W4(name.removesuffix(".weight"), tensors.pop(name).float())[0]
    save_file({k: t.contiguous() for k, t in tensors.items()}, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = packed_config(4, 32)
    (path / "config.json").write_text(json.dumps(config))
    expected = expect_tensors(read_spec(path), Checkpoint(path))
    assert expected.packed_bytes.blocks == num_weights
    with caplog.at_level(logging.WARNING):
        load(path)
    assert "weights that expand a latent become int8" in caplog.text
