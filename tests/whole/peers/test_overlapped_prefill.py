"""A prompt that another engine computes now: its pages come chunk by chunk, and what does
not come is computed."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from serve import LLM, SamplingParams
from serve.scheduler import prefix_lookup
from tests.support.engine.checkpoints import checkpoint
from tests.support.memory.peer_settings import INT8
from tests.support.memory.token_sink import TokenSink

CHUNK = 32
SETTINGS = INT8 | {"kv_page_bytes": 4096, "max_num_batched_tokens": CHUNK}
PREFILL = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
ALONE = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
AWAITED = ALONE.changed(awaits_prefill=True)
STEP_S = 0.1


def engine(key_file: Path, **settings) -> LLM:
    return LLM(str(checkpoint("llama")), **(SETTINGS | {"kv_peer_key_file": key_file} | settings))


def prompt(first: int, length: int = 230) -> list[int]:
    return [first, *[(5 * i * i + first) % 90 + 3 for i in range(length - 1)]]


def wait_for(condition, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.002)


def submit(llm: LLM, token_ids: list[int], params: SamplingParams) -> TokenSink:
    sink = TokenSink()
    llm._loaded.core.submit(token_ids, params, sink)
    return sink


def expected(token_ids: list[int]) -> list[int]:
    with LLM(str(checkpoint("llama")), **SETTINGS) as llm:
        (output,) = llm.generate([{"prompt_token_ids": token_ids}], ALONE)
        return list(output.outputs[0].token_ids)


def pulls(llm: LLM):
    (found,) = llm.stats().kv_peers.pulls.values()
    return found


@pytest.fixture
def pair(tmp_path, key_file, slow_steps):
    """Returns engines for prefill and for decoding; the steps of the first are slow."""
    with ExitStack() as opened:

        def make(scheme: str = "inproc") -> tuple[LLM, LLM]:
            url = {
                "inproc": f"inproc://{tmp_path}",
                "shm": f"shm://{tmp_path}/kv.sock",
                "tcp": "tcp://127.0.0.1:0",
            }[scheme]
            first = opened.enter_context(engine(key_file, kv_listen=url))
            url = first._loaded.kv.prefixes._store._server.url
            second = opened.enter_context(engine(key_file, kv_peers=[url]))
            wait_for(lambda: pulls(second).is_connected)
            slow_steps(first, STEP_S)
            return first, second

        yield make


@pytest.mark.covering(1)
@pytest.mark.parametrize("scheme", ["inproc", "shm", "tcp"])
@pytest.mark.parametrize("comes_first", [True, False])
def test_pages_come_while_later_ones_are_computed(pair, scheme, comes_first):
    """comes_first: the engine for decoding gets the request first."""
    first, second = pair(scheme)
    token_ids = prompt(3)
    if comes_first:
        sink = submit(second, token_ids, AWAITED)
        time.sleep(0.02)
    computing = submit(first, token_ids, PREFILL)
    if not comes_first:
        time.sleep(0.02)
        sink = submit(second, token_ids, AWAITED)
    page_end = first._loaded.kv.page_end
    num_pages = next(page for page in range(99) if page_end(page) > len(token_ids))
    wait_for(lambda: pulls(second).pulled >= num_pages // 2)
    assert not computing.is_over, "the other half is still computed"
    wait_for(lambda: sink.is_over)
    assert sink.token_ids == expected(token_ids)
    assert not computing.is_over or sink.ended_s - computing.ended_s < 0.3
    assert pulls(second).pulled == num_pages
    assert second.stats().num_prefill_rows < 2 * page_end(0), "the end, which fills no page"
    second._loaded.core.kv.check_integrity()


def test_several_prompts_are_awaited_at_once_and_others_do_not_wait(pair):
    first, second = pair()
    awaited = [prompt(k) for k in (3, 4, 5)]
    computing = [submit(first, ids, PREFILL) for ids in awaited]
    sinks = [submit(second, ids, AWAITED) for ids in awaited]
    other = prompt(50, 100)
    begun_s = time.monotonic()
    own = submit(second, other, ALONE)
    wait_for(lambda: own.is_over)
    assert own.ended_s - begun_s < 4 * STEP_S
    assert not any(sink.is_over for sink in computing)
    wait_for(lambda: all(sink.is_over for sink in sinks))
    assert [sink.token_ids for sink in sinks] == [expected(ids) for ids in awaited]
    assert own.token_ids == expected(other)
    assert pulls(second).pulled >= 3 * 6
    prefixes = second._loaded.core._scheduler.prefixes
    assert not second._loaded.kv.prefixes.is_transferring and prefixes._asking is None


@pytest.mark.parametrize("comes_first", [True, False])
def test_others_pull_what_they_need_meanwhile(pair, comes_first):
    """comes_first: the one that does not wait for a peer is before the one that does."""
    first, second = pair()
    known, token_ids = prompt(50), prompt(3)
    computing = submit(first, known, PREFILL)
    wait_for(lambda: computing.is_over)
    submit(first, token_ids, PREFILL)
    if comes_first:
        own, sink = submit(second, known, ALONE), submit(second, token_ids, AWAITED)
    else:
        sink, own = submit(second, token_ids, AWAITED), submit(second, known, ALONE)
    wait_for(lambda: own.is_over)
    assert second.stats().prefix_hit_tokens >= 192
    assert not sink.is_over
    wait_for(lambda: sink.is_over)
    assert second.stats().prefix_hit_tokens >= 2 * 192
    assert [own.token_ids, sink.token_ids] == [expected(known), expected(token_ids)]


def test_nobody_computes_the_prompt(pair):
    _, second = pair()
    token_ids = prompt(3)
    begun_s = time.monotonic()
    sink = submit(second, token_ids, AWAITED)
    wait_for(lambda: sink.is_over)
    assert prefix_lookup._UNKNOWN_S <= sink.ended_s - begun_s < prefix_lookup._UNKNOWN_S + 0.5
    assert sink.token_ids == expected(token_ids)


def test_two_engines_that_get_the_same_awaited_prompt_do_not_wait_for_each_other(
    tmp_path, key_file
):
    urls = [f"inproc://{tmp_path}/{name}" for name in "ab"]
    token_ids = prompt(3)
    with ExitStack() as opened:
        engines = [
            opened.enter_context(engine(key_file, kv_listen=own, kv_peers=[other]))
            for own, other in (urls, reversed(urls))
        ]
        wait_for(lambda: all(pulls(each).is_connected for each in engines))
        begun_s = time.monotonic()
        sinks = [submit(each, token_ids, AWAITED) for each in engines]
        wait_for(lambda: all(sink.is_over for sink in sinks))
        longest_s = max(sink.ended_s for sink in sinks) - begun_s
        assert prefix_lookup._UNKNOWN_S <= longest_s < prefix_lookup._UNKNOWN_S + 1.5
    assert [sink.token_ids for sink in sinks] == 2 * [expected(token_ids)]


def test_an_engine_without_peers_does_not_wait():
    token_ids = prompt(3)
    with LLM(str(checkpoint("llama")), **SETTINGS) as llm:
        (output,) = llm.generate([{"prompt_token_ids": token_ids}], AWAITED)
    assert list(output.outputs[0].token_ids) == expected(token_ids)


def test_a_prompt_that_is_given_up_there_is_computed_here(pair):
    first, second = pair()
    token_ids = prompt(3)
    state = first._loaded.core.submit(token_ids, PREFILL, TokenSink())
    sink = submit(second, token_ids, AWAITED)
    wait_for(lambda: pulls(second).pulled >= 2)
    first._loaded.core.abort(state)
    wait_for(lambda: sink.is_over)
    assert sink.token_ids == expected(token_ids)
    assert 2 <= pulls(second).pulled < 7


def test_an_engine_that_dies_while_it_computes(pair):
    first, second = pair()
    token_ids = prompt(3)
    submit(first, token_ids, PREFILL)
    sink = submit(second, token_ids, AWAITED)
    wait_for(lambda: pulls(second).pulled >= 2)
    first._loaded.kv.prefixes._store._server.close(1.0)
    wait_for(lambda: sink.is_over)
    assert sink.token_ids == expected(token_ids)


def test_an_engine_that_takes_too_long(pair, monkeypatch, slow_steps):
    monkeypatch.setattr(prefix_lookup, "_STALLED_UNKNOWN_S", 0.3)
    first, second = pair()
    token_ids = prompt(3)
    submit(first, token_ids, PREFILL)
    sink = submit(second, token_ids, AWAITED)
    wait_for(lambda: pulls(second).pulled >= 2)
    slow_steps(first, 3.0)
    begun_s = time.monotonic()
    wait_for(lambda: sink.is_over)
    assert 0.2 < sink.ended_s - begun_s < 1.5
    assert sink.token_ids == expected(token_ids)


def test_a_sequence_that_is_aborted_while_it_waits(pair):
    first, second = pair()
    token_ids = prompt(3)
    submit(first, token_ids, PREFILL)
    state = second._loaded.core.submit(token_ids, AWAITED, TokenSink())
    wait_for(lambda: pulls(second).pulled >= 1)
    second._loaded.core.abort(state)
    wait_for(lambda: not second.stats().num_unfinished)
    sink = submit(second, prompt(9, 100), ALONE)
    wait_for(lambda: sink.is_over)
    assert sink.token_ids == expected(prompt(9, 100))
    second._loaded.core.kv.check_integrity()
