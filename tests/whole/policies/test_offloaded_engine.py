"""The engine with K/V of running sequences on the disk: the tokens of K/V in memory, whatever is
shared, preempted or selected, and no wrong token when the disk fails."""

from __future__ import annotations

import errno
import os
import re
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memory.attention.early_choices import EarlyChoices
from memory.attention.offloaded import OffloadedPlan
from memory.offload.residency import Residency
from memory.offload.scratch_file import Lane, RingLane, ScratchFile
from memory.offload.unit_states import RESIDENT, STORED
from ops.cpu import native_library
from serve import LLM
from serve.config import DEFAULT_MODEL
from serve.engine.node_recovery import generation_error
from serve.errors import KV_LOST, ConfigError, OffloadLostError
from serve.http.edge.errors import to_api_error
from serve.machine import total_memory
from tests.support.engine.checkpoints import checkpoint
from tests.support.memory.offloaded_engine import (
    LENGTHS,
    OFF,
    QUEST,
    SETTINGS,
    expected,
    needed_bytes,
    offloaded,
    prompts,
)
from tests.support.preempted import until_preempted
from tests.support.speculation.scripted import check_drafted
from tests.whole.test_recent_tokens import answers, params, prompt

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.small_pages,
]
COSTLY = pytest.mark.exhaustive


@pytest.mark.covering(1)
@pytest.mark.parametrize("policy", [OFF, QUEST])
@pytest.mark.parametrize("share", [0.5, 0.33])
def test_tokens_are_those_of_k_v_in_memory(policy, share, tmp_path):
    with offloaded(tmp_path, policy, share, prefix_cache=False) as llm:
        assert answers(llm, prompts(), params(24)) == expected(policy)
        counts = llm._loaded.offload.counts()
        assert counts.fetched_bytes > 0 and counts.written_bytes > 0
        in_memory = int(needed_bytes(policy) * share)
        # the pages of answers that have ended may be free already
        assert counts.resident_bytes <= llm._loaded.offload.max_bytes <= in_memory
        assert llm.stats().num_preemptions == 0
        if policy == QUEST:
            assert llm._loaded.selection.counts()["read"] > 0


def test_early_choices_change_no_token(tmp_path, monkeypatch):
    told, expect = [], OffloadedPlan.expect

    def noted(plan, layer, q):
        told.append(layer)
        expect(plan, layer, q)

    monkeypatch.setattr(EarlyChoices, "always", True)
    monkeypatch.setattr(OffloadedPlan, "expect", noted)
    with offloaded(tmp_path, QUEST, 0.33, prefix_cache=False) as llm:
        assert answers(llm, prompts(), params(24)) == expected(QUEST)
        assert set(told) == {*range(1, llm._loaded.offload._states.num_layers)}


def test_prefixes_that_are_on_the_disk_are_shared(tmp_path):
    first = prompt(420, seed=3)
    questions = [[*first[:300], *prompt(40, seed=i)] for i in range(4, 7)]
    others = prompts()
    with LLM(DEFAULT_MODEL, kv_policy=QUEST, prefix_cache=False, **SETTINGS) as llm:
        wanted = [answers(llm, [one], params())[0] for one in (first, *questions)]
    with offloaded(tmp_path, QUEST, 0.4) as llm:
        found = answers(llm, [first], params())
        answers(llm, others[3:7], params())  # the first one leaves memory
        before = llm._loaded.offload.counts().fetched_bytes
        found += answers(llm, questions, params())
        assert llm.stats().prefix_hit_tokens >= 3 * (300 - 32)
        assert llm._loaded.offload.counts().fetched_bytes > before
    assert found == wanted


@pytest.mark.parametrize("policy", [OFF, QUEST])
def test_several_answers_to_one_prompt_share_what_is_fetched(policy, tmp_path):
    question, one = prompt(517, seed=2), params(60, n=3, temperature=0.8, seed=11)
    with LLM(DEFAULT_MODEL, kv_policy=policy, **SETTINGS) as llm:
        wanted = answers(llm, [question], one)
    settings = {"max_num_seqs": 3, "kv_cache_bytes": needed_bytes(policy) // 7}
    with offloaded(tmp_path, policy, 0.5, **settings) as llm:
        assert answers(llm, [question], one) == wanted


@pytest.mark.parametrize("prefix_cache", [False, pytest.param(True, marks=COSTLY)])
def test_answers_are_the_same_after_preemption(prefix_cache, tmp_path):
    several, one = [prompt(length, seed=length) for length in (60, 90, 120, 150)], params(250)
    settings = {"prefix_cache": prefix_cache, "max_model_len": 420}
    with LLM(DEFAULT_MODEL, kv_policy=QUEST, **SETTINGS | settings) as llm:
        roomy = answers(llm, several, one)
    little = {
        "memory_policy": "prompt_only",
        "max_num_seqs": 4,
        "kv_cache_bytes": 1100 << 10,
        "kv_offload_bytes": 1100 << 10,
        "kv_offload_dir": tmp_path,
    }
    with LLM(DEFAULT_MODEL, kv_policy=QUEST, **SETTINGS | settings | little) as llm:
        assert until_preempted(llm, lambda: answers(llm, several, one)) == roomy


@pytest.mark.parametrize("policy", [pytest.param(OFF, marks=COSTLY), QUEST])
def test_drafts_change_no_bit(policy, tmp_path):
    lengths = (127, 250, 300, 511)
    several = [{"prompt_token_ids": prompt(length, seed=length)} for length in lengths]
    those = [params(40, temperature=0.7, seed=seed) for seed in range(len(lengths))]
    with LLM(DEFAULT_MODEL, kv_policy=policy, speculation="off", **SETTINGS) as llm:
        outputs = llm.generate(several, those, use_tqdm=False)
    with offloaded(tmp_path, policy, 0.3, speculation="off", prefix_cache=False) as llm:
        check_drafted(llm, several, those, outputs)
        assert llm._loaded.offload.counts().fetched_bytes > 0


def test_a_step_whose_layer_does_not_fit_is_computed_in_parts(tmp_path):
    """All sequences at once read more of a layer than memory has."""
    settings = {"prefix_cache": False, "max_model_len": 560}
    wanted = expected(OFF)
    with offloaded(tmp_path, OFF, 0.19, **settings) as llm:
        assert answers(llm, prompts(), params(24)) == wanted


# ---- the disk fails


class _Disk:
    """Fails so many reads of computing layers."""

    def __init__(self) -> None:
        self.fails = 0

    def read(self, lane: RingLane, *given: Any) -> Any:
        if self.fails > 0 and "mergestep-kv" not in threading.current_thread().name:
            self.fails -= 1
            raise OSError(errno.EIO, "Input/output error")
        return _read(lane, *given)


_read = RingLane.read


@pytest.fixture
def disk(monkeypatch):
    found = _Disk()
    monkeypatch.setattr(RingLane, "read", lambda *given: found.read(*given))
    return found


def test_a_read_that_fails_once_costs_time_and_no_token(disk, tmp_path):
    with offloaded(tmp_path, OFF, 0.5) as llm:
        disk.fails = 1
        assert answers(llm, prompts(), params(24)) == expected(OFF)
        assert disk.fails == 0, "it was used"


def flip_bytes(units: Residency) -> int:
    """Changes a byte of each unit that is in the file alone; returns their number."""
    pool, count = units._pool, 0
    fd = os.open(f"/proc/self/fd/{units._file.fileno()}", os.O_RDWR)
    for layer, flags in enumerate(pool.states.flags):
        tiles = np.flatnonzero((flags & (RESIDENT | STORED)) == STORED)
        for place in pool._file_places(layer, tiles).tolist():
            (byte,) = os.pread(fd, 1, place + 100)
            os.pwrite(fd, bytes([byte ^ 4]), place + 100)
            count += 1
    os.fsync(fd)
    os.close(fd)
    return count


@pytest.mark.parametrize(
    ("policy", "length"),
    [
        pytest.param(OFF, 517, id="shared pages"),
        pytest.param(QUEST, 512, id="a copied page"),
        pytest.param(OFF, 512, marks=COSTLY),
        pytest.param(QUEST, 517, marks=COSTLY),
    ],
)
def test_a_changed_byte_makes_a_sequence_computed_again(policy, length, tmp_path, caplog):
    first, others = prompt(length, seed=517), prompts()[3:6]
    with offloaded(tmp_path, policy, 0.4) as llm:
        said = answers(llm, [first], params(24))
        assert (said == expected(policy)[-1:]) == (length == LENGTHS[-1])
        answers(llm, others, params(1))  # the first one leaves memory
        assert flip_bytes(llm._loaded.offload) > 0
        for again in (True, False):
            caplog.clear()
            assert answers(llm, [first], params(24)) == said
            assert ("computed again" in caplog.text) == again
        assert answers(llm, prompts(), params(24)) == expected(policy)


def test_a_disk_that_is_gone_ends_requests_and_the_engine_goes_on(disk, tmp_path):
    with offloaded(tmp_path, OFF, 0.5) as llm:
        disk.fails = 10**9
        outputs = llm.generate(
            [{"prompt_token_ids": each} for each in prompts()], params(24), use_tqdm=False
        )
        reasons = {each.outputs[0].finish_reason for each in outputs}
        assert "error" in reasons, "not all fit into memory"
        assert llm.stats().pages_in_use == 0
        disk.fails = 0
        assert answers(llm, prompts(), params(24)) == expected(OFF)


def test_a_disk_that_is_full_ends_requests_until_it_has_room(monkeypatch, tmp_path):
    is_full, write = [True], RingLane.write

    def write_or_fail(lane: RingLane, *given: Any) -> Any:
        if is_full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(lane, *given)

    monkeypatch.setattr(RingLane, "write", write_or_fail)
    with offloaded(tmp_path, OFF, 0.5) as llm:
        inputs = [{"prompt_token_ids": each} for each in prompts()]
        outputs = llm.generate(inputs, params(24), use_tqdm=False)
        assert "error" in {each.outputs[0].finish_reason for each in outputs}
        assert llm.stats().pages_in_use == 0
        is_full[0] = False
        assert answers(llm, prompts(), params(24)) == expected(OFF)


def test_a_lost_answer_has_an_error_that_says_so():
    error = generation_error(KV_LOST)
    assert isinstance(error, OffloadLostError)
    answer = to_api_error(error, "req_1")
    assert (answer.status, answer.code) == (503, "kv_lost")


def test_all_memory_is_given_back(tmp_path):
    with offloaded(tmp_path, QUEST, 0.5, prefix_cache=False) as llm:
        answers(llm, prompts(), params(8))
        units, core = llm._loaded.offload, llm._loaded.core
        assert 0 < units.counts().resident_bytes <= units.max_bytes
        core.kv.trim()
        assert units.counts().resident_bytes == 0


# ---- start

LITTLE = {"dtype": "int8", "kv_offload_bytes": 8 << 20, "kv_cache_bytes": 8 << 20}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"dtype": "float32"}, "kv_offload_bytes needs kv_dtype int8 or int4, not float32"),
        ({"kv_offload_bytes": 10}, "kv_offload_bytes 10 is less than a page of K/V, [0-9]+ bytes"),
        ({"kv_dtype": "int4"}, r"beside recent tokens in int8 of max_num_seqs sequences \(.*lower"),
        ({"kv_policy": "h2o:budget=64"}, "kv_policy h2o cannot be used with kv_offload_bytes"),
        ({"kv_cache_dir": "/tmp/x"}, "kv_cache_dir cannot be used with kv_offload_bytes"),
        ({"memory_nodes": "tcp://a:1"}, "memory_nodes cannot be used with kv_offload_bytes"),
        ({"kv_peers": "tcp://a:1"}, "kv_peers cannot be used with kv_offload_bytes"),
        ({"tensor_parallel_size": 2}, "several ranks cannot have kv_offload_bytes"),
        ({"speculation": "mtp"}, "speculation mtp cannot be used with kv_offload_bytes"),
        ({"kvp_segment_tokens": 256}, "kv_offload_bytes needs a kvp_segment_tokens of at least"),
        ({"backend": "cuda", "kv_dtype": "int8"}, "kv_offload_bytes needs the native kernels"),
        ({"kv_page_bytes": 65536}, "kv_page_bytes 65536 cannot be used with kv_offload_bytes"),
        ({"kv_cache_bytes": 1 << 18}, "kv_cache_bytes 262144 is too little for kv_offload_bytes"),
        ({"kv_cache_bytes": 2 * total_memory()}, "kv_cache_bytes: .* asked for, but this machine"),
        ({"kv_offload_dir": "/dev/null/x"}, "kv_offload_dir /dev/null/x: there is no directory"),
        (
            {"kv_offload_dir": "/no/such/x"},
            "kv_offload_dir /no/such/x: there is no directory /no/su",
        ),
        ({"kv_offload_dir": "/proc"}, "kv_offload_dir /proc: no file can be made there"),
        ({"kv_offload_dir": "/dev/null"}, "kv_offload_dir /dev/null is no directory"),
        ({"kv_offload_dir": "off\0x"}, "kv_offload_dir must be a path, not 'off"),
        ({"kv_offload_bytes": 0}, "kv_offload_bytes must be a positive integer"),
        ({"kv_offload_bytes": None, "kv_offload_dir": "/tmp"}, "kv_offload_dir needs kv_offload"),
    ],
)
def test_what_cannot_be_is_refused_by_name(settings, problem, tmp_path):
    given = LITTLE | {"kv_offload_dir": tmp_path} | settings
    with pytest.raises(ConfigError, match=problem):
        LLM(DEFAULT_MODEL, **given)


def test_the_log_says_which_directory_was_made(tmp_path, caplog):
    for number in range(2):
        with caplog.at_level("INFO"), LLM(DEFAULT_MODEL, **LITTLE, kv_offload_dir=tmp_path / "x"):
            assert caplog.text.count(f"made the directory {tmp_path / 'x'}") == 1, number


@pytest.mark.parametrize(("asked", "is_said"), [(1 << 40, True), (1 << 20, False)])
def test_more_than_all_sequences_need_is_not_taken_and_the_log_says_so(
    asked, is_said, tmp_path, caplog
):
    sizes = {"kv_cache_bytes": 8 << 20, "kv_offload_bytes": asked, "kv_offload_dir": tmp_path}
    caplog.set_level("INFO")
    with LLM(DEFAULT_MODEL, **SETTINGS, **sizes):
        pass
    assert bool(re.search("at most .* could be used by max_num_seqs", caplog.text)) == is_said


def test_a_full_disk_is_refused(monkeypatch, tmp_path):
    def open_file(folder: Path, num_bytes: int) -> None:
        assert num_bytes > 15 << 20, "of memory and the file together"
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("serve.loading.kv_offload.open_file", open_file)
    problem = r"kv_offload_dir .*No space left on device for kv_off.* and .*, 16 MiB together"
    with pytest.raises(ConfigError, match=problem):
        LLM(DEFAULT_MODEL, **LITTLE, kv_offload_dir=tmp_path)


def test_more_than_the_disk_has_is_refused_with_the_figures(tmp_path):
    many = {"kv_offload_bytes": 100 << 40, "max_num_seqs": 1 << 20}
    with pytest.raises(ConfigError, match=r"kv_offload_dir .*No space left.* TiB together"):
        LLM(DEFAULT_MODEL, **LITTLE | many, kv_offload_dir=tmp_path)


@pytest.mark.parametrize(("memory", "is_said"), [(4 << 20, True), (64 << 20, False)])
def test_a_memory_that_bounds_fill_gets_a_warning(memory, is_said, tmp_path, caplog):
    sizes = {"kv_cache_bytes": memory, "kv_offload_bytes": 40 << 20, "kv_policy": QUEST}
    with LLM(DEFAULT_MODEL, dtype="int8", **sizes, kv_offload_dir=tmp_path):
        pass
    said = "are taken by the bounds of all keys" in caplog.text
    assert said == is_said, caplog.text


def test_a_ring_that_the_kernel_refuses_is_named_and_leaves_no_thread(monkeypatch, tmp_path):
    made: list[object] = []

    def lane(file: ScratchFile) -> Lane:
        if len(made) == 2:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        made.append(_lane(file))
        return made[-1]

    _lane = ScratchFile.lane
    monkeypatch.setattr(ScratchFile, "lane", lane)
    with pytest.raises(ConfigError, match=r"kv_offload_dir .*Cannot allocate memory"):
        LLM(DEFAULT_MODEL, **LITTLE, kv_offload_dir=tmp_path)
    assert not [each for each in threading.enumerate() if each.name.startswith("mergestep-kv-")]


@pytest.mark.parametrize(
    ("family", "variant", "problem"),
    [
        ("gpt_oss", "long", "windows or chunks"),
        ("deepseek_v2", "long", "latent K/V"),
        ("gemma4_text", "long", "K/V shared by layers"),
    ],
)
def test_models_of_other_kinds_are_refused(family, variant, problem, tmp_path):
    with pytest.raises(ConfigError, match=f"kv_offload_bytes cannot be used with .*({problem})"):
        LLM(str(checkpoint(family, variant)), **LITTLE, kv_dtype="int8", kv_offload_dir=tmp_path)
