"""Whole generations with K/V on memory nodes behind real queue pairs (`make test-rdma`)."""

from __future__ import annotations

import functools

import pytest

from serve import LLM, SamplingParams
from tests.support.nodes.served_nodes import MIB, key_file, nodes
from tests.support.transport.rdma_device import device

__all__ = ["device"]

SETTINGS = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 128, "seed": 1}
SHARED = list(range(5, 75))
PROMPTS = [[7], [*SHARED[:40], 901, 902], [*SHARED, 4000], list(range(300, 317))]
PARAMS = [
    SamplingParams(max_tokens=12, temperature=temperature, seed=3, ignore_eos=True)
    for temperature in (0.0, 0.0, 0.8, 0.0)
]


def tokens_of(llm):
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@functools.cache
def local_tokens():
    with LLM(kv_cache_bytes=32 * MIB, **SETTINGS) as llm:
        return tokens_of(llm)


@pytest.mark.rdma
@pytest.mark.parametrize(
    ("count", "partition", "prefill"), [(2, "head", "local"), (1, "request", "remote")]
)
def test_tokens_are_those_of_the_local_engine(device, count, partition, prefill, tmp_path):
    with nodes("rdma", count, tmp_path) as urls:
        assert all(url.startswith("rdma://127.77.0.1:") for url in urls)
        with LLM(
            memory_nodes=urls,
            memory_partition=partition,
            memory_prefill=prefill,
            memory_node_key_file=key_file(tmp_path),
            kv_cache_bytes=16 * MIB,
            **SETTINGS,
        ) as llm:
            tokens = tokens_of(llm)
            stats = llm.stats()
    assert tokens == local_tokens()
    assert (stats.memory_nodes, stats.memory_nodes_lost) == (count, 0)
    assert stats.pages_in_use == 0
