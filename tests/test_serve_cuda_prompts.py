"""What is asked of prompts' own rows, on the CUDA back end: Triton's kernels in the interpreter, or
on a GPU."""

from __future__ import annotations

import random

import pytest

from serve import LLM, SamplingParams
from tests.checkpoints import checkpoint, reference_greedy
from tests.test_serve_prompt_logprobs import check

pytest.importorskip("triton")


def test_they_equal_transformers_beside_others():
    """Chunks cut the prompts; steps are launched one ahead."""
    rng = random.Random(1)
    prompts = [[rng.randrange(2, 300) for _ in range(n)] for n in (1, 30, 9, 5)]
    asking = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, prompt_logprobs=3)
    only = SamplingParams(max_tokens=0, prompt_logprobs=0)
    plain = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    path = checkpoint("llama")
    with LLM(
        str(path),
        backend="cuda",
        dtype="float32",
        max_num_seqs=4,
        max_model_len=64,
        max_num_batched_tokens=20,
        kv_cache_bytes=8 << 20,
    ) as llm:
        outputs = llm.generate(prompts, [asking, asking, only, plain], use_tqdm=False)
        assert llm.stats().pages_in_use == 0
    for prompt, output, num_top in zip(prompts, outputs, (3, 3, 0), strict=False):
        check(output.prompt_logprobs, prompt, num_top)
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 1, 0, 3]
    assert outputs[3].outputs[0].token_ids == reference_greedy(path, prompts[3], 3)
