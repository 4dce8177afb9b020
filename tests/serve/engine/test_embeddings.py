"""Embeddings equal Transformers' pooled hidden states, also after preemptions and failed steps."""

from __future__ import annotations

import asyncio
import random
import time

import numpy as np
import pytest
import torch

from serve import LLM, Engine, PoolingParams, SamplingParams
from serve.errors import (
    ContextLengthError,
    EngineStoppedError,
    GenerationError,
    OverloadedError,
    RequestError,
)
from serve.models import Decoder
from serve.runner.runner import ModelRunner
from tests.support.engine.checkpoints import checkpoint, reference_model
from tests.support.nodes.served_nodes import nodes

# fp32 on both sides, for a component of a vector of length 1
BOUND = 2e-5
MEAN, LAST = PoolingParams(), PoolingParams(kind="last")
SMALL = {"kv_page_bytes": 4096, "kv_cache_bytes": 400 * 4096, "max_model_len": 128}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 300) for _ in range(length)]


def expected(path, prompt: list[int], kind: str, dimensions: int | None = None) -> np.ndarray:
    """Returns the vector of Transformers' fp32 hidden states, scaled to length 1 in fp64."""
    with torch.no_grad():
        states = reference_model(path)(torch.tensor([prompt]), output_hidden_states=True)
    rows = states.hidden_states[-1][0].double()
    vector = (rows.mean(0) if kind == "mean" else rows[-1])[:dimensions].numpy()
    return vector / np.linalg.norm(vector)


def check(output, path, prompt: list[int], params: PoolingParams = MEAN) -> None:
    vector = output.embedding
    reference = expected(path, prompt, params.kind, params.dimensions)
    assert vector.dtype == np.float32 and vector.shape == reference.shape
    assert output.num_prompt_tokens == len(prompt)
    assert float(vector @ reference) > 0.9999
    assert np.abs(vector - reference).max() < BOUND
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("family", "name", "chunk"),
    [
        ("llama", "base", 7),
        ("llama", "base", 64),
        ("qwen3", "base", 16),
        ("opt", "base", 64),
        ("opt", "350m", 16),
        ("gpt2", "base", 16),
    ],
)
def test_embeddings_equal_transformers_beside_generation(family, name, chunk):
    path = checkpoint(family, name)
    prompts = [prompt_of(n, seed=n) for n in (1, 2, 23, 70)]
    others = [prompt_of(30, seed=n) for n in range(90, 94)]
    plain = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)

    async def main():
        settings = {"dtype": "float32", "max_num_seqs": 12, "max_chunk_tokens": chunk}
        async with Engine(str(path), max_model_len=128, **settings) as engine:
            alone = [await engine.generate(p, plain) for p in others]
            running = [asyncio.create_task(engine.generate(p, plain)) for p in others]
            embeddings = [
                await asyncio.gather(*[engine.embed(p, params) for p in prompts])
                for params in (MEAN, LAST)
            ]
            beside = await asyncio.gather(*running)
            assert engine.stats().pages_in_use == 0
        return alone, beside, embeddings

    alone, beside, embeddings = asyncio.run(main())
    for params, outputs in zip((MEAN, LAST), embeddings, strict=True):
        for prompt, output in zip(prompts, outputs, strict=True):
            check(output, path, prompt, params)
    tokens = [[o.outputs[0].token_ids for o in outputs] for outputs in (alone, beside)]
    assert tokens[0] == tokens[1]


def test_parameters_of_embeddings():
    path, prompt = checkpoint("llama"), prompt_of(20)
    with LLM(str(path), dtype="float32", max_model_len=20) as llm:
        short = PoolingParams(dimensions=5)
        check(llm.embed(prompt, short)[0], path, prompt, short)
        long = llm.embed([prompt], PoolingParams(normalize=False), use_tqdm=False)[0].embedding
        several = llm.embed([prompt, prompt_of(3), "the fox"], [MEAN, LAST, MEAN])
        assert llm.embed("the fox")[0].num_prompt_tokens == several[2].num_prompt_tokens
        size = len(long)
        for wrong, why in ((size + 1, RequestError), (1 << 30, RequestError)):
            with pytest.raises(why) as refused:
                llm.embed(prompt, PoolingParams(dimensions=wrong))
            assert refused.value.param == "dimensions"
        with pytest.raises(ContextLengthError):
            llm.embed(prompt_of(21))
        with pytest.raises(RequestError, match="empty"):
            llm.embed([[]])
        with pytest.raises(RequestError, match="pooling_params"):
            llm.embed([prompt, prompt], [MEAN])
        with pytest.raises(RequestError, match="PoolingParams"):
            llm.embed(prompt, SamplingParams())
    check(several[0], path, prompt)
    assert np.linalg.norm(long) != pytest.approx(1, abs=0.1)
    assert np.abs(long / np.linalg.norm(long) - several[0].embedding).max() < 1e-6


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "max"},
        {"kind": None},
        {"normalize": 1},
        {"dimensions": 0},
        {"dimensions": True},
        {"dimensions": 3.0},
        {"priority": "high"},
        {"cache_salt": "a b"},
    ],
)
def test_wrong_parameters_are_named(wrong):
    with pytest.raises(RequestError) as refused:
        PoolingParams(**wrong)
    assert refused.value.param == next(iter(wrong))


@pytest.mark.small_pages
def test_the_prefix_cache_serves_last_but_not_mean_pooling():
    path, prompt = checkpoint("llama"), prompt_of(60)
    with LLM(str(path), dtype="float32", **SMALL) as llm:
        first, mean, last = (llm.embed(prompt, p)[0] for p in (MEAN, MEAN, LAST))
    check(first, path, prompt)
    check(mean, path, prompt)
    check(last, path, prompt, LAST)
    assert mean.metrics.num_cached_tokens == 0
    assert last.metrics.num_cached_tokens > 0
    assert last.metrics.first_token_s is not None


@pytest.mark.small_pages
def test_embeddings_are_the_same_after_preemption_and_failed_steps(monkeypatch):
    """Growing sequences preempt prompts that are partly computed.

    Which step a fault meets depends on the clock, and with it whether a prompt is preempted. So
    the requests are sent until one was, at most five times.
    """
    original = ModelRunner.run
    count = iter(range(1 << 30))

    def run(self, plan, launched):
        result = original(self, plan, launched)
        if next(count) % 5 == 1 and len(plan.sequences) > 1:
            raise OSError("a fault that passes")
        return result

    monkeypatch.setattr(ModelRunner, "run", run)
    path, prompts = checkpoint("llama"), [prompt_of(n, seed=n) for n in (100, 90, 110)]
    greedy = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)

    async def main():
        settings = SMALL | {"kv_cache_bytes": 20 * 4096, "memory_policy": "prompt_only"}
        async with Engine(
            str(path), dtype="float32", max_num_seqs=6, max_chunk_tokens=4, **settings
        ) as engine:
            for _ in range(5):
                growing = [
                    asyncio.create_task(engine.generate(prompt_of(8, seed=n), greedy))
                    for n in range(3)
                ]
                outputs = await asyncio.gather(*[engine.embed(p) for p in prompts])
                await asyncio.gather(*growing)
                assert engine.stats().pages_in_use == 0
                for prompt, output in zip(prompts, outputs, strict=True):
                    check(output, path, prompt)
                if any(output.metrics.num_preemptions for output in outputs):
                    return
            pytest.fail("no embedding was preempted")

    asyncio.run(main())


def test_embeddings_over_memory_nodes(tmp_path):
    path, prompts = checkpoint("llama"), [prompt_of(n, seed=n) for n in (40, 7, 64)]
    settings = {"max_num_seqs": 4, "max_model_len": 128, "max_chunk_tokens": 16}
    with (
        nodes("inproc", 2, tmp_path) as urls,
        LLM(str(path), dtype="float32", memory_nodes=urls, **settings) as llm,
    ):
        outputs = llm.embed(prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        check(output, path, prompt)


def test_embedding_requests_end_as_generations_do(monkeypatch):
    """They can be cancelled or refused, and fail when the engine stops or a step fails."""
    prompt = prompt_of(100)
    long = SamplingParams(max_tokens=150, ignore_eos=True)
    original = ModelRunner.run

    def run(self, plan, launched):
        time.sleep(0.005)
        return original(self, plan, launched)

    monkeypatch.setattr(ModelRunner, "run", run)

    async def main():
        async with Engine(
            str(checkpoint("llama")), dtype="float32", max_num_seqs=1, max_num_waiting=1
        ) as engine:
            stream = engine.submit(prompt, long)
            await anext(stream)
            task = asyncio.create_task(engine.embed(prompt))
            await asyncio.sleep(0.01)
            with pytest.raises(OverloadedError):
                await engine.embed(prompt)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            stream.abort()
            while engine.stats().pages_in_use:
                await asyncio.sleep(0.001)
            with monkeypatch.context() as patch:
                patch.setattr(Decoder, "normed", lambda self, x: x * float("nan"))
                with pytest.raises(GenerationError):
                    await engine.embed(prompt)
                patch.setattr(Decoder, "normed", None)  # the step fails
                with pytest.raises(GenerationError, match="TypeError"):
                    await engine.embed(prompt)
            await engine.embed(prompt)
            await anext(engine.submit(prompt, long))
            task = asyncio.create_task(engine.embed(prompt))
            await asyncio.sleep(0.01)
        with pytest.raises(EngineStoppedError):
            await task

    asyncio.run(main())
