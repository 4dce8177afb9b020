"""Random checkpoints: the sizes of published models, files that load, and nothing partial."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from bench.common import checkpoints, safetensors_writer
from bench.common.checkpoint_shapes import SHAPES, config_of, gptq
from bench.common.checkpoints import random_checkpoint, with_idle_layers, write_random
from bench.common.random_weights import random_tensors
from bench.common.safetensors_writer import INDEX, SINGLE, StoredTensor, write_checkpoint
from ops import Fusion, LinearOp, get_backend
from quant.formats.base import joined
from serve import LLM, SamplingParams
from serve.config import default_model_path
from serve.errors import ConfigError
from serve.models import count_parameters, load_model, read_spec

# Total and active parameters of the published checkpoints; gpt-oss' and Qwen's authors round them
# to 20.9B and 3.6B (without the embedding), and to 30.5B and 3.3B.
PUBLISHED = {
    "qwen3-30b-a3b": (30_532_122_624, 3_353_032_704),
    "olmoe-1b-7b": (6_919_161_856, 1_282_017_280),
    "gpt-oss-20b": (20_914_757_184, 3_614_113_344 + 201_088 * 2880),
    "deepseek-v2-lite": (15_706_484_224, 2_661_150_208),
}


def small_config(shape: str, **changes: Any) -> dict[str, Any]:
    """Returns a shape's configuration with two small layers."""
    small = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 256,
    }
    return config_of(shape) | small | changes


SMALL = {
    "gptq": small_config(
        "qwen3-30b-a3b",
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        quantization_config=gptq(32),
    ),
    "mxfp4": small_config(
        "gpt-oss-20b",
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
        rope_scaling=None,
    ),
    "llama": small_config("tiny", intermediate_size=128),
}


def write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir()
    write_random(folder, config, "test", has_weights=True)
    return folder


@pytest.mark.parametrize("shape", PUBLISHED)
def test_the_sizes_are_the_published_ones(shape: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(shape)))
    counts = count_parameters(read_spec(tmp_path))
    assert (counts.total, counts.active) == PUBLISHED[shape]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_tied_table_counts_as_the_last_product(shape: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(shape)))
    spec = read_spec(tmp_path)
    counts, table = count_parameters(spec), spec.vocab_size * spec.embed_size
    assert (counts.head, counts.tables) == (table, 0 if spec.is_tied else table)


@pytest.mark.parametrize(
    ("shape", "size_gb"),
    [("qwen3-30b-a3b", 16.9), ("gpt-oss-20b", 13.8), ("olmoe-1b-7b", 13.8)],
)
def test_the_bytes_of_a_real_checkpoint(shape: str, size_gb: float, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(shape)))
    total = sum(tensor.size_bytes for tensor in random_tensors(tmp_path))
    assert total == pytest.approx(size_gb * 1e9, rel=0.01)


def test_another_configuration_has_a_name_of_its_own(tmp_path: Path) -> None:
    config = SMALL["llama"]
    path = random_checkpoint("other", config, folder=tmp_path)
    assert json.loads((path / "config.json").read_text()) == config
    written = (path / SINGLE).stat()
    assert random_checkpoint("other", config, folder=tmp_path) == path == tmp_path / "random-other"
    assert (path / SINGLE).stat().st_mtime_ns == written.st_mtime_ns, "it is written once"


@pytest.mark.parametrize("kind", SMALL)
def test_a_checkpoint_loads_and_answers(kind: str, tmp_path: Path) -> None:
    path = write(tmp_path / kind, SMALL[kind])
    with LLM(str(path)) as llm:
        (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 8


@pytest.mark.parametrize("kind", SMALL)
def test_products_have_the_deviation_of_a_trained_model(kind: str, tmp_path: Path) -> None:
    """Whatever the format: 1 / sqrt(inputs)."""
    path = write(tmp_path / kind, SMALL[kind])
    backend, weights = get_backend("reference"), []

    def make(parts: Sequence[Tensor], bias: Tensor | None, fusion: Fusion) -> LinearOp:
        weights.append(joined(parts))
        return backend.pack_linear(weights[-1], bias, fusion)

    load_model(path, dtype=torch.float32, backend=backend, make_linear=make, unpack=True)
    assert len(weights) > 8
    for weight in weights:
        deviation = float(weight.std()) * weight.shape[1] ** 0.5
        assert deviation == pytest.approx(1.0, rel=0.25), weight.shape


def test_several_files_hold_the_same_tensors(tmp_path: Path) -> None:
    path = write(tmp_path / "one", SMALL["gptq"])
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "config.json").write_text((path / "config.json").read_text())
    tensors = random_tensors(parts)
    seen: list[int] = []
    write_checkpoint(parts, tensors, max_file_bytes=100_000, advance=seen.append)
    assert sum(seen) == sum(tensor.size_bytes for tensor in tensors)
    index = json.loads((parts / INDEX).read_text())["weight_map"]
    assert len(set(index.values())) > 1
    with safe_open(path / SINGLE, framework="pt") as single:
        assert set(single.keys()) == set(index)
        for name, file in index.items():
            with safe_open(parts / file, framework="pt") as part:
                assert torch.equal(part.get_tensor(name), single.get_tensor(name)), name


def test_the_same_checkpoint_is_written_again(tmp_path: Path) -> None:
    first, second = (write(tmp_path / name, SMALL["mxfp4"]) for name in ("a", "b"))
    assert (first / SINGLE).read_bytes() == (second / SINGLE).read_bytes()


def test_a_full_disk_is_told_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10, 10, 300 << 20))
    with pytest.raises(ConfigError, match=r"qwen3-30b-a3b takes 15.8 GiB of disk, and 300 MiB"):
        random_checkpoint("qwen3-30b-a3b", folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_is_cut_off_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_some(folder: Path, tensors: list[StoredTensor], **settings: Any) -> None:
        safetensors_writer.write_checkpoint(folder, tensors[:3])
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints, "write_checkpoint", write_some)
    with pytest.raises(KeyboardInterrupt):
        random_checkpoint("tiny-mixture", folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_weights_come_after_a_checkpoint_without_them(tmp_path: Path) -> None:
    path = random_checkpoint("tiny-mixture", folder=tmp_path, has_weights=False)
    assert not (path / SINGLE).exists()
    assert random_checkpoint("tiny-mixture", folder=tmp_path) == path
    assert (path / SINGLE).exists()
    written = (path / SINGLE).stat().st_mtime_ns
    assert random_checkpoint("tiny-mixture", folder=tmp_path, has_weights=False) == path
    assert (path / SINGLE).stat().st_mtime_ns == written


def answers(**settings):
    """Returns the tokens and their log-probabilities of a few answers."""
    questions = ["What is 17 plus 25?", "Tell me a story about a fox.", "Repeat: red blue green"]
    conversations = [[{"role": "user", "content": question}] for question in questions]
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=1)
    with LLM(**settings) as llm:
        outputs = llm.chat(conversations, params, use_tqdm=False)
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]


def test_idle_layers_change_no_answer(tmp_path):
    path = with_idle_layers(tmp_path, 3)
    assert read_spec(path).num_layers == read_spec(default_model_path()).num_layers + 3
    wanted = answers()
    assert answers(model=str(path)) == wanted, "to the last bit"
    assert all(len(tokens) > 1 and logprobs for tokens, logprobs in wanted)
