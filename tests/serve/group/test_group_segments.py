"""Sequences longer than a segment, on several ranks and holders, have the bits of one process."""

from __future__ import annotations

import functools
import random

import pytest

from ops.cpu import native_library
from serve import LLM, SamplingParams
from tests.support.engine.checkpoints import checkpoint
from tests.support.group.thread_workers import thread_workers  # noqa: F401
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
def alone(model=("llama", "long"), make_load=load, one_by_one=False, **settings):
    """The same from one process without holders."""
    return scores((1, 1), model, make_load, one_by_one, **settings)[0]


@pytest.mark.parametrize("count", [0, 1, 2])
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_ranks_and_holders_give_the_bits_of_one_process(
    thread_workers,  # noqa: F811
    grid,
    count,
    tmp_path,
):
    """Prompts are cut into chunks beside decoding sequences, share prefixes, and cross the ends of
    segments in prefill and decode."""
    with nodes("inproc", count, tmp_path) as urls:
        found, stats = scores(grid, **({"kvp": urls} if count else {}))
    assert found == alone()
    assert stats.memory_nodes == count
    assert stats.prefix_hit_tokens > 0
