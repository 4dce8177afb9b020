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


def logprobs_of(llm) -> list[float]:
    """Returns the log-probabilities of a prompt's tokens, which is computed in two chunks."""
    prompt = prompts_of(300, 1)[2]
    output = llm.generate([prompt], greedy(1, prompt_logprobs=0), use_tqdm=False)[0]
    pairs = zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    return [found[token].logprob for found, token in pairs]


@functools.cache
def local_logprobs(dtype: str, kv_dtype: str = "auto") -> list[float]:
    with cuda_llm("llama", dtype=dtype, kv_dtype=kv_dtype, **CHUNKED) as llm:
        return logprobs_of(llm)


def mean_error(found: list[float], exact: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(found, exact, strict=True)) / len(exact)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "partition", "prefill"),
    [
        ("int8", "int8", "head", "remote"),
        ("int8", "int8", "sequence", "local"),
        ("bfloat16", "int8", "sequence", "remote"),
        ("float32", "bfloat16", "head", "local"),
    ],
)
def test_types_of_rows_and_kv(dtype, kv_dtype, partition, prefill, tmp_path):
    """Results are as close to fp32 as with local K/V: nodes round K/V as the device does, but
    products and sums are rounded in other places."""
    settings = {"memory_partition": partition, "memory_prefill": prefill, "kv_dtype": kv_dtype}
    settings |= {"dtype": dtype, "kv_cache_bytes": 4 * MIB} | CHUNKED
    with (
        nodes("inproc", 1, tmp_path) as urls,
        cuda_llm("llama", memory_nodes=tuple(urls), **settings) as llm,
    ):
        found = logprobs_of(llm)
    exact = local_logprobs("float32")
    of_local = mean_error(local_logprobs(dtype, kv_dtype), exact)
    assert 0 < mean_error(found, exact) < 1.5 * of_local


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
    [("llama", "base", "sequence"), ("deepseek_v2", "long", "auto")],
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
