"""Invalid checkpoints are refused with a message that names what is wrong."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from serve import LLM
from serve.errors import ModelLoadError
from serve.machine import total_memory
from serve.models import expect_tensors, read_spec
from serve.models.checkpoint import Checkpoint
from serve.models.checksums import check_manifest
from serve.models.parts import head_rows
from tests.support.engine.checkpoints import (
    Json,
    checkpoint,
    edit_json,
)
from tests.support.engine.decoders import copy_of, edit_tensors, load

pytestmark = pytest.mark.usefixtures("one_thread")


def refused(path: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(path)
    return str(caught.value)


CONFIG_ERRORS: list[tuple[str, Json, str]] = [
    ("llama", {"model_type": "rwkv"}, "model_type 'rwkv' is not supported"),
    ("llama", {"model_type": None}, "model_type is missing"),
    ("llama", {"model_type": "own", "auto_map": {"AutoModel": "evil.Model"}}, "auto_map"),
    ("llama", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
    ("llama", {"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ("llama", {"hidden_size": -1}, "hidden_size is -1"),
    ("llama", {"hidden_size": 0}, "hidden_size is 0"),
    ("llama", {"hidden_size": 10**9}, "hidden_size is 1000000000"),
    ("llama", {"hidden_size": "64"}, "hidden_size must be an integer"),
    ("llama", {"hidden_size": True}, "hidden_size must be an integer"),
    ("llama", {"hidden_size": None}, "hidden_size is missing"),
    ("llama", {"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000"),
    ("llama", {"num_hidden_layers": 3}, "model.layers.2"),
    ("llama", {"num_attention_heads": 5, "head_dim": None}, "does not divide hidden_size"),
    ("llama", {"num_key_value_heads": 3}, "cannot be divided"),
    ("llama", {"head_dim": 15}, "head_dim is 15"),
    ("llama", {"head_dim": 32}, "self_attn.q_proj.weight has shape"),
    ("llama", {"vocab_size": 321}, "vocab_size is 321, the table has 320 rows"),
    ("llama", {"intermediate_size": 1e300}, "intermediate_size is 1"),
    ("llama", {"rms_norm_eps": -1}, "rms_norm_eps"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ("llama", {"hidden_act": "mish"}, "hidden_act 'mish'"),
    ("llama", {"attention_bias": True}, "q_proj.bias is missing"),
    ("llama", {"attention_bias": "yes"}, "attention_bias must be true or false"),
    ("llama", {"rope_parameters": {"rope_type": "spiral"}}, "rope_type 'spiral'"),
    ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor is 0"),
    ("llama", {"rope_parameters": [1]}, "rope_parameters"),
    ("llama", {"rope_parameters": {"full_attention": {}}}, "rope_parameters"),
    ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ("llama", {"max_position_embeddings": 0}, "max_position_embeddings"),
    ("llama", {"eos_token_id": "</s>"}, "eos_token_id"),
    ("llama", {"bos_token_id": -1}, "bos_token_id"),
    ("qwen2", {"use_sliding_window": True, "layer_types": ["conv"] * 2}, "'conv'"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 2}, "sliding_window is missing"),
    ("qwen2", {"layer_types": ["full_attention"]}, "layer_types must list 2"),
    ("mistral", {"sliding_window": 0}, "sliding_window is 0"),
    ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
    ("gpt2", {"n_positions": 100}, "transformer.wpe.weight has shape"),
    ("opt", {"word_embed_proj_dim": 24}, "embed_tokens.weight has shape"),
]


@pytest.mark.parametrize(("family", "change", "message"), CONFIG_ERRORS)
@pytest.mark.row("X6")
def test_bad_config(family: str, change: Json, message: str, tmp_path: Path) -> None:
    path = copy_of(checkpoint(family), tmp_path)
    (path / "generation_config.json").unlink()
    edit_json(path / "config.json", lambda config: config.update(change))
    assert message in refused(path)


HUGE: list[tuple[str, str, Json]] = [
    (
        "ernie4_5",
        "head-20",
        {"num_attention_heads": 4096, "num_key_value_heads": 4096, "head_dim": 4096},
    ),
    ("llama", "base", {"num_attention_heads": 4096, "head_dim": 16, "num_hidden_layers": 4096}),
    ("deepseek_v2", "no-rank", {"num_attention_heads": 4096, "qk_nope_head_dim": 4096}),
]


@pytest.mark.parametrize(("family", "variant", "change"), HUGE)
@pytest.mark.row("X6")
def test_attention_larger_than_any_model(
    family: str, variant: str, change: Json, tmp_path: Path
) -> None:
    """The order of so many rows, built for each layer, took half an hour before the first tensor
    was found missing."""
    path = copy_of(checkpoint(family, variant), tmp_path)
    edit_json(path / "config.json", lambda config: config.update(change))
    assert "values in the heads of a layer" in refused(path)


def test_the_order_of_rows_is_built_once() -> None:
    spec = read_spec(checkpoint("ernie4_5", "head-20"))
    head_rows.cache_clear()
    expect_tensors(replace(spec, layers=spec.layers[:1] * 50))
    assert head_rows.cache_info().misses == 2  # of q and of k


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"a": ' * 100_000, "\udcff"])
@pytest.mark.row("X6")
def test_config_that_is_not_an_object(text: str, tmp_path: Path) -> None:
    path = copy_of(checkpoint("llama"), tmp_path)
    (path / "config.json").write_bytes(text.encode("utf-8", errors="surrogateescape"))
    assert "config.json" in refused(path)


@pytest.mark.row("X5")
def test_missing_directory_and_files(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nowhere")
    file = tmp_path / "file"
    file.write_text("")
    assert "not a directory" in refused(file)
    path = copy_of(checkpoint("llama"), tmp_path)
    (path / "model.safetensors").unlink()
    assert "has no weights" in refused(path)
    (path / "pytorch_model.bin").write_bytes(b"never opened")
    message = refused(path)
    assert "pytorch_model.bin" in message
    assert "safetensors" in message
    for name in ("a", "b"):
        save_file({name: torch.ones(1)}, path / f"{name}.safetensors")
    assert "several" in refused(path)
    (path / "config.json").unlink()
    assert "config.json" in refused(path)


def header(text: bytes, length: int | None = None, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text + data


ONE = b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
TWO = ONE[:-1] + b',"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}'

TWICE = ONE[:-1] + b"," + ONE[1:].replace(b"[0,4]", b"[4,8]")

BAD_FILES = {
    "seven bytes": b"1234567",
    "empty": b"",
    "header of length 0": header(b"", 0),
    "header beyond the file": header(ONE, 10_000, b"1234"),
    "header of 200 MB": header(ONE, 200 << 20, b"1234"),
    "header of 2^63": header(ONE, 1 << 63, b"1234"),
    "not json": header(b"xxxxxxxx"),
    "not utf-8": header(b'{"\xff\xfe":1}'),
    "data is short": header(ONE, None, b"12"),
    "data is long": header(ONE, None, b"12345678"),
    "end before begin": header(ONE.replace(b"[0,4]", b"[4,0]"), None, b"1234"),
    "negative": header(ONE.replace(b"[0,4]", b"[-4,0]"), None, b"1234"),
    "overlap": header(TWO, None, b"12345678"),
    "hole": header(TWO.replace(b"[2,6]", b"[6,10]"), None, b"1234567890"),
    "a tensor twice": header(
        TWO.replace(b'"b"', b'"a"').replace(b"[2,6]", b"[4,8]"), None, b"12345678"
    ),
    "overflow": header(ONE.replace(b"[1]", b"[4194305,4194305,4194305]"), None, b"1234"),
}


@pytest.mark.parametrize("data", BAD_FILES.values(), ids=BAD_FILES)
@pytest.mark.row("X1", "X2")
def test_bad_safetensors(data: bytes, tmp_path: Path) -> None:
    path = copy_of(checkpoint("llama"), tmp_path)
    (path / "model.safetensors").write_bytes(data)
    assert "model.safetensors cannot be read" in refused(path)


@pytest.mark.row("X3")
def test_truncated_safetensors(tmp_path: Path) -> None:
    path = copy_of(checkpoint("llama"), tmp_path)
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) // 2])
    text = refused(path)
    assert "model.safetensors cannot be read" in text
    assert text.endswith(
        f"it has {len(data) // 2:,} bytes, but its header describes {len(data):,}: it is cut off"
    )
    header = 8 + int.from_bytes(data[:8], "little")
    (path / "model.safetensors").write_bytes(data[:100])
    assert f"it has 100 bytes, but its header alone takes {header:,}: it is cut off" in refused(
        path
    )


def test_a_file_larger_than_memory_is_opened(tmp_path: Path) -> None:
    size = 2 * total_memory()
    place = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    header = json.dumps({"x": place}).encode()
    file = tmp_path / "model.safetensors"
    with open(file, "wb") as opened:
        opened.write(struct.pack("<Q", len(header)) + header)
        opened.truncate(8 + len(header) + size)  # without blocks on the disk
    assert not Checkpoint(tmp_path).fetch("x", 0).any()


@pytest.mark.parametrize("model_type", ["gemma3", "llama4", "mistral3", "internvl"])
def test_a_multimodal_model_without_a_nested_configuration(model_type: str, tmp_path: Path) -> None:
    path = copy_of(checkpoint("llama"), tmp_path)
    edit_json(path / "config.json", lambda config: config.update(model_type=model_type))
    text = refused(path)
    assert f"'{model_type}'" in text
    assert text.endswith("but the file has no text_config, llm_config or language_config")


NORM = "model.layers.1.input_layernorm.weight"

TENSOR_ERRORS: list[tuple[Callable[[Tensor], Tensor] | None, str]] = [
    (None, "is missing"),
    (lambda t: t[:-1].clone(), "has shape [63], but config.json asks for [64]"),
    (lambda t: t[None].clone(), "has shape [1, 64]"),
    (lambda t: t.to(torch.int64), "has type I64"),
    (lambda t: t.fill_(float("nan")), "holds NaN"),
    (lambda t: t.index_fill(0, torch.tensor([63]), float("-inf")), "holds NaN or infinity"),
]


@pytest.mark.parametrize(("change", "message"), TENSOR_ERRORS)
@pytest.mark.row("X4")
def test_bad_tensor(
    change: Callable[[Tensor], Tensor] | None, message: str, tmp_path: Path
) -> None:
    path = copy_of(checkpoint("llama"), tmp_path)

    def edit(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        tensor = tensors.pop(NORM)
        return tensors if change is None else tensors | {NORM: change(tensor)}

    edit_tensors(path, edit)
    complaint = refused(path)
    assert NORM in complaint
    assert message in complaint


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"x": "../../x.safetensors"}, "not in the directory"),
        ({"x": "/etc/passwd"}, "not in the directory"),
        ({"x": "sub/x.safetensors"}, "not in the directory"),
        ({"x": ".."}, "not in the directory"),
        ({"x": ""}, "a directory, not a regular file"),
        ({"x": "a\x00b"}, "does not exist"),
        ({"x": "gone.safetensors"}, "does not exist"),
        ({"x": 5}, "names a file 5"),
        ({}, "weight_map"),
        (None, "weight_map"),
        ([1], "weight_map"),
    ],
)
@pytest.mark.row("X3")
def test_bad_index(weight_map: object, message: str, tmp_path: Path) -> None:
    path = copy_of(checkpoint("llama", "sharded"), tmp_path)
    index = path / "model.safetensors.index.json"
    edit_json(index, lambda values: values.update(weight_map=weight_map))
    assert message in refused(path)


@pytest.mark.row("X3")
def test_missing_shard_and_shard_twice(tmp_path: Path) -> None:
    path = copy_of(checkpoint("llama", "sharded"), tmp_path)
    first, second, *_ = sorted(path.glob("*.safetensors"))
    shutil.copy(first, second)
    assert "is also in" in refused(path)
    second.unlink()
    assert f"{second.name}, which does not exist" in refused(path)


@pytest.mark.row("X3")
def test_link_out_of_the_directory(tmp_path: Path) -> None:
    path = copy_of(checkpoint("llama"), tmp_path)
    (path / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (path / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    assert "outside of the model directory" in refused(path)


@pytest.mark.row("X4")
def test_a_list_of_checksums_finds_a_flipped_bit(tmp_path: Path) -> None:
    path = copy_of(checkpoint("llama"), tmp_path)
    names = sorted(file.name for file in path.iterdir())
    sums = [f"{hashlib.sha256((path / name).read_bytes()).hexdigest()}  {name}" for name in names]
    manifest = path / "SHA256SUMS"
    manifest.write_text("\n".join(sums) + "\n")
    check_manifest(path)
    weights = path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is damaged"):
        LLM(str(path))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x", "line 1: not a SHA-256"),
        ("0" * 64 + "  ../config.json", "line 1: not a SHA-256"),
        ("0" * 64 + "  gone", "names gone: No such file"),
        ("0" * 64 + " *config.json", "config.json is damaged"),
        ("\n", "line 1"),
        ("x" * (2 << 20), "at most 1048576 are read"),
    ],
)
def test_a_bad_list_of_checksums(text: str, expected: str, tmp_path: Path) -> None:
    path = copy_of(checkpoint("llama"), tmp_path)
    check_manifest(path)
    (path / "SHA256SUMS").write_text(text)
    with pytest.raises(ModelLoadError, match=re.escape(expected)):
        check_manifest(path)
