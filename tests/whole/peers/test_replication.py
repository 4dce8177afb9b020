"""Running sequences whose K/V a peer copies go on elsewhere: the same tokens, and little work."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from memory.peers import copying
from memory.prefix import sequence_names
from serve import LLM, SamplingParams
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.sampling_params import AnswerSoFar
from tests.support.engine.checkpoints import checkpoint
from tests.support.memory.peer_settings import INT8, PAGE
from tests.support.memory.token_sink import TokenSink as Sink

KINDS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 1.0, "seed": 7}}
NUM_TOKENS = 180


@pytest.fixture(autouse=True)
def copying_is_quick(monkeypatch):
    monkeypatch.setattr(copying, "SHARE", 0.9)
    monkeypatch.setattr(copying, "NEWS_S", 0.01)
    monkeypatch.setitem(sequence_names.SequenceNames.__init__.__kwdefaults__, "min_age_s", 0.0)


def engine(key_file: Path, **settings) -> LLM:
    return LLM(str(checkpoint("llama")), **(INT8 | {"kv_peer_key_file": key_file} | settings))


def prompt(first: int) -> list[int]:
    return [first, *[(5 * i + first) % 90 + 3 for i in range(40)]]


def wait_for(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.002)


def connected(llm: LLM) -> bool:
    return all(pull.is_connected for pull in llm.stats().kv_peers.pulls.values())


def copies_of(llm: LLM):
    return llm.stats().kv_peers.copies


@pytest.mark.covering(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("holds_copies", [True, False])
def test_sequences_go_on_from_copies_when_their_engine_dies(
    tmp_path, key_file, kind, holds_copies, slow_steps
):
    """holds_copies: they go on at the engine that has the copies, or at one that pulls them from
    there."""
    urls = [f"inproc://{tmp_path}/{number}" for number in range(3)]
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **KINDS[kind])
    prompts = [prompt(first) for first in (3, 4, 5)]
    first = engine(key_file, kv_listen=urls[0])
    alone = first.generate([{"prompt_token_ids": ids} for ids in prompts], params)
    expected = [list(output.outputs[0].token_ids) for output in alone]
    first.shutdown()
    first = engine(key_file, kv_listen=urls[0])
    copier = engine(key_file, kv_listen=urls[1], kv_peers=urls[:1], kv_replica_bytes=1 << 20)
    other = engine(key_file, kv_peers=urls[:2])
    with copier, other:
        wait_for(lambda: connected(copier) and connected(other))
        sinks = [Sink() for _ in prompts]
        slow_steps(first, 0.004)  # so that copying keeps up with the tiny model
        for ids, sink in zip(prompts, sinks, strict=True):
            first._loaded.core.submit(ids, params, sink)
        wait_for(lambda: all(len(sink.token_ids) > 100 for sink in sinks), 30.0)
        so_far = [list(sink.token_ids) for sink in sinks]
        page_tokens = first._loaded.kv.page_end(0)
        num_complete = sum((41 + len(ids)) // page_tokens for ids in so_far)
        wait_for(lambda: copies_of(copier).pages >= num_complete)
        first._loaded.kv.prefixes._store._server.close(1.0)  # it dies: nobody is told anything
        first.shutdown()
        going_on = copier if holds_copies else other
        found = []
        for ids, tokens in zip(prompts, so_far, strict=True):
            again = params.changed(answers_so_far=(AnswerSoFar(tuple(tokens)),))
            (output,) = going_on.generate([{"prompt_token_ids": ids}], again)
            found.append(list(output.outputs[0].token_ids))
        assert found == expected
        stats = going_on.stats()
        num_asked = sum(41 + len(ids) for ids in so_far)
        num_left = num_asked - stats.prefix_hit_tokens
        assert num_left <= 3 * page_tokens, "the rest of a page at most"
        assert copies_of(copier).used >= num_complete
        going_on._loaded.core.kv.check_integrity()


def test_the_engines_own_pages_are_never_displaced_by_copies(tmp_path, key_file):
    """Copies are in memory of their own, within their bound, and are dropped after their time."""
    urls = [f"inproc://{tmp_path}/{number}" for number in range(2)]
    params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
    with (
        engine(key_file, kv_listen=urls[0]) as first,
        engine(key_file, kv_peers=urls[:1], kv_replica_bytes=6 * PAGE) as copier,
    ):
        wait_for(lambda: connected(copier))
        own = {"prompt_token_ids": prompt(9) * 5}
        few = params.changed(max_tokens=4)
        copier.generate([own], few)
        evicted, hits = copier.stats().prefix_evicted_pages, copier.stats().prefix_hit_tokens
        first.generate([{"prompt_token_ids": prompt(k)} for k in range(3, 11)], params)
        wait_for(lambda: copies_of(copier).pages == 6)
        assert copies_of(copier).num_bytes == 6 * PAGE
        copier.generate([own], few)
        assert copier.stats().prefix_evicted_pages == evicted
        assert copier.stats().prefix_hit_tokens - hits >= 128
        copies = copier._loaded.kv.prefixes._store._copies
        wait_for(lambda: not copies._streams)  # all have ended
        copies._kept_s = 0.0
        wait_for(lambda: copies_of(copier).num_bytes == 0)
        names = first._loaded.core._scheduler.prefixes.names
        assert not names._sequences and not names._running and not names._expected


def test_settings_that_do_not_fit_are_refused(key_file):
    with pytest.raises(ConfigError, match="kv_replica_bytes needs kv_peers"):
        LLM(str(checkpoint("llama")), **INT8, kv_replica_bytes=1 << 20)
    with pytest.raises(ConfigError, match="kv_replica_bytes must be a positive integer"):
        EngineConfig(kv_replica_bytes=0, kv_peers=["tcp://h:1"])
    with pytest.raises(ConfigError, match="kv_replica_bytes is 100, less than a page of 8192"):
        engine(key_file, kv_peers=["tcp://127.0.0.1:9"], kv_replica_bytes=100)
