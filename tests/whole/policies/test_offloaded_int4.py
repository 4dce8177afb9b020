"""int4 K/V of running sequences on the disk, with recent tokens in int8 in memory: the tokens of
K/V in memory, wherever a block of recent tokens ends."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from memory.offload.scratch_file import RingLane
from ops.cpu import native_library
from quant.kv import RECENT_BLOCK
from serve import LLM
from serve.config import DEFAULT_MODEL
from serve.runner.runner import ModelRunner
from tests.support.memory.offloaded_engine import (
    OFF,
    QUEST,
    SETTINGS,
    expected,
    needed_bytes,
    offloaded,
    prompts,
    recent_bytes,
)
from tests.support.preempted import until_preempted
from tests.support.speculation.scripted import check_drafted
from tests.whole.test_recent_tokens import answers, before_the_end_of_a_block, params, prompt

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.small_pages,
]
COSTLY = pytest.mark.exhaustive
INT4: dict[str, Any] = SETTINGS | {"kv_dtype": "int4"}


def blocks_of(llm: LLM) -> dict[int, frozenset[int]]:
    """Returns the blocks of each range that have memory."""
    return llm._loaded.core._runner._attention._recent._memory._held


@pytest.mark.parametrize("policy", [OFF, QUEST])
@pytest.mark.parametrize("share", [0.6, pytest.param(0.45, marks=COSTLY)])
@pytest.mark.parametrize("chunk", [None, pytest.param(37, marks=COSTLY)])
def test_tokens_are_those_of_k_v_in_memory(policy, share, chunk, tmp_path):
    settings = {"kv_dtype": "int4", "prefix_cache": False, "max_chunk_tokens": chunk}
    with offloaded(tmp_path, policy, share, **settings) as llm:
        assert answers(llm, prompts(), params(24)) == expected(policy, "int4")
        counts = llm._loaded.offload.counts()
        assert counts.fetched_bytes > 0 and counts.written_bytes > 0
        in_memory = int(needed_bytes(policy, "int4") * share)
        assert counts.resident_bytes <= llm._loaded.offload.max_bytes <= in_memory
        if policy == QUEST:
            assert llm._loaded.selection.counts()["read"] > 0
        held = blocks_of(llm)
        assert held and all(1 <= len(each) <= 2 for each in held.values())


@pytest.mark.parametrize("shared", [100, 128, 300, pytest.param(384, marks=COSTLY)])
def test_a_prefix_hit_ends_with_a_block(shared, tmp_path):
    first = prompt(420, seed=3)
    questions = [[*first[:shared], *prompt(40, seed=i)] for i in range(4, 7)]
    with LLM(DEFAULT_MODEL, prefix_cache=False, **INT4) as llm:
        wanted = [answers(llm, [one], params())[0] for one in (first, *questions)]
    with offloaded(tmp_path, OFF, 0.5, kv_dtype="int4") as llm:
        found = answers(llm, [first], params())
        found += answers(llm, questions, params())
        reused = shared // RECENT_BLOCK * RECENT_BLOCK
        assert llm.stats().prefix_hit_tokens >= len(questions) * reused
        assert llm.stats().prefix_hit_tokens % RECENT_BLOCK == 0
    assert found == wanted


@pytest.mark.parametrize("policy", [pytest.param(OFF, marks=COSTLY), QUEST])
def test_answers_are_the_same_after_preemption(policy, tmp_path):
    several, one = [prompt(length, seed=length) for length in (60, 90, 120, 150)], params(250)
    settings = INT4 | {"kv_policy": policy, "max_model_len": 420}
    with LLM(DEFAULT_MODEL, **settings) as llm:
        roomy = answers(llm, several, one)
    little = {
        "memory_policy": "prompt_only",
        "max_num_seqs": 4,
        "kv_cache_bytes": (600 << 10) + recent_bytes(4),
        "kv_offload_bytes": 500 << 10,
        "kv_offload_dir": tmp_path,
    }
    with LLM(DEFAULT_MODEL, **settings | little) as llm:
        assert until_preempted(llm, lambda: answers(llm, several, one)) == roomy


@pytest.mark.parametrize("policy", [OFF, pytest.param(QUEST, marks=COSTLY)])
def test_drafts_that_cross_the_end_of_a_block_change_no_bit(policy, tmp_path):
    several = [{"prompt_token_ids": each} for each in before_the_end_of_a_block()]
    those = [params(40, temperature=0.7, seed=seed) for seed in range(len(several))]
    settings = {"speculation": "off", "prefix_cache": False, "kv_dtype": "int4"}
    with LLM(DEFAULT_MODEL, kv_policy=policy, **SETTINGS | settings) as llm:
        outputs = llm.generate(several, those, use_tqdm=False)
    with offloaded(tmp_path, policy, 0.5, **settings) as llm:
        check_drafted(llm, several, those, outputs)


def test_rows_that_are_computed_again_have_their_recent_tokens(monkeypatch, tmp_path):
    """After all layers of a step something fails, so that it is computed again in parts."""
    run, failures = ModelRunner.run, []

    def run_and_fail(runner: ModelRunner, plan: Any, launched: Any) -> Any:
        result = run(runner, plan, launched)
        if len(plan.sequences) > 1 and len(failures) < 40:
            failures.append(plan)
            raise RuntimeError("sampling failed")
        return result

    monkeypatch.setattr(ModelRunner, "run", run_and_fail)
    settings = {"kv_dtype": "int4", "prefix_cache": False, "max_num_batched_tokens": 300}
    with offloaded(tmp_path, OFF, 0.6, **settings) as llm:
        assert answers(llm, prompts(), params(24)) == expected(OFF, "int4")
    assert len(failures) == 40


def test_a_read_that_fails_once_costs_time_and_no_token(monkeypatch, tmp_path):
    read, fails = RingLane.read, [1]

    def read_or_fail(lane: RingLane, *given: Any) -> Any:
        if fails:
            fails.pop()
            raise OSError(errno.EIO, "Input/output error")
        return read(lane, *given)

    monkeypatch.setattr(RingLane, "read", read_or_fail)
    with offloaded(tmp_path, QUEST, 0.5, kv_dtype="int4") as llm:
        assert answers(llm, prompts(), params(24)) == expected(QUEST, "int4")
    assert not fails
