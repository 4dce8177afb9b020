"""Models whose layers have states over memory nodes: the K/V is there, the states are here."""

from __future__ import annotations

import functools
import itertools
import random
from contextlib import contextmanager

import pytest

from memory.nodes.remote_plan import RemotePlan
from serve import LLM, FinishReason, SamplingParams
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.setting_checks import check_for_states
from tests.support.engine.checkpoints import checkpoint
from tests.support.nodes.served_nodes import MIB, key_file, nodes
from tests.support.profile import every_day
from tests.support.speculation.mixed_requests import answers_of
from tests.support.speculation.scripted import draft_by_script, num_accepted
from tests.support.transport.transport_rig import wait_until
from tests.whole.nodes.test_engine_nodes import SETTINGS, growing, local_tokens, mixed, tokens_of
from transport.base import PeerLostError

VOCAB = 320
CONV, DELTA = ("lfm2", "long"), ("qwen3_5_text", "long")
MIXER, PARALLEL = ("nemotron_h", "long"), ("falcon_h1", "long")
LATENT = ("kimi_linear", "long")
ON_NODES = {"memory_prefill": "remote"}
INT8 = {"dtype": "int8"}


@contextmanager
def engine(model, urls, folder, **settings):
    """An engine whose K/V and states are checked, and must be unused, at the end of the block, and
    given back after it."""
    secret = {"memory_node_key_file": key_file(folder)} if urls[0].startswith("tcp") else {}
    with LLM(
        str(checkpoint(*model)),
        memory_nodes=urls,
        **(SETTINGS | {"kv_cache_bytes": 16 * MIB} | secret | settings),
    ) as llm:
        kv = llm._loaded.core.kv
        yield llm
        stats = llm.stats()
        assert (stats.pages_in_use, stats.num_unfinished) == (0, 0)
        assert (kv.num_in_use, stats.state_bytes_in_use) == (0, 0)
        assert stats.state_bytes_capacity == kv.records.num_pages * kv.records.page_bytes > 0
        kv.check_integrity()
    assert (kv.num_mapped, kv.records.num_mapped, kv.records.num_cached) == (0, 0, 0)


def far_tokens(model, urls, folder, make_load=mixed, **settings):
    with engine(model, urls, folder, **settings) as llm:
        return tokens_of(llm, VOCAB, make_load), llm.stats()


@functools.cache
def local_int8_tokens(model):
    with LLM(str(checkpoint(*model)), kv_cache_bytes=64 * MIB, **(SETTINGS | INT8)) as llm:
        return tokens_of(llm, VOCAB)


@pytest.mark.parametrize(
    ("model", "scheme", "count", "partition", "more"),
    every_day(
        (0, 1),
        [
            (CONV, "inproc", 2, "head", {}),
            (DELTA, "inproc", 2, "request", ON_NODES),
            (MIXER, "tcp", 2, "request", {}),
            (PARALLEL, "shm", 1, "auto", {}),
            (PARALLEL, "inproc", 2, "sequence", ON_NODES),
            (LATENT, "inproc", 2, "auto", {}),
            (LATENT, "inproc", 3, "sequence", ON_NODES),
            (DELTA, "inproc", 1, "auto", {"prefix_cache": False}),
        ],
    ),
)
def test_tokens_are_those_of_the_local_engine(model, scheme, count, partition, more, tmp_path):
    """Requests arrive and end while others decode, fork, and share prefixes."""
    with nodes(scheme, count, tmp_path) as urls:
        more = {"memory_partition": partition, **more}
        tokens, stats = far_tokens(model, urls, tmp_path, **more)
    assert tokens == local_tokens(model, VOCAB)
    assert (stats.memory_nodes_lost, stats.memory_nodes_missing) == (0, 0)
    if partition != "sequence":  # its pages are longer than the common prefixes
        assert (stats.prefix_hit_tokens > 0) == more.get("prefix_cache", True)


@pytest.mark.parametrize(
    ("model", "partition"),
    every_day(
        (1,),
        [
            (CONV, "request"),
            (DELTA, "head"),
            (MIXER, "head"),
            (PARALLEL, "request"),
            (LATENT, "request"),
        ],
    ),
)
def test_int8(model, partition, tmp_path):
    with nodes("inproc", 2, tmp_path) as urls:
        tokens, _ = far_tokens(model, urls, tmp_path, memory_partition=partition, **INT8)
    assert tokens == local_int8_tokens(model)


# ---- little memory


@pytest.mark.parametrize(
    ("model", "partition"),
    every_day((0,), [(DELTA, "request"), (CONV, "head"), (MIXER, "request")]),
)
def test_with_little_memory_on_nodes_sequences_are_preempted(model, partition, tmp_path):
    """They go on from a record whose K/V is still there."""
    settings = {"memory_partition": partition, "memory_policy": "prompt_only"}
    with nodes("inproc", 2, tmp_path) as urls:
        tokens, stats = far_tokens(
            model, urls, tmp_path, growing, memory_node_bytes=256 << 10, **settings
        )
    assert stats.num_preemptions > 0
    assert tokens == local_tokens(model, VOCAB, growing)


def test_with_little_memory_here_fewer_sequences_run(tmp_path):
    """Each has a state, and there is room for another while an interval begins."""
    model, most = DELTA, 0
    with nodes("inproc", 1, tmp_path) as urls:
        with engine(model, urls, tmp_path) as llm:
            record_bytes = llm._loaded.core.kv.records.page_bytes
        little = {"kv_cache_bytes": 2 * 5 * record_bytes + 4096}
        with engine(model, urls, tmp_path, **little) as llm:
            kv, update = llm._loaded.core.kv, llm._loaded.core._scheduler.update
            assert kv.records.num_pages == 5

            def watch(plan, *args):
                nonlocal most
                most = max(most, len(plan.sequences))
                assert llm.stats().state_bytes_in_use == kv.records.num_in_use * record_bytes > 0
                return update(plan, *args)

            llm._loaded.core._scheduler.update = watch
            tokens, stats = tokens_of(llm, VOCAB, growing), llm.stats()
    assert tokens == local_tokens(model, VOCAB, growing)
    assert (most, stats.num_preemptions) == (2, 0)


def test_memory_for_less_than_a_sequence_is_refused(tmp_path):
    with (
        nodes("inproc", 1, tmp_path) as urls,
        pytest.raises(ConfigError, match="kv_cache_bytes 8192 is too little for the 2 states of"),
        engine(DELTA, urls, tmp_path, kv_cache_bytes=8192),
    ):
        pass


@pytest.mark.parametrize("setting", ["kvp", "borrow"])
def test_nodes_that_have_parts_of_sequences_are_refused(setting):
    path = str(checkpoint(*CONV))
    with pytest.raises(ConfigError, match=f"{setting} cannot be used with lfm2"):
        LLM(path, kv_cache_bytes=MIB, **SETTINGS, **{setting: ["inproc://none"]})


def test_a_gpu_is_refused():
    config = EngineConfig(memory_nodes=["inproc://none"])
    check_for_states(config, "lfm2", "cpu")
    with pytest.raises(ConfigError, match=r"memory_nodes cannot be used with lfm2, .* on a GPU"):
        check_for_states(config, "lfm2", "cuda")


# ---- nodes that are lost, steps that fail


def unreachable(url, timeout_s):
    raise PeerLostError("there is no listener")


def lose_a_node(monkeypatch, llm, at_layer, *, is_gone=False):
    """Ends the connection to the first node in the middle of a step."""
    finish, counter = RemotePlan.finish, itertools.count()
    links = llm._loaded.core._recovery.nodes

    def cut_off_once(plan, *args):
        if next(counter) == at_layer:
            links.connect = unreachable if is_gone else links.connect
            links.partitions[0].links[0].endpoint.close()
        return finish(plan, *args)

    monkeypatch.setattr(RemotePlan, "finish", cut_off_once)


@pytest.mark.parametrize(
    ("model", "count", "partition", "is_gone"),
    every_day(
        (0,),
        [
            (DELTA, 2, "request", False),
            (CONV, 2, "head", True),
            (MIXER, 2, "request", True),
            (DELTA, 1, "auto", True),
        ],
    ),
)
def test_a_lost_node_costs_a_pause_and_no_token(
    model, count, partition, is_gone, tmp_path, monkeypatch
):
    """The rows of its step have changed states of sequences on the other node as well. Without any
    node the K/V is in this machine's memory."""
    with (
        nodes("inproc", count, tmp_path) as urls,
        engine(model, urls, tmp_path, memory_partition=partition) as llm,
    ):
        lose_a_node(monkeypatch, llm, 61, is_gone=is_gone)
        tokens, stats = tokens_of(llm, VOCAB, growing), llm.stats()
    assert stats.memory_nodes_lost == 1
    if is_gone:  # with `head` all of them are placed anew
        assert stats.memory_nodes_missing == (count if partition == "head" else 1)
    assert stats.recomputed_sequences > 0
    assert tokens == local_tokens(model, VOCAB, growing)


def test_records_are_dropped_with_the_kv_of_a_lost_node(tmp_path):
    prompt = [(7 * i) % 290 + 3 for i in range(200)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    with nodes("inproc", 1, tmp_path) as urls, engine(DELTA, urls, tmp_path) as llm:
        kv = llm._loaded.core.kv
        [first] = llm.generate([prompt], params, use_tqdm=False)
        assert (kv.records.num_cached, llm.stats().prefix_hit_tokens) == (3, 0)
        [again] = llm.generate([prompt], params, use_tqdm=False)
        assert llm.stats().prefix_hit_tokens == 192
        llm._loaded.core._recovery.nodes.interrupt()
        wait_until(lambda: llm.stats().memory_nodes_lost)
        wait_until(lambda: not kv.records.num_cached)
        [last] = llm.generate([prompt], params, use_tqdm=False)
        assert llm.stats().prefix_hit_tokens == 192
    answers = [output.outputs[0].token_ids for output in (first, again, last)]
    assert answers == [answers[0]] * 3


@pytest.mark.parametrize("partition", every_day((0,), ["request", "head"]))
def test_a_step_that_fails_ends_one_request_and_changes_no_other(partition, tmp_path, monkeypatch):
    """The step fails after it has changed the states of all of its sequences."""
    prompts = [[(7 * i + j) % 290 + 3 for i in range(90)] for j in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with (
        nodes("inproc", 2, tmp_path) as urls,
        engine(DELTA, urls, tmp_path, memory_partition=partition) as llm,
    ):
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        runner = llm._loaded.core._executor._runner
        run = runner.run

        def fails(plan, launched):
            result = run(plan, launched)
            for sequence in plan.sequences:
                if sequence.token_ids[:90] == prompts[2] and sequence.num_output_tokens >= 7:
                    raise ZeroDivisionError
            return result

        monkeypatch.setattr(runner, "run", fails)
        outputs = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
    assert outputs[2].finish_reason == FinishReason.ERROR.value
    assert 7 <= len(outputs[2].token_ids) < 40
    assert [o.token_ids for o in outputs] == [
        tokens[: len(output.token_ids)] for tokens, output in zip(expected, outputs, strict=True)
    ]
    assert [len(o.token_ids) for i, o in enumerate(outputs) if i != 2] == [40] * 3


# ---- drafts


@pytest.mark.parametrize(("partition", "loses"), [("request", False), ("request", True)])
def test_drafts(partition, loses, tmp_path, monkeypatch):
    """Rows of drafts are kept in the records, which are lost with a node."""
    prompts, params = growing(VOCAB)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    with (
        nodes("inproc", 2, tmp_path) as urls,
        engine(DELTA, urls, tmp_path, memory_partition=partition, speculation="lookup") as llm,
    ):
        llm._loaded.core._scheduler.drafting = None
        outputs = llm.generate(requests, params, use_tqdm=False)
        draft_by_script(llm, answers_of(requests, outputs), 0.8)
        if loses:
            lose_a_node(monkeypatch, llm, 35)
        tokens = tokens_of(llm, VOCAB, growing)
        assert num_accepted(llm) > 100
        assert llm.stats().memory_nodes_lost == loses
    assert tokens == local_tokens(DELTA, VOCAB, growing)


@pytest.mark.exhaustive
def test_no_draft_crosses_the_end_of_a_record(tmp_path):
    """A record is kept when its interval is full. What is found of it later must be the state after
    its last token, whatever rows of drafts a step had there."""
    rng = random.Random(5)
    greedy = SamplingParams(max_tokens=33, temperature=0.0, ignore_eos=True, logprobs=1)

    def one(llm, prompt):
        return llm.generate([{"prompt_token_ids": prompt}], greedy, use_tqdm=False)[0]

    def random_prompt(length):
        return [rng.randrange(2, VOCAB) for _ in range(length)]

    prompts = [random_prompt(length) for length in range(34, 43)]
    off = {"speculation": "off", "prefix_cache": False}
    with LLM(str(checkpoint(*DELTA)), kv_cache_bytes=64 * MIB, **(SETTINGS | off)) as llm:
        first = [one(llm, prompt) for prompt in prompts]
        follow = [
            [*prompt, *output.outputs[0].token_ids, 7, 9, 11]
            for prompt, output in zip(prompts, first, strict=True)
        ]
        expected = [one(llm, prompt).outputs[0] for prompt in follow]
    with (
        nodes("inproc", 2, tmp_path) as urls,
        engine(DELTA, urls, tmp_path, memory_partition="request", speculation="lookup") as llm,
    ):
        scheduler = llm._loaded.core._scheduler
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        draft_by_script(llm, answers_of(given, first), 1.0)
        drafting = scheduler.drafting
        for prompt, after, right in zip(prompts, follow, expected, strict=True):
            scheduler.drafting = drafting
            one(llm, prompt)
            scheduler.drafting = None
            for _ in range(3):
                one(llm, random_prompt(9))  # in the ranges that the answer has left
            found = one(llm, after).outputs[0]
            assert found.token_ids == right.token_ids
            assert found.cumulative_logprob == pytest.approx(right.cumulative_logprob, abs=1e-3)
        assert num_accepted(llm) > 100 and llm.stats().prefix_hit_tokens >= 64 * len(prompts)
