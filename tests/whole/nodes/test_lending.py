"""A replica whose memory is full uses pages that another one lends, and the results are the same.

The lender's own sequences have precedence: they get the pages back at once."""

from __future__ import annotations

import threading
import time

import pytest

from serve import LLM, SamplingParams
from serve.config import DEFAULT_MODEL
from serve.errors import ConfigError
from tests.support.memory.one_store import one_store
from tests.support.nodes.served_nodes import MIB

SETTINGS = {
    "dtype": "int8",
    "max_num_seqs": 12,
    "max_model_len": 512,
    "max_num_batched_tokens": 96,
    "memory_policy": "prompt_only",
    "seed": 1,
}
SMALL = 1 << 20
SMALL_LENDER = {"kv_cache_bytes": SMALL, "lend_bytes": SMALL // 2}


def prompts(count, length=200, first=0):
    return [
        [(n * 37 + i * (n + 3)) % 3000 + 5 for i in range(length)]
        for n in range(first, first + count)
    ]


def greedy(num_tokens):
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=0)


def answers(outputs):
    found = []
    for output in outputs:
        one = output.outputs[0]
        assert one.finish_reason == "length"
        found.append(
            [(t, at[t].logprob) for t, at in zip(one.token_ids, one.logprobs, strict=True)]
        )
    return found


def pages_are_back(llm, timeout_s=5.0):
    """Waits until nothing is lent; returns whether that came true."""
    until_s = time.monotonic() + timeout_s
    while llm.stats().kvp_lent_bytes and time.monotonic() < until_s:
        time.sleep(0.01)
    return llm.stats().kvp_lent_bytes == 0


class MostRunning:
    """Notes the most running sequences and borrowed bytes of an engine, in a thread."""

    def __init__(self, llm):
        self.running = self.borrowed = 0
        self._llm, self._end = llm, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        while not self._end.wait(0.002):
            stats = self._llm.stats()
            self.running = max(self.running, stats.num_running)
            self.borrowed = max(self.borrowed, stats.kvp_borrowed_bytes)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self._thread.join()


@pytest.mark.parametrize(("kv_dtype", "small"), [("int8", SMALL), ("int4", SMALL * 9 // 16)])
def test_a_full_replica_runs_more_sequences_with_the_same_bits(tmp_path, kv_dtype, small):
    params, many = greedy(20), prompts(12)
    own = SETTINGS | {"kv_dtype": kv_dtype, "kv_cache_bytes": small}
    with one_store(), LLM(DEFAULT_MODEL, **own) as llm, MostRunning(llm) as alone:
        expected = answers(llm.generate(many, params, use_tqdm=False))
    url = f"inproc://{tmp_path.name}"
    lends = {"lend": url, "lend_bytes": 4 * MIB, "kv_cache_bytes": 8 * MIB}
    with (
        LLM(DEFAULT_MODEL, kv_dtype=kv_dtype, **lends, **SETTINGS) as lender,
        LLM(DEFAULT_MODEL, borrow=[url], **own) as llm,
    ):
        with MostRunning(llm) as most:
            found = answers(llm.generate(many, params, use_tqdm=False))
        assert found == expected
        assert most.borrowed > 0
        assert most.running >= 1.8 * alone.running
        assert llm.stats().pages_in_use == 0
        assert pages_are_back(lender)
        lender._loaded.core.kv.check_integrity()


@pytest.mark.exhaustive
def test_the_lenders_own_requests_get_the_pages_back_and_no_token_changes(tmp_path):
    """The borrower uses most of the lender's memory when the lender gets requests that need all of
    it. None of these is preempted, and the borrower's sequences are computed again."""
    params, many, own = greedy(120), prompts(12), prompts(6, 480, first=40)
    with LLM(DEFAULT_MODEL, kv_cache_bytes=8 * MIB, **SETTINGS) as llm:
        expected = answers(llm.generate(many, params, use_tqdm=False))
        own_expected = answers(llm.generate(own, greedy(20), use_tqdm=False))
    url = f"inproc://{tmp_path.name}"
    lends = {"lend": url, "lend_bytes": 3 * MIB, "kv_cache_bytes": 4 * MIB}
    with (
        LLM(DEFAULT_MODEL, **lends, **SETTINGS) as lender,
        LLM(DEFAULT_MODEL, kv_cache_bytes=SMALL, borrow=[url], **SETTINGS) as llm,
    ):
        found = []
        thread = threading.Thread(
            target=lambda: found.append(answers(llm.generate(many, params, use_tqdm=False)))
        )
        thread.start()
        until_s = time.monotonic() + 20
        while lender.stats().kvp_lent_bytes < 2 * MIB and time.monotonic() < until_s:
            time.sleep(0.005)
        assert lender.stats().kvp_lent_bytes >= 2 * MIB
        own_found = answers(lender.generate(own, greedy(20), use_tqdm=False))
        node = lender._loaded.lender.node
        assert node.num_recalled > 0
        thread.join()
        stats = llm.stats()
        assert stats.recomputed_sequences > 0 and stats.memory_nodes_lost == 0
        assert lender.stats().num_preemptions == 0
        assert pages_are_back(lender)
        lender._loaded.core.kv.check_integrity()
    assert found == [expected]
    assert own_found == own_expected


@pytest.mark.exhaustive
def test_replicas_lend_to_each_other_and_one_that_leaves_costs_no_token(tmp_path):
    """The first replica starts while the other is absent, and finds it later."""
    params, many = greedy(60), prompts(10)
    one, other = (f"inproc://{tmp_path.name}-{number}" for number in range(2))
    sizes = {"lend_bytes": 3 * MIB, "kv_cache_bytes": 4 * MIB}
    with LLM(DEFAULT_MODEL, kv_cache_bytes=8 * MIB, **SETTINGS) as llm:
        expected = answers(llm.generate(many, params, use_tqdm=False))
    with (
        LLM(DEFAULT_MODEL, lend=one, borrow=[other], **SETTINGS, **(sizes | SMALL_LENDER)) as llm,
        LLM(DEFAULT_MODEL, lend=other, borrow=[one], **SETTINGS, **sizes) as lender,
    ):
        until_s = time.monotonic() + 20
        while not llm.stats().kvp_holders and time.monotonic() < until_s:
            time.sleep(0.02)
        assert (llm.stats().kvp_holders, lender.stats().kvp_holders) == (1, 1)
        found = []
        thread = threading.Thread(
            target=lambda: found.append(answers(llm.generate(many, params, use_tqdm=False)))
        )
        thread.start()
        while not lender.stats().kvp_lent_bytes and time.monotonic() < until_s:
            time.sleep(0.005)
        assert lender.stats().kvp_lent_bytes > 0
        lender._loaded.lender.close()
        thread.join()
        assert llm.stats().recomputed_sequences > 0
        assert lender.stats().kvp_lent_bytes == 0 or pages_are_back(lender)
    assert found == [expected]


def test_a_borrower_whose_connection_breaks_gives_everything_back(tmp_path):
    params, many = greedy(60), prompts(10)
    url = f"inproc://{tmp_path.name}"
    with LLM(DEFAULT_MODEL, kv_cache_bytes=8 * MIB, **SETTINGS) as llm:
        expected = answers(llm.generate(many, params, use_tqdm=False))
    with (
        LLM(
            DEFAULT_MODEL, lend=url, lend_bytes=3 * MIB, kv_cache_bytes=4 * MIB, **SETTINGS
        ) as lender,
        LLM(DEFAULT_MODEL, kv_cache_bytes=SMALL, borrow=[url], **SETTINGS) as llm,
    ):
        found = []
        thread = threading.Thread(
            target=lambda: found.append(answers(llm.generate(many, params, use_tqdm=False)))
        )
        thread.start()
        until_s = time.monotonic() + 20
        while not lender.stats().kvp_lent_bytes and time.monotonic() < until_s:
            time.sleep(0.005)
        llm._loaded.core._recovery.nodes.interrupt()
        thread.join()
        assert llm.stats().memory_nodes_lost == 1
        assert pages_are_back(lender)
        lender._loaded.core.kv.check_integrity()
    assert found == [expected]


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"lend": "7000"}, "lend must be an address"),
        ({"lend": "inproc://a", "lend_bytes": 1 << 40}, "lend_bytes .* must be from"),
        ({"lend": "tcp://127.0.0.1:0"}, "memory_node_key_file"),
        ({"borrow": ["inproc://a"], "kvp": ["inproc://b"]}, "borrow cannot be used with kvp"),
        ({"lend": "inproc://a", "memory_nodes": ["inproc://b"]}, "lend cannot be used with"),
    ],
)
def test_settings_that_are_refused(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        LLM(DEFAULT_MODEL, kv_cache_bytes=4 * MIB, **(SETTINGS | settings))
