"""Models in GGUF files: the tokens are those of Transformers on the same weights, in fp32."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import gguf
import pytest

from serve import LLM, SamplingParams
from serve.models.gguf.architectures import ARCHITECTURES
from tests.support.engine.checkpoints import reference_greedy
from tests.support.gguf.cases import CASES, Case, find_case, make, original
from tests.support.gguf.quantized import packed, plain_copy
from tests.support.gguf.rows import ROWS
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


def _greedy(model: Path, **settings: Any) -> list[list[int]]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    with LLM(str(model), dtype="float32", **settings) as llm:
        return [list(out.outputs[0].token_ids) for out in llm.generate(_prompts(), params)]


def _reference(model: Path) -> list[list[int]]:
    return [reference_greedy(model, prompt, NUM_TOKENS) for prompt in _prompts()]


def _case(case: Case) -> Any:
    marks = [] if case.is_everyday else [pytest.mark.exhaustive]
    return pytest.param(case, id=str(case), marks=marks)


@pytest.mark.parametrize("case", map(_case, CASES))
def test_tokens_equal_those_of_the_original(case: Case, tmp_path: Path) -> None:
    file = write_gguf(original(case), tmp_path / "model.gguf", case.family)
    assert _greedy(file) == _reference(original(case))


def test_every_architecture_is_tested() -> None:
    written = {gguf.MODEL_ARCH_NAMES[ROWS[case.family].arch] for case in CASES}
    # the text models of vision models, whose keys and tensors are those of Qwen 2 and 3
    assert written | {"qwen2vl", "qwen3vl", "qwen3vlmoe"} == set(ARCHITECTURES)


# -- quantized

# Kinds with blocks of 256 weights.
_WIDE = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 320, "head_dim": 64}
_MIXED = {"v_proj": "Q6_K", "down_proj": "Q5_K", "embed_tokens": "Q6_K"}
"""As in Q4_K_M."""


def _written(case: Case, folder: Path, choose: Any) -> tuple[Path, Path]:
    """Returns a quantized model as a GGUF file, and a directory with the same numbers."""
    source = original(case) if case in CASES else make(folder / "source", *case[::2])
    weights = packed(source, choose)
    file = write_gguf(source, folder / "model.gguf", case.family, weights)
    return file, plain_copy(source, weights, folder / "plain")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q5_1", "MXFP4"])
@pytest.mark.parametrize("name", ["llama-llama3", "qwen3_moe-base", "qwen2-tied"])
def test_tokens_equal_those_of_the_dequantized_model(name: str, kind: str, tmp_path: Path) -> None:
    file, plain = _written(find_case(name), tmp_path, lambda _: kind)
    assert _greedy(file) == _reference(plain)


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_mixture_of_kinds_with_large_blocks(is_tied: bool, tmp_path: Path) -> None:
    case = Case("llama", "wide", _WIDE | {"tie_word_embeddings": is_tied})

    def choose(name: str) -> str:
        return next((kind for part, kind in _MIXED.items() if part in name), "Q4_K")

    file, plain = _written(case, tmp_path, choose)
    assert _greedy(file) == _reference(plain)
