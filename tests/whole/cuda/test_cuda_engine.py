"""The engine on the CUDA back end, with Triton's kernels in the interpreter or on a GPU.

Checkpoints are small and tokens few, because the interpreter takes tens of milliseconds a launch.
The runner is the real one, with padded sizes, tokens on the device and steps launched ahead.
"""

from __future__ import annotations

import functools
import random

import pytest
import torch

from memory.attention.seam import AttentionStep
from serve import LLM, SamplingParams
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.loading.runtime import load_runtime
from tests.support.engine.checkpoints import checkpoint, reference_greedy

pytestmark = pytest.mark.exhaustive

pytest.importorskip("triton")

NUM_TOKENS = 4
PROMPT_LENGTHS = (1, 17, 34)


def prompts_of(vocab_size: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2, vocab_size) for _ in range(n)] for n in PROMPT_LENGTHS]


@functools.cache
def expected(family: str, name: str, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
    return reference_greedy(checkpoint(family, name), list(prompt), num_tokens)


def cuda_llm(family: str, name: str = "base", **settings: object) -> LLM:
    base = {"dtype": "float32", "max_num_seqs": 4, "max_model_len": 64, "kv_cache_bytes": 8 << 20}
    base["max_num_batched_tokens"] = 64  # the start computes the largest step
    return LLM(str(checkpoint(family, name)), backend="cuda", **(base | settings))


def greedy(num_tokens: int = NUM_TOKENS, **params: object) -> SamplingParams:
    return SamplingParams(
        **({"max_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True} | params)
    )


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "base"),
        ("llama", "head-dim"),
        ("qwen2", "window"),
        ("qwen3", "base"),
        ("opt", "base"),
    ],
)
def test_greedy_tokens_equal_transformers(family, name):
    """The prompts run together in chunks, beside a sampled request."""
    prompts = prompts_of(300, seed=len(family + name))
    params = [greedy(), greedy(temperature=0.9, seed=3, top_p=0.8), greedy()]
    with cuda_llm(family, name, max_num_batched_tokens=20) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert llm.stats().pages_in_use == 0
    for i in (0, 2):
        assert outputs[i].outputs[0].token_ids == expected(
            family, name, tuple(prompts[i]), NUM_TOKENS
        ), f"prompt {i}"
    assert len(outputs[1].outputs[0].token_ids) == NUM_TOKENS


def logprobs(backend: str, dtype: str, tokens: list[int]) -> torch.Tensor:
    """Returns log-probabilities [len(tokens), vocab] from two chunks and a decode row."""
    precision, _, kv_dtype = dtype.partition("/")
    config = EngineConfig(
        model=str(checkpoint("llama", "base")),
        dtype=precision,
        kv_dtype=kv_dtype or "auto",
        backend=backend,
        max_model_len=64,
        max_num_seqs=1,
        max_num_batched_tokens=32,
        kv_cache_bytes=1 << 20,
    )
    runtime = load_runtime(config)
    target = runtime.kv.open(len(tokens))
    chunks = []
    with torch.inference_mode():
        for start, end in ((0, 20), (20, len(tokens) - 1), (len(tokens) - 1, len(tokens))):
            assert runtime.kv.grow(target, end, start)
            runtime.kv.commit()
            num_decodes = int(end - start == 1)
            step = AttentionStep(num_decodes, [target.start], [end - start], [end])
            hidden = runtime.model.forward(
                torch.tensor(tokens[start:end], device=runtime.model.device),
                torch.arange(start, end, device=runtime.model.device),
                runtime.attention.plan(step),
            )
            chunks.append(torch.log_softmax(runtime.model.logits(hidden), -1).double().cpu())
    runtime.kv.close(target)
    memory = runtime.memory
    del runtime
    memory.close()
    return torch.cat(chunks)


def divergence(one: torch.Tensor, other: torch.Tensor) -> float:
    """Returns the mean KL divergence of the rows."""
    return float((one.exp() * (one - other)).sum(-1).mean())


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "int8/bfloat16", "int4/int8", "nf4/int8"])
def test_precisions_are_close_to_the_cpu(dtype):
    """Both round weights and K/V alike, but CUDA has bf16 between products. The distributions of
    random checkpoints are flat, so KL shows every error."""
    rng = random.Random(1)
    tokens = [rng.randrange(2, 300) for _ in range(34)]
    cuda, cpu = logprobs("cuda", dtype, tokens), logprobs("cpu", dtype, tokens)
    assert 0 < divergence(cpu, cuda) < (0.002 if dtype == "bfloat16" else 0.006)
    if dtype in ("bfloat16", "int8"):  # nearly as close to fp32 as on the CPU
        plain = logprobs("cpu", "float32", tokens)
        assert divergence(plain, cuda) < 1.5 * divergence(plain, cpu)


def test_tokens_do_not_depend_on_the_batch():
    prompts = prompts_of(300, seed=4)[:2]
    with cuda_llm("llama", dtype="int8") as llm:
        together = llm.generate(prompts, greedy(logprobs=1), use_tqdm=False)
        alone = [llm.generate([p], greedy(logprobs=1), use_tqdm=False)[0] for p in prompts]
    for one, other in zip(together, alone, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert one.outputs[0].cumulative_logprob == other.outputs[0].cumulative_logprob


def test_a_stop_token_that_is_seen_late_leaves_no_trace():
    prompt = prompts_of(300, seed=5)[1]
    whole = expected("llama", "base", tuple(prompt), 2 * NUM_TOKENS)
    stop = next(t for i, t in enumerate(whole) if i >= 2 and whole.index(t) == i)
    end = whole.index(stop)
    with cuda_llm("llama") as llm:
        output = llm.generate(
            [prompt], greedy(2 * NUM_TOKENS, stop_token_ids=[stop], logprobs=0), use_tqdm=False
        )[0].outputs[0]
        assert output.finish_reason == "stop"
        assert output.token_ids == whole[: end + 1]
        assert len(output.logprobs) == end + 1
        stats = llm.stats()
        assert stats.pages_in_use == 0 and stats.num_decode_rows == end


def test_penalties_and_biases():
    prompt = prompts_of(300, seed=6)[1]
    settings = {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "logit_bias": {17: 1.5, 40: -3.0},
        "min_tokens": 2,
    }
    with LLM(str(checkpoint("llama", "base")), dtype="float32", backend="cpu") as llm:
        cpu = llm.generate([prompt], greedy(**settings), use_tqdm=False)[0].outputs[0]
    with cuda_llm("llama") as llm:
        cuda = llm.generate([prompt], greedy(**settings), use_tqdm=False)[0].outputs[0]
    assert cuda.token_ids == cpu.token_ids


@pytest.mark.small_pages
def test_a_prefix_hit_gives_the_same_tokens():
    prompt = prompts_of(300, seed=7)[2]
    with cuda_llm("llama", kv_page_bytes=4096, prefix_cache=True) as llm:
        first = llm.generate([prompt], greedy(), use_tqdm=False)[0].outputs[0].token_ids
        again = llm.generate([prompt], greedy(), use_tqdm=False)[0].outputs[0].token_ids
        assert llm.stats().prefix_hit_tokens > 0
    assert first == again == expected("llama", "base", tuple(prompt), NUM_TOKENS)


@pytest.mark.small_pages
def test_preempted_sequences_give_the_same_tokens():
    """Memory holds four pages of 16 tokens, and the sequences need five in the end."""
    prompts = prompts_of(300, seed=8)[:2]
    settings = {"kv_page_bytes": 8192, "memory_policy": "prompt_only", "max_model_len": 48}
    with cuda_llm("llama", kv_cache_bytes=4 * 8192, **settings) as llm:
        outputs = llm.generate(prompts, greedy(18), use_tqdm=False)
        assert llm.stats().num_preemptions > 0
        assert llm.stats().pages_in_use == 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == expected("llama", "base", tuple(prompt), 18)


def test_unsupported_settings_are_refused():
    with pytest.raises(ConfigError, match="kv_page_bytes cannot be used with memory_nodes"):
        cuda_llm("llama", kv_page_bytes=4096, memory_nodes="inproc://nobody")
    if torch.cuda.is_available():
        return
    with pytest.raises(ConfigError, match="fp8 needs the cuda back end"):
        LLM(str(checkpoint("llama", "base")), backend="cpu", dtype="fp8")
