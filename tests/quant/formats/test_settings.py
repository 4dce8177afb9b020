"""Settings of single products, files beside config.json, and what is said when they are loaded."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from ops import get_backend
from ops.cpu import native_library
from quant.formats.modelopt import read_hf_quant_config
from quant.formats.read import METHODS, read_format
from serve.errors import ModelLoadError
from serve.models import load_model, read_spec
from serve.models.checkpoint import Checkpoint
from tests.quant.formats.test_published import fetching, header, written
from tests.support.engine.checkpoints import edit_json
from tests.support.engine.format_writers import gptq8, hqq, mxfp4_experts, nvfp4
from tests.support.engine.published_formats import GPTQ8, PUBLISHED, hqq_config
from tests.support.engine.quantized import AWQ, GPTQ, four_bits, write

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)


def check_both(form, writers) -> None:
    """Checks that products of each writer are read by one checkpoint's formats."""
    for quantize in writers:
        tensors, plain, names = written(quantize, 40, num_in=96)
        product = form.of(header(tensors), names[0], 96, 40)
        assert product is not None
        got = product.load(fetching(tensors), names).plain()
        torch.testing.assert_close(got, plain, rtol=2e-6, atol=1e-9)


def test_products_of_gptq_with_settings_of_their_own():
    dynamic = {"+:.*down.*": {"bits": 8}, "-:.*gate.*": {}, "(a+)+$": {"group_size": 16}}
    config = GPTQ | {"dynamic": dynamic}
    writers = [four_bits(GPTQ), gptq8(32), four_bits(GPTQ | {"group_size": 16})]
    check_both(read_format(config), writers)


@pytest.mark.parametrize("base", [GPTQ, AWQ], ids=["gptq", "awq"])
def test_files_of_auto_round(base):
    config = {
        "quant_method": "auto-round",
        "packing_format": f"auto_round:auto_{base['quant_method']}",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "data_type": "int",
        "extra_config": {"lm_head": {"bits": 16}, "model.layers.0": {"group_size": 16}},
    }
    check_both(read_format(config), [four_bits(base), four_bits(base | {"group_size": 16})])
    for wrong in ({"packing_format": "auto_round:exllama"}, {"extra_config": {"a": 1}}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            read_format(config | wrong)


def test_kinds_of_products_of_hqq():
    kinds = {
        "self_attn.q_proj": hqq_config(4, 32)["quant_config"],
        "mlp.down_proj": hqq_config(8, 48)["quant_config"],
        "mlp.up_proj": None,
    }
    form = read_format({"quant_method": "hqq", "quant_config": kinds, "skip_modules": []})
    check_both(form, [hqq(4, 32), hqq(8, 48)])


def test_every_method_is_written_and_read_by_a_test():
    # gguf is that of tests/serve/models/gguf
    written_here = {"gptq", "awq", "auto-round", "mxfp4", "gguf"}
    assert (
        set(METHODS) == {config["quant_method"] for config, _ in PUBLISHED.values()} | written_here
    )


def test_too_many_groups_are_refused():
    group = PUBLISHED["w4a16"][0]["config_groups"]["group_0"]
    groups = {
        str(size): group | {"weights": group["weights"] | {"group_size": 16 * size}}
        for size in range(1, 70)
    }
    with pytest.raises(ValueError, match="config_groups has 69 formats"):
        read_format(PUBLISHED["w4a16"][0] | {"config_groups": groups})


def test_modelopt_settings_beside_config_json(tmp_path):
    packed, _ = write(tmp_path, PUBLISHED["nvfp4-modelopt"][0], nvfp4(is_modelopt=True))
    edit_json(packed / "config.json", lambda c: c.pop("quantization_config"))
    settings = {"producer": {}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": []}}
    source = packed / "hf_quant_config.json"
    source.write_text(json.dumps(settings))
    spec = read_spec(packed)
    assert spec.packed is not None and spec.packed.method == "modelopt"
    load_model(packed, dtype=torch.float32, backend=get_backend("cpu"))
    source.write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(ModelLoadError, match=r"hf_quant_config.json: quant_algo 'W4A8_AWQ'"):
        read_spec(packed)
    source.write_text("[]")
    with pytest.raises(ModelLoadError, match=r"hf_quant_config.json must hold a JSON object"):
        read_spec(packed)


def test_a_file_that_quantizes_only_keys_and_values_is_none():
    quantization = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}
    assert read_hf_quant_config({"quantization": quantization}) is None
    with pytest.raises(ValueError, match="quantization must be an object"):
        read_hf_quant_config({"quantization": "FP8"})


def test_a_loss_is_logged_once(tmp_path, caplog):
    packed, _ = write(tmp_path, *PUBLISHED["fp8-blocks"])
    settings = {"dtype": torch.float32, "backend": get_backend("cpu")}
    load_model(packed, **settings)
    assert caplog.text.count("FP8 weights become int8") == 1
    caplog.clear()
    load_model(packed, unpack=True, **settings)
    assert "become int8" not in caplog.text


def test_an_exact_format_logs_nothing(tmp_path, caplog):
    packed, _ = write(tmp_path, GPTQ8 | {"group_size": -1}, gptq8(-1))
    load_model(packed, dtype=torch.float32, backend=get_backend("cpu"))
    assert "become" not in caplog.text and "changes" not in caplog.text


def test_one_expert_is_read_from_a_file(tmp_path):
    name = "model.layers.0.mlp.experts.down_proj"
    tensors, plain = mxfp4_experts(name, torch.randn(5, 16, 64))
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    form = read_format({"quant_method": "mxfp4"}).of_experts(checkpoint.entries, name, 5, 64, 16)
    assert form is not None
    for expert in (4, 0):
        got = form.load_expert(checkpoint.fetch, name, expert).plain()
        torch.testing.assert_close(got, plain[expert])
    tensors[f"{name}_scales"][3] = 255
    save_file(tensors, tmp_path / "model.safetensors")
    form.load_expert(Checkpoint(tmp_path).fetch, name, 2)
    with pytest.raises(ValueError, match="down_proj_scales holds NaN"):
        form.load_expert(Checkpoint(tmp_path).fetch, name, 3)
