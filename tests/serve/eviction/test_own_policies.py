"""Requests with an eviction policy of their own: beside others, with the bits of an engine that has
it for all."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from serve.engine.core_view import any_request
from serve.errors import RequestError
from tests.serve.eviction.test_eviction import (
    POLICIES,
    engine,
    generate,
    greedy,
    prompts,
    tokens_of,
)
from tests.support.engine.checkpoints import checkpoint
from tests.support.memory.evicting_reference import EvictingLlama
from tests.support.preempted import until_preempted

pytestmark = pytest.mark.small_pages
SERVER = "snapkv:budget=50%,least=1"
BUDGETS = {
    "window": "24,least=1",
    "h2o": "30%,least=1",
    "snapkv": "20,least=1",
    "keyformer": "25%,least=16",
    "pyramid": "24,least=1",
}
OWN = [f"{name}:budget={amount}" for name, amount in BUDGETS.items()]
MIXED = [*OWN, "h2o:budget=50%,least=1", "off", None]
FEW = [OWN[3], OWN[4], "off", None]


def each(policies, num_tokens=80, **settings):
    return [greedy(num_tokens, kv_policy=policy, **settings) for policy in policies]


def scored(outputs):
    """Returns the tokens with their log-probabilities."""
    answers = [answer for output in outputs for answer in output.outputs]
    return [
        [(t, of[t].logprob) for t, of in zip(one.token_ids, one.logprobs, strict=True)]
        for one in answers
    ]


def ask(llm, asked, params):
    return scored(llm.generate([{"prompt_token_ids": ids} for ids in asked], params))


@functools.cache
def alone(policy, kv_dtype="int8"):
    """Returns the answer of an engine whose policy this is to the one request that it has."""
    with engine(policy, kv_dtype=kv_dtype, prefix_cache=False) as llm:
        return ask(llm, prompts(130), greedy(logprobs=0))[0]


@pytest.mark.parametrize(
    ("server", "kv_dtype", "policies"),
    [
        (SERVER, "int8", FEW),
        *[
            pytest.param(server, kv_dtype, MIXED, marks=pytest.mark.exhaustive)
            for server in (SERVER, *OWN)
            for kv_dtype in ("int8", "float32", "bfloat16")
        ],
    ],
)
def test_policies_run_together_with_the_bits_of_each_alone(server, kv_dtype, policies):
    expected = [alone(policy or server, kv_dtype) for policy in policies]
    assert len({str(one) for one in expected[:-1]}) == len(policies) - 1, "the policies matter"
    asked, params = prompts(130) * len(policies), each(policies, logprobs=0)
    with engine(server, kv_dtype=kv_dtype, max_chunk_tokens=33) as llm:
        for _ in range(2):  # the second time with prefix hits
            assert ask(llm, asked, params) == expected
        for policy, answer in zip(policies, expected, strict=True):  # and one after the other
            assert ask(llm, asked[:1], each([policy], logprobs=0)) == [answer]
        assert llm.stats().pages_in_use == 0
    assert llm.stats().pages_mapped == 0


@pytest.mark.exhaustive
def test_answers_are_those_of_a_reference():
    """In floats, where the reference is exact; all policies in one batch."""
    names = list(POLICIES)
    asked, num_answer = prompts(*[70 + 7 * i for i in range(len(names))]), 75
    own = [f"{name}:budget=30%,least=1" for name in names]
    with engine("window:budget=40,least=1", kv_dtype="float32") as llm:
        found = generate(llm, asked, each(own, num_answer))
    for name, ids, answers in zip(names, asked, found, strict=True):
        reference = EvictingLlama(
            checkpoint("llama"), name, lambda n: max(1, -int(-n * 0.3 // 1)), seed=5
        )
        assert answers == [reference.generate(ids, num_answer)], name


def test_a_budget_of_everything_is_that_of_off():
    said = [*[f"{policy}:budget=100%" for policy in POLICIES], "off"]
    with engine("h2o:budget=24,least=1") as llm:
        answers = ask(llm, prompts(97) * len(said), each(said, 60, logprobs=0))
        assert answers == answers[-1:] * len(said)
        assert llm.stats().dropped_tokens == 0


def test_preempted_sequences_get_the_same_tokens():
    asked = prompts(*[60, 50, 64, 40, 55, 62, 58, 47], seed=4)
    params = each(MIXED, 150)
    with engine(SERVER) as llm:
        expected = generate(llm, asked, params)
        assert llm.stats().num_preemptions == 0
    small = {"kv_cache_bytes": 80 << 10, "memory_policy": "prompt_only", "max_model_len": 256}
    with engine(SERVER, **small) as llm:
        assert until_preempted(llm, lambda: generate(llm, asked, params)) == expected
        assert llm.stats().pages_in_use == 0


def test_outputs_of_one_request_have_its_policy():
    for policy in ("h2o:budget=24,least=1", "pyramid:budget=24,least=1"):
        sampled = {"temperature": 0.8, "n": 3}
        with engine(policy, prefix_cache=False) as llm:
            expected = generate(llm, prompts(100), greedy(70, **sampled))
        with engine(SERVER) as llm:
            assert generate(llm, prompts(100), each([policy], 70, **sampled)) == expected
            assert llm.stats().pages_in_use == 0


# ---- memory

TIGHT = {"kv_cache_bytes": 200 << 10, "max_num_seqs": 12, "max_model_len": 256}


@pytest.mark.parametrize("memory_policy", ["worst_case", "predicted"])
def test_small_budgets_are_counted_where_the_server_keeps_all(memory_policy, monkeypatch):
    """Twelve answers whose whole K/V would not fit run at once, without a preemption."""
    asked = prompts(*[60] * 12, seed=9)
    settings = TIGHT | {"prefix_cache": False, "memory_policy": memory_policy}

    def most_at_once(policy):
        with engine("snapkv:budget=100%", **settings) as llm:
            scheduler, running = llm._loaded.core._scheduler, []
            commit = scheduler.kv.commit

            def counted(*args):
                running.append(len(scheduler.running))
                return commit(*args)

            monkeypatch.setattr(scheduler.kv, "commit", counted)
            generate(llm, asked, each([policy] * 12, 90))
            stats = llm.stats()
            assert stats.pages_in_use == 0
            return max(running), stats.num_preemptions

    assert most_at_once("h2o:budget=16,least=1") == (12, 0)
    at_once, num_preemptions = most_at_once(None)
    assert at_once < 12 or num_preemptions > 0, "all of it does not fit"


def test_large_budgets_are_counted_where_the_server_keeps_little():
    """By the worst case none has to be computed again; counted as the server's they would be."""
    asked = prompts(*[60] * 12, seed=9)
    settings = TIGHT | {"prefix_cache": False}
    for memory_policy, preempts in (("worst_case", False), ("prompt_only", True)):
        with engine("h2o:budget=16,least=1", **settings, memory_policy=memory_policy) as llm:
            generate(llm, asked, each(["h2o:budget=90%,least=1"] * 12, 150))
            assert (llm.stats().num_preemptions > 0) is preempts
            assert llm.stats().pages_in_use == 0


def test_what_is_dropped_follows_the_own_budget():
    with engine("h2o:budget=100%", max_num_seqs=1) as llm:
        generate(llm, prompts(100), each(["window:budget=24,least=1"], 100))
        # 76 of the prompt, then 64 when 88 are held: at 164 computed tokens
        assert llm.stats().dropped_tokens == 76 + 64
        generate(llm, prompts(100), each([None], 100))
        assert llm.stats().dropped_tokens == 76 + 64


# ---- the prefix cache


@pytest.mark.parametrize(
    "policy",
    [
        "h2o",
        "snapkv",
        *[pytest.param(one, marks=pytest.mark.exhaustive) for one in ("window", "pyramid")],
    ],
)
def test_hits_end_where_the_own_rows_with_scores_begin(policy, monkeypatch):
    """Pages of prompts are shared whatever the policies are, and predicted as they are found."""
    own = f"{policy}:budget=24,least=1"
    (prompt,) = prompts(130)
    for server in ("h2o:budget=64", "window:budget=64"):
        with engine(server) as llm:
            view = llm._loaded.core.view
            # else a hit that takes longer to map than to compute is not used
            monkeypatch.setattr(llm._loaded.core.kv, "map_seconds", lambda hit: 0.0)
            generate(llm, [prompt], each(["off"], 2))
            [params] = each([own])
            request = dataclasses.replace(any_request(1, params), prompt_token_ids=tuple(prompt))
            predicted = view.num_cached_tokens(request)
            before = llm.stats().prefix_hit_tokens
            answer = tokens_of(llm.generate([{"prompt_token_ids": prompt}], params))
            assert predicted == llm.stats().prefix_hit_tokens - before
            assert (predicted == 0) == (policy in ("h2o", "keyformer"))
            assert answer == [[[token for token, _ in alone(own)]]]


# ---- refusals


def test_what_is_not_possible_is_refused_with_what_is():
    with engine("h2o:budget=25%") as llm:
        with pytest.raises(RequestError) as caught:
            generate(llm, prompts(20), each(["quest:budget=25%"], 3))
        assert caught.value.param == "kv_policy"
        assert str(caught.value) == (
            "kv_policy 'quest' cannot be used by a request here: the server runs with kv_policy"
            " h2o:budget=25%; a request may say off or NAME:budget=AMOUNT, where NAME is window,"
            " h2o, snapkv, keyformer or pyramid"
        )
        generate(llm, prompts(20), each(["pyramid:budget=25%"], 3))


def test_what_no_engine_has_is_refused_before_it_is_asked():
    for wanted, match in (
        ("best:budget=25%", "must be off or one of quest, window, .* not 'best'"),
        ("window", "needs a budget, such as window:budget=25%"),
        ("window:budget=25", "has a budget of 25 tokens: did you mean window:budget=25%"),
        ("keyformer:budget=0%", "must have a budget"),
    ):
        with pytest.raises(RequestError, match=f"^kv_policy {match}") as caught:
            greedy(3, kv_policy=wanted)
        assert caught.value.param == "kv_policy"
