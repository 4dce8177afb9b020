"""Drafts on the CUDA back end, with Triton's kernels in the interpreter or on a GPU."""

from __future__ import annotations

import pytest

from bench.common.scripted_drafts import ScriptedDrafter
from serve import LLM, SamplingParams
from serve.speculation.speculation import Speculation
from tests.serve.speculation.test_same_tokens import answers_of, results
from tests.support.engine.checkpoints import checkpoint
from tests.support.speculation.scripted import FreeRows, num_accepted

pytestmark = pytest.mark.exhaustive
pytest.importorskip("triton")


def requests():
    prompts = [{"prompt_token_ids": [5 + 3 * i, *range(7, 9 + 5 * i)]} for i in range(3)]
    params = [
        SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, logprobs=1),
        SamplingParams(max_tokens=8, temperature=0.9, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True, repetition_penalty=1.3),
    ]
    return prompts, params


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_drafts_change_no_token(dtype):
    """A step with drafts is launched when all tokens are known, and the next one after it; the
    sequence with penalties has none."""
    settings = {"dtype": dtype, "max_num_seqs": 8, "max_model_len": 64, "kv_cache_bytes": 8 << 20}
    settings |= {"max_num_batched_tokens": 64, "prefix_cache": False, "speculation": "off"}
    with LLM(str(checkpoint("llama")), backend="cuda", **settings) as llm:
        prompts, params = requests()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        core = llm._loaded.core
        for rate in (1.0, 0.5):
            drafter = ScriptedDrafter(answers_of(prompts, outputs), rate)
            core._scheduler.drafting = Speculation(drafter, FreeRows(), core.kv, 4, device_rows=8)
            before = num_accepted(llm)
            again = llm.generate(prompts, params, use_tqdm=False)
            assert num_accepted(llm) > before
            assert [r[:4] for r in results(again)] == [r[:4] for r in results(outputs)]
        assert llm.stats().pages_in_use == 0


def test_lookup_is_on_by_default():
    """Steps are launched ahead again when nothing repeats."""
    settings = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 64}
    settings |= {"max_num_batched_tokens": 64, "kv_cache_bytes": 8 << 20}
    with LLM(str(checkpoint("llama")), backend="cuda", **settings) as llm:
        drafting = llm._loaded.core._scheduler.drafting
        assert drafting is not None
        prompt = {"prompt_token_ids": [5, 6, 7, 8] * 4 + [5, 6]}
        params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        first = llm.generate([prompt], params, use_tqdm=False)
        llm._loaded.core._scheduler.drafting = None
        assert results(llm.generate([prompt], params, use_tqdm=False)) == results(first)
