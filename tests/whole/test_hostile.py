"""A hostile request of every kind in a batch of 32 changes no token of the other 31 requests, and
the engine continues."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from serve import Engine, PoolingParams, SamplingParams
from serve.engine.output_processor import OutputState
from serve.engine.request_stream import RequestStream
from serve.errors import GenerationError, RequestError
from serve.runner.runner import ModelRunner
from serve.sampling_params import MAX_N, MAX_STOP_STRINGS
from serve.structured_output import StructuredOutput
from tests.support.engine.checkpoints import checkpoint

VOCABULARY, CONTEXT = 320, 256
NUM_OTHERS = 31
HOSTILE = "hostile"


def others() -> list[tuple[list[int], SamplingParams]]:
    """Returns greedy and sampled requests with many parameters, of short and chunked prompts."""
    rng = random.Random(3)
    requests = []
    for number in range(NUM_OTHERS):
        params = SamplingParams(
            max_tokens=rng.randint(4, 14),
            temperature=rng.choice([0.0, 0.7, 1.4]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 30]),
            min_p=rng.choice([0.0, 0.05]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            frequency_penalty=rng.choice([0.0, 0.4]),
            logit_bias=rng.choice([None, {7: 2.0, 9: -3.0}]),
            logprobs=rng.choice([None, 2]),
            seed=number,
            ignore_eos=True,
        )
        length = rng.choice([1, 2, 9, 33, 70])
        requests.append(([rng.randrange(2, VOCABULARY) for _ in range(length)], params))
    return requests


OTHERS = others()
ALL_IDS = list(range(VOCABULARY))
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
# name: (prompt, parameters). A request may be refused, but has no other effect.
ATTACKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "a prompt beyond the context": (list(range(2, 200)) * 5, {}),
    "a prompt of the whole context": ([5] * CONTEXT, {}),
    "a prompt that leaves one token": ([5] * (CONTEXT - 1), {"max_tokens": None}),
    "a text of a megabyte": ("a " * 500_000, {}),
    "an id beyond the logits": ([5, VOCABULARY], {}),
    "a negative id": ([5, -1], {}),
    "ids at the edge": ([VOCABULARY - 1] * 40 + [0], {}),
    "no ids": ([], {}),
    "values that are not ids": ([5, None, "a", 1.5], {}),
    "no prompt": (None, {}),
    "a lone surrogate": ("\ud800", {}),
    "every parameter at its maximum": (
        [5, 6],
        {
            "temperature": 2.0,
            "top_k": 1 << 31,
            "top_p": 1.0,
            "min_p": 1.0,
            "repetition_penalty": 100.0,
            "presence_penalty": 2.0,
            "frequency_penalty": 2.0,
            "logit_bias": dict.fromkeys(ALL_IDS, 100.0),
            "seed": (1 << 63) - 1,
        },
    ),
    "every parameter at its minimum": (
        [5, 6],
        {
            "temperature": 1e-4,
            "top_k": -1,
            "top_p": 0.0,
            "min_p": 0.0,
            "repetition_penalty": 0.01,
            "presence_penalty": -2.0,
            "frequency_penalty": -2.0,
            "logit_bias": dict.fromkeys(ALL_IDS, -100.0),
            "seed": -(1 << 63),
        },
    ),
    "all logprobs": ([5] * 60, {"logprobs": 20, "prompt_logprobs": 20, "n": 4}),
    "only prompt logprobs": ([5] * 60, {"max_tokens": 0, "prompt_logprobs": 20}),
    "no output": ([5] * 60, {"max_tokens": 0}),
    "the maximum of outputs": ([5, 6, 7], {"n": MAX_N, "seed": 1}),
    "the maximum of stop strings": (
        [5],
        {"stop": [chr(97 + i) for i in range(MAX_STOP_STRINGS)], "ignore_eos": False},
    ),
    "every token is a stop token": ([5], {"stop_token_ids": ALL_IDS}),
    "every token is a stop token after the minimum": (
        [5],
        {"stop_token_ids": ALL_IDS, "min_tokens": 12},
    ),
    "a schema": ([5], {"structured": StructuredOutput("json_schema", json.dumps(SCHEMA))}),
    "an invalid schema": ([5], {"structured": StructuredOutput("json_schema", "{")}),
    "a large regular expression": (
        [5],
        {"structured": StructuredOutput("regex", "(a{1,90}){1,90}")},
    ),
    "one token only": ([5], {"allowed_token_ids": [9]}),
    "bad words": ([5], {"bad_words": ["a", "the", "zzz"]}),
    "low priority and a salt": ([5] * 50, {"priority": -(1 << 31), "cache_salt": "x" * 128}),
}


@contextlib.contextmanager
def faulty_rows(engine: Engine):
    """Makes every step with a decode row of the hostile request fail."""
    original = ModelRunner.run

    def run(self, plan, launched):
        for sequence in plan.sequences:
            if sequence.request.request_id == HOSTILE and sequence.num_output_tokens:
                raise ZeroDivisionError("a hostile row")
        return original(self, plan, launched)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "run", run)
        yield


@contextlib.contextmanager
def faulty_text(engine: Engine):
    """Makes detokenizing the third token of the hostile request's output 7 fail."""
    original = OutputState.push

    def push(self, token, logprobs):
        if self.index == 7 and self.num_output == 2:
            raise ValueError("no text")
        return original(self, token, logprobs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OutputState, "push", push)
        yield


def submit(engine: Engine, prompt: Any, params: SamplingParams | PoolingParams) -> RequestStream:
    if isinstance(params, PoolingParams):
        return engine.submit_embedding(prompt, params, request_id=HOSTILE)
    return engine.submit(prompt, params, request_id=HOSTILE)


def params_of(**given: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 12, "temperature": 1.0, "ignore_eos": True} | given))


async def tokens(engine: Engine, attack: Callable[[], Any] | None = None) -> list[Any]:
    """Returns the outputs of the other requests, beside an attack that starts while they run."""
    running = [
        asyncio.create_task(engine.generate(prompt, params)) for prompt, params in OTHERS[:16]
    ]
    attacking = asyncio.create_task(attack()) if attack is not None else None
    await asyncio.sleep(0)  # submits the attack
    running += [
        asyncio.create_task(engine.generate(prompt, params)) for prompt, params in OTHERS[16:]
    ]
    outputs = await asyncio.gather(*running)
    if attacking is not None:
        await attacking
    return [
        (o.outputs[0].token_ids, o.outputs[0].text, o.outputs[0].cumulative_logprob)
        for o in outputs
    ]


async def send(engine: Engine, prompt: Any, given: dict[str, Any]) -> None:
    with contextlib.suppress(RequestError):
        await engine.collect(submit(engine, prompt, params_of(**given)))


async def cancel(engine: Engine, num_deltas: int) -> None:
    """Cancels the request after num_deltas deltas, or with -1 as soon as it is submitted."""
    stream = submit(engine, [5] * 100, params_of(max_tokens=100, n=3))
    if num_deltas >= 0:
        await stream.accepted()
        for _ in range(num_deltas):
            await anext(stream)
    stream.abort()
    with contextlib.suppress(RequestError):
        last = [delta async for delta in stream]
        assert {delta.finish_reason.value for delta in last if delta.finish_reason} == {"abort"}


async def cancel_in_prefill(engine: Engine) -> None:
    stream = submit(engine, [5] * 200, params_of())
    core = engine.loaded.core
    while not any(s.num_computed_tokens for s in core._requests.states()[-1].sequences):
        await asyncio.sleep(0.001)
    stream.abort()


async def embed(engine: Engine) -> None:
    await engine.embed([5] * 150, request_id=HOSTILE)


async def fail(engine: Engine, fault: Callable[..., Any], **given: Any) -> None:
    stream = submit(engine, [5] * 40, params_of(**given))
    output = await engine.collect(stream)
    assert "error" in {each.finish_reason for each in output.outputs}


def attacks(engine: Engine) -> dict[str, Callable[[], Any]]:
    attacks: dict[str, Callable[[], Any]] = {
        name: lambda prompt=prompt, given=given: send(engine, prompt, given)
        for name, (prompt, given) in ATTACKS.items()
    }
    for when in (-1, 0, 1, 7):
        attacks[f"cancelled after {when} deltas"] = lambda when=when: cancel(engine, when)
    attacks["cancelled in its prefill"] = lambda: cancel_in_prefill(engine)
    attacks["an embedding"] = lambda: embed(engine)
    return attacks


def test_other_requests_are_not_affected() -> None:
    async def main() -> dict[str, list[int]]:
        affected: dict[str, list[int]] = {}
        async with Engine(
            str(checkpoint("llama")),
            dtype="float32",
            max_num_seqs=200,
            max_num_waiting=400,
            max_chunk_tokens=16,
            max_model_len=CONTEXT,
        ) as engine:
            alone = await tokens(engine)
            for name, attack in attacks(engine).items():
                record(affected, name, alone, await tokens(engine, attack))
            for fault, given in ((faulty_rows, {}), (faulty_text, {"n": 8})):
                with fault(engine):
                    beside = await tokens(
                        engine, lambda fault=fault, given=given: fail(engine, fault, **given)
                    )
                record(affected, fault.__name__, alone, beside)
            with pytest.raises((RequestError, GenerationError)):
                await engine.generate([VOCABULARY], params_of())
            assert engine.loaded.core.num_unfinished() == 0
            assert engine.stats().pages_in_use == 0
            assert not engine.loaded.core.has_failed
        return affected

    assert asyncio.run(asyncio.wait_for(main(), 120)) == {}


def record(affected: dict[str, list[int]], name: str, alone: list[Any], beside: list[Any]) -> None:
    differing = [i for i, pair in enumerate(zip(alone, beside, strict=True)) if pair[0] != pair[1]]
    if differing:
        affected[name] = differing
