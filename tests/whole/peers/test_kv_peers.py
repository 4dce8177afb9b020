"""An engine gets cached K/V from another one: the same tokens, whatever the peer does."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from pathlib import Path

import pytest

from memory.prefix.load_times import LoadTimes
from serve import LLM, SamplingParams
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.loading import runtime
from serve.loading.model_source import ModelSource
from serve.models.progress import LoadProgress
from serve.scheduler.step_time import StepTimeModel
from tests.support.engine.checkpoints import checkpoint
from tests.support.memory.peer_settings import PAGE, SETTINGS

KINDS = {
    "plain": {"dtype": "float32"},
    "int8": {"dtype": "int8"},
    "int4": {"dtype": "int8", "kv_dtype": "int4"},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def prompt(first: int, length: int) -> dict[str, list[int]]:
    return {"prompt_token_ids": [first, *[(5 * i + first) % 90 + 3 for i in range(length - 1)]]}


PROMPTS = [prompt(k, 200 + 5 * k) for k in range(3, 7)]


def tokens(llm: LLM, prompts=PROMPTS) -> list[list[int]]:
    outputs = llm.generate(prompts, GREEDY)
    return [output.outputs[0].token_ids for output in outputs]


def engine(key_file: Path, **settings) -> LLM:
    settings = SETTINGS | {"kv_peer_key_file": key_file} | settings
    return LLM(str(checkpoint("llama")), **settings)


def listening(llm: LLM) -> str:
    """Returns the address at which the engine serves its pages."""
    return llm._loaded.kv.prefixes._store._server.url


def wait_for(condition, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not come"
        time.sleep(0.01)


def pulls(llm: LLM):
    (found,) = llm.stats().kv_peers.pulls.values()
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", ["inproc", "shm", "tcp"])
def test_a_prefix_is_pulled_and_the_tokens_are_the_same(tmp_path, key_file, kind, scheme):
    listen = {
        "inproc": f"inproc://{tmp_path}",
        "shm": f"shm://{tmp_path}/kv.sock",
        "tcp": "tcp://127.0.0.1:0",
    }[scheme]
    with engine(key_file, kv_listen=listen, **KINDS[kind]) as first:
        expected = tokens(first)
        with engine(key_file, kv_peers=[listening(first)], **KINDS[kind]) as second:
            wait_for(lambda: pulls(second).is_connected)
            assert tokens(second) == expected
            stats = second.stats()
            found = pulls(second)
            assert 12 <= found.pulled <= found.found
            assert found.refused == found.lost == 0
            num_tokens = sum([len(each["prompt_token_ids"]) for each in PROMPTS])
            assert stats.prefix_hit_tokens > 0.6 * num_tokens
            assert found.seconds > 0.0
            second._loaded.core.kv.check_integrity()
        assert first.stats().kv_peers.serves.served == found.pulled


def test_pages_are_served_while_the_peer_computes(key_file, tmp_path):
    url = f"inproc://{tmp_path}"
    with engine(key_file, kv_listen=url, dtype="int8") as first:
        expected = tokens(first)
        busy = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
        core = first._loaded.core
        sinks = [Sink() for _ in range(4)]
        for number, sink in enumerate(sinks):
            core.submit(prompt(30 + number, 60), busy, sink)
        with engine(key_file, kv_peers=[url], dtype="int8") as second:
            wait_for(lambda: pulls(second).is_connected)
            assert tokens(second) == expected
            assert pulls(second).pulled >= 10
        wait_for(lambda: all(sink.is_over for sink in sinks), 20.0)
        core.kv.check_integrity()


class Sink:
    """Takes the results of a request that nobody reads."""

    def __init__(self) -> None:
        self.is_over = False

    def accept(self, request) -> None:
        pass

    def push(self, delta) -> None:
        self.is_over |= delta.finish_reason is not None

    def wake(self) -> None:
        pass

    def fail(self, error: Exception) -> None:
        raise AssertionError(error)


def test_wrong_pages_are_computed_instead(key_file, tmp_path, monkeypatch):
    """A peer with the key, whose pages do not have the bytes of their names."""
    url = f"inproc://{tmp_path}"
    with engine(key_file, kv_listen=url, dtype="int8") as first:
        expected = tokens(first)
        server = first._loaded.kv.prefixes._store._server
        source = server._source
        first_page = source._address_of(0)
        honest = server._checksums
        source._address_of = lambda page: first_page
        server._checksums = Mixed(honest)
        with engine(key_file, kv_peers=[url], dtype="int8") as second:
            wait_for(lambda: pulls(second).is_connected)
            assert tokens(second) == expected
            assert pulls(second).refused == 1
            assert pulls(second).pulled == 0
            assert second.stats().disk_lost_pages >= 1


class Mixed:
    """Gives each page the checksum that it has under another name."""

    def __init__(self, checksums) -> None:
        self._checksums = checksums

    def of(self, name: bytes, page: memoryview) -> bytes:
        return self._checksums.of(name[::-1], page)


def test_a_peer_that_ends_only_means_computing(key_file, tmp_path):
    url = f"inproc://{tmp_path}"
    first = engine(key_file, kv_listen=url, dtype="int8")
    expected = tokens(first)
    with engine(key_file, kv_peers=[url, "tcp://127.0.0.1:9"], dtype="int8") as second:
        peers = second.stats().kv_peers
        wait_for(lambda: second.stats().kv_peers.pulls[url].is_connected)
        assert not peers.pulls["tcp://127.0.0.1:9"].is_connected
        assert tokens(second, PROMPTS[:1]) == expected[:1]
        first.shutdown()
        assert tokens(second) == expected


def test_engines_that_pull_from_one_another_while_pages_are_evicted(key_file, tmp_path):
    urls = [f"inproc://{tmp_path}/{number}" for number in (0, 1)]
    prompts = [prompt(k, 150 + 6 * k) for k in range(3, 14)]
    small = {"kv_cache_bytes": 60 * PAGE, "dtype": "float32", "max_num_seqs": 2}
    with LLM(str(checkpoint("llama")), **(SETTINGS | {"dtype": "float32"})) as alone:
        expected = tokens(alone, prompts)
    with contextlib.ExitStack() as opened:
        engines = [
            opened.enter_context(engine(key_file, kv_listen=url, kv_peers=urls, **small))
            for url in urls
        ]
        for each in engines:
            wait_for(lambda each=each: sum(p.is_connected for p in peers_of(each)) == 1)
        wrong: list[int] = []

        def ask(number: int) -> None:
            rng = random.Random(number)
            for _ in range(12):
                chosen = rng.choices(range(len(prompts)), k=3)
                found = tokens(engines[number], [prompts[k] for k in chosen])
                pairs = zip(chosen, found, strict=True)
                wrong.extend([k for k, token_ids in pairs if token_ids != expected[k]])

        threads = [threading.Thread(target=ask, args=(number,)) for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        for each in engines:
            assert each.stats().prefix_evicted_pages > 50
            assert sum(p.pulled for p in peers_of(each)) > 10
            assert sum(p.refused + p.lost for p in peers_of(each)) == 0
            each._loaded.core.kv.check_integrity()


def peers_of(llm: LLM):
    return llm.stats().kv_peers.pulls.values()


def test_a_page_costs_more_than_computing_it_and_is_computed(key_file, tmp_path, monkeypatch):
    monkeypatch.setattr(LoadTimes, "seconds", lambda times, num_pages: 10.0)
    monkeypatch.setattr(StepTimeModel, "prefill_seconds", lambda *_: 0.001)
    url = f"inproc://{tmp_path}"
    with engine(key_file, kv_listen=url, dtype="int8") as first:
        expected = tokens(first)
        with engine(key_file, kv_peers=[url], dtype="int8") as second:
            wait_for(lambda: pulls(second).is_connected)
            assert tokens(second) == expected
            assert pulls(second).found >= 12 and pulls(second).pulled == 0
            assert second.stats().disk_declined_fetches >= 4


def test_pages_of_the_disk_tier_are_served_and_names_outlive_a_restart(key_file, tmp_path):
    url, small = f"inproc://{tmp_path}", {"kv_cache_bytes": 26 * PAGE, "dtype": "int8"}
    disk = {"kv_cache_dir": tmp_path / "disk", **small}
    with engine(key_file, kv_listen=url, **disk) as first:
        expected = tokens(first)
    with engine(key_file, kv_listen=url, **disk) as again:
        with engine(key_file, kv_peers=[url], dtype="int8") as second:
            wait_for(lambda: pulls(second).is_connected)
            assert tokens(second) == expected
            assert pulls(second).pulled >= 10
        assert again.stats().kv_peers.serves.served >= 10


@pytest.mark.parametrize("setting", [{"kv_peers": ["tcp://h:1"]}, {"kv_listen": "tcp://h:1"}])
def test_kv_in_a_gpus_memory_is_not_pulled(setting):
    config = EngineConfig(**setting)
    source = ModelSource(config, None, None, None, None)
    with pytest.raises(ConfigError, match="kv_peers and kv_listen need K/V in host memory"):
        runtime._load_cuda(source, LoadProgress(), 1.0, None)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"kv_peers": ["h:1"]}, "kv_peers must be an address"),
        ({"kv_listen": "h:1"}, "kv_listen must be an address"),
        ({"kv_peers": ["tcp://h:1"] * 2}, "kv_peers has an address twice"),
        ({"kv_peers": ["tcp://h:1"], "prefix_cache": False}, "kv_peers needs prefix_cache"),
        (
            {"kv_listen": "tcp://h:1", "borrow": ["tcp://h:2"]},
            "borrow cannot be used with kv_listen",
        ),
        ({"kv_peers": ["tcp://h:1"], "tensor_parallel_size": 2}, "leave out tensor_parallel_size"),
    ],
)
def test_settings_that_do_not_fit_are_refused(key_file, settings, text):
    with pytest.raises(ConfigError, match=text):
        EngineConfig(**({"kv_peer_key_file": key_file} | settings))


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"kv_peers": ["tcp://h:1"], "kv_peer_key_file": None},
            "kv_peers needs a kv_peer_key_file",
        ),
        ({"kv_listen": "inproc://x", "kv_peer_key_file": None}, "kv_listen needs a kv_peer_key"),
        ({"kv_peers": ["ftp://h:1"]}, "kv_peers: ftp://h:1: no transport"),
        ({"kv_listen": "tcp://host.invalid:1"}, "kv_listen: "),
        (
            {"kv_listen": "inproc://x", "kv_peer_key_file": "/dev/null"},
            "kv_peer_key_file /dev/null",
        ),
    ],
)
def test_addresses_and_keys_that_cannot_be_used_are_refused(key_file, settings, text):
    with pytest.raises(ConfigError, match=text):
        engine(**({"key_file": key_file, "dtype": "int8"} | settings))
