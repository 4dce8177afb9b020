"""An engine goes on with an answer that another one has begun, with the same next token."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from serve import LLM, SamplingParams
from serve.config import DEFAULT_MODEL
from serve.sampling_params import AnswerSoFar
from serve.structured_output import StructuredOutput

SETTINGS: dict[str, Any] = {"dtype": "int8", "max_model_len": 512, "max_num_seqs": 8}
PROMPT = "Tell a story about a small dog and a red boat."
SCHEMA = (
    '{"type":"object","properties":{"name":{"type":"string"},"age":{"type":"integer"}},'
    '"required":["name","age"]}'
)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.95},
    "two": {"temperature": 1.0, "n": 2},
    "penalties": {"temperature": 0.8, "frequency_penalty": 1.2, "repetition_penalty": 1.3},
    "bias": {"temperature": 0.8, "logit_bias": {100: 5.0}, "bad_words": ["dog"]},
    "logprobs": {"temperature": 0.8, "logprobs": 2},
    "schema": {"temperature": 1.0, "structured": StructuredOutput("json_schema", SCHEMA)},
    # the text so far may end with a part of the stop string, which is held back
    "stop": {"temperature": 0.7, "stop": ["e dog asked ev", "zz"], "min_tokens": 12},
    "stop kept": {
        "temperature": 0.7,
        "stop": ["e dog asked ev"],
        "min_tokens": 12,
        "include_stop_str_in_output": True,
    },
    "drafted": {"temperature": 0.0, "prediction": "Once upon a time there was a small dog."},
}


def answers(llm: LLM, params: SamplingParams) -> list[tuple[object, ...]]:
    (output,) = llm.generate([PROMPT], params, use_tqdm=False)
    return [
        (tuple(o.token_ids), o.text, str(o.finish_reason), o.stop_reason) for o in output.outputs
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_token_is_the_same(kind: str) -> None:
    params = SamplingParams(max_tokens=40, seed=7, **KINDS[kind])
    with LLM(DEFAULT_MODEL, **SETTINGS) as llm:
        whole = answers(llm, params)
    with LLM(DEFAULT_MODEL, **SETTINGS) as llm:
        places = range(40) if params.n == 1 else (0, 1, 7, 19, 39)
        for cuts in itertools.product(places, repeat=params.n):
            so_far = []
            for cut, (tokens, _, reason, _) in zip(cuts, whole, strict=True):
                has_ended = cut >= len(tokens)
                so_far.append(AnswerSoFar(tokens[:cut], reason if has_ended else None))
            assert answers(llm, params.changed(answers_so_far=tuple(so_far))) == whole, cuts
        so_far = [AnswerSoFar(tokens, reason) for tokens, _, reason, _ in whole]
        assert answers(llm, params.changed(answers_so_far=tuple(so_far))) == whole
        assert llm.stats().num_running == 0
