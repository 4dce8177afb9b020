"""Sequences that grow onto memory nodes have the bits of an engine that has all segments."""

from __future__ import annotations

import functools
import itertools
import random

import pytest

from memory.nodes.segment_links import HeldSegments
from serve import LLM, SamplingParams
from serve.config import DEFAULT_MODEL
from serve.errors import ConfigError
from tests.support.engine.checkpoints import checkpoint
from tests.support.memory.one_store import one_store
from tests.support.nodes.served_nodes import MIB, key_file, nodes
from tests.support.profile import every_day
from transport.base import PeerLostError

SEGMENT = 256
SETTINGS = {
    "dtype": "int8",
    "max_num_seqs": 6,
    "max_model_len": 1024,
    "max_num_batched_tokens": 96,
    "kvp_segment_tokens": SEGMENT,
    "seed": 1,
}
WINDOWS, SINKS = ("qwen2", "long-mixed"), ("gpt_oss", "long")
LATENT, SHARED = ("deepseek_v2", "long"), ("gemma4_text", "long")


def load(vocab, longest, count=8):
    """Prompts on both sides of segments' ends, some with a common prefix, and answers that cross
    such an end."""
    rng = random.Random(7)
    shared = [rng.randrange(5, vocab) for _ in range(longest // 5)]
    prompts, params = [], []
    for number in range(count):
        length = rng.choice([9, longest // 4 - 5, longest // 4, longest // 3, 2 * longest // 3])
        own = [rng.randrange(5, vocab) for _ in range(length)]
        prompts.append((shared * (number % 2) + own)[: longest - 40])
        params.append(
            SamplingParams(
                max_tokens=rng.choice([3, 20, 38]),
                temperature=rng.choice([0.0, 0.8]),
                seed=number,
                ignore_eos=True,
                logprobs=0,
            )
        )
    return prompts, params


def few(vocab, longest):
    return load(vocab, longest, count=4)


def growing(vocab, longest):
    """Prompts that fit into memory together, but whose sequences outgrow it."""
    rng = random.Random(8)
    prompts = [[rng.randrange(5, vocab) for _ in range(length)] for length in (200, 190, 500, 490)]
    return prompts, SamplingParams(
        max_tokens=90, temperature=0.0, ignore_eos=True, logprobs=0, seed=1
    )


def scores(model=DEFAULT_MODEL, vocab=4096, make_load=load, one_by_one=False, **settings):
    """Returns each answer's tokens with their log-probabilities, and the engine's counters."""
    path = model if isinstance(model, str) else str(checkpoint(*model))
    settings = SETTINGS | {"kv_cache_bytes": 16 * MIB} | settings
    with LLM(path, **settings) as llm:
        prompts, params = make_load(vocab, settings["max_model_len"])
        if one_by_one:
            pairs = zip(prompts, params, strict=True)
            outputs = [llm.generate([p], one, use_tqdm=False)[0] for p, one in pairs]
        else:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        stats = llm.stats()
    assert (stats.pages_in_use, stats.num_unfinished) == (0, 0)
    found = [
        [(t, given[t].logprob) for t, given in zip(o.token_ids, o.logprobs, strict=True)]
        for output in outputs
        for o in output.outputs
    ]
    return found, stats


@functools.cache
def alone(model=DEFAULT_MODEL, vocab=4096, make_load=load, one_by_one=False, **settings):
    """The same from an engine that has all segments itself, with K/V as beside holders."""
    with one_store():
        return scores(model, vocab, make_load, one_by_one, **settings)[0]


@pytest.mark.parametrize(
    ("scheme", "count", "settings"),
    every_day(
        (0, 1, 2, 4),
        [
            ("inproc", 1, {}),
            ("inproc", 2, {}),
            ("inproc", 2, {"kv_dtype": "int4"}),
            ("shm", 2, {"dtype": "float32", "kv_dtype": "int8"}),
            ("tcp", 2, {"max_num_batched_tokens": 300}),
            ("inproc", 1, {"dtype": "bfloat16", "kv_dtype": "int8"}),
            ("inproc", 3, {"max_chunk_tokens": 7}),
            ("inproc", 2, {"prefix_cache": False}),
        ],
    ),
)
def test_any_number_of_holders_gives_the_same_bits(scheme, count, settings, tmp_path):
    """Prompts are cut into chunks beside decoding sequences, share prefixes, and cross the ends of
    segments in prefill and decode."""
    with nodes(scheme, count, tmp_path) as urls:
        key = {"memory_node_key_file": key_file(tmp_path)} if scheme == "tcp" else {}
        found, stats = scores(kvp=urls, **key, **settings)
    local = alone(**{name: value for name, value in settings.items() if "token" not in name})
    assert found == local
    assert (stats.prefix_hit_tokens > 0) == settings.get("prefix_cache", True)


@pytest.mark.parametrize("dtype", every_day((0,), ["float32", "bfloat16"]))
def test_without_int8_sequences_that_run_alone_have_the_same_bits(dtype, tmp_path):
    """Beside others their bits depend on the chunks, with holders and without."""
    sizes = {"max_model_len": 512, "kvp_segment_tokens": 128}
    local = alone(make_load=few, one_by_one=True, dtype=dtype, **sizes)
    with nodes("inproc", 2, tmp_path) as urls:
        found, _ = scores(make_load=few, one_by_one=True, dtype=dtype, kvp=urls, **sizes)
    assert found == local


@pytest.mark.parametrize(
    ("model", "count"), every_day((0, 2), [(WINDOWS, 2), (SINKS, 1), (LATENT, 2), (SHARED, 1)])
)
def test_other_kinds_of_layers(model, count, tmp_path):
    """Layers with windows stay in the engine's memory."""
    sizes = {"max_model_len": 384, "kvp_segment_tokens": 128}
    local = alone(model, 320, few, **sizes)
    with nodes("inproc", count, tmp_path) as urls:
        found, _ = scores(model, 320, few, kvp=urls, **sizes)
    assert found == local


def test_sequences_within_a_segment_have_the_bits_of_an_engine_without_segments(tmp_path):
    def short(vocab, longest):
        return load(vocab, SEGMENT)

    local, _ = scores(make_load=short, kvp_segment_tokens=1 << 20)
    with nodes("inproc", 1, tmp_path) as urls:
        found, _ = scores(make_load=short, kvp=urls)
    assert found == local


def test_growth_onto_a_holder_takes_no_further_step(tmp_path):
    """A prompt crosses one end of a segment, its answer another."""

    def one(vocab, longest):
        params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, logprobs=0)
        return [[number % 97 + 5 for number in range(500)]], [params]

    expected, before = scores(make_load=one)
    with nodes("inproc", 2, tmp_path) as urls:
        found, stats = scores(make_load=one, kvp=urls)
    assert found == expected
    assert stats.num_steps == before.num_steps == 6 + 29
    assert stats.num_preemptions == 0


@pytest.mark.parametrize(
    ("own_bytes", "node_bytes"),
    [(640 << 10, 16 * MIB), (16 * MIB, 800 << 10)],
    ids=["this machine is short", "the node is short"],
)
def test_preempted_sequences_have_the_same_bits(own_bytes, node_bytes, tmp_path):
    little = {"memory_policy": "prompt_only", "max_model_len": 640}
    local = alone(make_load=growing, max_model_len=640)
    with nodes("inproc", 1, tmp_path, capacity_bytes=node_bytes) as urls:
        found, stats = scores(make_load=growing, kvp=urls, kv_cache_bytes=own_bytes, **little)
    assert stats.num_preemptions > 0
    assert found == local


def test_a_lost_holder_costs_a_pause_and_no_token(tmp_path, monkeypatch):
    """Sequences with segments there are computed again when it is back."""
    local = alone(make_load=growing, max_model_len=640)
    begin, counter = HeldSegments.begin, itertools.count()

    def cut_off_once(held, layer, q):
        begin(held, layer, q)
        if held._holders and next(counter) == 60:
            held._holders[0].link.endpoint.close()

    monkeypatch.setattr(HeldSegments, "begin", cut_off_once)
    with nodes("inproc", 1, tmp_path) as urls:
        found, stats = scores(make_load=growing, kvp=urls, max_model_len=640)
    assert (stats.memory_nodes_lost, stats.memory_nodes_missing) == (1, 0)
    assert stats.recomputed_sequences > 0
    assert found == local


def unreachable(url, timeout_s):
    raise PeerLostError("there is no listener")


def test_the_other_holders_take_the_segments_of_a_lost_one(tmp_path, monkeypatch):
    local = alone(make_load=growing, max_model_len=640)
    begin, counter = HeldSegments.begin, itertools.count()

    def lose_one(held, layer, q):
        begin(held, layer, q)
        if held._holders and next(counter) == 60:
            held._parent._nodes.connect = unreachable
            held._holders[0].link.endpoint.close()

    monkeypatch.setattr(HeldSegments, "begin", lose_one)
    with nodes("inproc", 3, tmp_path) as urls:
        found, stats = scores(make_load=growing, kvp=urls, max_model_len=640)
    assert (stats.memory_nodes_lost, stats.memory_nodes_missing) == (1, 1)
    assert found == local


def test_while_a_holder_is_gone_short_sequences_run_and_long_ones_end(tmp_path, monkeypatch):
    monkeypatch.setattr("serve.engine.node_recovery._GIVE_UP_S", 0.3)
    shorts = [[number + 5] * 40 for number in range(4)]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    settings = SETTINGS | {"kv_cache_bytes": 16 * MIB}
    with nodes("inproc", 1, tmp_path) as urls, LLM(DEFAULT_MODEL, kvp=urls, **settings) as llm:
        before = llm.generate(shorts, params, use_tqdm=False)
        holders = llm._loaded.core._recovery.nodes
        holders.connect = unreachable
        holders.interrupt()
        first, *others = llm.generate([[7] * 400, *shorts], params, use_tqdm=False)
        stats = llm.stats()
    assert [o.outputs[0].token_ids for o in others] == [o.outputs[0].token_ids for o in before]
    assert first.outputs[0].finish_reason == "error"
    assert (stats.memory_nodes, stats.memory_nodes_missing) == (1, 1)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"memory_nodes": ["inproc://a"]}, "kvp cannot be used with memory_nodes"),
        ({"kvp": ""}, "kvp has no address"),
        ({"kvp_segment_tokens": 200}, "kvp_segment_tokens must be a multiple of 128"),
        ({"kv_cache_dir": "/tmp"}, "kv_cache_dir cannot be used with kvp"),
        ({}, "kvp: .*inproc://nobody"),
    ],
)
def test_settings_that_are_refused(settings, reason):
    with pytest.raises(ConfigError, match=reason):
        LLM(DEFAULT_MODEL, **(SETTINGS | {"kvp": ["inproc://nobody"]} | settings))


def test_messages_that_a_holder_cannot_take_are_refused(tmp_path):
    more = {"max_num_batched_tokens": 4096, "kv_cache_bytes": 16 * MIB, "kvp_segment_tokens": 128}
    with (
        nodes("inproc", 1, tmp_path) as urls,
        pytest.raises(ConfigError, match=r"over 7 segments .* lower max_num_batched_tokens or"),
    ):
        LLM(DEFAULT_MODEL, **(SETTINGS | {"kvp": urls} | more))


def test_a_context_that_the_holders_cannot_hold_is_refused(tmp_path):
    with (
        nodes("inproc", 1, tmp_path, capacity_bytes=1 << 18) as urls,
        pytest.raises(ConfigError, match=r"max_model_len 1024 does not fit onto 1 kvp nodes"),
    ):
        LLM(DEFAULT_MODEL, **(SETTINGS | {"kvp": urls, "kv_cache_bytes": 16 * MIB}))
