"""A model is served with the tokenizer and the chat template of another directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from serve import LLM, SamplingParams
from serve.cli.main import app
from serve.cli.quality import evaluate
from serve.config import EngineConfig
from serve.errors import ConfigError, ModelLoadError
from tests.support.engine.checkpoints import BOS, checkpoint, edit_json
from tests.support.gguf.cases import find_case, original
from tests.support.gguf.writer import write_gguf

GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
TEXT = "the quick brown fox"
TEMPLATE = "{% for message in messages %}[{{ message['content'] }}]{% endfor %}"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache of directories of GGUF files."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def others(tmp_path: Path) -> Path:
    """A directory with nothing but a tokenizer that puts no BOS before texts, and a template."""
    path = tmp_path / "tokenizer"
    path.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(checkpoint("llama") / name, path / name)
    edit_json(path / "tokenizer.json", lambda state: state.update(post_processor=None))
    edit_json(path / "tokenizer_config.json", lambda state: state.update(chat_template=TEMPLATE))
    return path


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A model without a tokenizer."""
    path = shutil.copytree(checkpoint("llama"), tmp_path / "bare")
    for file in path.glob("*tok*"):
        file.unlink()
    return path


def tokens(llm: LLM, prompt: Any) -> list[int]:
    (output,) = llm.generate([prompt], GREEDY)
    return list(output.outputs[0].token_ids)


def check_texts(llm: LLM, reference: LLM) -> None:
    """The ids and the rendered chats are those of the other tokenizer, the model is the same."""
    ids = reference.tokenizer.encode(TEXT)[1:]
    assert llm.tokenizer.encode(TEXT) == ids != reference.tokenizer.encode(TEXT)
    assert tokens(llm, TEXT) == tokens(reference, ids)
    (answer,) = llm.chat([[{"role": "user", "content": TEXT}]], GREEDY)
    assert list(answer.prompt_token_ids) == llm.tokenizer.encode(f"[{TEXT}]")


def test_texts_and_chats_are_those_of_the_directory(others: Path, bare: Path) -> None:
    with LLM(str(checkpoint("llama"))) as reference:
        for model in (checkpoint("llama"), bare):
            with LLM(str(model), tokenizer=others) as llm:
                check_texts(llm, reference)
    with pytest.raises(ModelLoadError, match="bare has no tokenizer"):
        LLM(str(bare))


@pytest.mark.process
def test_a_model_of_several_processes(others: Path, bare: Path) -> None:
    with (
        LLM(str(checkpoint("llama"))) as reference,
        LLM(str(bare), tokenizer=others, tensor_parallel_size=2) as llm,
    ):
        check_texts(llm, reference)


def test_a_gguf_file_whose_texts_are_split_in_an_unknown_way(others: Path, tmp_path: Path) -> None:
    case = find_case("llama-llama3")
    file = write_gguf(original(case), tmp_path / "tiny.gguf", case.family, pre="unheard-of")
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf.*'unheard-of'.*--tokenizer DIR"):
        LLM(str(file))
    with LLM(str(file), tokenizer=str(others)) as llm:
        assert llm.tokenizer.encode(TEXT)[0] != llm.tokenizer.special_token_ids[BOS]
        assert len(tokens(llm, TEXT)) == 8
    assert listed(str(file))[0]["problem"] != ""
    assert listed(str(file), "--tokenizer", str(others))[0]["problem"] == ""


def listed(*arguments: str) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["models", "--json", *arguments])
    assert result.exit_code == 0, result.output
    models: list[dict[str, Any]] = json.loads(result.stdout)
    return models


def test_models_are_listed_with_it(others: Path, bare: Path, tmp_path: Path) -> None:
    assert listed(str(bare))[0]["problem"].startswith("has no tokenizer")
    assert listed(str(bare), "--tokenizer", str(others))[0]["problem"] == ""
    wrong = listed(str(checkpoint("llama")), "--tokenizer", str(tmp_path / "nowhere"))
    assert "nowhere, where the tokenizer should be, is not a directory" in wrong[0]["problem"]


def test_eval_reads_a_text_with_it(others: Path, bare: Path) -> None:
    precisions = [("float32", "float32")]
    (with_bos,) = evaluate(str(checkpoint("llama")), TEXT, precisions)
    (without,) = evaluate(str(bare), TEXT, precisions, tokenizer=str(others))
    assert without.num_tokens == with_bos.num_tokens - 1


def test_chat_and_run_take_it(others: Path, bare: Path) -> None:
    given = [str(bare), "--tokenizer", str(others)]
    result = CliRunner().invoke(app, ["chat", *given, "-m", "fox", "--max-tokens", "3"])
    assert result.exit_code == 0, result.output
    result = CliRunner().invoke(app, ["run", *given, "--print-config"])
    assert result.exit_code == 0 and f'tokenizer = "{others}"' in result.stdout


def test_the_tokenizer_of_another_vocabulary(others: Path) -> None:
    def change(state: dict[str, Any]) -> None:
        state["model"]["vocab"]["beyond"] = 100_000

    edit_json(others / "tokenizer.json", change)
    with pytest.raises(ModelLoadError, match=r"tokenizer/tokenizer\.json has tokens up to the id"):
        LLM(str(checkpoint("llama")), tokenizer=others)


@pytest.mark.parametrize("value", ["", 5, b"folder"])
def test_a_value_that_is_no_path(value: Any) -> None:
    with pytest.raises(ConfigError, match="tokenizer must be a path"):
        EngineConfig(tokenizer=value)


def test_the_home_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert EngineConfig(tokenizer="~/words").tokenizer_path == tmp_path / "words"
    assert EngineConfig().tokenizer_path == EngineConfig().model_path
