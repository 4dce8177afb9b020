"""The prefix cache end to end: it saves computation, changes no token and leaks no page."""

from __future__ import annotations

import pytest

from serve import LLM, SamplingParams
from serve.errors import RequestError
from tests.support.engine.checkpoints import checkpoint
from tests.support.preempted import until_preempted

PREFIX = [(7 * i) % 90 + 3 for i in range(100)]
pytestmark = pytest.mark.small_pages
SETTINGS = {
    "kv_cache_bytes": 4 << 20,
    "kv_page_bytes": 4096,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 24,
}


def prompt(*tail: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [*PREFIX, *tail]}


def greedy(n: int = 12, **settings) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, logprobs=0, **settings)


def answers(outputs):
    return [
        (o.outputs[0].token_ids, [next(iter(p.values())).logprob for p in o.outputs[0].logprobs])
        for o in outputs
    ]


def cached(outputs) -> list[int]:
    return [output.metrics.num_cached_tokens for output in outputs]


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [("int8", "auto"), ("int8", "int4"), ("float32", "auto"), ("bfloat16", "auto")],
)
def test_a_hit_changes_no_bit(dtype, kv_dtype):
    prompts = [prompt(), prompt(5), prompt(5, 6, 7), prompt(*range(10, 40))]
    path, types = str(checkpoint("llama")), {"dtype": dtype, "kv_dtype": kv_dtype}
    with LLM(path, prefix_cache=False, **types, **SETTINGS) as llm:
        expected = answers([llm.generate(p, greedy())[0] for p in prompts])
    with LLM(path, **types, **SETTINGS) as llm:
        one_by_one = [llm.generate(p, greedy())[0] for p in prompts]
        at_once = llm.generate(prompts, greedy())
        stats = llm.stats()
    assert answers(one_by_one) == expected
    assert answers(at_once) == expected
    assert cached(one_by_one)[0] == 0
    assert min(cached(one_by_one)[1:]) >= 64
    assert cached(at_once)[0] >= 64, "all but the last token are hits"
    assert stats.prefix_hit_tokens >= 400
    assert stats.pages_in_use == 0
    assert stats.pages_cached > 0


def test_the_next_turn_hits_the_previous_answer():
    with LLM(str(checkpoint("llama")), dtype="int8", **SETTINGS) as llm:
        first = llm.generate(prompt(), greedy(60))[0]
        turn = [*PREFIX, *first.outputs[0].token_ids, 4, 5, 6]
        second = llm.generate({"prompt_token_ids": turn}, greedy())[0]
        assert second.metrics.num_cached_tokens >= 100 + 60 - 32


def test_prefixes_with_different_salts_are_separate():
    with LLM(str(checkpoint("llama")), dtype="int8", **SETTINGS) as llm:
        for salt, hit in (("a", False), ("b", False), ("a", True), (None, False)):
            output = llm.generate(prompt(), greedy(cache_salt=salt))[0]
            assert (output.metrics.num_cached_tokens > 0) == hit, salt


@pytest.mark.parametrize("salt", ["", "a b", "x" * 129, "\n", 5])
def test_invalid_salts_are_refused(salt):
    with pytest.raises(RequestError, match="cache_salt"):
        SamplingParams(cache_salt=salt)


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_evictions_and_preemptions_change_no_token(kv_dtype):
    """There are more prefixes than pages."""
    path = str(checkpoint("llama"))
    prompts = [{"prompt_token_ids": [k, *PREFIX[: 20 + 7 * k]]} for k in range(3, 13)]
    types = {"dtype": "int8", "kv_dtype": kv_dtype}
    size = {"int8": 120 << 10, "int4": 120 << 10}[kv_dtype]
    small = SETTINGS | {"kv_cache_bytes": size, "max_model_len": 200}
    small["memory_policy"] = "prompt_only"
    with LLM(path, prefix_cache=False, **types, **SETTINGS) as llm:
        expected = answers(llm.generate(prompts, greedy(70)))
    with LLM(path, **types, **small) as llm:
        assert answers(llm.generate(prompts, greedy(70))) == expected
        again = until_preempted(llm, lambda: llm.generate(prompts, greedy(70)))
        assert answers(again) == expected
        stats = llm.stats()
        assert stats.prefix_evicted_pages > 0
        assert stats.pages_in_use == 0
