"""What an engine publishes about its prefix cache is what is in it, whatever happens to it."""

from __future__ import annotations

import random

import pytest

from serve import LLM, SamplingParams
from serve.errors import ConfigError, ModelLoadError
from serve.events import publisher
from tests.support.engine.checkpoints import checkpoint
from tests.support.events.follower import Follower

pytestmark = pytest.mark.small_pages
SETTINGS = {
    "kv_cache_bytes": 256 << 10,
    "kv_page_bytes": 4096,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "dtype": "float32",
    "seed": 1,
    "kv_events": "tcp://*:0",
}


@pytest.fixture(autouse=True)
def _quick_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """A subscriber need not wait for a second after the last one."""
    monkeypatch.setattr(publisher, "_SNAPSHOT_S", 0.1)


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, 90), k=count)


def run(llm: LLM, *prompts: list[int], salt: str | None = None, count: int = 2) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, cache_salt=salt)
    llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)


def follower(llm: LLM) -> Follower:
    return Follower(*llm._loaded.events.endpoints)


def cached_chains(llm: LLM, *sequences: list[int]) -> set[tuple[int, ...]]:
    """The chains of whole blocks that the index has of these sequences, page by page."""
    kv, found = llm._loaded.kv, set()
    hasher = llm._loaded.core._scheduler.prefixes._hasher
    for sequence in sequences:
        keys: list[bytes] = []
        hasher.extend(keys, sequence)
        for number, key in enumerate(keys):
            if not kv.prefixes.is_cached(key):
                break
            end = kv.page_end(number)
            found |= {tuple(sequence[:stop]) for stop in range(16, end + 1, 16)}
    return found


def test_a_follower_has_what_the_cache_has_while_memory_is_short():
    prompts = [tokens(seed, 40 + 30 * (seed % 7)) for seed in range(12)]
    prompts += [prompts[0][:50] + tokens(99, 60), prompts[3][:64]]
    order = random.Random(3)
    with LLM(str(checkpoint("llama")), **SETTINGS) as llm, follower(llm) as follow:
        follow.follow()
        for _ in range(15):
            run(llm, *order.sample(prompts, 3), count=1)
        follow.follow()
        assert llm.stats().prefix_evicted_pages > 50
        assert follow.chains() == cached_chains(llm, *prompts)
        assert follow.chains(), "something is cached"
        with follower(llm) as late:  # a router that starts now
            assert late.follow(500).blocks == follow.blocks
            assert late.topic.startswith(b"kv@") and late.topic.endswith(b"-0")
        kept = follow.follow().blocks
        assert llm._loaded.core.stats().pages_cached > 0
        llm.shutdown()
        assert kept and not follow.follow().blocks, "an orderly stop removes every block"


def test_an_answer_of_the_replay_socket_is_the_index():
    with LLM(str(checkpoint("llama")), **SETTINGS) as llm, follower(llm) as follow:
        run(llm, tokens(1, 100), tokens(2, 100))
        follow.follow(500)
        with Follower(*llm._loaded.events.endpoints, topic=None) as other:
            assert other.ask(follow.last - 1) == follow.last
            assert other.blocks == follow.blocks
            assert other.ask(0) == follow.last
            assert other.ask(follow.last + 1) == -1, "nothing was missed"


@pytest.mark.parametrize("with_salted", [False, True])
def test_salted_prompts_are_published_only_if_asked_for(with_salted):
    settings = SETTINGS | {"kv_events_salted": with_salted}
    with LLM(str(checkpoint("llama")), **settings) as llm, follower(llm) as follow:
        run(llm, tokens(1, 64), salt="secret")
        run(llm, tokens(2, 64))
        follow.follow(500)
        firsts = [follow.salts[it] for it, (parent, _) in follow.blocks.items() if parent is None]
        assert sorted(firsts, key=str) == ([None, "secret"] if with_salted else [None])
        assert len([salt for salt in follow.salts.values() if salt]) == with_salted


@pytest.mark.parametrize(
    ("family", "variant", "least"), [("qwen2", "long-mixed", 96), ("mistral", "long", 0)]
)
def test_layers_with_a_window_promise_nothing(family, variant, least):
    """Only pages of the layers without a window are needed from the first token on."""
    path = str(checkpoint(family, variant))
    settings = SETTINGS | {"kv_cache_bytes": 1 << 20}
    with LLM(path, **settings) as llm, follower(llm) as follow:
        prompt = tokens(5, 120)
        run(llm, prompt)
        follow.follow(500)
        chains = follow.chains()
        assert max(map(len, chains), default=0) >= least and bool(chains) == bool(least)
        assert all(chain == tuple(prompt[: len(chain)]) for chain in chains)
        assert len(follow.blocks) == len(chains), "no block twice"
        assert len(llm._loaded.kv.prefixes.index) > len(chains)


def test_pages_that_come_back_from_the_disk_are_published(tmp_path):
    settings = SETTINGS | {"kv_cache_dir": str(tmp_path)}
    prompt = tokens(1, 100)
    with LLM(str(checkpoint("llama")), **settings) as llm:
        run(llm, prompt)
    with LLM(str(checkpoint("llama")), **settings) as llm, follower(llm) as follow:
        assert not follow.follow(500).blocks
        run(llm, prompt, count=1)
        assert llm.stats().disk_loaded_pages > 0
        assert tuple(prompt[:80]) in follow.follow().chains()
        assert follow.chains() == cached_chains(llm, prompt)


def test_later_versions_of_vllm_read_maps():
    settings = SETTINGS | {"kv_events_format": "map", "kv_events_salted": True}
    with LLM(str(checkpoint("llama")), **settings) as llm:
        live, replay = llm._loaded.events.endpoints
        with Follower(live, replay, as_maps=True) as follow:
            run(llm, tokens(1, 100))
            run(llm, tokens(2, 64), salt="s")
            follow.follow(500)
            assert tuple(tokens(1, 96)) in {it[:96] for it in follow.chains()}
            assert "s" in follow.salts.values()
            with Follower(live, replay, topic=None, as_maps=True) as other:
                assert other.ask(0) == follow.last
                assert other.blocks == follow.blocks
            llm.shutdown()
            assert not follow.follow().blocks


def test_a_restart_is_a_gap_and_begins_with_a_clear():
    firsts = []
    for _ in range(2):
        with LLM(str(checkpoint("llama")), **SETTINGS) as llm, follower(llm) as follow:
            follow.follow(500)
            firsts.append(follow.last - follow.num_messages)
            assert not follow.blocks
    assert firsts[1] - firsts[0] > 1e5, "microseconds"


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kv_events": "5557"}, "kv_events must be tcp://HOST:PORT or ipc://PATH, not '5557'"),
        ({"kv_events": "tcp://*:70000"}, "kv_events must be"),
        ({"kv_events_replay_endpoint": "x"}, "kv_events_replay_endpoint must be"),
        ({"prefix_cache": False}, "kv_events needs prefix_cache"),
        ({"kv_events_topic": ""}, "kv_events_topic must be a non-empty string"),
        ({"kv_events_format": "json"}, "kv_events_format must be one of array, map"),
        ({"kv_events_salted": 1}, "kv_events_salted must be true or false"),
        ({"memory_nodes": ("tcp://a:1",), "kv_page_bytes": None}, "with memory_nodes"),
    ],
)
def test_wrong_settings_are_named(settings, problem):
    with pytest.raises(ConfigError, match=problem.replace("*", r"\*")):
        LLM(str(checkpoint("llama")), **(SETTINGS | settings))


def test_an_address_in_use_is_named_and_frees_the_engine():
    with LLM(str(checkpoint("llama")), **SETTINGS) as llm:
        live, _ = llm._loaded.events.endpoints
        taken = live.replace("0.0.0.0", "*")
        with pytest.raises((ConfigError, ModelLoadError), match=r"kv_events: .* cannot be opened"):
            LLM(str(checkpoint("llama")), **(SETTINGS | {"kv_events": taken}))
