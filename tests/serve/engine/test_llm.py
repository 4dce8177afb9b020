"""The offline interface, engines side by side, and memory policies by name."""

from __future__ import annotations

import asyncio
import gc
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from serve import LLM, SamplingParams
from serve.errors import (
    ConfigError,
    ContextLengthError,
    RequestError,
)
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.engine_rig import PROMPT, Rig, go, params, text_script


def test_llm_prompts_params_and_errors(capfd):
    with LLM(str(checkpoint("llama")), dtype="float32") as llm:
        outputs = llm.generate(
            ["hello", {"prompt_token_ids": PROMPT}, PROMPT],
            [params(max_tokens=n) for n in (1, 2, 3)],
            use_tqdm=False,
        )
        assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2, 3]
        assert outputs[0].prompt == "hello"
        assert outputs[1].prompt_token_ids == PROMPT
        assert outputs[1].outputs[0].token_ids == outputs[2].outputs[0].token_ids[:2]
        assert llm.generate("hi", params(), use_tqdm=False)[0].prompt == "hi"
        with pytest.raises(RequestError, match="2 sampling_params for 1"):
            llm.generate("hi", [params()] * 2, use_tqdm=False)
        with pytest.raises(ContextLengthError):
            llm.generate(["fine", [5] * 5000], params(), use_tqdm=False)
        chat = llm.chat([{"role": "user", "content": "hi"}], params())
        assert len(chat) == 1
        assert capfd.readouterr() == ("", "")  # the progress bar is for terminals
        assert llm.stats().num_unfinished == 0


def test_prompts_that_are_cut():
    with LLM(str(checkpoint("llama")), dtype="float32") as llm:

        def ids(**prompt):
            return llm.generate(prompt, params(max_tokens=1), use_tqdm=False)[0].prompt_token_ids

        whole = ids(prompt="the quick brown fox")
        assert ids(prompt="the quick brown fox", truncate_prompt_tokens=3) == whole[-3:]
        assert (
            ids(prompt_token_ids=whole, truncate_prompt_tokens=3, truncation_side="right")
            == whole[:3]
        )
        for bad in ({"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": True}):
            with pytest.raises(RequestError, match="truncate_prompt_tokens"):
                ids(prompt="a", **bad)
        with pytest.raises(RequestError, match="truncation_side"):
            ids(prompt="a", truncate_prompt_tokens=1, truncation_side="middle")


def test_llm_seeded_requests_repeat_in_any_batch():
    sampled = SamplingParams(temperature=1.0, seed=11, max_tokens=20, top_p=0.95)
    with LLM(str(checkpoint("llama")), dtype="float32", max_num_seqs=8) as llm:
        alone = llm.generate([PROMPT], sampled, use_tqdm=False)[0].outputs[0].token_ids
        noise = SamplingParams(temperature=1.0, max_tokens=30)
        mixed = llm.generate(
            [[9, 8], PROMPT, [4] * 30, PROMPT], [noise, sampled, noise, sampled], use_tqdm=False
        )
        assert mixed[1].outputs[0].token_ids == alone
        assert mixed[3].outputs[0].token_ids == alone
        several = llm.generate([PROMPT], SamplingParams(n=4, seed=11, max_tokens=20, top_p=0.95))
        texts = [tuple(o.token_ids) for o in several[0].outputs]
        assert texts[0] == tuple(alone)
        assert len(set(texts)) == 4


def test_two_models_in_one_process():
    """Two real engines at once, each with its own memory and model."""
    with (
        LLM(str(checkpoint("llama")), dtype="float32") as one,
        LLM(str(checkpoint("gpt2")), dtype="float32") as two,
    ):
        alone = [llm.generate(PROMPT, params(), use_tqdm=False)[0] for llm in (one, two)]
        with ThreadPoolExecutor(2) as pool:
            jobs = [
                pool.submit(llm.generate, [PROMPT] * 8, params(), use_tqdm=False)
                for llm in (one, two)
            ]
            together = [job.result() for job in jobs]
    for single, several in zip(alone, together, strict=True):
        for output in several:
            assert output.outputs[0].token_ids == single.outputs[0].token_ids


def test_an_unreferenced_llm_is_collected():
    llm = LLM(str(checkpoint("llama")), dtype="float32")
    core = llm._loaded.core
    llm.generate(PROMPT, params(), use_tqdm=False)
    del llm
    gc.collect()
    for _ in range(100):
        if not core._compute.is_alive():
            return
        time.sleep(0.02)
    raise AssertionError("threads still run")


def test_lengths_are_learned_per_client_and_reported():
    """The predictor gets the client's name, and the statistics report its coverage."""

    async def main():
        script = text_script("abcdef")
        async with Rig(num_pages=64, script=script) as rig:
            wanted = params(max_tokens=250, ignore_eos=False, stop="f")
            for _ in range(60):
                stream = rig.engine.submit(PROMPT, wanted, client="an app")
                await rig.engine.collect(stream)
            policy = rig.engine.loaded.core._scheduler.policy
            assert ("an app", -1) in policy.lengths.histories
            while (stats := rig.engine.stats()).num_unfinished:
                await asyncio.sleep(0.005)  # a stop string ends the last request a moment later
            assert stats.num_finished == 60
            assert stats.preemptions_per_1000 == 0
            assert 0 < stats.memory_utilisation < 0.1
            assert stats.coverage_p90 is not None and stats.coverage_p90 > 0.9

    go(main())


@pytest.mark.parametrize("policy", ["predicted", "worst_case", "prompt_only"])
def test_memory_policies_by_name(policy):
    async def main():
        async with Rig(num_pages=80, memory_policy=policy) as rig:
            outputs = await asyncio.gather(
                *(rig.engine.generate(PROMPT, params(max_tokens=20)) for _ in range(12))
            )
            assert all(len(o.outputs[0].token_ids) == 20 for o in outputs)
            stats = rig.engine.stats()
            assert stats.num_finished == 12
            assert (stats.coverage_p50 is None) == (stats.coverage_p90 is None)

    go(main())


def test_an_unknown_memory_policy_is_refused():
    with pytest.raises(ConfigError, match="memory_policy must be one of predicted"):
        Rig(memory_policy="hope")
