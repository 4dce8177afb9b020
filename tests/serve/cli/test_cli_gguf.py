"""Commands take GGUF files where they take models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serve.cli.main import app
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.loading.footprint import footprint, weight_bytes
from serve.loading.model_source import read_source
from serve.loading.precision import resolve_precision
from serve.models import read_spec
from serve.models.open_checkpoint import open_checkpoint
from serve.single_file.config import with_directory
from tests.support.gguf.cases import find_case, make, original
from tests.support.gguf.quantized import packed
from tests.support.gguf.writer import write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def written(folder: Path, name: str, kind: str | None = None) -> Path:
    source = original(find_case("qwen2-tied"))
    weights = packed(source, lambda _: kind)
    return write_gguf(source, folder / f"{name}.gguf", "qwen2", weights)


def listed(*arguments: Path) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["models", "--json", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    models: list[dict[str, Any]] = json.loads(result.stdout)
    return models


def test_models_lists_files_and_folders_of_them(tmp_path: Path) -> None:
    file = written(tmp_path, "small", "Q4_0")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF")
    (only,) = listed(file)
    broken, small = listed(tmp_path)
    only["max_sequences"] = small["max_sequences"]  # as much memory as is free at the time
    assert only == small and small["name"] == str(file) and small["problem"] == ""
    assert small["family"] == "qwen2" and small["dtype"].startswith("gguf")
    assert small["size_bytes"] == file.stat().st_size
    assert small["max_sequences"] > 0
    assert "broken.gguf" in broken["name"] and "cut off" in broken["problem"]


def test_what_a_quantized_file_takes(tmp_path: Path) -> None:
    config = with_directory(EngineConfig(str(written(tmp_path, "small", "Q4_0"))))
    spec = read_spec(config.model_path)
    checkpoint = open_checkpoint(config.model_path, spec)
    precision = resolve_precision(config, spec)
    takes = weight_bytes(config, spec, precision, checkpoint)
    in_blocks = sum(
        entry.shape[0] * entry.shape[1]
        for entry in checkpoint.entries.values()
        if entry.dtype == "Q4_0" and entry.shape[0] != spec.vocab_size
    )
    size = spec.vocab_size * spec.hidden_size
    assert takes.blocks == in_blocks / 2 + in_blocks / 32 * 2  # codes, and a scale for 32
    assert takes.head == size / 2 + size / 32 * 2
    assert takes.tables == 2 * size  # the embedding is looked up in fp16
    assert footprint(config, spec, precision, takes).max_sequences > 0


def test_k_quants_take_what_they_become_on_the_device(tmp_path: Path) -> None:
    """A CPU has products of Q6_K, and a GPU computes with int8."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_hidden_layers": 2}
    source = make(tmp_path / "source", "llama", wide)
    file = write_gguf(source, tmp_path / "k.gguf", "llama", packed(source, lambda _: "Q6_K"))
    config = with_directory(EngineConfig(str(file), backend="cpu"))
    spec = read_spec(config.model_path)
    checkpoint, precision = (
        open_checkpoint(config.model_path, spec),
        resolve_precision(config, spec),
    )
    takes = weight_bytes(config, spec, precision, checkpoint)
    on_gpu = weight_bytes(config, spec, replace(precision, backend="cuda"), checkpoint)
    assert takes.blocks == pytest.approx(on_gpu.blocks * 6.5625 / 8)
    assert on_gpu.head == spec.vocab_size * spec.hidden_size


def test_eval_compares_the_file_s_own_weights(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a page is mapped when it is needed " * 10)
    file = written(tmp_path, "small", "Q8_0")
    limits = ["--max-tokens", "64", "--window", "16", "--json", str(tmp_path / "table.json")]
    result = CliRunner().invoke(app, ["eval", str(file), "--text", str(text), *limits])
    assert result.exit_code == 0, result.output
    unpacked, _, packed_rows = json.loads((tmp_path / "table.json").read_text())
    assert unpacked["kl"] == 0.0 and packed_rows["kl"] < 0.1


def test_the_converter_takes_none(tmp_path: Path) -> None:
    config = with_directory(EngineConfig(str(written(tmp_path, "small")), converter=True))
    with pytest.raises(ConfigError, match="no GGUF files"):
        read_source(config)
