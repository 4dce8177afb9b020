"""Drafts in steps with prompt rows change no token: chunks of any size, masks, preemption, hits."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import pytest

from serve import LLM, SamplingParams
from tests.serve.speculation import test_masked_drafts as masked
from tests.support.engine.checkpoints import VARIANTS, checkpoint
from tests.support.engine.variants.table import is_first
from tests.support.group.thread_workers import thread_workers  # noqa: F401
from tests.support.nodes.served_nodes import MIB, nodes
from tests.support.profile import every_day
from tests.support.speculation.mixed_requests import answers_of, requests, results
from tests.support.speculation.scripted import draft_by_script, num_accepted

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES, CHUNKS = ("float32", "int8"), (1, 7, 64)
FIRST = [v for v in VARIANTS if is_first(v)]
# Llama in all combinations, each other family with each dtype and two of the chunks.
CASES = [
    *product([v for v in FIRST if v.family == "llama"], DTYPES, CHUNKS),
    *[
        (variant, dtype, CHUNKS[(number + place) % 3])
        for number, variant in enumerate(v for v in FIRST if v.family != "llama")
        for place, dtype in enumerate(DTYPES)
    ],
]
OFTEN = [i for i, case in enumerate(CASES) if case[0].family in ("llama", "gemma2", "olmoe")]
FEW: dict[str, Any] = {"max_num_seqs": 5, "max_model_len": 160, "prefix_cache": False}


def draft(llm: LLM, prompts: list[Any], outputs: list[Any], rate: float) -> list[int]:
    """From now on steps have drafts. Returns a list that gets the draft tokens of each step with
    prompt rows."""
    draft_by_script(llm, answers_of(prompts, outputs), rate)
    scheduler, beside = llm._loaded.core._scheduler, list[int]()
    drafting, most_rows = scheduler.drafting, scheduler.limits.max_num_batched_tokens
    extend = drafting.extend

    def counted(plan: Any, *limits: Any) -> None:
        extend(plan, *limits)
        if plan.num_prompt_rows:
            beside.append(plan.num_drafted)
            assert plan.num_total_rows <= most_rows

    drafting.extend = counted  # type: ignore[method-assign]
    return beside


def check(llm: LLM, prompts: list[Any], params: list[Any], outputs: list[Any]) -> None:
    """Computes requests with drafts; outputs: what they must give."""
    chunk = llm._loaded.core._scheduler.limits.max_chunk_tokens
    for rate in (1.0, 0.7):
        beside, before = draft(llm, prompts, outputs, rate), num_accepted(llm)
        assert results(llm.generate(prompts, params, use_tqdm=False)) == results(outputs)
        assert num_accepted(llm) > before + 10
        assert chunk == 1 or sum(map(bool, beside)) > 2, "steps have drafts beside prompts"
    assert llm.stats().pages_in_use == 0


def long_prompts(count: int, shared: int = 0) -> list[Any]:
    rng = random.Random(1)
    start = [rng.randrange(5, 300) for _ in range(shared)]
    return [
        {"prompt_token_ids": [*start, *[rng.randrange(5, 300) for _ in range(rng.randint(3, 90))]]}
        for _ in range(count)
    ]


@pytest.mark.parametrize(("variant", "dtype", "chunk"), every_day(OFTEN, CASES), ids=str)
def test_every_family(variant, dtype, chunk):
    path = str(checkpoint(variant.family, variant.name))
    settings = FEW | {"dtype": dtype, "max_chunk_tokens": chunk}
    with LLM(path, max_num_batched_tokens=600, **settings) as llm:
        llm._loaded.core._scheduler.drafting = None  # records of states have room for drafts
        prompts, params = requests(300, 14, 30)
        check(llm, prompts, params, llm.generate(prompts, params, use_tqdm=False))


def test_grammars():
    prompts, (_, params) = long_prompts(14), masked.requests()
    with LLM(
        str(checkpoint("llama")), dtype="int8", speculation="off", max_chunk_tokens=7, **FEW
    ) as llm:
        check(llm, prompts, params, llm.generate(prompts, params, use_tqdm=False))


def test_within_the_rows_of_a_step():
    """Chunks take all rows of a step, but those that were worth it in the step before."""
    settings = FEW | {"dtype": "int8", "speculation": "off", "max_num_batched_tokens": 64}
    with LLM(str(checkpoint("llama")), **settings) as llm:
        prompts, params = requests(300, 14, 30)
        check(llm, prompts, params, llm.generate(prompts, params, use_tqdm=False))


@pytest.mark.parametrize("dtype", ["int8", "float32"])
@pytest.mark.parametrize("grid", [(2, 1), (1, 2)], ids=str)
def test_on_ranks(thread_workers, grid, dtype):  # noqa: F811
    tensor, stages = grid
    settings = FEW | {"dtype": dtype, "max_chunk_tokens": 7, "max_num_batched_tokens": 600}
    prompts, params = requests(300, 10, 30)
    with LLM(str(checkpoint("llama")), speculation="off", **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    settings |= {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
    with LLM(str(checkpoint("llama")), **settings) as llm:
        check(llm, prompts, params, outputs)


def test_on_memory_nodes(tmp_path):
    """Steps are also computed as two micro-batches."""
    settings = FEW | {"dtype": "int8", "max_chunk_tokens": 7}
    prompts, params = requests(300, 14, 30)
    with LLM(str(checkpoint("llama")), speculation="off", **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    with nodes("inproc", 2, tmp_path) as urls:
        there = {"memory_nodes": urls, "memory_partition": "head", "kv_cache_bytes": 16 * MIB}
        with LLM(str(checkpoint("llama")), **settings | there) as llm:
            check(llm, prompts, params, outputs)


@pytest.mark.small_pages
def test_preempted_sequences():
    settings = FEW | {"dtype": "int8", "kv_page_bytes": 4096, "memory_policy": "prompt_only"}
    prompts = long_prompts(12)
    params = [SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)] * 12
    with LLM(str(checkpoint("llama")), speculation="off", **settings) as llm:
        pages = llm._loaded.core.kv.pages_for(160)
        outputs = llm.generate(prompts, params, use_tqdm=False)
    settings |= {"kv_cache_bytes": (2 * pages + 1) * 4096, "max_chunk_tokens": 7}
    with LLM(str(checkpoint("llama")), **settings) as llm:
        check(llm, prompts, params, outputs)
        assert llm.stats().num_preemptions > 0


@pytest.mark.small_pages
def test_prefix_hits():
    settings = FEW | {"dtype": "int8", "kv_page_bytes": 4096, "max_chunk_tokens": 16}
    prompts = long_prompts(12, 60)
    params = [SamplingParams(max_tokens=9 + i, temperature=0.0, ignore_eos=True) for i in range(12)]
    with LLM(str(checkpoint("llama")), speculation="off", **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    with LLM(str(checkpoint("llama")), **settings | {"prefix_cache": True}) as llm:
        check(llm, prompts, params, outputs)
        assert llm.stats().prefix_hit_tokens > 100
