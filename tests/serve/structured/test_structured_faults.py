"""A failing grammar changes no other sequence of its batch; repeated steps have the same masks."""

from __future__ import annotations

import itertools
import json
import time

import jsonschema
import pytest
from llguidance import LLParserLimits

from serve import LLM, SamplingParams
from serve.runner import mask_filler as mask_filling
from serve.structured import grammar_worker
from serve.structured.token_mask import NOTHING_ALLOWED, REQUEST_FAULTS, TOO_COMPLEX, Matcher
from serve.structured_output import StructuredOutput
from tests.support.engine.checkpoints import checkpoint
from tests.support.preempted import until_preempted

SCHEMA = {
    "type": "object",
    "properties": {
        "words": {"type": "array", "items": {"type": "string", "maxLength": 5}, "minItems": 3}
        | {"maxItems": 6},
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["words", "n"],
    "additionalProperties": False,
}
PLAIN = [
    SamplingParams(max_tokens=40, seed=7, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=40, seed=9, top_p=0.8, logprobs=1, ignore_eos=True),
    SamplingParams(max_tokens=40, seed=3, presence_penalty=1.0, logit_bias={5: 2.0}),
]
PROMPTS = [[5, 6, 7], [9, 9, 8, 7], [30] * 12, [40, 41]]


def masked(seed, **kwargs):
    structured = StructuredOutput("json_schema", json.dumps(SCHEMA))
    return SamplingParams(**({"max_tokens": 160, "seed": seed} | kwargs), structured=structured)


def make_llm(**settings):
    return LLM(str(checkpoint("llama")), dtype="float32", **({"max_num_seqs": 16} | settings))


def generate(llm, prompts, params):
    results = llm.generate(prompts, params, use_tqdm=False)
    return [output for result in results for output in result.outputs]


def tokens(outputs):
    return [output.token_ids for output in outputs]


def check(outputs):
    for output in outputs:
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), SCHEMA)


@pytest.fixture(scope="module")
def alone():
    """The tokens of each request when it runs alone."""
    with make_llm() as llm:
        plain = [generate(llm, [p], [q])[0] for p, q in zip(PROMPTS, PLAIN, strict=True)]
        structured = [generate(llm, [p], [masked(i)])[0] for i, p in enumerate(PROMPTS)]
    check(structured)
    return tokens(plain), tokens(structured)


def mixed_prompts():
    return [*PROMPTS, *PROMPTS], [*PLAIN, *[masked(i) for i in range(4)]]


def test_tokens_in_a_mixed_batch_are_those_alone(alone):
    with make_llm() as llm:
        outputs = generate(llm, *mixed_prompts())
    assert tokens(outputs[:4]) == alone[0]
    assert tokens(outputs[4:]) == alone[1]


def test_n_sequences_have_matchers_of_their_own():
    with make_llm() as llm:
        outputs = generate(llm, [PROMPTS[0]], masked(5, n=8, temperature=1.2))
        assert len(outputs) == 8
        check(outputs)
        assert len({output.text for output in outputs}) > 4
        # the prefix cache has the prompt now
        again = generate(llm, [PROMPTS[0]], masked(5, n=8, temperature=1.2))
        assert tokens(again) == tokens(outputs)


def test_preempted_sequences_continue_with_the_same_tokens(alone):
    settings = {"kv_page_bytes": 8192, "memory_policy": "prompt_only", "max_model_len": 192}
    with make_llm(kv_cache_bytes=13 * 8192, **settings) as llm:
        results = until_preempted(llm, lambda: llm.generate(*mixed_prompts(), use_tqdm=False))
    outputs = [result.outputs[0] for result in results]
    assert tokens(outputs[:4]) == alone[0]
    assert tokens(outputs[4:]) == alone[1]


@pytest.mark.parametrize("when", ["before", "after"])
def test_steps_that_fail_are_run_again(alone, when):
    """The whole batch fails and its halves succeed, so a row's mask is computed several times."""
    with make_llm() as llm:
        steps = llm._loaded.core._executor
        runner, numbers = steps._runner, itertools.count()

        class Failing:
            def run(self, plan, launched):
                fails = len(plan.sequences) > 2 and next(numbers) % 3 == 0
                if fails and when == "before":
                    raise RuntimeError("a step failed")
                result = runner.run(plan, launched)
                if fails:
                    raise RuntimeError("a step failed")
                return result

            def __getattr__(self, name):
                return getattr(runner, name)

        steps._runner = Failing()
        outputs = generate(llm, *mixed_prompts())
        steps._runner = runner
        assert next(numbers) > 20
    assert tokens(outputs[:4]) == alone[0]
    assert tokens(outputs[4:]) == alone[1]


def test_late_masks_change_no_tokens(alone, monkeypatch):
    """Sequences with slow masks are left out of steps, at the end of the prompt and later."""
    original = Matcher.fill
    numbers = itertools.count()
    late = []
    wait = mask_filling.FillingMasks.wait

    def slow(self, bits):
        if next(numbers) % 3 == 0:
            time.sleep(0.003)
        original(self, bits)

    def recording(self):
        late_sequences = wait(self)
        late.extend(late_sequences)
        return late_sequences

    monkeypatch.setattr(Matcher, "fill", slow)
    monkeypatch.setattr(mask_filling, "STEP_WAIT_S", 0.001)
    monkeypatch.setattr(mask_filling.FillingMasks, "wait", recording)
    with make_llm() as llm:
        outputs = generate(llm, *mixed_prompts())
        assert llm.stats().pages_in_use == 0
    assert tokens(outputs[:4]) == alone[0]
    assert tokens(outputs[4:]) == alone[1]
    assert len(late) > 20


class _Panic(BaseException):
    """Imitates the library's panics."""


_Panic.__name__ = "PanicException"


@pytest.mark.parametrize("error", [ValueError, _Panic])
@pytest.mark.parametrize("method", ["fill", "follow"])
def test_a_fault_in_a_matcher_ends_only_its_request(alone, monkeypatch, error, method, caplog):
    original = getattr(Matcher, method)
    victims: list[Matcher] = []

    def failing(self, *args):
        if not victims and len(self._seen) == 7:
            victims.append(self)
        if self in victims:
            raise error("broken")
        return original(self, *args)

    monkeypatch.setattr(Matcher, method, failing)
    with make_llm() as llm:
        outputs = generate(llm, *mixed_prompts())
        assert llm.stats().pages_in_use == 0
    assert tokens(outputs[:4]) == alone[0]
    failed = [i for i in range(4) if outputs[4 + i].finish_reason == "error"]
    assert len(failed) == 1
    assert "token mask" in outputs[4 + failed[0]].error
    assert outputs[4 + failed[0]].token_ids == alone[1][failed[0]][:7]
    for i in set(range(4)) - set(failed):
        assert outputs[4 + i].token_ids == alone[1][i]
    caplog.clear()


def test_a_grammar_that_becomes_too_complex_ends_its_request_alone(alone, monkeypatch):
    """A grammar that reaches the library's limits during generation is an error of the request."""
    limits = LLParserLimits(max_lexer_states=40, verbose_errors=False)
    monkeypatch.setattr(grammar_worker, "_LIMITS", limits)
    bomb = StructuredOutput("regex", "(.*a.{0,1500}b.{0,1500}c)")
    params = SamplingParams(max_tokens=150, seed=1, structured=bomb, ignore_eos=True)
    with make_llm() as llm:
        outputs = generate(llm, [*PROMPTS, [5]], [*PLAIN, params])
    assert tokens(outputs[:4]) == alone[0]
    assert (outputs[4].finish_reason, outputs[4].error) == ("error", TOO_COMPLEX)
    assert {TOO_COMPLEX, NOTHING_ALLOWED} == REQUEST_FAULTS


def test_a_sequence_without_allowed_tokens_ends(alone):
    with make_llm() as llm:
        size = llm.tokenizer.vocab_size
        every = [llm.tokenizer.token_text(i) for i in range(size)]
        words = sorted({text for text in every if set(text) <= set("abx ") and text.strip()})
        nothing = SamplingParams(
            structured=StructuredOutput("choice", '["abx"]'), bad_words=words, seed=1
        )
        outputs = generate(llm, [*PROMPTS, [5]], [*PLAIN, nothing])
        assert tokens(outputs[:4]) == alone[0]
        assert (outputs[4].finish_reason, outputs[4].error) == ("error", NOTHING_ALLOWED)
        assert outputs[4].token_ids == []
