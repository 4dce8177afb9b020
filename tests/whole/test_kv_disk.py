"""K/V on disk gives the same tokens with little memory, faulty disks, kills and restarts."""

from __future__ import annotations

import errno
import functools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import serve.loading.disk_store
from memory.prefix.load_times import LoadTimes
from memory.tiers.disk_tier import DiskTier
from serve import LLM, SamplingParams
from serve.errors import ConfigError
from serve.models.open_checkpoint import checkpoint_fingerprint
from serve.scheduler.step_time import StepTimeModel
from tests.support.engine.checkpoints import checkpoint
from tests.support.memory.faulty_storage import faulty

PAGE = 8192  # two blocks, so that a write can be torn
SETTINGS = {
    "dtype": "int8",
    "kv_page_bytes": PAGE,
    "max_model_len": 250,
    "max_num_seqs": 20,
    "kv_disk_bytes": 4 << 20,
    "max_num_batched_tokens": 64,
}
AMPLE = {"kv_cache_bytes": 8 << 20}
SMALL = {"kv_cache_bytes": 26 * PAGE, "memory_policy": "prompt_only"}


# Pages must reach the disk before memory evicts them, and a busy machine writes them too late.
KEEPS_UP = pytest.mark.timing


@pytest.fixture(autouse=True)
def loading_costs_nothing(monkeypatch):
    """Makes loading and mapping always cheaper than computing, which the tiny model would otherwise
    prefer (tests/serve/scheduler/test_hit_costs.py)."""
    monkeypatch.setattr(LoadTimes, "seconds", lambda times, num_pages: 0.0)
    monkeypatch.setattr(StepTimeModel, "prefill_seconds", lambda *_: 0.0)


def prompt(first: int, length: int) -> dict[str, list[int]]:
    tail = [(5 * i + first) % 90 + 3 for i in range(length - 1)]
    return {"prompt_token_ids": [first, *tail]}


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


# Short prompts with long answers, which are admitted together and preempt each other as they grow.
DIALOGS = [(prompt(k, 10 + k), greedy(220 - k)) for k in range(3, 23)]
# Long prompts with short answers, which evict each other before they are sent again.
PREFIXES = [(prompt(k, 200 + k), greedy(3)) for k in range(23, 43)]


def generate(llm: LLM, requests) -> list[list[int]]:
    outputs = llm.generate([p for p, _ in requests], [params for _, params in requests])
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected() -> list[list[list[int]]]:
    """The outputs without a memory limit, a prefix cache or a disk."""
    with LLM(str(checkpoint("llama")), prefix_cache=False, **SETTINGS, **AMPLE) as llm:
        return [generate(llm, DIALOGS), generate(llm, PREFIXES), generate(llm, PREFIXES)]


def working_set(requests, token_bytes: int) -> float:
    """Returns the K/V bytes of all requests at their end."""
    lengths = [len(p["prompt_token_ids"]) + params.max_tokens for p, params in requests]
    return sum(lengths) * token_bytes


def run(folder: Path, **settings):
    """Runs the dialogs, then every prefix twice; returns the tokens and the final statistics."""
    path = str(checkpoint("llama"))
    with LLM(path, kv_cache_dir=str(folder), **(SETTINGS | settings)) as llm:
        answers = [generate(llm, DIALOGS), generate(llm, PREFIXES), generate(llm, PREFIXES)]
        for _ in range(100):  # the last pages are still being written
            if (stats := llm.stats()).pages_in_use == 0:
                break
            time.sleep(0.05)
        assert stats.pages_in_use == 0
        llm._loaded.core.kv.check_integrity()
    assert llm.stats().pages_mapped == llm.stats().pages_in_use == 0
    return answers, stats


def run_small(folder: Path, **settings):
    answers, stats = run(folder, **(SMALL | settings))
    memory_bytes = stats.pages_total * PAGE
    for requests in (DIALOGS, PREFIXES):
        assert working_set(requests, stats.kv_bytes_per_token) >= 3 * memory_bytes
    assert stats.prefix_evicted_pages > 60
    return answers, stats


@KEEPS_UP
@pytest.mark.parametrize("policy", ["predicted", "prompt_only"])
def test_a_working_set_three_times_the_memory(tmp_path, expected, policy):
    answers, stats = run_small(tmp_path, memory_policy=policy)
    assert answers == expected
    assert stats.disk_stored_pages > 20 and stats.disk_loaded_pages > 10
    assert stats.disk_lost_pages == stats.disk_failed_pages == 0
    if policy == "prompt_only":
        assert stats.num_preemptions >= 6, "preempted sequences are loaded from disk"


@KEEPS_UP
def test_preempted_sequences_are_loaded_from_disk(tmp_path):
    """Only preempted sequences have a prefix to load here."""
    with LLM(str(checkpoint("llama")), kv_cache_dir=str(tmp_path), **(SETTINGS | SMALL)) as llm:
        generate(llm, DIALOGS)
        stats = llm.stats()
    assert stats.num_preemptions >= 6
    assert stats.disk_loaded_pages > 5


@KEEPS_UP
def test_a_restart_loads_stored_pages(tmp_path, expected):
    run_small(tmp_path)
    answers, stats = run(tmp_path, **AMPLE)
    assert answers == expected
    assert stats.disk_loaded_pages > 30
    assert stats.prefix_evicted_pages == stats.disk_lost_pages == 0


@KEEPS_UP
@pytest.mark.parametrize(
    "plan",
    [
        lambda kind, number: errno.EIO if number % 3 == 1 else None,
        lambda kind, number: errno.ENOSPC if kind == "write" and number > 30 else None,
        lambda kind, number: "torn" if kind == "write" and number % 3 == 1 else None,
        lambda kind, number: "short" if number % 4 == 2 else None,
        lambda kind, number: errno.EIO,
    ],
    ids=["EIO", "disk full", "torn writes", "short", "all fail"],
)
def test_tokens_are_right_on_a_faulty_disk(tmp_path, expected, monkeypatch, plan):
    opener, opened = faulty(plan)
    store = functools.partial(DiskTier, open_file=opener)
    monkeypatch.setattr(serve.loading.disk_store, "DiskTier", store)
    answers, stats = run_small(tmp_path)
    assert answers == expected
    assert opened and stats.num_preemptions >= 6
    num_faults = stats.disk_failed_pages + stats.disk_lost_pages
    assert num_faults > 0, "no fault occurred"
    if plan("read", 0) is None:
        assert stats.disk_loaded_pages > 0, "no intact page was loaded"
    else:
        assert stats.disk_loaded_pages == stats.disk_stored_pages == 0


def test_a_hung_disk_delays_no_request(tmp_path, expected, monkeypatch):
    """Prefixes are computed while no read and no write after the 40th ends."""
    is_hung = [True]
    opener, opened = faulty(
        lambda kind, number: "hold" if is_hung[0] and (kind == "read" or number > 40) else None
    )
    store = functools.partial(DiskTier, open_file=opener)
    monkeypatch.setattr(serve.loading.disk_store, "DiskTier", store)
    with LLM(str(checkpoint("llama")), kv_cache_dir=str(tmp_path), **(SETTINGS | SMALL)) as llm:
        for requests, tokens in ((PREFIXES, expected[1]), (PREFIXES, expected[2])):
            assert generate(llm, requests) == tokens
        assert 0 < llm.stats().pages_in_use <= 26 // 4 + 26 // 8, "pages of pending transfers"
        is_hung[0] = False
        opened[0].release()


@pytest.mark.row("X9")
def test_a_flipped_bit_is_a_miss(tmp_path, expected):
    run_small(tmp_path)
    (pages,) = tmp_path.glob("*/pages-*.kv")
    content = bytearray(pages.read_bytes())
    for offset in range(7, len(content), 4096):
        content[offset] ^= 4
    pages.write_bytes(content)
    answers, stats = run(tmp_path, **AMPLE)
    assert answers == expected
    assert stats.disk_loaded_pages == 0
    assert stats.disk_corrupt_pages == stats.disk_lost_pages > 0


def test_pages_are_written_in_idle_time(tmp_path, expected):
    """They are written although memory is ample, so that a kill does not lose them."""
    path = str(checkpoint("llama"))
    with LLM(path, kv_cache_dir=str(tmp_path), **SETTINGS) as llm:
        generate(llm, PREFIXES)
        for _ in range(100):
            if llm.stats().disk_stored_pages >= 30:
                break
            time.sleep(0.05)
        assert llm.stats().disk_stored_pages >= 30


def test_one_engine_at_a_time(tmp_path):
    path = str(checkpoint("llama"))
    with (
        LLM(path, kv_cache_dir=str(tmp_path), **SETTINGS),
        pytest.raises(ConfigError, match=r"kv_cache_dir.*in use"),
    ):
        LLM(path, kv_cache_dir=str(tmp_path), **SETTINGS)


def test_other_weights_have_another_fingerprint(tmp_path):
    source = checkpoint("llama")
    for file in source.iterdir():
        shutil.copy2(file, tmp_path / file.name)
    assert checkpoint_fingerprint(tmp_path) == checkpoint_fingerprint(source)
    (weights,) = tmp_path.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1
    time_ns = weights.stat().st_mtime_ns
    weights.write_bytes(content)
    os.utime(weights, ns=(time_ns, time_ns))
    assert checkpoint_fingerprint(tmp_path) != checkpoint_fingerprint(source)
    shutil.copy(next(source.glob("*.safetensors")), weights)
    assert checkpoint_fingerprint(tmp_path) != checkpoint_fingerprint(source), "rewritten"


CHILD = """
import sys
from serve import LLM
from tests.whole.test_kv_disk import PREFIXES, SETTINGS, SMALL, DIALOGS, generate
with LLM(sys.argv[1], kv_cache_dir=sys.argv[2], **(SETTINGS | SMALL)) as llm:
    while True:
        for requests in (DIALOGS, PREFIXES):
            generate(llm, requests)
            stats = llm.stats()  # the next process may load all that it needs
            if stats.disk_stored_pages or stats.disk_loaded_pages:
                print("stored", flush=True)
"""


@pytest.mark.process
def test_killed_and_started_again(tmp_path, expected):
    """With ample memory, only pages of the killed processes are loaded."""
    rng = random.Random(2)
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, str(checkpoint("llama")), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([".", *sys.path])},
        ) as child:
            assert child.stdout is not None
            while child.stdout.readline().strip() != b"stored":
                assert child.poll() is None
            time.sleep(rng.uniform(0.0, 0.5))
            child.send_signal(signal.SIGKILL)
    answers, stats = run(tmp_path, **AMPLE)
    assert answers == expected
    assert stats.disk_loaded_pages > 5 and stats.prefix_evicted_pages == 0
    answers, _ = run_small(tmp_path)
    assert answers == expected
