"""K/V on disk end to end: a working set larger than memory, faults, restarts; the same tokens."""

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

import serve.kv_store
from memory.spill import SpillStore
from serve import LLM, SamplingParams
from serve.errors import ConfigError
from serve.kv_store import checkpoint_fingerprint
from tests.checkpoints import checkpoint
from tests.faulty_storage import faulty

SETTINGS = {
    "dtype": "int8",
    "kv_page_bytes": 4096,
    "max_model_len": 200,
    "max_num_seqs": 6,
    "kv_disk_bytes": 4 << 20,
    "max_num_batched_tokens": 32,
}
SMALL = {"kv_cache_bytes": 30 * 4096}  # six sequences of the longest prompt and answer need 40
PROMPTS = [
    {"prompt_token_ids": [k, *((5 * i + k) % 90 + 3 for i in range(90 + 3 * k))]}
    for k in range(3, 17)
]
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)


def tokens(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    with LLM(str(checkpoint("llama")), prefix_cache=False, **SETTINGS) as llm:
        return tokens(llm.generate(PROMPTS, GREEDY))


def run_twice(folder: Path, **settings):
    """Every prompt twice in little memory; the answers of both times and the statistics."""
    with LLM(str(checkpoint("llama")), kv_cache_dir=str(folder), **SETTINGS, **settings) as llm:
        answers = [tokens(llm.generate(PROMPTS, GREEDY)) for _ in range(2)]
        for _ in range(100):  # the last pages are still being written
            if (stats := llm.stats()).pages_in_use == 0:
                break
            time.sleep(0.05)
        assert stats.pages_in_use == 0
        llm._loaded.core._kv.check_integrity()
    return answers, stats


@pytest.mark.parametrize("policy", ["predicted", "prompt_only"])
def test_a_working_set_larger_than_memory(tmp_path, expected, policy):
    answers, stats = run_twice(tmp_path, memory_policy=policy, **SMALL)
    assert answers == [expected, expected]
    assert stats.prefix_evicted_pages > 60
    assert stats.disk_stored_pages > 40
    assert stats.disk_loaded_pages > 10
    if policy == "prompt_only":
        assert stats.num_preemptions > 0, "preempted sequences come back from the disk"


def test_a_restart_finds_what_was_there(tmp_path, expected):
    run_twice(tmp_path, **SMALL)
    answers, stats = run_twice(tmp_path, kv_cache_bytes=4 << 20)
    assert answers == [expected, expected]
    assert stats.disk_loaded_pages > 30
    assert stats.disk_lost_pages == 0


@pytest.mark.parametrize(
    "plan",
    [
        lambda kind, number: errno.EIO if number % 3 == 1 else None,
        lambda kind, number: errno.ENOSPC if kind == "write" and number > 20 else None,
        lambda kind, number: "torn" if kind == "write" and number % 2 else None,
        lambda kind, number: "short" if number % 4 == 2 else None,
        lambda kind, number: errno.EIO,
    ],
    ids=["EIO", "disk full", "torn writes", "short", "all fail"],
)
def test_whatever_the_disk_does_the_tokens_are_right(tmp_path, expected, monkeypatch, plan):
    opener, opened = faulty(plan)
    store = functools.partial(SpillStore, open_file=opener)
    monkeypatch.setattr(serve.kv_store, "SpillStore", store)
    answers, stats = run_twice(tmp_path, **SMALL)
    assert answers == [expected, expected]
    assert opened
    assert stats.prefix_evicted_pages > 60


def test_a_flipped_bit_is_a_miss(tmp_path, expected):
    run_twice(tmp_path, **SMALL)
    (pages,) = tmp_path.glob("*/pages-*.kv")
    content = bytearray(pages.read_bytes())
    for offset in range(7, len(content), 4096):
        content[offset] ^= 4
    pages.write_bytes(content)
    answers, stats = run_twice(tmp_path, kv_cache_bytes=4 << 20)
    assert answers == [expected, expected]
    assert stats.disk_loaded_pages == 0
    assert stats.disk_lost_pages > 0


def test_idle_moments_save_what_a_kill_would_lose(tmp_path, expected):
    """In ample memory nothing has to leave it; it is written all the same."""
    path = str(checkpoint("llama"))
    with LLM(path, kv_cache_dir=str(tmp_path), **SETTINGS) as llm:
        llm.generate(PROMPTS, GREEDY)
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
    assert checkpoint_fingerprint(tmp_path) != checkpoint_fingerprint(source), "written again"


CHILD = """
import sys
from serve import LLM
from tests.test_serve_kv_disk import GREEDY, PROMPTS, SETTINGS, SMALL
llm = LLM(sys.argv[1], kv_cache_dir=sys.argv[2], **SETTINGS, **SMALL)
print("ready", flush=True)
while True:
    llm.generate(PROMPTS, GREEDY)
"""


def test_killed_and_started_again(tmp_path, expected):
    rng = random.Random(2)
    for _ in range(2):
        with subprocess.Popen(
            [sys.executable, "-c", CHILD, str(checkpoint("llama")), str(tmp_path)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([".", *sys.path])},
        ) as child:
            assert child.stdout is not None
            while child.stdout.readline().strip() != b"ready":
                assert child.poll() is None
            time.sleep(rng.uniform(0.3, 0.8))
            child.send_signal(signal.SIGKILL)
    answers, _ = run_twice(tmp_path, **SMALL)
    assert answers == [expected, expected]
