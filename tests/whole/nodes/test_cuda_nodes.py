"""An engine on the CUDA back end over memory nodes, with Triton's kernels in the interpreter or on
a GPU, gives the tokens of the same engine with local K/V."""

from __future__ import annotations

import functools

import pytest

from tests.support.nodes.served_nodes import MIB, nodes
from tests.whole.cuda.test_cuda_engine import cuda_llm, greedy, prompts_of

pytestmark = pytest.mark.exhaustive

pytest.importorskip("triton")

CHUNKED = {"max_num_batched_tokens": 20}


def tokens_of(llm, seed: int) -> list[list[int]]:
    """The prompts run together in chunks, beside a sampled request with a penalty."""
    sampled = greedy(temperature=0.9, seed=3, top_p=0.8, repetition_penalty=1.2)
    outputs = llm.generate(prompts_of(300, seed), [greedy(), sampled, greedy()], use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@functools.cache
def local_tokens(family: str, name: str, seed: int) -> list[list[int]]:
    with cuda_llm(family, name, **CHUNKED) as llm:
        return tokens_of(llm, seed)


@pytest.mark.parametrize(
    ("partition", "prefill", "scheme"),
    [
        ("head", "local", "inproc"),
        ("head", "remote", "inproc"),
        ("request", "local", "inproc"),
        ("sequence", "local", "inproc"),
        ("sequence", "remote", "shm"),
    ],
)
def test_tokens_are_those_of_local_kv(partition, prefill, scheme, tmp_path):
    settings = {"memory_partition": partition, "memory_prefill": prefill}
    with (
        nodes(scheme, 2, tmp_path) as urls,
        cuda_llm(
            "llama", memory_nodes=tuple(urls), kv_cache_bytes=4 * MIB, **CHUNKED, **settings
        ) as llm,
    ):
        found = tokens_of(llm, 1)
        stats = llm.stats()
        staging = llm._loaded.core._runner._runner._attention.remote.staging
        assert staging.buffers.num_taken == 0
        assert (stats.memory_nodes, stats.memory_nodes_missing) == (2, 0)
        assert (stats.pages_in_use, stats.memory_nodes_lost) == (0, 0)
    assert found == local_tokens("llama", "base", 1)
