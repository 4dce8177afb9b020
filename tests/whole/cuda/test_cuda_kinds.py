"""Mixtures, sinks with windows, shared K/V and latents on the CUDA back end, with Triton's kernels
in the interpreter or on a GPU."""

from __future__ import annotations

import pytest

from serve.errors import ConfigError
from tests.support.engine.checkpoints import checkpoint, reference_greedy
from tests.whole.cuda.test_cuda_engine import NUM_TOKENS, cuda_llm, greedy, prompts_of

pytestmark = pytest.mark.exhaustive

pytest.importorskip("triton")


@pytest.mark.small_pages
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "gemma4_text", "deepseek_v2"])
def test_greedy_tokens_equal_transformers(family):
    """The prompts run together in chunks, beside a sampled request; then each finds its prefix."""
    prompts = prompts_of(300, seed=len(family))
    params = [greedy(), greedy(temperature=0.9, seed=3, top_p=0.8), greedy()]
    settings = {"max_num_batched_tokens": 20, "kv_page_bytes": 4096}
    with cuda_llm(family, "long", **settings) as llm:
        first = llm.generate(prompts, params, use_tqdm=False)
        before = llm.stats().prefix_hit_tokens
        again = llm.generate([prompts[2]], greedy(), use_tqdm=False)[0]
        stats = llm.stats()
        llm._loaded.core.kv.check_integrity()
    assert stats.pages_in_use == 0
    assert stats.prefix_hit_tokens > before
    path = checkpoint(family, "long")
    for number in (0, 2):
        expected = reference_greedy(path, prompts[number], NUM_TOKENS)
        assert first[number].outputs[0].token_ids == expected
    assert again.outputs[0].token_ids == first[2].outputs[0].token_ids


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_tokens_do_not_depend_on_the_batch(dtype):
    """The router chooses the same experts for a row, and no bit of its results differs."""
    prompts = prompts_of(300, seed=4)[:2]
    with cuda_llm("qwen3_moe", "long", dtype=dtype) as llm:
        together = llm.generate(prompts, greedy(logprobs=1), use_tqdm=False)
        alone = [llm.generate([p], greedy(logprobs=1), use_tqdm=False)[0] for p in prompts]
    for one, other in zip(together, alone, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].cumulative_logprob == other.outputs[0].cumulative_logprob


def test_what_has_no_kernel_is_refused():
    with pytest.raises(ConfigError, match="attention_chunk_size"):
        cuda_llm("llama4_text", "long")
