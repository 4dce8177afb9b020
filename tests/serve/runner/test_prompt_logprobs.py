"""Prompt logprobs equal Transformers', also after preemptions and failed steps."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest
import torch

from ops.cpu import sampling
from ops.cpu.token_logprobs import Scores, describe, describe_with_torch
from serve import LLM, Engine, SamplingParams
from serve.errors import RequestError
from serve.models import Decoder
from serve.runner import prompt_reader as prompt_rows
from serve.runner.runner import ModelRunner
from tests.support.engine.checkpoints import checkpoint, reference_logits
from tests.support.nodes.served_nodes import nodes
from tests.support.preempted import until_preempted

VOCABULARY = 320
# Both sides compute in fp32; rounding in another order moves logits of a few tens by less.
BOUND = 1e-3
SMALL = {"kv_page_bytes": 4096, "kv_cache_bytes": 400 * 4096, "max_model_len": 256}


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCABULARY) for _ in range(length)]


def logprob_params(num_top: int = 5, **params: object) -> SamplingParams:
    defaults = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    return SamplingParams(**(defaults | params), prompt_logprobs=num_top)


def check(entries, prompt: list[int], num_top: int, path=None, bound: float = BOUND) -> None:
    """Compares RequestOutput.prompt_logprobs with the fp64 log-softmax of Transformers' logits."""
    logits = reference_logits(path or checkpoint("llama"), prompt).double()
    expected = torch.log_softmax(logits, -1)
    assert len(entries) == len(prompt) and entries[0] is None
    for position, entry in enumerate(entries[1:], start=1):
        token, row = prompt[position], expected[position - 1]
        assert entry[token].rank == 1 + int((row > row[token]).sum())
        assert num_top <= len(entry) <= num_top + 1
        for candidate, item in entry.items():
            assert item.logprob == pytest.approx(float(row[candidate]), abs=bound)
        best = torch.topk(row, num_top).indices.tolist() if num_top else []
        assert set(best) <= set(entry)


@pytest.mark.parametrize("num_top", [0, 1, 5, 20])
@pytest.mark.parametrize("use_native", [True, False])
def test_described_rows_equal_fp64(num_top, use_native):
    torch.manual_seed(num_top)
    logits = torch.randn(37, 5003) * 6
    logits[3] = logits[3].round()  # gives many equal logits
    tokens = np.array([random.Random(i).randrange(5003) for i in range(37)], dtype=np.int32)
    tokens[5] = int(logits[5].argmax())
    if use_native:
        assert sampling.is_available()
        found = describe(logits, tokens, num_top)
    else:
        made = describe_with_torch(logits, tokens, num_top)
        assert isinstance(made, Scores)
        found = made.as_rows()
    expected = torch.log_softmax(logits.double(), -1)
    assert found["token"].tolist() == tokens.tolist()
    assert found["num_top"].tolist() == [num_top] * 37
    for i, token in enumerate(tokens.tolist()):
        row = expected[i]
        assert found["logprob"][i] == pytest.approx(float(row[token]), abs=2e-5)
        assert found["rank"][i] == 1 + int((logits[i] > logits[i, token]).sum())
        best = torch.sort(row, descending=True, stable=True)
        given = found["top_logprobs"][i, :num_top].tolist()
        assert given == pytest.approx(best.values[:num_top].tolist(), abs=2e-5)
        if i != 3 or use_native:  # torch's topk takes any of equal logits
            assert found["top_tokens"][i, :num_top].tolist() == best.indices[:num_top].tolist()
    assert found["rank"][5] == 1


def test_a_token_beyond_the_vocabulary_is_refused():
    with pytest.raises(IndexError):
        describe(torch.zeros(2, 10), np.array([3, 10], dtype=np.int32), 1)
    with pytest.raises(IndexError):
        describe(torch.zeros(2, 10), np.array([-1, 3], dtype=np.int32), 1)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_they_equal_transformers_with_any_chunk(chunk):
    """The requests run beside others, with and without generated tokens."""
    prompts = [prompt_of(n, seed=n) for n in (1, 2, 23, 70)]
    others = [prompt_of(40, seed=n) for n in range(90, 98)]
    plain = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    params = [
        logprob_params(0),
        logprob_params(3, max_tokens=0),
        logprob_params(20, max_tokens=1),
        logprob_params(5),
    ]
    with LLM(
        str(checkpoint("llama")), dtype="float32", max_num_seqs=8, max_chunk_tokens=chunk
    ) as llm:
        outputs = llm.generate(prompts + others, params + [plain] * 8, use_tqdm=False)
        alone = llm.generate(others, plain, use_tqdm=False)
        assert llm.stats().pages_in_use == 0
    for prompt, param, output in zip(prompts, params, outputs, strict=False):
        check(output.prompt_logprobs, prompt, param.prompt_logprobs)
        assert len(output.outputs[0].token_ids) == param.max_tokens
        assert output.outputs[0].finish_reason == "length"
    assert [o.outputs[0].token_ids for o in outputs[4:]] == [o.outputs[0].token_ids for o in alone]
    assert all(o.prompt_logprobs is None for o in outputs[4:])


@pytest.mark.small_pages
def test_the_prefix_cache_skips_no_prompt_row_but_gets_the_pages():
    prompt = prompt_of(60)
    with LLM(str(checkpoint("llama")), dtype="float32", **SMALL) as llm:
        first, second = (
            llm.generate(prompt, logprob_params(2), use_tqdm=False)[0] for _ in range(2)
        )
        last = llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)[0]
    check(first.prompt_logprobs, prompt, 2)
    assert first.prompt_logprobs == second.prompt_logprobs
    assert second.metrics.num_cached_tokens == 0
    assert last.metrics.num_cached_tokens > 0


@pytest.mark.small_pages
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_all_outputs_of_a_request_share_them(prefix_cache):
    prompt = prompt_of(50)
    with LLM(
        str(checkpoint("llama")),
        dtype="float32",
        max_chunk_tokens=16,
        prefix_cache=prefix_cache,
        **SMALL,
    ) as llm:
        params = logprob_params(3, n=4, temperature=1.0, seed=5)
        output = llm.generate(prompt, params, use_tqdm=False)[0]
        none = llm.generate(prompt, logprob_params(3, n=3, max_tokens=0), use_tqdm=False)[0]
    check(output.prompt_logprobs, prompt, 3)
    assert len({tuple(o.token_ids) for o in output.outputs}) == 4
    check(none.prompt_logprobs, prompt, 3)
    assert [o.token_ids for o in none.outputs] == [[], [], []]


@pytest.mark.small_pages
def test_they_are_the_same_after_preemption():
    """Memory holds a fraction of the sequences, so prompts are recomputed."""
    prompts = [prompt_of(n, seed=n) for n in (70, 60, 50, 70, 65, 55)]
    params = logprob_params(4, max_tokens=50)
    with LLM(
        str(checkpoint("llama")),
        dtype="float32",
        max_num_seqs=6,
        max_model_len=140,
        max_chunk_tokens=16,
        kv_page_bytes=4096,
        memory_policy="prompt_only",
        kv_cache_bytes=24 * 4096,
    ) as llm:
        outputs = until_preempted(llm, lambda: llm.generate(prompts, params, use_tqdm=False))
        assert llm.stats().pages_in_use == 0
    for prompt, output in zip(prompts, outputs, strict=True):
        check(output.prompt_logprobs, prompt, 4)


def test_invalid_values_are_refused():
    for value in (-1, 21, 1.5, True, "3"):
        with pytest.raises(RequestError) as refused:
            SamplingParams(prompt_logprobs=value)
        assert refused.value.param == "prompt_logprobs"


def test_rows_of_failed_steps_count_once(monkeypatch):
    """Every third step fails after its computation, and its halves run, some of which fail."""
    original = ModelRunner.run
    count = iter(range(1 << 30))

    def run(self, plan, launched):
        result = original(self, plan, launched)
        if next(count) % 3 == 1 and len(plan.sequences) > 1:
            raise OSError("a transient fault")
        return result

    monkeypatch.setattr(ModelRunner, "run", run)
    prompts = [prompt_of(n, seed=n) for n in (70, 33, 12, 51)]
    with LLM(str(checkpoint("llama")), dtype="float32", max_num_seqs=4, max_chunk_tokens=9) as llm:
        outputs = llm.generate(prompts, logprob_params(2), use_tqdm=False)
    assert next(count) > 20
    for prompt, output in zip(prompts, outputs, strict=True):
        check(output.prompt_logprobs, prompt, 2)


class AlwaysSplit:
    """Splits every step into two micro-batches."""

    def splits(self, num_decodes, num_prompt_rows):
        return True

    def learn(self, num_decodes, num_prompt_rows, is_split, seconds):
        pass


def test_microbatches_give_the_same_logprobs():
    prompts = [prompt_of(n, seed=n) for n in (40, 7, 90, 23)]
    with LLM(str(checkpoint("llama")), dtype="float32", max_chunk_tokens=16) as llm:
        whole = llm.generate(prompts, logprob_params(2), use_tqdm=False)
        llm._loaded.core._runner._microbatches = AlwaysSplit()
        split = llm.generate(prompts, logprob_params(2), use_tqdm=False)
    for prompt, one, other in zip(prompts, whole, split, strict=True):
        check(other.prompt_logprobs, prompt, 2)
        assert one.outputs[0].token_ids == other.outputs[0].token_ids


def test_prompt_logprobs_over_memory_nodes(tmp_path):
    prompts = [prompt_of(n, seed=n) for n in (40, 7)]
    with (
        nodes("inproc", 2, tmp_path) as urls,
        LLM(
            str(checkpoint("llama")),
            dtype="float32",
            max_num_seqs=4,
            max_model_len=128,
            max_chunk_tokens=16,
            memory_nodes=urls,
        ) as llm,
    ):
        outputs = llm.generate(prompts, logprob_params(2), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        check(output.prompt_logprobs, prompt, 2)


def test_a_slice_of_logits_is_bounded(monkeypatch):
    """At most three rows of logits are computed at a time, whatever the chunk."""
    monkeypatch.setattr(prompt_rows, "LOGITS_BYTES", 3 * 4 * VOCABULARY)
    most = []
    original = Decoder.logits
    monkeypatch.setattr(Decoder, "logits", lambda self, x: most.append(len(x)) or original(self, x))
    prompt = prompt_of(64)
    with LLM(str(checkpoint("llama")), dtype="float32", max_num_seqs=2) as llm:
        output = llm.generate(prompt, logprob_params(2, max_tokens=0), use_tqdm=False)[0]
    check(output.prompt_logprobs, prompt, 2)
    assert most == [3] * 21


def test_a_stream_delivers_them_first_to_a_slow_reader_too():
    prompt = prompt_of(20)

    async def main():
        async with Engine(str(checkpoint("llama")), dtype="float32") as engine:
            stream = engine.submit(prompt, logprob_params(1, n=2, max_tokens=6))
            while len(stream.sink.pending) < 12:
                await asyncio.sleep(0.005)
            return [delta async for delta in stream]

    deltas = asyncio.run(main())
    first = {}
    for delta in deltas:
        assert (delta.prompt_logprobs is None) == (delta.index in first)
        first.setdefault(delta.index, delta.prompt_logprobs)
    assert list(first[0]) == list(first[1]) == first[0][:]
    assert first[0][0] is None and first[0][-1] == first[0][19]
    assert [item.token_id for item in first[0][1:]] == prompt[1:]
    with pytest.raises(IndexError):
        first[0][20]
