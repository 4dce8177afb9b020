"""Requests with a kv_policy of their own: beside others, with the bits of an engine that has it."""

from __future__ import annotations

import functools

import pytest

from ops.cpu import native_library
from serve import LLM
from serve.config import DEFAULT_MODEL
from serve.errors import RequestError
from tests.support.preempted import until_preempted
from tests.whole.test_recent_tokens import answers, params, prompt

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.small_pages,
]
FEW, QUARTER, HALF = "quest:budget=64", "quest:budget=25%,least=1", "quest:budget=50%,least=1"
POLICIES = ("off", FEW, QUARTER, HALF)
SETTINGS = {"dtype": "int8", "max_model_len": 640, "max_num_seqs": 8}
QUESTION = tuple(prompt(300, seed=2))


def said(llm, policies, prompts=None, num_tokens=40, **more):
    """Returns the scored tokens of requests with these policies, which run together."""
    asked = [QUESTION] * len(policies) if prompts is None else prompts
    inputs = [{"prompt_token_ids": list(ids)} for ids in asked]
    each = [params(num_tokens, kv_policy=policy, **more) for policy in policies]
    outputs = llm.generate(inputs, each, use_tqdm=False)
    return [
        [(t, of[t].logprob) for t, of in zip(one.token_ids, one.logprobs, strict=True)]
        for (one,) in (output.outputs for output in outputs)
    ]


@functools.cache
def alone(policy, kv_dtype="int8"):
    """Returns what an engine with this policy answers to QUESTION."""
    with LLM(DEFAULT_MODEL, **SETTINGS, kv_dtype=kv_dtype, kv_policy=policy) as llm:
        return answers(llm, [list(QUESTION)], params(40))[0]


@pytest.mark.parametrize("kv_dtype", ["int8", pytest.param("int4", marks=pytest.mark.exhaustive)])
def test_rows_of_different_budgets_run_together_with_the_bits_of_each_alone(kv_dtype):
    expected = [alone(policy, kv_dtype) for policy in POLICIES]
    assert len({str(each) for each in expected}) == len(POLICIES), "the budgets matter"
    with LLM(DEFAULT_MODEL, **SETTINGS, kv_dtype=kv_dtype, kv_policy=QUARTER) as llm:
        for _ in range(2):  # the second time with prefix hits
            assert said(llm, [*POLICIES, None]) == [*expected, expected[2]]
        assert llm.stats().pages_in_use == 0


def test_answers_share_their_kv_only_under_the_same_budget():
    settings = SETTINGS | {"kv_page_bytes": 4096}
    with LLM(DEFAULT_MODEL, **settings, kv_policy=QUARTER) as llm:
        [first] = said(llm, [HALF], num_tokens=60)
        longer = [*QUESTION, *[token for token, _ in first]]

        def hits(policy):
            before = llm.stats().prefix_hit_tokens
            said(llm, [policy], [longer], num_tokens=3)
            return llm.stats().prefix_hit_tokens - before

        assert hits(HALF) > 300
        assert hits(None) == hits(FEW) == hits("off") == 0
        assert hits(QUARTER) > 300, "the engine's own is that of requests that name none"


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_budgets_hold_after_preemption(prefix_cache):
    prompts = [prompt(length, seed=length) for length in (60, 90, 120, 150)]
    policies = [FEW, None, HALF, "off"]
    little = {"kv_cache_bytes": 1050 << 10, "memory_policy": "prompt_only", "max_num_seqs": 4}
    settings = SETTINGS | {"kv_page_bytes": 4096, "prefix_cache": prefix_cache}
    settings |= {"kv_policy": QUARTER}
    with LLM(DEFAULT_MODEL, **settings) as llm:
        roomy = said(llm, policies, prompts, 250)
    with LLM(DEFAULT_MODEL, **settings | little | {"max_model_len": 420}) as llm:
        assert until_preempted(llm, lambda: said(llm, policies, prompts, 250)) == roomy


def test_budgets_hold_where_kv_is_in_a_file(tmp_path):
    settings = SETTINGS | {"max_num_seqs": 4, "kv_cache_bytes": 2 << 20, "kv_policy": QUARTER}
    offload = {"kv_offload_bytes": 16 << 20, "kv_offload_dir": str(tmp_path)}
    with LLM(DEFAULT_MODEL, **settings | offload) as llm:
        assert said(llm, POLICIES) == [alone(policy) for policy in POLICIES]


@pytest.mark.parametrize(
    ("policy", "wanted", "match"),
    [
        ("off", QUARTER, "kv_policy off, so it keeps nothing to .* a request may say off$"),
        ("off", "h2o:budget=25%", "kv_policy 'h2o' .* runs with kv_policy off, so it drops noth"),
        (QUARTER, "h2o:budget=25%", "runs with .* quest; a request may say off or quest:budget"),
        (
            "h2o:budget=25%",
            QUARTER,
            "with kv_policy h2o:budget=25%; a request may say off or NAME:",
        ),
    ],
)
def test_what_an_engine_cannot_do_is_refused(policy, wanted, match):
    with LLM(DEFAULT_MODEL, **SETTINGS, kv_policy=policy) as llm:
        with pytest.raises(RequestError, match=match) as caught:
            said(llm, [wanted], num_tokens=3)
        assert caught.value.param == "kv_policy"
        said(llm, [policy], num_tokens=3)  # its own is never refused


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("quest", "kv_policy needs a budget"),
        ("quest:budget=25", "did you mean quest:budget=25%"),
        ("quest:budget=0%", "kv_policy must have a budget"),
        ("x" * 10_000, "kv_policy is longer than 64 characters$"),
        (5, "kv_policy must be off or"),
        ([], "kv_policy must be off or"),
    ],
)
def test_what_is_no_policy_is_refused(text, match):
    with pytest.raises(RequestError, match=match) as caught:
        params(3, kv_policy=text)
    assert caught.value.param == "kv_policy"


@pytest.mark.parametrize("policy", ["h2o:budget=64", "pyramid:budget=64", "window:budget=64"])
def test_a_request_keeps_everything_at_an_engine_that_drops_kv(policy):
    """Beside others that drop, before and after, and with prefix hits."""
    with LLM(DEFAULT_MODEL, **SETTINGS, kv_policy=policy) as llm:
        [dropping] = said(llm, [None])
        assert dropping != alone("off")
        dropped = llm.stats().dropped_tokens
        for _ in range(2):
            assert said(llm, ["off", None, "off"]) == [alone("off"), dropping, alone("off")]
        assert llm.stats().dropped_tokens == 3 * dropped
        assert llm.stats().pages_in_use == 0


def test_requests_that_keep_everything_are_counted_whole():
    """By the worst case none has to be computed again; counted as the others they would be."""
    settings = SETTINGS | {"kv_page_bytes": 4096, "prefix_cache": False, "max_model_len": 420}
    settings |= {"kv_cache_bytes": 1050 << 10, "kv_policy": "h2o:budget=64"}
    asked = [prompt(60, seed=i) for i in range(6)]
    with LLM(DEFAULT_MODEL, **settings, memory_policy="worst_case") as llm:
        said(llm, ["off"] * len(asked), asked, 250)
        assert llm.stats().num_preemptions == 0
        assert llm.stats().pages_in_use == 0


def test_policies_run_together_where_layers_have_pages_of_their_own():
    """An engine with pyramid parts its layers; sequences of other policies hold as much in all."""
    own = ["h2o:budget=64", "keyformer:budget=64", "pyramid:budget=96"]
    settings = SETTINGS | {"kv_page_bytes": 4096}

    def only(policy):
        with LLM(DEFAULT_MODEL, **settings, kv_policy=policy) as llm:
            return said(llm, [None], seed=5)[0]

    expected = [only(policy) for policy in own]
    with LLM(DEFAULT_MODEL, **settings, kv_policy="pyramid:budget=64") as llm:
        assert len(llm._loaded.core.kv.layout.groups) > 1
        for _ in range(2):  # the second time with prefix hits
            assert said(llm, [*own, "off"], seed=5) == [*expected, alone("off")]
        assert llm.stats().pages_in_use == 0
