"""Models with sliding windows give the same tokens over sequences of many windows, whichever pages
are released, shared, preempted or loaded from disk."""

from __future__ import annotations

import functools
import random
from itertools import product
from pathlib import Path

import pytest

import memory.range_mapper
from memory.pages.layer_groups import GroupPages
from ops.cpu import native_library
from serve import LLM, SamplingParams
from serve.cli.eval import parse_precision
from serve.config import EngineConfig
from serve.loading.runtime import load_runtime
from serve.scheduler.step_time import StepTimeModel
from tests.support.engine.checkpoints import LONG_VARIANTS, checkpoint, reference_greedy
from tests.support.preempted import until_preempted
from tests.support.profile import every_day

pytestmark = pytest.mark.small_pages
SETTINGS = {"kv_page_bytes": 4096, "max_model_len": 480, "max_num_seqs": 8}
ROOMY = {"kv_cache_bytes": 16 << 20}
PRECISIONS = ["float32", "bfloat16"]
PRECISIONS += ["int8", "int8/int4"] if native_library.is_available() else []
PREFIX = [(7 * i) % 90 + 3 for i in range(300)]


def path_of(variant) -> str:
    return str(checkpoint(variant.family, variant.name))


def types_of(precision: str) -> dict[str, str]:
    dtype, kv_dtype = parse_precision(precision)
    return {"dtype": dtype, "kv_dtype": kv_dtype}


def greedy(num_tokens: int = 60) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)


LENGTHS = (5, 90, 200, 333, 400)


def prompts(lengths=LENGTHS) -> list[dict[str, list[int]]]:
    rng = random.Random(7)
    return [{"prompt_token_ids": [rng.randrange(2, 320) for _ in range(n)]} for n in lengths]


def generate(llm: LLM, requests, num_tokens: int = 60) -> list[object]:
    """Returns the tokens and the exact sum of their log-probabilities."""
    outputs = [r.outputs[0] for r in llm.generate(requests, greedy(num_tokens), use_tqdm=False)]
    assert llm.stats().pages_in_use == 0
    llm._loaded.core.kv.check_integrity()
    return [(o.token_ids, o.cumulative_logprob) for o in outputs]


@functools.cache
def without_release(
    path: str, precision: str, lengths=LENGTHS, num_tokens: int = 60
) -> list[object]:
    """Returns the outputs without released pages, one request after the other."""
    first_slot = GroupPages.first_slot
    GroupPages.first_slot = lambda self, num_computed: 0
    try:
        with LLM(path, **types_of(precision), prefix_cache=False, **SETTINGS, **ROOMY) as llm:
            return [generate(llm, one, num_tokens)[0] for one in prompts(lengths)]
    finally:
        GroupPages.first_slot = first_slot


@pytest.fixture(autouse=True)
def unmap_at_once(monkeypatch):
    """Unmaps released pages at once, so that an access behind a window ends with SIGSEGV."""
    monkeypatch.setattr(memory.range_mapper, "_UNMAP_SLOTS", 1)


@pytest.mark.parametrize(
    ("variant", "chunk"), every_day((0, 3), list(product(LONG_VARIANTS, [7, 256])))
)
def test_greedy_tokens_equal_transformers(variant, chunk):
    path = path_of(variant)
    settings = SETTINGS | {"max_chunk_tokens": chunk}
    with LLM(path, dtype="float32", **settings, **ROOMY) as llm:
        answers = generate(llm, prompts())
    for (token_ids, _), prompt in zip(answers, prompts(), strict=True):
        assert token_ids == reference(path, tuple(prompt["prompt_token_ids"]))


@functools.cache
def reference(path: str, prompt: tuple[int, ...]) -> list[int]:
    return reference_greedy(Path(path), list(prompt), 60)


@pytest.mark.covering(2)
@pytest.mark.parametrize("chunk", [13, 256])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("variant", LONG_VARIANTS, ids=str)
def test_released_pages_change_no_bit(variant, precision, chunk):
    if native_library.instruction_set() == "portable" and "int8" not in precision:
        pytest.skip("torch's prefill attention has other sums")
    path = path_of(variant)
    with LLM(path, **types_of(precision), max_chunk_tokens=chunk, **SETTINGS, **ROOMY) as llm:
        assert generate(llm, prompts()) == without_release(path, precision)


@pytest.mark.parametrize(
    ("variant", "precision"),
    every_day(
        (0, 3), list(product(LONG_VARIANTS, [each for each in PRECISIONS if each != "bfloat16"]))
    ),
)
def test_preemption_in_memory_for_one_sequence(variant, precision):
    """bfloat16 is left out, since a recomputed row has other bits than a decoded one there."""
    path = path_of(variant)
    lengths = (3, 5, 9, 9, 30, 200, 3, 4)
    small = {"kv_cache_bytes": least_pages(path, precision) * 4096, "memory_policy": "prompt_only"}
    with LLM(path, **types_of(precision), max_chunk_tokens=40, **SETTINGS, **small) as llm:
        first = generate(llm, prompts(lengths), 200)
        again = until_preempted(llm, lambda: generate(llm, prompts(lengths), 200))
        assert llm.stats().prefix_evicted_pages > 0
    tokens = [token_ids for token_ids, _ in without_release(path, precision, lengths, 200)]
    assert [token_ids for token_ids, _ in first] == tokens
    assert [token_ids for token_ids, _ in again] == tokens


def least_pages(path: str, precision: str) -> int:
    """Returns the pages of one sequence of max_model_len."""
    config = EngineConfig(
        model=path, **types_of(precision), max_chunk_tokens=40, **SETTINGS, **ROOMY
    )
    runtime = load_runtime(config)
    pages = runtime.kv.pages_for(480)
    kv_memory = runtime.memory
    del runtime
    kv_memory.close()
    return pages


@pytest.mark.covering(1)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("variant", LONG_VARIANTS, ids=str)
def test_a_prefix_hit_changes_no_bit(variant, precision):
    if native_library.instruction_set() == "portable" and "int8" not in precision:
        pytest.skip("torch's prefill attention has other sums")
    path = path_of(variant)
    requests = [
        {"prompt_token_ids": [*PREFIX, *tail]} for tail in ([], [5], [5, 6, 7], range(10, 50))
    ]
    with LLM(path, **types_of(precision), prefix_cache=False, **SETTINGS, **ROOMY) as llm:
        expected = generate(llm, requests)
    with LLM(path, **types_of(precision), **SETTINGS, **ROOMY) as llm:
        assert [generate(llm, one)[0] for one in requests] == expected
        one_by_one = llm.stats().prefix_hit_tokens
        assert one_by_one > 3 * 200
        assert generate(llm, requests) == expected
        assert llm.stats().prefix_hit_tokens > one_by_one + 4 * 220


@pytest.mark.parametrize("variant", LONG_VARIANTS, ids=str)
def test_the_next_turn_hits_the_previous_turn(variant):
    """The hit needs only the pages that its windows reach."""
    with LLM(path_of(variant), dtype="float32", **SETTINGS, **ROOMY) as llm:
        first = llm.generate({"prompt_token_ids": PREFIX}, greedy(100), use_tqdm=False)[0]
        turn = [*PREFIX, *first.outputs[0].token_ids, 4, 5, 6]
        second = llm.generate({"prompt_token_ids": turn}, greedy(), use_tqdm=False)[0]
    assert second.metrics.num_cached_tokens >= 400 - 32


@pytest.mark.parametrize("variant", LONG_VARIANTS, ids=str)
def test_prefixes_are_loaded_from_disk(variant, tmp_path, monkeypatch):
    # A busy machine may need longer to map pages than this small model to compute them.
    monkeypatch.setattr(StepTimeModel, "prefill_seconds", lambda *_: 0.0)
    path = path_of(variant)
    settings = SETTINGS | {"dtype": "float32", "kv_cache_dir": str(tmp_path)}
    requests = [{"prompt_token_ids": [k, *PREFIX]} for k in range(3, 9)]
    with LLM(path, dtype="float32", prefix_cache=False, **SETTINGS, **ROOMY) as llm:
        expected = generate(llm, requests)
    with LLM(path, **settings, **ROOMY) as llm:
        assert generate(llm, requests) == expected
    with LLM(path, **settings, **ROOMY) as llm:
        assert generate(llm, requests) == expected
        stats = llm.stats()
    assert stats.disk_loaded_pages >= 6 * 5, "at least the pages within the window"
    assert stats.disk_lost_pages == 0
    assert stats.prefix_hit_tokens > 6 * 250


@pytest.mark.parametrize("variant", LONG_VARIANTS, ids=str)
def test_a_window_makes_room_for_a_longer_context(variant):
    """The context would not fit into the memory if all layers kept all tokens."""
    path = path_of(variant)
    pages = least_pages(path, "float32")
    num_layers = {"qwen2": 4, "mistral": 2}[variant.family]
    assert pages < 480 * num_layers * 256 // 4096 * 0.8
    settings = SETTINGS | {"max_chunk_tokens": 40, "kv_cache_bytes": pages * 4096}
    with LLM(path, dtype="float32", **settings) as llm:
        answers = generate(llm, prompts((400,)))
    assert answers[0][0] == reference(path, tuple(prompts((400,))[0]["prompt_token_ids"]))
