"""Models in GGUF files: the tokens are those of Transformers on the same weights, in fp32."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from serve import LLM, SamplingParams
from tests.support.engine.checkpoints import reference_greedy
from tests.support.gguf.cases import CASES, Case, find_case, original
from tests.support.gguf.quantized import packed, plain_copy
from tests.support.gguf.writer import write_gguf

NUM_TOKENS = 20
PROMPT_LENGTHS = (1, 5, 23, 70)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of directories."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _prompts(vocab_size: int = 320) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(2, vocab_size) for _ in range(n)] for n in PROMPT_LENGTHS]


def _greedy(model: Path, *, dtype: str = "float32", **settings: Any) -> list[list[int]]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(str(model), dtype=dtype, **settings) as llm:
        return [list(out.outputs[0].token_ids) for out in llm.generate(_prompts(), params)]


def _reference(model: Path) -> list[list[int]]:
    return [reference_greedy(model, prompt, NUM_TOKENS) for prompt in _prompts()]


def _case(case: Case) -> Any:
    marks = [] if case.is_everyday else [pytest.mark.exhaustive]
    return pytest.param(case, id=str(case), marks=marks)


@pytest.mark.parametrize("case", [_case(case) for case in CASES])
def test_tokens_equal_those_of_the_original(case: Case, tmp_path: Path) -> None:
    file = write_gguf(original(case), tmp_path / "model.gguf", case.family)
    assert _greedy(file) == _reference(original(case))


@pytest.mark.parametrize("name", ["llama-llama3", "qwen2-tied"])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "IQ4_NL"])
@pytest.mark.exhaustive
def test_tokens_equal_those_of_the_dequantized_model(name: str, kind: str, tmp_path: Path) -> None:
    source = original(find_case(name))
    weights = packed(source, lambda _: kind)
    file = write_gguf(source, tmp_path / "model.gguf", find_case(name).family, weights)
    assert _greedy(file) == _reference(plain_copy(source, weights, tmp_path / "plain"))


@pytest.mark.parametrize("name", ["llama-llama3", "qwen3_moe-base"])
def test_a_model_in_several_files_is_served_from_its_first(name: str, tmp_path: Path) -> None:
    case = find_case(name)
    first = write_gguf(original(case), tmp_path / "split.gguf", case.family, split_tensors=5)
    assert first.name.startswith("split-00001-of-000")
    assert len(list(tmp_path.glob("split-*.gguf"))) > 2
    assert not (tmp_path / "split.gguf").exists()
    reference = _reference(original(case))
    assert _greedy(first) == reference
    # and so is the directory that holds them
    assert _greedy(tmp_path) == reference


@pytest.mark.process
@pytest.mark.parametrize(
    "ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tensor", "stages"]
)
def test_ranks_read_their_parts(ranks: dict[str, int], tmp_path: Path) -> None:
    """The tokens of int8 rows are those of one process, to the last bit."""
    source = original(find_case("llama-llama3"))
    weights = packed(source, lambda _: "Q4_0")
    file = write_gguf(source, tmp_path / "model.gguf", "llama", weights)
    assert _greedy(file, dtype="auto", **ranks) == _greedy(file, dtype="auto")


def test_a_file_is_a_model_with_its_tokenizer_and_template(tmp_path: Path) -> None:
    source = original(find_case("llama-llama3"))
    file = write_gguf(source, tmp_path / "tiny.gguf", "llama")
    text = "the quick brown fox, el ni\u00f1o \U0001f44d 1234"
    messages = [{"role": "user", "content": text}]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    with LLM(str(file), dtype="float32") as ours, LLM(str(source), dtype="float32") as theirs:
        assert ours.config.model_name == "tiny"
        for llm_call in ("generate", "chat"):
            asked = text if llm_call == "generate" else messages
            (one,), (other,) = (getattr(llm, llm_call)(asked, params) for llm in (ours, theirs))
            assert one.prompt_token_ids == other.prompt_token_ids
            assert one.outputs[0].text == other.outputs[0].text
