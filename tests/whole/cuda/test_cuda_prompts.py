"""Prompt logprobs and embeddings on the CUDA back end, with Triton's kernels in the interpreter or
on a GPU. One engine runs all, because the interpreter takes tens of milliseconds a launch."""

from __future__ import annotations

import pytest

from serve import LLM, SamplingParams
from tests.serve.engine.test_embeddings import LAST, MEAN, prompt_of
from tests.serve.engine.test_embeddings import check as check_embedding
from tests.serve.runner.test_prompt_logprobs import check
from tests.support.engine.checkpoints import checkpoint, reference_greedy

pytestmark = pytest.mark.exhaustive

pytest.importorskip("triton")


def test_logprobs_and_embeddings_equal_transformers():
    """Prompts run in chunks, steps are launched ahead, and another request decodes beside them."""
    path = checkpoint("llama")
    prompts = [prompt_of(n, seed=n) for n in (26, 7, 5)]
    with_output = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=3)
    without_output = SamplingParams(max_tokens=0, prompt_logprobs=0)
    plain = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    with LLM(
        str(path),
        backend="cuda",
        dtype="float32",
        max_num_seqs=4,
        max_model_len=64,
        max_num_batched_tokens=20,
        kv_cache_bytes=8 << 20,
    ) as llm:
        outputs = llm.generate(prompts, [with_output, without_output, plain], use_tqdm=False)
        vectors = llm.embed(prompts, [MEAN, LAST, MEAN])
        assert llm.stats().pages_in_use == 0
    check(outputs[0].prompt_logprobs, prompts[0], 3)
    check(outputs[1].prompt_logprobs, prompts[1], 0)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 0, 3]
    assert outputs[2].outputs[0].token_ids == reference_greedy(path, prompts[2], 3)
    for vector, prompt, params in zip(vectors, prompts, (MEAN, LAST, MEAN), strict=True):
        check_embedding(vector, path, prompt, params)
