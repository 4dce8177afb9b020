"""Mixtures of experts, latent attention, windows with sinks, shared K/V and attention within chunks
under everything that the engine does with K/V and weights.

Tests compare an engine that uses one of these with one that uses none, whose tokens are those of
Transformers.
"""

from __future__ import annotations

import functools
import json
import random
import time

import jsonschema
import pytest
from torch import Tensor

import memory.range_mapper
from memory.prefix.load_times import LoadTimes
from ops.cpu import native_library
from serve import LLM, SamplingParams
from serve.config import EngineConfig
from serve.loading.runtime import load_runtime
from serve.scheduler.step_time import StepTimeModel
from serve.structured_output import StructuredOutput
from tests.support.engine.checkpoints import checkpoint, reference_greedy
from tests.support.engine.logprobs import divergence, logprobs_of
from tests.support.preempted import until_preempted

pytestmark = [
    pytest.mark.small_pages,
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
]
# mixtures, one of them with sinks and windows; latents, with and without a rank of the queries;
# shared K/V; attention within chunks; layers with states
STATES = ["lfm2", "qwen3_5_text", "falcon_h1", "kimi_linear"]
KINDS = [
    "qwen3_moe",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
    "gemma4_text",
    "llama4_text",
    *STATES,
]
PAGE = 4096
SETTINGS = {
    "kv_page_bytes": PAGE,
    "max_model_len": 280,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
}
ROOMY = {"kv_cache_bytes": 8 << 20}
PREFIX = [(7 * i) % 90 + 3 for i in range(150)]
REQUESTS = [{"prompt_token_ids": [*PREFIX, *tail]} for tail in ([], [5], [5, 6, 7], range(10, 40))]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(autouse=True)
def unmap_at_once(monkeypatch):
    """Unmaps released pages at once, so that an access behind a window ends with SIGSEGV."""
    monkeypatch.setattr(memory.range_mapper, "_UNMAP_SLOTS", 1)


@pytest.fixture(autouse=True)
def loading_costs_nothing(monkeypatch):
    """Makes loading and mapping always cheaper than computing, which tiny models would prefer."""
    monkeypatch.setattr(LoadTimes, "seconds", lambda times, num_pages: 0.0)
    monkeypatch.setattr(StepTimeModel, "prefill_seconds", lambda *_: 0.0)


def path_of(kind: str) -> str:
    return str(checkpoint(kind, "long"))


def greedy(num_tokens: int = 12) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)


def generate(llm: LLM, requests, num_tokens: int = 12) -> list[object]:
    """Returns the tokens; in int8 also the exact sum of their log-probabilities, as only there rows
    of a prompt have the bits of decoded ones."""
    outputs = [r.outputs[0] for r in llm.generate(requests, greedy(num_tokens), use_tqdm=False)]
    for _ in range(100):  # pages are still being written to disk
        if llm.stats().pages_in_use == 0:
            break
        time.sleep(0.05)
    assert llm.stats().pages_in_use == 0
    llm._loaded.core.kv.check_integrity()
    is_exact = llm._loaded.precision.is_int8
    return [(o.token_ids, o.cumulative_logprob if is_exact else None) for o in outputs]


@functools.cache
def alone(kind: str, dtype: str) -> list[object]:
    """Returns the outputs of REQUESTS one after the other, without a prefix cache."""
    with LLM(path_of(kind), dtype=dtype, prefix_cache=False, **SETTINGS, **ROOMY) as llm:
        return [generate(llm, [one])[0] for one in REQUESTS]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_equal_transformers(kind):
    (token_ids, _), *_ = alone(kind, "float32")
    prompt = REQUESTS[0]["prompt_token_ids"]
    assert token_ids == reference_greedy(checkpoint(kind, "long"), prompt, len(token_ids))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_prefix_hits_batches_and_chunks_change_no_token(kind, dtype):
    with LLM(path_of(kind), dtype=dtype, max_chunk_tokens=23, **SETTINGS, **ROOMY) as llm:
        assert [generate(llm, [one])[0] for one in REQUESTS] == alone(kind, dtype)
        one_by_one = llm.stats().prefix_hit_tokens
        assert one_by_one > 3 * least_hit(kind)
        assert generate(llm, REQUESTS) == alone(kind, dtype)
        assert llm.stats().prefix_hit_tokens > one_by_one + 4 * least_hit(kind)
    assert llm.stats().pages_mapped == 0


def least_hit(kind: str) -> int:
    """Returns how much of PREFIX is found at least: one record of a state, where pages of K/V end
    before the second one does."""
    return 60 if kind in STATES else 96


def random_prompts(lengths) -> list[dict[str, list[int]]]:
    rng = random.Random(7)
    return [{"prompt_token_ids": [rng.randrange(2, 320) for _ in range(n)]} for n in lengths]


@functools.cache
def least_pages(kind: str, dtype: str) -> int:
    """Returns the pages of one sequence of max_model_len."""
    runtime = load_runtime(EngineConfig(model=path_of(kind), dtype=dtype, **SETTINGS, **ROOMY))
    pages = runtime.kv.pages_for(SETTINGS["max_model_len"])
    kv_memory = runtime.memory
    del runtime
    kv_memory.close()
    return pages


@pytest.mark.parametrize("kind", KINDS)
def test_preempted_sequences_are_recomputed(kind):
    """Memory holds little more than one sequence."""
    requests = random_prompts([30, 9, 50, 80, 3, 60])
    with LLM(path_of(kind), dtype="int8", **SETTINGS, **ROOMY) as llm:
        expected = generate(llm, requests, 150)
        assert llm.stats().num_preemptions == 0
    small = {
        "kv_cache_bytes": (least_pages(kind, "int8") + 2) * PAGE,
        "memory_policy": "prompt_only",
    }
    with LLM(path_of(kind), dtype="int8", **SETTINGS, **small) as llm:
        assert until_preempted(llm, lambda: generate(llm, requests, 150)) == expected
        assert llm.stats().prefix_evicted_pages > 0


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ["int8", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_restarted_engine_loads_the_prefix_from_disk(
    kind, dtype, tmp_path, loading_costs_nothing
):
    settings = SETTINGS | ROOMY | {"dtype": dtype, "kv_disk_bytes": 4 << 20}
    with LLM(path_of(kind), kv_cache_dir=str(tmp_path), **settings) as llm:
        assert generate(llm, REQUESTS[:1]) == alone(kind, dtype)[:1]
        expected_pages = llm.stats().pages_cached
    with LLM(path_of(kind), kv_cache_dir=str(tmp_path), **settings) as llm:
        assert llm.stats().disk_pages > 0
        assert generate(llm, REQUESTS) == alone(kind, dtype)
        stats = llm.stats()
    assert 0 < stats.disk_loaded_pages <= expected_pages
    assert stats.disk_lost_pages == stats.disk_corrupt_pages == 0
    assert stats.prefix_hit_tokens > least_hit(kind)
    assert llm.stats().pages_mapped == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_schema_is_followed(kind):
    structured = StructuredOutput("json_schema", json.dumps(SCHEMA))
    params = [
        SamplingParams(max_tokens=120, temperature=t, seed=1, n=n, structured=structured)
        for t, n in ((0.0, 1), (1.0, 3))
    ]
    with LLM(path_of(kind), dtype="int8", **SETTINGS, **ROOMY) as llm:
        results = llm.generate(["Once", "b"], params, use_tqdm=False)
        assert llm.stats().pages_in_use == 0
    for output in (o for result in results for o in result.outputs):
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), SCHEMA)


# Random weights amplify every error, in each model another time, so the yardstick is what rounding
# to bfloat16 does to the same model. An int8 value's error is 4 times as large (a 254th of the
# group's largest against a 512th of the value), which KL divergence squares.
YARDSTICKS = {"float32/int8": "float32/bfloat16", "int8": "bfloat16"}


@pytest.mark.parametrize("precision", YARDSTICKS)
@pytest.mark.parametrize("kind", KINDS)
def test_int8_is_close_to_fp32(kind, precision):
    """Where an error makes a mixture choose another expert the divergence is that of two models;
    the median of the rows does not see that."""
    median = float(divergences(kind, precision).median())
    assert 0 < median < 16 * float(divergences(kind, YARDSTICKS[precision]).median())
    assert median < 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_int4_is_nearer_to_fp32_than_other_rows(kind):
    """The weights have an error of about a tenth, which is most of what so small models know."""
    plain = logprobs(kind, "float32")
    others = float(divergence(plain, plain.roll(1, 0)).mean())
    assert 0 < float(divergences(kind, "int4").mean()) < 0.6 * others


def divergences(kind: str, precision: str) -> Tensor:
    return divergence(logprobs(kind, "float32"), logprobs(kind, precision))


@functools.cache
def logprobs(kind: str, precision: str) -> Tensor:
    rng = random.Random(1)
    return logprobs_of(path_of(kind), precision, [rng.randrange(2, 320) for _ in range(90)])
