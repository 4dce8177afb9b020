"""Sequences longer than a segment, on several ranks and holders, have the bits of one process."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
import threading
from contextlib import nullcontext

import pytest

from memory.nodes.segment_links import HeldSegments
from ops.cpu import native_library
from serve import LLM, Engine, SamplingParams
from serve.errors import ConfigError
from tests.support.engine.checkpoints import checkpoint
from tests.support.group.thread_workers import thread_workers  # noqa: F401
from tests.support.memory.one_store import one_store
from tests.support.nodes.served_nodes import MIB, nodes
from tests.support.profile import every_day

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.small_pages,
]
SEGMENT = 128
SETTINGS = {
    "dtype": "int8",
    "max_num_seqs": 5,
    "max_model_len": 512,
    "max_num_batched_tokens": 96,
    "kvp_segment_tokens": SEGMENT,
    "kv_cache_bytes": 4 * MIB,
    "kv_page_bytes": 4096,
    "seed": 1,
}
GRIDS = [(2, 1), (1, 2), (2, 2)]


def load(vocab=320, longest=512, count=6):
    """Prompts on both sides of segments' ends, some with a common prefix, and answers that cross
    such an end."""
    rng = random.Random(7)
    shared = [rng.randrange(5, vocab) for _ in range(longest // 5)]
    prompts, params = [], []
    for number in range(count):
        length = rng.choice([9, SEGMENT - 5, SEGMENT, longest // 3, 2 * longest // 3])
        own = [rng.randrange(5, vocab) for _ in range(length)]
        prompts.append((shared * (number % 2) + own)[: longest - 40])
        temperature = rng.choice([0.0, 0.8])
        params.append(
            SamplingParams(
                max_tokens=rng.choice([3, 20, 38]),
                temperature=temperature,
                seed=number,
                ignore_eos=True,
                logprobs=0,
            )
        )
    return prompts, params


def scores(grid, model=("llama", "long"), make_load=load, one_by_one=False, **settings):
    """Returns each answer's tokens with their log-probabilities, and the engine's counters."""
    tensor, stages = grid
    settings = SETTINGS | settings
    with LLM(
        str(checkpoint(*model)),
        tensor_parallel_size=tensor,
        pipeline_parallel_size=stages,
        **settings,
    ) as llm:
        prompts, params = make_load()
        found = []
        for _ in range(2):  # the second finds prefixes
            groups = zip(prompts, params, strict=True) if one_by_one else [(prompts, params)]
            for some, those in groups:
                some = [some] if one_by_one else some
                found += llm.generate(some, those, use_tqdm=False)
        stats = llm.stats()
    assert (stats.pages_in_use, stats.num_unfinished) == (0, 0)
    return [
        [(t, given[t].logprob) for t, given in zip(o.token_ids, o.logprobs, strict=True)]
        for output in found
        for o in output.outputs
    ], stats


@functools.cache
def alone(model=("llama", "long"), make_load=load, one_by_one=False, is_beside=False, **settings):
    """The same from one process without holders. is_beside: int4 K/V is as beside holders."""
    with one_store() if is_beside else nullcontext():
        return scores((1, 1), model, make_load, one_by_one, **settings)[0]


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("grid", "count", "kv_dtype"),
    [
        *((grid, count, "int8") for grid in GRIDS for count in (0, 1, 2)),
        *(((2, 1), count, "int4") for count in (0, 2)),
        ((1, 2), 0, "int4"),
    ],
)
def test_ranks_and_holders_give_the_bits_of_one_process(
    thread_workers,  # noqa: F811
    grid,
    count,
    kv_dtype,
    tmp_path,
):
    """Prompts are cut into chunks beside decoding sequences, share prefixes, and cross the ends of
    segments in prefill and decode."""
    with nodes("inproc", count, tmp_path) as urls:
        holders = {"kvp": urls} if count else {}
        found, stats = scores(grid, kv_dtype=kv_dtype, **holders)
    assert found == alone(kv_dtype=kv_dtype, is_beside=count > 0)
    assert stats.memory_nodes == count
    assert stats.prefix_hit_tokens > 0


def few():
    return load(count=2)


@pytest.mark.parametrize("grid", GRIDS[:2], ids=str)
def test_int4_weights_have_the_same_bits(thread_workers, grid, tmp_path):  # noqa: F811
    with nodes("inproc", 2, tmp_path) as urls:
        found, _ = scores(grid, make_load=few, kvp=urls, dtype="int4")
    assert found == alone(make_load=few, dtype="int4")
    assert found != alone(make_load=few)


@pytest.mark.parametrize("grid", GRIDS[:2], ids=str)
def test_fp32_sequences_that_run_alone_have_the_same_bits(thread_workers, grid, tmp_path):  # noqa: F811
    """Beside others, and after a prefix hit, their last bits depend on the chunks, on one process
    too."""
    settings = {"dtype": "float32", "prefix_cache": False}
    with nodes("inproc", 1, tmp_path) as urls:
        found, _ = scores(grid, make_load=few, one_by_one=True, kvp=urls, **settings)
    assert found == alone(make_load=few, one_by_one=True, **settings)


@pytest.mark.parametrize(
    ("model", "grid"),
    every_day((0, 1), [(("gpt_oss", "long"), (2, 1)), (("deepseek_v2", "long"), (2, 1))]),
)
def test_other_kinds_of_layers(thread_workers, model, grid, tmp_path):  # noqa: F811
    """Windows, sinks, latents. Layers with windows stay in the ranks' own memory."""
    with nodes("inproc", 2, tmp_path) as urls:
        found, _ = scores(grid, model, few, kvp=urls)
    assert found == alone(model, few)


def growing():
    """Prompts that fit into memory together, but whose sequences outgrow it."""
    rng = random.Random(8)
    prompts = [[rng.randrange(5, 320) for _ in range(length)] for length in (100, 95, 250, 245)]
    return prompts, [
        SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True, logprobs=0, seed=1)
    ] * 4


@pytest.mark.parametrize("grid", GRIDS[:2], ids=str)
def test_preempted_sequences_have_the_same_bits(thread_workers, grid, tmp_path):  # noqa: F811
    """The node is short."""
    settings = {"memory_policy": "prompt_only", "max_model_len": 384, "prefix_cache": False}
    with nodes("inproc", 1, tmp_path, capacity_bytes=200 << 10) as urls:
        found, stats = scores(grid, make_load=growing, kvp=urls, **settings)
    assert stats.num_preemptions > 0
    assert found == alone(make_load=growing, max_model_len=384)


def ended():
    """Long sequences, one after the other, each ended from outside while a step of it is in flight,
    beside a short one that goes on."""
    rng = random.Random(9)
    return [[rng.randrange(5, 320) for _ in range(length)] for length in (200, 9)]


@pytest.mark.parametrize("grid", [(1, 2), (2, 2)], ids=str)
def test_sequences_that_are_aborted_cost_no_holder(thread_workers, grid, tmp_path):  # noqa: F811
    """The last long sequence's memory is released while later steps are in flight: no rank may hear
    of that before those steps' own edits."""
    long, short = ended()
    endless = SamplingParams(max_tokens=280, ignore_eos=True, temperature=0.0)

    async def run(urls):
        ranks = {"tensor_parallel_size": grid[0], "pipeline_parallel_size": grid[1]}
        async with Engine(
            str(checkpoint("llama", "long")), kvp=urls, **ranks, **SETTINGS
        ) as engine:
            beside = asyncio.ensure_future(engine.generate(short, endless))
            for number in range(6):
                stream, count = engine.submit(long, endless), 0
                async for delta in stream:
                    count += len(delta.token_ids)
                    if count >= 3 + number:
                        break
                stream.abort()
            output = await beside
            return output.outputs[0].token_ids, engine.stats()

    with nodes("inproc", 1, tmp_path) as urls:
        tokens, stats = asyncio.run(run(urls))
    assert stats.memory_nodes_lost == 0
    assert len(tokens) == 280


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("grid", "rank"), [((2, 1), 0), ((2, 1), 1), ((1, 2), 0), ((1, 2), 1)], ids=str
)
def test_a_lost_holder_costs_a_pause_and_no_token(
    thread_workers,  # noqa: F811
    monkeypatch,
    grid,
    rank,
    tmp_path,
):
    """Whichever rank loses its connection, all attach again; sequences with segments there are
    computed again."""
    begin, counts = HeldSegments.begin, itertools.count()

    def cut_off_once(held, layer, q):
        begin(held, layer, q)
        name = threading.current_thread().name
        is_it = name == f"rank-{rank}" if rank else not name.startswith("rank-")
        if is_it and held._holders and next(counts) == 40:
            held._holders[0].link.endpoint.close()

    monkeypatch.setattr(HeldSegments, "begin", cut_off_once)
    with nodes("inproc", 1, tmp_path) as urls:
        found, stats = scores(grid, kvp=urls)
    assert next(counts) > 40
    assert (stats.memory_nodes_lost, stats.memory_nodes_missing) == (1, 0)
    assert stats.recomputed_sequences > 0
    assert found == alone()
    assert thread_workers[0].num_started == grid[0] * grid[1] - 1


@pytest.mark.parametrize("grid", GRIDS[:2], ids=str)
def test_a_lost_rank_attaches_again(thread_workers, monkeypatch, grid, tmp_path):  # noqa: F811
    begin, counts = HeldSegments.begin, itertools.count()

    def lose_once(held, layer, q):
        begin(held, layer, q)
        if threading.current_thread().name == "rank-1" and next(counts) == 40:
            thread_workers[0].workers[1]._engine.close()

    monkeypatch.setattr(HeldSegments, "begin", lose_once)
    with nodes("inproc", 2, tmp_path) as urls:
        found, stats = scores(grid, kvp=urls)
    assert thread_workers[0].num_started == 2
    assert stats.recomputed_sequences > 0
    assert (stats.memory_nodes, stats.memory_nodes_missing) == (2, 0)
    assert found == alone()


def test_what_a_group_with_holders_does_not_have_is_named(tmp_path):
    path = str(checkpoint("llama", "long"))
    with pytest.raises(ConfigError, match="memory_nodes needs a model on one rank"):
        LLM(path, tensor_parallel_size=2, memory_nodes=["inproc://a"])
