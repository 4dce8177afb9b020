"""Quantized checkpoints that cannot be served as they are meant are refused, by key or tensor."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ops import get_backend
from ops.cpu import native_library
from serve.errors import ModelLoadError
from serve.models import load_model, read_spec
from tests.support.engine.checkpoints import checkpoint, edit_json
from tests.support.engine.published_formats import PUBLISHED
from tests.support.engine.quantized import (
    ALL_CASES,
    AWQ,
    CASES,
    GPTQ,
    LAYERS,
    W8A8,
    Json,
    Tensors,
    four_bits,
    write,
)

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)


def _with(config: Json, key: str, value: object) -> Json:
    """Returns a copy with a value at a dotted key."""
    first, _, rest = key.partition(".")
    return config | {first: _with(config[first], rest, value) if rest else value}


GROUP = "config_groups.group_0"
REFUSED: list[tuple[Json, str, object]] = [
    (W8A8, "quant_method", "quanto"),
    (W8A8, "quant_method", ["gptq"]),
    (W8A8, "format", "marlin-24"),
    (W8A8, "format", "mixed-precision"),
    (W8A8, "quantization_status", "calibration"),
    (W8A8, "sparsity_config", {"format": "sparse-24-bitmask"}),
    (W8A8, "transform_config", {"config_groups": {"R1": {}}}),
    (W8A8, "config_groups", {}),
    (W8A8, "config_groups", {"group_0": None}),
    (W8A8, f"{GROUP}.format", "sparse"),
    (W8A8, f"{GROUP}.weights.dynamic", True),
    (W8A8, f"{GROUP}.output_activations", {"num_bits": 8}),
    (W8A8, f"{GROUP}.weights", None),
    (W8A8, f"{GROUP}.weights.num_bits", 4),
    (W8A8, f"{GROUP}.weights.type", "float"),
    (W8A8, f"{GROUP}.weights.symmetric", "no"),
    (W8A8, f"{GROUP}.weights.strategy", "token"),
    (W8A8, f"{GROUP}.weights.group_size", 24),
    (W8A8, f"{GROUP}.weights.actorder", "group"),
    (W8A8, f"{GROUP}.input_activations", 8),
    (W8A8, f"{GROUP}.input_activations.dynamic", False),
    (W8A8, f"{GROUP}.input_activations.strategy", "tensor"),
    (W8A8, f"{GROUP}.input_activations.symmetric", False),
    (W8A8, f"{GROUP}.input_activations.num_bits", 4),
    (GPTQ, "bits", 3),
    (GPTQ, "bits", 2),
    (GPTQ, "bits", None),
    (GPTQ, "bits", "4"),
    (GPTQ, "group_size", 8),
    (GPTQ, "group_size", 1024),
    (GPTQ, "group_size", True),
    (GPTQ, "checkpoint_format", "marlin"),
    (GPTQ, "dynamic", {"+:.*down.*": {"bits": 3}}),
    (GPTQ, "dynamic", {"+:.*down.*": 8}),
    (GPTQ, "dynamic", [1]),
    (GPTQ, "pack_dtype", "int16"),
    (GPTQ, "desc_act", "true"),
    (AWQ, "bits", 8),
    (AWQ, "version", "gemv"),
    (AWQ, "version", "marlin"),
    (AWQ, "zero_point", False),
    (AWQ, "group_size", 8),
    (PUBLISHED["w4a16"][0], f"{GROUP}.weights.num_bits", 3),
    (PUBLISHED["w4a16"][0], f"{GROUP}.weights.group_size", 20),
    (PUBLISHED["w4a16"][0], f"{GROUP}.weights.group_size", 1 << 40),
    (PUBLISHED["w4a16"][0], f"{GROUP}.weights.type", "float"),
    (PUBLISHED["w4a16"][0], f"{GROUP}.weights.actorder", "random"),
    (PUBLISHED["float-block"][0], f"{GROUP}.weights.block_structure", [128]),
    (PUBLISHED["float-block"][0], f"{GROUP}.weights.block_structure", [0, 128]),
    (PUBLISHED["float-block"][0], f"{GROUP}.weights.strategy", "token"),
    (PUBLISHED["float-block"][0], f"{GROUP}.weights.num_bits", 4),
    (PUBLISHED["nvfp4"][0], f"{GROUP}.weights.group_size", 32),
    (PUBLISHED["nvfp4"][0], f"{GROUP}.weights.symmetric", False),
    (PUBLISHED["mxfp4"][0], f"{GROUP}.weights.group_size", 16),
    (PUBLISHED["mxfp8"][0], f"{GROUP}.weights.num_bits", 4),
    (PUBLISHED["fp8-blocks"][0], "weight_block_size", [128, 0]),
    (PUBLISHED["fp8-blocks"][0], "weight_block_size", [128, True]),
    (PUBLISHED["fp8-blocks"][0], "weight_block_size", "128"),
    (PUBLISHED["fp8-blocks"][0], "fmt", "e5m2"),
    (PUBLISHED["fp8-blocks"][0], "scale_fmt", "int"),
    (PUBLISHED["fp8-blocks"][0], "expert_dtype", "fp4"),
    (PUBLISHED["fp8-blocks"][0], "activation_scheme", "none"),
    (PUBLISHED["nvfp4-modelopt"][0], "quant_algo", "NVFP4_AWQ"),
    (PUBLISHED["nvfp4-modelopt"][0], "quant_algo", None),
    (PUBLISHED["bnb-nf4"][0], "bnb_4bit_quant_type", "af4"),
    (PUBLISHED["bnb-nf4"][0], "bnb_4bit_quant_storage", "bfloat16"),
    (PUBLISHED["bnb-nf4"][0], "load_in_4bit", False),
    (PUBLISHED["bnb-int8"][0], "llm_int8_has_fp16_weight", True),
    (PUBLISHED["hqq4"][0], "quant_config", None),
    (PUBLISHED["hqq4"][0], "quant_config", {}),
    (PUBLISHED["hqq4"][0], "quant_config.scale_quant_params", {"nbits": 8}),
    (PUBLISHED["hqq4"][0], "quant_config.weight_quant_params.nbits", 3),
    (PUBLISHED["hqq4"][0], "quant_config.weight_quant_params.axis", 0),
    (PUBLISHED["hqq4"][0], "quant_config.weight_quant_params.group_size", 40),
    (PUBLISHED["hqq4"][0], "quant_config.weight_quant_params.view_as_float", True),
]


@pytest.fixture(scope="module")
def packed_path(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("packed"), GPTQ, four_bits(GPTQ))[0]


@pytest.mark.parametrize(("config", "key", "value"), REFUSED, ids=str)
def test_unsupported_settings_are_named(packed_path, config, key, value):
    changed = _with(config, key, value)
    edit_json(packed_path / "config.json", lambda c: c.update(quantization_config=changed))
    with pytest.raises(ModelLoadError) as caught:
        read_spec(packed_path)
    assert key in str(caught.value)
    assert str(caught.value).count("quant_method") == 1
    assert "quantization_config" in str(caught.value)


def test_a_config_that_is_no_object_and_conv_weights_are_refused(packed_path, tmp_path):
    edit_json(packed_path / "config.json", lambda c: c.update(quantization_config="int8"))
    with pytest.raises(ModelLoadError, match="must be an object"):
        read_spec(packed_path)
    shutil.copytree(checkpoint("gpt2"), tmp_path / "gpt2")
    edit_json(tmp_path / "gpt2" / "config.json", lambda c: c.update(quantization_config=GPTQ))
    with pytest.raises(ModelLoadError, match=r"quantization_config.*gptq.*model_type"):
        read_spec(tmp_path / "gpt2")


def _shuffle(tensors: Tensors, name: str) -> None:
    size = len(tensors[f"{name}.g_idx"])
    tensors[f"{name}.g_idx"] = tensors[f"{name}.g_idx"][torch.randperm(size)]


def _scale(tensors: Tensors, name: str, value: float) -> None:
    """Sets one of a tensor's scales; they become fp32 to hold it."""
    tensors[name] = tensors[name].float()
    tensors[name][0, 0] = value


def _bytes(tensors: Tensors, name: str, value: int) -> None:
    """Sets the first bytes of a tensor; of a scale all of them."""
    flat = tensors[name].view(torch.uint8).flatten()
    flat[: 1 if name.endswith("weight") else None] = value


def _state(tensors: Tensors, name: str, key: str, value: object) -> None:
    """Changes the JSON of bitsandbytes."""
    at = f"{name}.weight.quant_state.bitsandbytes__nf4"
    state = json.loads(bytes(tensors[at].tolist())) | {key: value}
    tensors[at] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


Q, K, OUT, DOWN = LAYERS[0], LAYERS[1], LAYERS[3], LAYERS[6]
DAMAGES: list[tuple[str, Callable[[Tensors], object], str]] = [
    ("gptq", lambda t: t.pop(f"{OUT}.scales"), f"{OUT}.scales is missing"),
    ("gptq", lambda t: t.pop(f"{OUT}.qweight"), f"(or {OUT}.qweight) is missing"),
    ("gptq", lambda t: t.pop(f"{Q}.qweight"), f"tensor {Q}.weight (or {Q}.qweight) is missing"),
    (
        "gptq",
        lambda t: t.update({f"{OUT}.qzeros": t[f"{OUT}.qzeros"][:1].clone()}),
        "qzeros has shape",
    ),
    ("gptq", lambda t: t.update({f"{OUT}.qweight": t[f"{OUT}.qweight"].long()}), "type I64"),
    ("gptq", lambda t: t[f"{OUT}.scales"].fill_(float("nan")), f"{OUT}.scales holds NaN"),
    ("gptq", lambda t: t[f"{OUT}.scales"].zero_(), f"{OUT}.scales holds only zeros"),
    ("gptq", lambda t: _scale(t, f"{OUT}.scales", 3e38), f"{OUT}.scales holds a scale of 3e+38"),
    ("awq", lambda t: _scale(t, f"{K}.scales", -65505.0), f"{K}.scales holds a scale of 6.55e+04"),
    ("w8a8", lambda t: t[f"{OUT}.weight_scale"].zero_(), "weight_scale holds only zeros"),
    ("w8a8", lambda t: _scale(t, f"{K}.weight_scale", 3e38), f"{K}.weight_scale holds a scale"),
    ("gptq", lambda t: t[f"{OUT}.g_idx"].fill_(0), f"{OUT}.g_idx does not give"),
    ("gptq", lambda t: t[f"{OUT}.g_idx"].fill_(-1), f"{OUT}.g_idx does not give"),
    ("gptq", lambda t: _shuffle(t, K), f"{K}.g_idx differs"),
    ("gptq-order", lambda t: t.pop(f"{OUT}.g_idx"), f"{OUT}.g_idx is missing"),
    ("awq", lambda t: t.pop(f"{DOWN}.qzeros"), f"{DOWN}.qzeros is missing"),
    ("awq", lambda t: t.update({f"{Q}.scales": t[f"{Q}.scales"].int()}), "type I32"),
    ("w8a8", lambda t: t.update({f"{OUT}.weight": t[f"{OUT}.weight"].int()}), "type I32"),
    ("w8a8", lambda t: t.pop(f"{OUT}.weight_scale"), "type I8"),
    ("w8a8", lambda t: t.update({f"{OUT}.weight_scale": torch.ones(3)}), "weight_scale has shape"),
    ("w4a16", lambda t: t[f"{OUT}.weight_shape"].fill_(64 << 40), f"{OUT}.weight_shape says"),
    ("w4a16", lambda t: t[f"{OUT}.weight_shape"].fill_(-64), f"{OUT}.weight_shape says"),
    ("w4a16", lambda t: t[f"{OUT}.weight_shape"].fill_(0), f"{OUT}.weight_shape says"),
    ("w4a16", lambda t: t[f"{OUT}.weight_scale"].fill_(float("inf")), "weight_scale holds NaN"),
    ("w4a16-order", lambda t: t[f"{OUT}.weight_g_idx"].fill_(7), "weight_g_idx does not give"),
    ("w4a16-order", lambda t: t.pop(f"{OUT}.weight_g_idx"), f"{OUT}.weight_g_idx is missing"),
    ("w4a16-asym", lambda t: t.pop(f"{OUT}.weight_zero_point"), "weight_zero_point is missing"),
    ("fp8-blocks", lambda t: _bytes(t, f"{OUT}.weight", 0x7F), f"{OUT}.weight holds NaN"),
    ("fp8-blocks", lambda t: t[f"{K}.weight_scale_inv"].zero_(), "_scale_inv holds only zeros"),
    (
        "fp8-blocks",
        lambda t: t.update({f"{K}.weight_scale_inv": torch.ones(2, 2)}),
        f"{K}.weight_scale_inv has shape",
    ),
    ("fp8-blocks", lambda t: t.pop(f"{OUT}.weight_scale_inv"), "type F8_E4M3"),
    ("fp8-powers", lambda t: _bytes(t, f"{K}.weight_scale_inv", 255), "weight_scale_inv holds NaN"),
    ("mxfp8", lambda t: t[f"{K}.weight_scale"].fill_(255), f"{K}.weight_scale holds NaN"),
    ("mxfp4", lambda t: t[f"{K}.weight_scale"].fill_(255), f"{K}.weight_scale holds NaN"),
    ("mxfp4", lambda t: t[f"{K}.weight_scale"].fill_(254), f"{K}.weight_scale holds a scale"),
    ("mxfp4", lambda t: t.pop(f"{K}.weight_scale"), f"{K}.weight_scale is missing"),
    ("nvfp4", lambda t: t[f"{K}.weight_global_scale"].zero_(), "weight_global_scale holds 0"),
    ("nvfp4", lambda t: t[f"{K}.weight_global_scale"].neg_(), "weight_global_scale holds -"),
    ("nvfp4", lambda t: _bytes(t, f"{K}.weight_scale", 0), "weight_scale holds only zeros"),
    ("nvfp4", lambda t: _bytes(t, f"{K}.weight_scale", 255), f"{K}.weight_scale holds NaN"),
    ("nvfp4-modelopt", lambda t: t.pop(f"{K}.weight_scale_2"), f"{K}"),
    ("bnb-nf4", lambda t: t[f"{K}.weight.quant_map"].neg_(), "quant_map is not the table of nf4"),
    ("bnb-nf4", lambda t: t[f"{K}.weight.absmax"].zero_(), "absmax holds only zeros"),
    ("bnb-nf4", lambda t: _state(t, K, "shape", [64, 64]), "shape [64, 64] does not fit"),
    ("bnb-nf4", lambda t: _state(t, OUT, "shape", [32, 128]), "another shape than config.json"),
    ("bnb-nf4", lambda t: _state(t, K, "shape", "64"), "has no shape of a product"),
    ("bnb-nf4", lambda t: _state(t, K, "blocksize", 64), "does not fit the weight"),
    ("bnb-nf4", lambda t: _state(t, K, "blocksize", 0), "blocksize 0 does not fit"),
    ("bnb-nf4-nested", lambda t: _state(t, K, "nested_blocksize", 0), "nested_blocksize 0"),
    ("bnb-nf4-nested", lambda t: _state(t, K, "nested_blocksize", 16), "has 1 scales for"),
    ("bnb-nf4-nested", lambda t: _state(t, K, "nested_offset", "a"), "nested_offset 'a'"),
    (
        "bnb-nf4-nested",
        lambda t: _state(t, K, "nested_offset", 1e300),
        "absmax holds a scale of inf",
    ),
    (
        "bnb-nf4",
        lambda t: t[f"{K}.weight.quant_state.bitsandbytes__nf4"].fill_(ord("[")),
        "bitsandbytes__nf4 is not JSON",
    ),
    ("bnb-int8", lambda t: t[f"{K}.SCB"].zero_(), f"{K}.SCB holds only zeros"),
    ("bnb-int8", lambda t: t[f"{K}.weight_format"].fill_(1), f"{K}.weight_format is 1"),
    ("hqq4", lambda t: t[f"{K}.shape"].fill_(64), f"{K}.shape says"),
    ("hqq4", lambda t: t[f"{OUT}.shape"].copy_(torch.tensor([32, 128])), "another shape than"),
    ("hqq4", lambda t: t[f"{K}.nbits"].fill_(8), f"{K}.nbits is not 4"),
    ("hqq4", lambda t: t[f"{K}.axis"].fill_(0), f"{K}.axis is not 1"),
    ("hqq4", lambda t: t[f"{K}.zero"].fill_(float("nan")), f"{K}.zero holds NaN"),
    ("hqq8", lambda t: t.pop(f"{K}.scale"), f"{K}.scale is missing"),
]


@pytest.mark.parametrize(("case", "damage", "named"), DAMAGES)
def test_damaged_tensors_are_named(case, damage, named, tmp_path):
    packed, _ = write(tmp_path, *ALL_CASES[case])
    tensors = load_file(packed / "model.safetensors")
    damage(tensors)
    save_file(tensors, packed / "model.safetensors")
    with pytest.raises(ModelLoadError) as caught:
        load_model(packed, dtype=torch.float32, backend=get_backend("cpu"))
    assert named in str(caught.value)


# Tensors that some writers add everywhere, as zeros where they have no effect.
OTHERS: list[tuple[str, str, Tensor]] = [
    ("gptq", f"{OUT}.bias", torch.ones(64, dtype=torch.float16)),
    ("gptq", f"{Q}.bias", torch.ones(64, dtype=torch.float16)),
    ("awq", f"{DOWN}.g_idx", torch.ones(96, dtype=torch.int32)),
    ("w8a8", f"{OUT}.weight_zero_point", torch.ones(64, 1, dtype=torch.int8)),
    ("w8a8", f"{DOWN}.input_scale", torch.full((1,), 0.02, dtype=torch.bfloat16)),
    ("w8a8", f"{DOWN}.input_scale", torch.ones(1).to(torch.float8_e4m3fn)),
    ("w8a8", f"{Q}.lora_A.weight", torch.ones(2, 64)),
    ("w8a8", "lm_head.bias", torch.ones(320)),
    ("w8a8", "model.norm.bias", torch.ones(64)),
]


@pytest.mark.parametrize(("case", "name", "value"), OTHERS)
def test_a_tensor_that_would_change_the_numbers_is_not_dropped(case, name, value, tmp_path, caplog):
    """A tensor of zeros changes nothing and is not logged."""
    packed, _ = write(tmp_path, *CASES[case])
    tensors = load_file(packed / "model.safetensors")
    settings = {"dtype": torch.float32, "backend": get_backend("cpu")}
    save_file(tensors | {name: torch.zeros_like(value)}, packed / "model.safetensors")
    load_model(packed, **settings)
    assert "not used" not in caplog.text
    save_file(tensors | {name: value}, packed / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"{name} is not zero"):
        load_model(packed, **settings)


def test_the_order_of_inputs_is_needed_only_where_config_asks_for_it(tmp_path):
    """It is not needed either where all inputs share a group."""
    channel = GPTQ | {"group_size": -1}
    for config, served_config in ((GPTQ, GPTQ), (channel, channel | {"desc_act": True})):
        packed, _ = write(
            tmp_path / str(served_config["group_size"]), served_config, four_bits(config)
        )
        tensors = load_file(packed / "model.safetensors")
        without = {name: t for name, t in tensors.items() if not name.endswith("g_idx")}
        save_file(without, packed / "model.safetensors")
        load_model(packed, dtype=torch.float32, backend=get_backend("cpu"))


def test_groups_that_do_not_divide_a_layer_are_refused(tmp_path):
    packed, _ = write(tmp_path, GPTQ, four_bits(GPTQ))
    config = GPTQ | {"group_size": 64}  # the MLP has 96 inputs
    edit_json(packed / "config.json", lambda c: c.update(quantization_config=config))
    with pytest.raises(ModelLoadError, match="96 inputs cannot be divided by 64"):
        load_model(packed, dtype=torch.float32, backend=get_backend("cpu"))
