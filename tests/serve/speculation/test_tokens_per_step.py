"""The tokens that a step gives a sequence are learned: its own, and those of past answers."""

from __future__ import annotations

import pytest

from serve import LLM, SamplingParams
from serve.speculation.tokens_per_step import TokensPerStep
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.fakes import make_seq
from tests.support.speculation.mixed_requests import answers_of
from tests.support.speculation.scripted import draft_by_script


def test_a_token_a_step_at_first():
    assert TokensPerStep().of(0, 0) == TokensPerStep().of(500, 0) == 1.0


def test_own_steps_count_most():
    speeds = TokensPerStep()
    assert speeds.of(800, 600) == pytest.approx(4.0, rel=0.1)
    assert 1.0 < speeds.of(8, 6) < 1.5


def test_past_answers_count_for_new_ones():
    speeds = TokensPerStep()
    for _ in range(300):
        speeds.learn(200, 150)
    assert speeds.of(0, 0) == pytest.approx(4.0, rel=0.1)
    assert speeds.of(800, 0) < 1.1
    for _ in range(300):
        speeds.learn(200, 0)
    assert speeds.of(0, 0) == pytest.approx(1.0, rel=0.1)


@pytest.mark.usefixtures("one_thread")
def test_an_engine_learns_them():
    """The queue and the memory policy ask what has given the steps their drafts."""
    prompts = [{"prompt_token_ids": [5 + 3 * i, *range(7, 30)]} for i in range(12)]
    params = [SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)] * 12
    with LLM(str(checkpoint("llama")), dtype="int8", order="srpt", max_num_seqs=4) as llm:
        scheduler, new = llm._loaded.core._scheduler, make_seq(5)
        assert scheduler.drafting is not None
        assert scheduler.waiting.tokens_per_step(new) == 1.0
        assert scheduler.policy.tokens_per_step(new) == 1.0
        outputs = llm.generate(prompts, params, use_tqdm=False)
        draft_by_script(llm, answers_of(prompts, outputs), 1.0)
        llm.generate(prompts, params, use_tqdm=False)
        assert scheduler.drafting.tokens_per_step(new) > 1.8
