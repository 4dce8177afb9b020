"""Models by their names in the embedded library and in measurements, as in `serve run`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.common.checkpoints import model_directory
from serve import LLM, SamplingParams
from serve.cli.main import app
from serve.errors import ConfigError, DownloadError, ModelLoadError
from tests.support.hub.models import llama_files, plain_files
from tests.support.hub.server import FakeHub

SMALL: dict[str, Any] = {"max_model_len": 64, "max_num_seqs": 2}


def test_a_name_is_fetched_once(hub: FakeHub, cache: Path) -> None:
    hub.add("Org/Model", llama_files())
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
    with LLM("Org/Model", **SMALL) as llm:
        first = llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids
        assert llm.config.model_name == "Org/Model" and llm.config.model_path.is_relative_to(cache)
    before = len(hub.seen)
    with LLM("Org/Model", served_model_name="mine", **SMALL) as llm:
        assert llm.generate([[5, 6, 7]], params)[0].outputs[0].token_ids == first
        assert llm.config.model_name == "mine"
    assert len(hub.seen) == before and len(first) == 3


def test_a_revision(hub: FakeHub, cache: Path) -> None:
    hub.add("Org/Model", llama_files(), commit="b" * 40).commits["v1"] = "b" * 40
    with LLM("Org/Model", revision="v1", **SMALL) as llm:
        assert llm.config.model_path.name == "b" * 40
    assert model_directory("Org/Model", revision="v1") == str(
        cache / "models--Org--Model" / "snapshots" / ("b" * 40)
    )


def test_what_cannot_be_found(hub: FakeHub, cache: Path, tmp_path: Path) -> None:
    hub.add("Org/Model", llama_files())
    with pytest.raises(DownloadError, match="Org/Gone does not exist here"):
        LLM("Org/Gone")
    with pytest.raises(DownloadError, match="no revision v9"):
        LLM("Org/Model", revision="v9")
    with pytest.raises(ConfigError, match="only models by their names on the hub have revisions"):
        LLM(str(tmp_path), revision="v1")
    with pytest.raises(ConfigError, match="default is none"):
        LLM(revision="v1")
    with pytest.raises(ConfigError, match="model must be a non-empty string"):
        LLM("")
    with pytest.raises(ModelLoadError, match="does not exist"):  # a path is never a name
        LLM(Path("Org/Model"))
    assert not hub.fetched()


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "latency"],
        ["bench", "throughput"],
        ["bench", "startup"],
        ["bench", "ablation"],
        ["bench", "stalls"],
        ["bench", "engine"],
        ["bench", "http"],
        ["bench", "prefix-cache"],
        ["bench", "soak"],
        ["bench"],
        ["eval"],
    ],
    ids=" ".join,
)
def test_commands_take_a_revision(command: list[str], hub: FakeHub, cache: Path) -> None:
    hub.add("Org/Model", plain_files())
    result = CliRunner().invoke(app, [*command, "Org/Model", "--revision", "v9"])
    assert result.exit_code == 1 and "has no revision v9" in result.stderr


def test_a_revision_goes_with_a_model_that_is_loaded_here() -> None:
    for where in (["--simulate"], ["--url", "http://127.0.0.1:1"]):
        result = CliRunner().invoke(app, ["bench", *where, "--revision", "v1"])
        assert result.exit_code == 2 and "revision goes with a model" in result.stderr
