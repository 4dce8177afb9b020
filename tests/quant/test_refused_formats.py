"""Quantized checkpoints that cannot be served as they are meant are refused, by key or tensor."""

from __future__ import annotations

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
from tests.support.engine.quantized import (
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
    (W8A8, "quant_method", "bitsandbytes"),
    (W8A8, "format", "float-quantized"),
    (W8A8, "format", "pack-quantized"),
    (W8A8, "quantization_status", "frozen"),
    (W8A8, "kv_cache_scheme", {"num_bits": 8}),
    (W8A8, "sparsity_config", {"format": "sparse-24-bitmask"}),
    (W8A8, "transform_config", {"config_groups": {"R1": {}}}),
    (W8A8, "config_groups", {}),
    (W8A8, "config_groups", {"group_0": None}),
    (W8A8, f"{GROUP}.format", "pack-quantized"),
    (W8A8, f"{GROUP}.output_activations", {"num_bits": 8}),
    (W8A8, f"{GROUP}.weights", None),
    (W8A8, f"{GROUP}.weights.num_bits", 4),
    (W8A8, f"{GROUP}.weights.type", "float"),
    (W8A8, f"{GROUP}.weights.symmetric", False),
    (W8A8, f"{GROUP}.weights.strategy", "group"),
    (W8A8, f"{GROUP}.weights.actorder", "group"),
    (W8A8, f"{GROUP}.input_activations", None),
    (W8A8, f"{GROUP}.input_activations.dynamic", False),
    (W8A8, f"{GROUP}.input_activations.strategy", "tensor"),
    (W8A8, f"{GROUP}.input_activations.symmetric", False),
    (W8A8, f"{GROUP}.input_activations.num_bits", 4),
    (GPTQ, "bits", 3),
    (GPTQ, "bits", 8),
    (GPTQ, "bits", None),
    (GPTQ, "bits", "4"),
    (GPTQ, "group_size", 8),
    (GPTQ, "group_size", 1024),
    (GPTQ, "group_size", True),
    (GPTQ, "checkpoint_format", "marlin"),
    (GPTQ, "dynamic", {"-:.*down.*": {}}),
    (GPTQ, "pack_dtype", "int16"),
    (GPTQ, "desc_act", "true"),
    (AWQ, "bits", 8),
    (AWQ, "version", "gemv"),
    (AWQ, "version", "marlin"),
    (AWQ, "zero_point", False),
    (AWQ, "group_size", 8),
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


Q, K, OUT, DOWN = LAYERS[0], LAYERS[1], LAYERS[3], LAYERS[6]
DAMAGES: list[tuple[str, Callable[[Tensors], object], str]] = [
    ("gptq", lambda t: t.pop(f"{OUT}.scales"), f"{OUT}.scales is missing"),
    ("gptq", lambda t: t.pop(f"{OUT}.qweight"), f"(or {OUT}.qweight) is missing"),
    ("gptq", lambda t: t.pop(f"{Q}.qweight"), f"{Q} is not quantized"),
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
]


@pytest.mark.parametrize(("case", "damage", "named"), DAMAGES)
def test_damaged_tensors_are_named(case, damage, named, tmp_path):
    packed, _ = write(tmp_path, *CASES[case])
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
