"""Prompt lookup as it is by default, in the built-in model, whose answers repeat themselves."""

from __future__ import annotations

import random
from typing import Any

import pytest

from serve import LLM, SamplingParams
from tests.serve.speculation.test_same_tokens import results
from tests.support.speculation.scripted import num_accepted

TASKS = (
    "Count from {a} to {b}.",
    "Tell me a story about a fox in {a} sentences.",
    "What is {a} plus {b}?",
    "Repeat after me: the quick brown fox jumps over the lazy dog {a} times, {b} times.",
)


def requests(seed: int, count: int, most: int) -> tuple[list[Any], list[SamplingParams]]:
    rng = random.Random(seed)
    chats, params = [], []
    for i in range(count):
        text = rng.choice(TASKS).format(a=rng.randint(1, 9), b=rng.randint(10, 40))
        chats.append([{"role": "user", "content": " ".join([text] * rng.choice((1, 1, 5)))}])
        some = SamplingParams(
            max_tokens=rng.randint(most // 2, most),
            temperature=rng.choice((0.0, 0.7, 1.0)),
            top_p=rng.choice((1.0, 0.9)),
            seed=rng.randrange(1000),
            repetition_penalty=rng.choice((1.0, 1.0, 1.1)),
            stop=() if i % 3 else ("seven", "fox"),
            logprobs=1 if i % 5 == 0 else None,
            n=1 + (i % 9 == 8),
            ignore_eos=i % 2 == 0,
        )
        params.append(some)
    return chats, params


def check(seeds: range, count: int, most: int, more: range = range(0), **settings: Any) -> int:
    """Compares answers with and without drafts; returns their number of tokens. more: seeds for a
    busy machine, on which drafts may not pay at first, as measured."""
    num_tokens = 0
    with LLM(speculation="off") as plain, LLM(**settings) as llm:
        for seed in (*seeds, *more):
            if seed in more and num_accepted(llm) > num_tokens / 200:
                break
            chats, params = requests(seed, count, most)
            expected = plain.chat(chats, params, use_tqdm=False)
            assert results(llm.chat(chats, params, use_tqdm=False)) == results(expected)
            num_tokens += sum(len(o.token_ids) for each in expected for o in each.outputs)
        stats = llm.stats()
        assert stats.num_draft_tokens >= stats.num_accepted_tokens > num_tokens / 200
        assert num_accepted(plain) == 0
        assert stats.pages_in_use == 0
    return num_tokens


def test_mixed_requests() -> None:
    check(range(1), 24, 60, more=range(1, 6))


@pytest.mark.exhaustive
def test_a_hundred_thousand_tokens() -> None:
    """64 requests at once, in chunks, with shared prefixes."""
    settings = {"max_num_seqs": 24, "max_chunk_tokens": 16, "max_num_batched_tokens": 64}
    assert check(range(14), 64, 260, **settings) > 100_000


@pytest.mark.exhaustive
@pytest.mark.small_pages
def test_preempted_sequences() -> None:
    """A draft takes no page that a sequence needs, and is forgotten with its preemption."""
    settings = {"memory_policy": "prompt_only", "kv_page_bytes": 4096, "max_model_len": 512}
    chats, params = requests(3, 20, 200)
    params = [SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True) for _ in params]
    with LLM(speculation="off") as plain:
        expected = results(plain.chat(chats, params, use_tqdm=False))
        num_bytes = 512 * plain._loaded.core.kv.token_bytes * 2
    with LLM(kv_cache_bytes=num_bytes, **settings) as llm:
        for _ in range(5):  # what runs at once depends on when each request arrives
            assert results(llm.chat(chats, params, use_tqdm=False)) == expected
            if llm.stats().num_preemptions and llm.stats().num_accepted_tokens:
                break
        assert llm.stats().num_preemptions > 0
        assert llm.stats().num_accepted_tokens > 0
        assert llm.stats().pages_in_use == 0
