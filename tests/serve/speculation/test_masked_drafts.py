"""Drafts of masked sequences: grammars, bad words and bounds of reasoning see each token."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve import LLM, SamplingParams
from serve.structured_output import StructuredOutput
from tests.serve.speculation.test_same_tokens import results
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.thinking import thinking_checkpoint
from tests.support.speculation.scripted import check_drafted, draft_by_script

SCHEMA = {
    "type": "object",
    "properties": {
        "words": {"type": "array", "items": {"type": "string", "maxLength": 5}, "maxItems": 4},
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["words", "n"],
    "additionalProperties": False,
}
STRUCTURED = [
    StructuredOutput("json_schema", json.dumps(SCHEMA)),
    StructuredOutput("json_object"),
    StructuredOutput("regex", "[ab]{3,9}(cd|efg)+[0-9]{2}"),
    StructuredOutput("choice", json.dumps(["the first answer", "the second one", "none"])),
]


def requests() -> tuple[list[Any], list[SamplingParams]]:
    rng = random.Random(3)
    prompts = [{"prompt_token_ids": [rng.randrange(5, 300) for _ in range(9)]} for _ in range(14)]
    params = []
    for i in range(len(prompts)):
        some = SamplingParams(
            max_tokens=60,
            temperature=(0.0, 0.9, 1.3)[i % 3],
            seed=i,
            structured=None if i % 5 == 4 else STRUCTURED[i % 4],
            logprobs=1,
            min_tokens=3 * (i % 2),
        )
        if i % 5 == 4:
            some = replace(some, bad_words=("a", "the", "is"), ignore_eos=True)
        params.append(some)
    return prompts, params


def check(llm: LLM, prompts: list[Any], params: list[SamplingParams]) -> None:
    check_drafted(llm, prompts, params, llm.generate(prompts, params, use_tqdm=False))


def test_grammars_and_bad_words() -> None:
    with LLM(str(checkpoint("llama")), dtype="int8", max_num_seqs=6, speculation="off") as llm:
        check(llm, *requests())


def test_bounds_of_reasoning(tmp_path: Path) -> None:
    """What a bound forces is drafted like any other token, and the answer after it has a form."""
    path = str(thinking_checkpoint(tmp_path))
    with LLM(path, dtype="float32", max_num_seqs=6, speculation="off") as llm:
        tokens = llm.tokenizer.encode("user: hello\nassistant: ")
        prompts = [{"prompt_token_ids": [*tokens, 40 + i]} for i in range(8)]
        params = [
            SamplingParams(
                max_tokens=110,
                temperature=0.9 * (i % 2),
                seed=i,
                ignore_eos=i % 3 > 0,
                thinking_token_budget=(0, 5, 30, 52)[i % 4],
                is_reasoning_open=True,
                structured=None if i % 3 else StructuredOutput("json_schema", json.dumps(SCHEMA)),
            )
            for i in range(8)
        ]
        check(llm, prompts, params)


@pytest.mark.parametrize("is_right", [True, False])
def test_a_draft_beyond_the_grammar(is_right: bool) -> None:
    """A grammar's end within a draft ends the sequence there; what a wrong draft would break is the
    draft's fault."""
    with LLM(str(checkpoint("llama")), dtype="int8", speculation="off") as llm:
        prompt = {"prompt_token_ids": [9, 8, 7]}
        params = SamplingParams(max_tokens=40, structured=STRUCTURED[3], seed=1)
        [output] = llm.generate([prompt], params, use_tqdm=False)
        tokens = list(output.outputs[0].token_ids)
        others = [200] * 30
        script = [*tokens, *others] if is_right else [tokens[0], *others]
        draft_by_script(llm, {(9, 8, 7): [script]}, 1.0)
        [again] = llm.generate([prompt], params, use_tqdm=False)
        assert results([again]) == results([output])
        assert again.outputs[0].finish_reason == "stop"
