"""`serve models` lists models, and commands find a model by its name."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serve.cli.main import app
from serve.cli.model_files import find_model
from serve.cli.models import show_served
from serve.config import default_model_path
from serve.errors import ModelLoadError
from serve.hub.cache import cached_models
from serve.loading import footprint
from serve.models import count_parameters, read_spec
from serve.models.checkpoint import Checkpoint
from tests.support.engine.checkpoints import VARIANTS, Variant, checkpoint
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.running_server import ServerThread


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hugging Face cache."""
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    hub = tmp_path / "home" / "hub"
    hub.mkdir(parents=True)
    return hub


def add(cache: Path, name: str, revision: str = "abc", *, is_main: bool = True) -> Path:
    """Adds a model as the cache keeps it: blobs, and a snapshot of links to them."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir(exist_ok=True)
    for file in checkpoint("llama").iterdir():
        blob = folder / "blobs" / f"{revision}-{file.name}"
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(blob)
    if is_main:
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text(revision)
    return snapshot


def listed(*arguments: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["models", "--json", *arguments])
    assert result.exit_code == 0, result.output
    models: list[dict[str, Any]] = json.loads(result.stdout)
    return models


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_parameters_are_counted_as_in_the_files(variant: Variant) -> None:
    path = checkpoint(variant.family, variant.name)
    shapes = [entry.shape for entry in Checkpoint(path).entries.values()]
    assert count_parameters(read_spec(path)).total == sum(map(math.prod, shapes))


def test_the_embedded_model_and_the_cache(cache: Path) -> None:
    snapshot = add(cache, "Org/Tiny")
    add(cache, "Org/Broken")
    (cache / "models--Org--Broken" / "snapshots" / "abc" / "tokenizer.json").unlink()
    (cache / "datasets--Org--Text").mkdir()
    embedded, broken, tiny = listed()
    assert embedded["name"] == "default"
    assert embedded["parameters"] == count_parameters(read_spec(default_model_path())).total
    assert (tiny["name"], tiny["path"], tiny["problem"]) == ("Org/Tiny", str(snapshot), "")
    assert tiny["size_bytes"] == (snapshot / "model.safetensors").stat().st_size
    assert "bfloat16" in tiny["dtypes"] and "fp8" not in tiny["dtypes"]
    assert broken["problem"].startswith("has no tokenizer: tokenizer.json, tokenizer.model, ")
    result = CliRunner().invoke(app, ["models"])
    assert "Org/Broken: has no tokenizer" in result.stdout


def test_folders(tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to(checkpoint("llama"))
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "config.json").write_text('{"model_type": "mamba"}')
    (tmp_path / "three").mkdir()
    one, two = listed(str(tmp_path))
    assert one["family"] == "llama" and not one["problem"]
    assert two["problem"].startswith("config.json: model_type 'mamba' is not supported")
    assert [model["name"] for model in listed(str(tmp_path / "one"))] == [str(tmp_path / "one")]
    assert listed(str(tmp_path / "three")) == []


def test_the_table_is_whole_at_80_columns(tmp_path: Path) -> None:
    folder = tmp_path / "a-rather-long-name-of-a-folder"
    folder.mkdir()
    (folder / "one").symlink_to(checkpoint("llama"))
    (folder / "two").mkdir()
    (folder / "two" / "config.json").write_text('{"model_type": "mamba"}')
    result = CliRunner().invoke(app, ["models", str(folder)], env={"COLUMNS": "80"})
    rows = [line for line in result.stdout.splitlines() if "│" in line or "┃" in line]
    assert {line.count("│") + line.count("┃") for line in rows} == {9}
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in rows if "│" in line]
    assert str(folder / "one") in "".join(row[0] for row in cells)
    assert "".join(row[7] for row in cells).count("float32") == 0  # the choice of auto


def test_a_problem_names_the_path_once(tmp_path: Path) -> None:
    path = tmp_path / "bad"
    path.mkdir()
    (path / "config.json").symlink_to(checkpoint("llama") / "config.json")
    index = {"weight_map": {"x": "gone.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (model,) = listed(str(path))
    assert model["problem"].startswith("model.safetensors.index.json names gone.safetensors")


def test_a_model_that_does_not_fit_is_told_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(footprint, "available_memory", lambda: 350_000)
    result = CliRunner().invoke(app, ["models", str(checkpoint("llama"))])
    assert re.search(r"the weights take .* as float32, and .* are free; dtype", result.stdout)
    assert "would fit" in result.stdout


def test_the_cache_of_another_revision(cache: Path) -> None:
    """The revision in refs/main is used, or else the latest complete one."""
    add(cache, "A/x", "old", is_main=False)
    new = add(cache, "A/x", "new")
    assert cached_models() == {"A/x": new}
    (cache / "models--A--x" / "refs" / "main").write_text("gone")
    assert cached_models()["A/x"].name in ("old", "new")


def test_names_and_paths(cache: Path, tmp_path: Path) -> None:
    tiny = add(cache, "Org/Tiny")
    assert find_model("Org/Tiny") == (str(tiny), "Org/Tiny")
    assert find_model("Tiny") == (str(tiny), "Org/Tiny")
    assert find_model(str(tmp_path)) == (str(tmp_path), None)
    add(cache, "Other/Tiny")
    with pytest.raises(ModelLoadError, match="could be Org/Tiny or Other/Tiny"):
        find_model("Tiny")


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [("Org/Tinny", "Org/Tiny"), ("tinny", "Org/Tiny"), ("defualt", "default")],
)
def test_a_missing_model_suggests_a_similar_name(cache: Path, name: str, suggestion: str) -> None:
    add(cache, "Org/Tiny")
    with pytest.raises(ModelLoadError, match=f"does not exist .*; did you mean {suggestion}"):
        find_model(name)


def test_a_missing_path_suggests_a_similar_one(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "Qwen3-0.6B").symlink_to(checkpoint("llama"))
    with pytest.raises(ModelLoadError, match=r"did you mean .*/Qwen3-0\.6B"):
        find_model(str(tmp_path / "qwen-0.6B"))


def test_a_cached_model_can_be_served_by_name(cache: Path) -> None:
    add(cache, "Org/Tiny")
    result = CliRunner().invoke(app, ["chat", "Org/Tiny", "-m", "hi", "--max-tokens", "2"])
    assert result.exit_code == 0, result.output


def test_the_models_of_a_server() -> None:
    with ServerThread(FakeEngine()) as server:
        assert [model["id"] for model in listed("--url", server.url)] == ["fake"]
        result = CliRunner().invoke(app, ["models", server.url])
    assert "fake" in result.stdout and "2,000" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "exit_code", "expected"),
    [
        (("/nowhere",), 2, "/nowhere: No such file or directory"),
        ((str(Path(__file__)),), 2, "Not a directory"),
        (("--url", "http://127.0.0.1:9"), 1, "Connection refused"),
        (("--url", "http://127.0.0.1:9", "x"), 2, "either directories or the URL"),
        (("--url", "x://y", "--api-key-file", "/nowhere"), 2, "api_key_file /nowhere cannot"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], exit_code: int, expected: str) -> None:
    result = CliRunner().invoke(app, ["models", *arguments])
    assert (result.exit_code, expected in result.stderr) == (exit_code, True), result.output
    assert "Traceback" not in result.output


def test_states_of_several_models_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    one = {"id": "a", "owned_by": "mergestep", "max_model_len": 2048}
    show_served([one], as_json=False)
    assert "state" not in capsys.readouterr().out
    show_served([one | {"state": "asleep", "memory_bytes": 3 << 20}, {"id": "b"}], as_json=False)
    out = capsys.readouterr().out
    assert "asleep" in out and "3 MiB" in out
