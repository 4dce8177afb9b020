"""An engine on the CUDA back end, interpreted, whose stream exchanges rows with memory nodes by
lanes (tests/support/cuda/fakes_lane.py), gives the tokens of the same engine with local K/V."""

from __future__ import annotations

import threading
import time

import pytest

from memory.nodes.server import node_lane
from serve.loading import cuda_remote
from tests.support.cuda.fakes_lane import LaneHub
from tests.support.nodes.served_nodes import MIB, nodes
from tests.whole.cuda.test_cuda_engine import cuda_llm, greedy, prompts_of
from tests.whole.nodes.test_cuda_nodes import CHUNKED, local_tokens, tokens_of

pytestmark = pytest.mark.exhaustive

pytest.importorskip("triton")


@pytest.fixture
def hub(monkeypatch) -> LaneHub:
    hub = LaneHub()
    monkeypatch.setattr(node_lane, "accept", hub.accept)
    monkeypatch.setattr(cuda_remote, "open_lanes", lambda config, device: hub.lanes(4))
    return hub


def links_of(llm):
    nodes = llm._loaded.core._runner._runner._attention.remote._nodes
    return [link for partition in nodes.partitions for link in partition.links]


@pytest.mark.parametrize(
    ("partition", "prefill", "num_nodes"),
    [
        ("head", "local", 1),
        ("head", "remote", 2),
        ("request", "local", 2),
        ("sequence", "local", 2),
    ],
)
def test_tokens_are_those_of_local_kv(hub, partition, prefill, num_nodes, tmp_path):
    settings = {"memory_partition": partition, "memory_prefill": prefill} | CHUNKED
    settings |= {"dtype": "float32", "kv_cache_bytes": 4 * MIB}
    with nodes("inproc", num_nodes, tmp_path) as urls:
        with cuda_llm("llama", memory_nodes=tuple(urls), **settings) as llm:
            found = tokens_of(llm, 1)
            assert all(link.lane.num_steps > 2 for link in links_of(llm))
            assert llm.stats().memory_nodes_lost == 0
        assert hub.num_open == 0 and not hub.driver.registered
    assert found == local_tokens("llama", "base", "float32", 1)


def test_a_node_that_is_lost_while_the_stream_waits_for_it(hub, tmp_path):
    """The stream is released, the step is void, and the tokens are the same."""
    prompt, params = prompts_of(300, 3)[1], greedy(12)
    with cuda_llm("llama", **CHUNKED) as llm:
        want = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    writes = []

    def hang(lane, number) -> None:
        writes.append(number)
        if len(writes) == 6:
            links[0].endpoint.close()
            time.sleep(0.3)  # the result comes when the stream was released

    with nodes("inproc", 1, tmp_path) as urls:
        settings = {"memory_nodes": tuple(urls), "kv_cache_bytes": 4 * MIB, **CHUNKED}
        with cuda_llm("llama", **settings) as llm:
            links = links_of(llm)
            hub.on_write = hang
            found = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
            stats = llm.stats()
            assert stats.memory_nodes_lost == 1 and stats.recomputed_sequences == 1
            assert hub.driver.num_releases > 0
        assert hub.num_open == 0
    assert not [x for x in threading.enumerate() if x.name == "mergestep-lanes"]
    assert found == want
