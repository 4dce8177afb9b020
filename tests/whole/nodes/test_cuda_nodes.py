"""An engine on the CUDA back end over memory nodes, with Triton's kernels in the interpreter or on
a GPU, gives the tokens of the same engine with local K/V."""

from __future__ import annotations

import functools
import threading
import time
from functools import partial

import pytest

from serve.errors import ConfigError
from serve.loading import cuda_remote
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
def local_tokens(family: str, name: str, dtype: str, seed: int) -> list[list[int]]:
    with cuda_llm(family, name, dtype=dtype, **CHUNKED) as llm:
        return tokens_of(llm, seed)


def remote_tokens(family, name, dtype, seed, urls, **settings) -> list[list[int]]:
    """Returns the tokens; no buffer, page or node is lost."""
    settings |= {"memory_nodes": tuple(urls), "kv_cache_bytes": 4 * MIB}
    with cuda_llm(family, name, dtype=dtype, **CHUNKED, **settings) as llm:
        found = tokens_of(llm, seed)
        stats = llm.stats()
        staging = llm._loaded.core._runner._runner._attention.remote.staging
    assert staging.buffers.num_taken == 0
    assert (stats.memory_nodes, stats.memory_nodes_missing) == (len(urls), 0)
    assert (stats.pages_in_use, stats.memory_nodes_lost) == (0, 0)
    return found


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
    with nodes(scheme, 2, tmp_path) as urls:
        found = remote_tokens("llama", "base", "float32", 1, urls, **settings)
    assert found == local_tokens("llama", "base", "float32", 1)


@pytest.mark.parametrize(
    ("family", "partition", "prefill"),
    [
        ("gpt_oss", "head", "local"),
        ("gemma4_text", "request", "local"),
        ("deepseek_v2", "request", "remote"),
        ("deepseek_v2", "sequence", "local"),
    ],
)
def test_sinks_windows_shared_kv_and_latents(family, partition, prefill, tmp_path):
    settings = {"memory_partition": partition, "memory_prefill": prefill}
    with nodes("inproc", 1, tmp_path) as urls:
        found = remote_tokens(family, "long", "float32", 2, urls, **settings)
    assert found == local_tokens(family, "long", "float32", 2)


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        ("int8", {"memory_partition": "head", "memory_prefill": "remote"}),
        ("int8", {"memory_partition": "sequence"}),
        ("bfloat16", {"memory_partition": "sequence", "kv_dtype": "int8"}),
        ("bfloat16", {"memory_partition": "head", "memory_wire": "int8"}),
        ("float32", {"memory_partition": "head", "kv_dtype": "bfloat16"}),
    ],
)
def test_types_of_rows_and_kv(dtype, settings, tmp_path):
    """Nodes round K/V as the device does, but products and sums are rounded in other places, so
    only the first tokens are compared."""
    settings = {"memory_prefill": "local"} | settings
    with nodes("inproc", 1, tmp_path) as urls:
        found = remote_tokens("llama", "base", dtype, 1, urls, **settings)
    plain = local_tokens("llama", "base", dtype, 1)
    assert [len(tokens) for tokens in found] == [len(tokens) for tokens in plain]
    assert [found[i][0] for i in (0, 2)] == [plain[i][0] for i in (0, 2)]


def test_a_node_that_goes_while_steps_run(tmp_path):
    """The K/V is computed again in this machine's memory, and the tokens are the same."""
    prompt, params = prompts_of(300, 3)[1], greedy(12)
    with cuda_llm("llama", **CHUNKED) as llm:
        want = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
    with nodes("inproc", 1, tmp_path) as urls:
        settings = {"memory_nodes": tuple(urls), "kv_cache_bytes": 4 * MIB, **CHUNKED}
        with cuda_llm("llama", **settings) as llm:
            core = llm._loaded.core
            links = core._runner._runner._attention.remote._nodes.partitions[0].links

            def cut() -> None:
                while llm.stats().num_decode_rows < 3:
                    time.sleep(0.002)
                links[0].endpoint.close()

            thread = threading.Thread(target=cut)
            thread.start()
            found = llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids
            thread.join(10)
            stats = llm.stats()
            assert stats.memory_nodes_lost == 1 and stats.recomputed_sequences == 1
            staging = core._runner._runner._attention.remote.staging
        assert staging.buffers.num_taken == 0
    assert found == want


@pytest.mark.parametrize(
    ("family", "name", "partition"),
    [
        ("llama", "base", "sequence"),
        ("gemma4_text", "long", "head"),
        ("deepseek_v2", "long", "auto"),
    ],
)
def test_warming_up(family, name, partition, tmp_path, monkeypatch):
    """Steps without a sequence launch all kernels and change no later token."""
    load = partial(cuda_remote.load_cuda_over_nodes, warms_up=True)
    monkeypatch.setattr(cuda_remote, "load_cuda_over_nodes", load)
    settings = {"memory_partition": partition, "memory_prefill": "local"}
    with nodes("inproc", 1, tmp_path) as urls:
        found = remote_tokens(family, name, "float32", 2, urls, **settings)
    assert found == local_tokens(family, name, "float32", 2)


def test_settings_that_are_refused(tmp_path):
    with (
        nodes("inproc", 1, tmp_path) as urls,
        pytest.raises(ConfigError, match=r"memory_nodes: .*pages are too few"),
    ):
        cuda_llm("llama", memory_nodes=tuple(urls), memory_node_bytes=1 << 12)
    with pytest.raises(ConfigError, match="memory_nodes: "):
        cuda_llm("llama", memory_nodes=("inproc://nobody",))
    with pytest.raises(ConfigError, match="attention_chunk_size"):
        cuda_llm("llama4_text", "long", memory_nodes=("inproc://nobody",))
