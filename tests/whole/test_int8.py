"""The engine in int8 gives the same tokens in any batch, as in bf16 and fp32, close to fp32."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from ops.cpu import native_library, sampling
from quant.kv import MAX_HEAD_DIM, TILE_TOKENS
from serve import LLM, SamplingParams
from serve.cli.eval import parse_precision
from serve.cli.quality import evaluate
from serve.http.openai.requests import MAX_TOP_LOGPROBS
from serve.machine import usable_processors
from serve.models import read_spec
from serve.sampling_params import MAX_LOGPROBS
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.logprobs import divergence, logprobs_of
from tests.support.preempted import until_preempted

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)
HELDOUT = Path(__file__).parents[2] / "bench" / "data" / "heldout.txt"
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "opt", "gpt2"]


def _requests(
    vocab_size: int, seed: int, count: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(seed)
    prompts = [
        [rng.randrange(2, vocab_size) for _ in range(rng.choice([1, 3, 40, 90]))]
        for _ in range(count)
    ]
    params = [
        SamplingParams(
            max_tokens=rng.randint(10, 40),
            temperature=rng.choice([0.0, 0.9]),
            top_p=0.95,
            seed=rng.randrange(1000),
            ignore_eos=True,
            logprobs=1,
        )
        for _ in range(count)
    ]
    return prompts, params


def _outputs(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[object]:
    """Returns the tokens and the exact sum of their log-probabilities."""
    outputs = [r.outputs[0] for r in llm.generate(prompts, params, use_tqdm=False)]
    return [(o.token_ids, o.cumulative_logprob) for o in outputs]


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
@pytest.mark.parametrize("precision", ["int8", "int8/int4", "bfloat16", "float32"])
def test_tokens_do_not_depend_on_the_batch_or_the_chunks(family, precision):
    path = str(checkpoint(family, "base"))
    prompts, params = _requests(320, 5, 12)
    dtype, kv_dtype = parse_precision(precision)
    settings = {"dtype": dtype, "kv_dtype": kv_dtype, "max_model_len": 140}
    with LLM(path, max_num_seqs=12, **settings) as llm:
        together = _outputs(llm, prompts, params)
        alone = [_outputs(llm, [p], [s])[0] for p, s in zip(prompts, params, strict=True)]
        assert llm.stats().pages_in_use == 0
    assert together == alone
    for chunks in ({"max_num_seqs": 5, "max_chunk_tokens": 7}, {"inter_token_factor": 1.01}):
        with LLM(path, **chunks, **settings) as llm:
            assert _outputs(llm, prompts, params) == alone


@pytest.mark.small_pages
@pytest.mark.parametrize(("kv_dtype", "num_pages"), [("int8", 12), ("int4", 17)])
def test_tokens_are_the_same_after_preemption(kv_dtype, num_pages):
    """Log-probabilities too are exact, since prefill rows equal decode rows in int8 and int4."""
    path = str(checkpoint("llama", "base"))
    prompts, params = _requests(320, 6, 12)
    params = [replace(p, max_tokens=45) for p in params]
    settings = {"dtype": "int8", "kv_dtype": kv_dtype, "max_model_len": 140, "max_num_seqs": 12}
    settings["kv_page_bytes"] = 4096
    with LLM(path, **settings) as llm:
        roomy = _outputs(llm, prompts, params)
        assert llm.stats().num_preemptions == 0
    with LLM(path, kv_cache_bytes=num_pages * 4096, memory_policy="prompt_only", **settings) as llm:
        assert until_preempted(llm, lambda: _outputs(llm, prompts, params)) == roomy
        assert llm.stats().pages_in_use == 0


def _head_dim(family: str) -> int:
    return read_spec(checkpoint(family, "base")).attention_layers[0].head_dim


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "precision", ["int8", "int8/float32", "float32/int8", "float32/bfloat16", "float32/int4"]
)
def test_every_family_is_close_to_fp32(family, precision):
    """Random checkpoints have flat distributions, so KL shows every error."""
    rng = random.Random(1)
    tokens = [rng.randrange(2, 320) for _ in range(60)]
    if precision.endswith(("/int8", "/int4")) and _head_dim(family) % TILE_TOKENS:
        pytest.skip("K/V in tiles needs heads of a multiple of 16")
    plain = logprobs_of(checkpoint(family, "base"), "float32", tokens)
    other = logprobs_of(checkpoint(family, "base"), precision, tokens)
    kl = divergence(plain, other)
    bound = 0.01 if precision.startswith("int8") else 0.001
    if precision.endswith("int4"):
        bound = 0.2  # half a step of 4 bits is 16 times that of 8, and KL grows with the square
    assert 0 < float(kl.mean()) < bound
    assert float(kl.max()) < 10 * bound


@pytest.mark.exhaustive
def test_int8_keeps_the_perplexity_of_the_default_model():
    """`--dtype auto` relies on at most 0.5 % each for the products and the K/V."""
    precisions = ["float32", "int8/float32", "float32/int8", "int8", "float32/int4"]
    results = evaluate(
        "default",
        HELDOUT.read_text(encoding="utf-8"),
        [parse_precision(p) for p in precisions],
        max_tokens=3000,
    )
    reference, products, kv, both, int4_kv = results
    assert reference.kl == 0.0 and reference.agreement == 1.0
    assert abs(products.change_from(reference)) < 0.005
    assert abs(kv.change_from(reference)) < 0.005
    assert abs(both.change_from(reference)) < 0.01
    assert 0.0 < kv.kl < products.kl < 0.01
    assert both.kv_bytes_per_token < reference.kv_bytes_per_token / 3
    assert kv.kl < int4_kv.kl < 2.5e-4 and abs(int4_kv.change_from(reference)) < 0.01
    assert int4_kv.kv_bytes_per_token < 0.56 * kv.kv_bytes_per_token


def test_the_default_model_runs_in_int8_by_default(caplog):
    if native_library.instruction_set() == "portable":
        pytest.skip("auto takes int8 only where there are instructions for it")
    with caplog.at_level("INFO"), LLM() as llm:
        (reply,) = llm.chat([{"role": "user", "content": "What is 7 + 8?"}])
    assert "15" in reply.outputs[0].text
    assert "dtype auto: int8" in caplog.text


def test_a_second_engine_keeps_the_number_of_threads():
    """It does not take the first engine's torch count for the machine's."""
    count = usable_processors()
    with LLM(dtype="int8") as first, LLM(dtype="int8") as second:
        assert native_library.num_threads() == count
        assert first.generate(["a"], use_tqdm=False) and second.generate(["b"], use_tqdm=False)
    with LLM(dtype="bfloat16"):
        assert native_library.num_threads() == count


def test_copies_of_the_librarys_limits_agree():
    """Modules that must not import the library have copies of its limits."""
    library = native_library.library()
    assert library.TILE == TILE_TOKENS
    assert library.MAX_HEAD_DIM == MAX_HEAD_DIM
    assert library.MAX_TOP == sampling.MAX_TOP == MAX_LOGPROBS == MAX_TOP_LOGPROBS
