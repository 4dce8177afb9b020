"""Heads on the CUDA back end, with Triton's kernels in the interpreter or on a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve import LLM
from tests.serve.speculation.test_cuda_drafts import requests
from tests.serve.speculation.test_heads import GREEDY, Noted, reference_of
from tests.support.speculation.heads import PLAIN, settings_of
from tests.support.speculation.mixed_requests import results
from tests.support.speculation.scripted import always_draft

pytestmark = pytest.mark.exhaustive
pytest.importorskip("triton")
SMALL = {"backend": "cuda", "max_num_seqs": 10, "max_model_len": 64, "kv_cache_bytes": 8 << 20}
SMALL |= {"max_num_batched_tokens": 40, "max_draft_tokens": 3}
HEADS = [("eagle3", "llama", "base"), ("mtp", "deepseek_v3", "yarn"), ("mtp", "glm4_moe", "groups")]


@pytest.mark.parametrize(
    ("head", "dtype"), [(0, "int8"), (1, "float32"), (1, "int8"), (2, "bfloat16")]
)
def test_same_tokens(head, dtype, tmp_path):
    kind, family, variant = HEADS[head]
    settings = SMALL | settings_of(tmp_path, kind, family, variant) | {"dtype": dtype}
    prompts, params = requests()
    params = [replace(each, max_tokens=7) for each in params]
    with LLM(**settings | PLAIN) as llm:
        expected = results(llm.generate(prompts, params, use_tqdm=False))
    with LLM(**settings) as llm:
        drafts = always_draft(llm)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [r[:4] for r in results(outputs)] == [r[:4] for r in expected]
        assert llm.stats().num_draft_tokens >= 2  # not after steps that are launched ahead
        assert llm.stats().pages_in_use == 0
        assert not drafts._texts


@pytest.mark.parametrize(("kind", "family", "variant"), HEADS[:2])
def test_drafts_are_the_references(kind, family, variant, tmp_path):
    """Each draft is what the head gives for the sequence's tokens, with prompts in chunks."""
    settings = settings_of(tmp_path, kind, family, variant)
    reference = reference_of(settings, kind, family, variant)
    settings |= SMALL | {"dtype": "float32", "kv_dtype": "float32", "prefix_cache": False}
    settings["max_num_batched_tokens"] = 12
    prompts = [{"prompt_token_ids": [7 * i + j for j in range(5 + 14 * i)]} for i in range(2)]
    with LLM(**settings) as llm:
        noted = Noted(llm, reference)
        llm.generate(prompts, replace(GREEDY, max_tokens=9), use_tqdm=False)
        noted.check(3)


def test_kernels_are_warmed_up(tmp_path, monkeypatch):
    """All sizes of steps of the head are computed before a request comes."""
    settings = SMALL | settings_of(tmp_path, *HEADS[0]) | {"dtype": "int8"}
    with LLM(**settings | {"max_num_seqs": 3, "max_num_batched_tokens": 4}) as llm:
        runner = llm._loaded.core._runner
        head, sizes = runner._model.draft_head, set()
        forward = head.forward

        def noted(next_ids, *args):
            sizes.add(len(next_ids))
            return forward(next_ids, *args)

        monkeypatch.setattr(head, "forward", noted)
        runner.warm_up()
        assert sizes == {1, 2, 3, 4}
