"""Greedy tokens equal Hugging Face Transformers' under mixed load, for every family.

Each prompt is served while 16 other requests of random lengths and sampling settings run in the
same batches, with prefill chunks of 1, 7 and 64 rows for the first shape of each family and of
7 rows for the others. The everyday tests take chunks of 7 for the first shape of each family, and
all sizes for that of Llama.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from serve import LLM, SamplingParams
from tests.support.engine.checkpoints import VARIANTS, Variant, checkpoint, reference_greedy
from tests.support.engine.variants import classic
from tests.support.engine.variants.table import is_first
from tests.support.preempted import until_preempted

NUM_TOKENS = 20
PROMPT_LENGTHS = (1, 5, 23, 70)
NUM_OTHERS = 16
FIRST_FAMILIES = set(classic.BASES)


def _prompts(vocab_size: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, vocab_size) for _ in range(n)] for n in PROMPT_LENGTHS]


def _others(vocab_size: int, seed: int) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(2, vocab_size) for _ in range(rng.randint(1, 90))] for _ in range(NUM_OTHERS)
    ]
    params = [
        SamplingParams(
            max_tokens=rng.randint(1, 50),
            temperature=rng.choice([0.0, 0.8, 1.3]),
            top_k=rng.choice([0, 20]),
            top_p=rng.choice([1.0, 0.9]),
            ignore_eos=True,
        )
        for _ in range(NUM_OTHERS)
    ]
    return prompts, params


def _cases() -> list[Any]:
    steady = [variant for variant in VARIANTS if variant.is_steady]
    return [
        pytest.param(
            variant,
            chunk,
            id=f"{variant}-{chunk}",
            marks=[] if _is_everyday(variant, chunk) else [pytest.mark.exhaustive],
        )
        for variant in steady
        for chunk in ((1, 7, 64) if _is_early(variant) else (7,))
    ]


def _is_early(variant: Variant) -> bool:
    return variant.family in FIRST_FAMILIES or is_first(variant)


def _is_everyday(variant: Variant, chunk: int) -> bool:
    return is_first(variant) and (chunk == 7 or variant.family == "llama")


@pytest.mark.parametrize(("variant", "chunk"), _cases())
def test_greedy_tokens_equal_transformers(variant, chunk):
    path = checkpoint(variant.family, variant.name)
    vocab_size = variant.settings.get("vocab_size", 320)
    targets = _prompts(vocab_size, seed=hash_of(variant, 0))
    others, other_params = _others(vocab_size, seed=hash_of(variant, chunk))
    greedy = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True)
    # targets are spread among the others, so that they start and end at different steps
    prompts, params = list(others), list(other_params)
    offsets = [0, 5, 11, len(prompts)]
    for i, offset in enumerate(offsets):
        prompts.insert(offset + i, targets[i])
        params.insert(offset + i, greedy)
    with LLM(
        str(path), dtype="float32", max_num_seqs=24, max_chunk_tokens=chunk, max_model_len=200
    ) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats().pages_in_use == 0
        assert llm.stats().num_preemptions == 0
    for i, offset in enumerate(offsets):
        expected = reference_greedy_cached(path, tuple(targets[i]))
        assert outputs[offset + i].outputs[0].token_ids == expected, f"prompt {i}"


_expected: dict[tuple[object, ...], list[int]] = {}


def reference_greedy_cached(path, prompt):
    key = (path, prompt)
    if key not in _expected:
        _expected[key] = reference_greedy(path, list(prompt), NUM_TOKENS)
    return _expected[key]


def hash_of(variant, extra: int) -> int:
    return sum(ord(c) * (i + 1) for i, c in enumerate(str(variant))) * 100 + extra


@pytest.mark.small_pages
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2"])
def test_tokens_are_the_same_after_preemption(family):
    """Memory holds a fraction of the sequences; preemption and recomputation change no token."""
    path = checkpoint(family, "base")
    targets = _prompts(320, seed=3) + _prompts(320, seed=4)
    greedy = SamplingParams(max_tokens=NUM_TOKENS * 3, temperature=0.0, ignore_eos=True)
    with LLM(
        str(path),
        dtype="float32",
        max_num_seqs=16,
        max_model_len=140,
        kv_page_bytes=4096,
        kv_cache_bytes=400 * 4096,
    ) as llm:
        roomy = llm.generate(targets, greedy, use_tqdm=False)
        assert llm.stats().num_preemptions == 0
    token_bytes = {"llama": 512, "mistral": 512, "gpt2": 1152}[family]
    pages = -(-140 * token_bytes // 4096) + 4
    with LLM(
        str(path),
        dtype="float32",
        max_num_seqs=16,
        max_model_len=140,
        kv_page_bytes=4096,
        memory_policy="prompt_only",
        kv_cache_bytes=pages * 4096,
    ) as llm:
        tight = until_preempted(llm, lambda: llm.generate(targets, greedy, use_tqdm=False))
        assert llm.stats().pages_in_use == 0
    for one, other in zip(roomy, tight, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids


def test_logprobs_equal_transformers():
    import torch

    from tests.support.engine.checkpoints import reference_logits

    path = checkpoint("llama", "base")
    prompt = _prompts(320, seed=9)[2]
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=5)
    with LLM(str(path), dtype="float32") as llm:
        output = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]
    logits = reference_logits(path, prompt + output.token_ids)
    expected = torch.log_softmax(logits, -1)
    total = 0.0
    for i, (token, entry) in enumerate(zip(output.token_ids, output.logprobs, strict=True)):
        row = expected[len(prompt) - 1 + i]
        assert len(entry) == 5
        for candidate, item in entry.items():
            assert item.logprob == pytest.approx(float(row[candidate]), abs=1e-3)
        assert entry[token].rank == 1
        total += entry[token].logprob
    assert output.cumulative_logprob == pytest.approx(total)
