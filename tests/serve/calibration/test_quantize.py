"""`serve quantize`: moments as Transformers sees them, and a checkpoint that is more accurate."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from ops.cpu import native_library
from serve.calibration.moments import layer_moments
from serve.calibration.quantize import quantize_checkpoint
from serve.cli.main import app
from serve.cli.quality import evaluate
from serve.errors import ConfigError, ModelLoadError
from serve.models import read_spec
from tests.support.engine.checkpoints import checkpoint, edit_json, reference_model
from tests.support.engine.decoders import token_ids
from tests.support.profile import every_day

TEXT = "The small boat sailed over the quiet lake until the moon came up. " * 40
LLAMA = ("llama", "base")
# what differs: biases, norms and windows, a fused product, experts, latents, states
OTHERS = [
    ("opt", "base"),
    ("olmo3", "window"),
    ("phi3", "window"),
    ("qwen2", "base"),
    ("qwen3_moe", "head-24"),
    ("deepseek_v3", "yarn"),
    ("qwen3_5_text", "net"),
    ("lfm2", "convs"),
    ("bamba", "mixer"),
    ("kimi_linear", "odd"),
]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "quantized"
    quantize(checkpoint(*LLAMA), path)
    return path


@pytest.mark.parametrize(("family", "variant"), every_day([0, 1], [LLAMA, *OTHERS]))
def test_moments_are_those_of_transformers(family, variant):
    path = checkpoint(family, variant)
    size = read_spec(path).vocab_size
    windows = [token_ids(9, size), token_ids(14, size)[5:]]
    expected: dict[str, torch.Tensor] = {}
    model = reference_model(path)
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):

            def note(module, inputs, name=name):
                rows = inputs[0].reshape(-1, inputs[0].shape[-1]).double()
                expected[name] = expected.get(name, 0) + rows.T @ rows

            hooks.append(module.register_forward_pre_hook(note))
    with torch.inference_mode():
        for window in windows:
            model(torch.tensor([window]))
    for hook in hooks:
        hook.remove()
    found = {name: x for _, layer in layer_moments(path, windows) for name, x in layer.items()}
    assert len(found) >= 2 * read_spec(path).num_layers
    compared = found.keys() & expected.keys()
    assert compared
    for name in compared:
        got, want = found[name].double(), expected[name]
        assert float((got - want).norm()) <= 1e-3 * float(want.norm()), name


def quantize(path: Path, output: Path, **settings) -> object:
    values = {"group": 32, "max_tokens": 600, "window": 128} | settings
    return quantize_checkpoint(path, output, TEXT, **values)


@pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built")
@pytest.mark.parametrize(("family", "variant"), every_day([0], [LLAMA, *OTHERS[1:]]))
def test_the_checkpoint_is_more_accurate_than_rounding(family, variant, tmp_path):
    path, output = checkpoint(family, variant), tmp_path / "quantized"
    done = quantize(path, output)
    assert done.num_products  # products of 24 inputs stay plain
    assert done.num_tokens == 600
    rows = [("float32",), ("int4", "float32"), ("auto", "float32", str(output))]
    text = TEXT.replace("boat", "ship").replace("moon", "sun")
    results = evaluate(str(path), text, rows, max_tokens=500, window=128, weight_group=32)
    assert results[2].precision.startswith("quantized: compressed-tensors")
    assert results[2].kl < 0.9 * results[1].kl


def test_the_files_of_the_checkpoint(tmp_path):
    path, output = tmp_path / "model", tmp_path / "quantized"
    shutil.copytree(checkpoint("llama"), path)
    (path / "SHA256SUMS").write_text("\n")
    (path / "pytorch_model.bin").write_text("not copied")
    done = quantize(path, output)
    names = {file.name for file in output.iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= names
    assert not names & {"SHA256SUMS", "pytorch_model.bin", "model.safetensors"}
    index = json.loads((output / "model.safetensors.index.json").read_text())
    stored = {}
    for file in sorted(output.glob("*.safetensors")):
        tensors = load_file(file)
        assert tensors and all(index["weight_map"][name] == file.name for name in tensors)
        stored |= tensors
    assert len(index["weight_map"]) == len(stored)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
    assert done.size_bytes == index["metadata"]["total_size"]
    plain = load_file(path / "model.safetensors")
    kept = plain.keys() & stored.keys()
    assert all(torch.equal(plain[name], stored[name]) for name in kept)
    assert {name.removesuffix(".weight") for name in plain.keys() - kept} == {
        name.removesuffix("_packed").removesuffix(".weight")
        for name in stored
        if name.endswith("_packed")
    }
    assert [item for item in tmp_path.iterdir() if item.name.startswith(".")] == []


def test_products_that_groups_do_not_divide_stay_plain(tmp_path):
    done = quantize(checkpoint("llama"), tmp_path / "quantized", group=64)  # down has 96 inputs
    num_layers = read_spec(checkpoint("llama")).num_layers
    assert (done.num_products, done.num_plain) == (6 * num_layers, num_layers)
    config = json.loads((tmp_path / "quantized" / "config.json").read_text())
    assert "model.layers.0.mlp.down_proj" in config["quantization_config"]["ignore"]


def test_what_cannot_be_quantized_is_refused(quantized, tmp_path):
    with pytest.raises(ConfigError, match="gpt2 stores weights transposed"):
        quantize(checkpoint("gpt2"), tmp_path / "again")
    with pytest.raises(ConfigError, match="exists already"):
        quantize(checkpoint("llama"), quantized)
    with pytest.raises(ConfigError, match=r"already quantized \(compressed-tensors\)"):
        quantize(quantized, tmp_path / "again")
    with pytest.raises(ConfigError, match="is not a directory"):
        quantize(checkpoint("llama"), tmp_path / "none" / "quantized")
    with pytest.raises(ConfigError, match="fewer than two tokens"):
        quantize(checkpoint("llama"), tmp_path / "again", max_tokens=1)


def test_an_error_leaves_nothing_behind(tmp_path):
    path = tmp_path / "model"
    shutil.copytree(checkpoint("llama"), path)
    edit_json(path / "config.json", lambda values: values.update(intermediate_size=64))
    with pytest.raises(ModelLoadError):
        quantize(path, tmp_path / "quantized")
    assert [item.name for item in tmp_path.iterdir()] == ["model"]


def test_the_command(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    command = ["quantize", str(checkpoint("llama")), str(tmp_path / "out"), "--text", str(text)]
    result = CliRunner().invoke(app, [*command, "--weight-group", "32", "--max-tokens", "300"])
    assert result.exit_code == 0, result.output
    assert "300 tokens were read" in result.output.replace("\n", " ")
    for options, complaint in (
        (["--max-tokens", "1"], "max_tokens and window must be at least 2"),
        (["--weight-group", "5"], "weight_group must be one of"),
    ):
        result = CliRunner().invoke(app, [*command, *options])
        assert result.exit_code == 2
        assert complaint in result.output.replace("\n", " ")
