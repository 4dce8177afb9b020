"""One hostile request of every kind inside a batch of 32: the other 31 have the same tokens, to the
byte, that they have without it, and the engine goes on."""

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
    """Greedy and sampled requests with every parameter; short and chunked prompts."""
    rng = random.Random(3)
    found = []
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
        found.append(([rng.randrange(2, VOCABULARY) for _ in range(length)], params))
    return found


OTHERS = others()
ALL_IDS = list(range(VOCABULARY))
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
# (prompt, parameters): the request is refused with an error, and nothing else happens
ASKED: dict[str, tuple[Any, dict[str, Any]]] = {
    "a prompt beyond the context": (list(range(2, 200)) * 5, {}),
    "a prompt of the whole context": ([5] * CONTEXT, {}),
    "a prompt that leaves one token": ([5] * (CONTEXT - 1), {"max_tokens": None}),
    "a text of a megabyte": ("a " * 500_000, {}),
    "an id beyond the logits": ([5, VOCABULARY], {}),
    "a negative id": ([5, -1], {}),
    "ids at the edge": ([VOCABULARY - 1] * 40 + [0], {}),
    "no ids": ([], {}),
    "things that are no ids": ([5, None, "a", 1.5], {}),
    "no prompt at all": (None, {}),
    "half a character": ("\ud800", {}),
    "every parameter at its top": (
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
    "every parameter at its bottom": (
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
    "all there is to know": ([5] * 60, {"logprobs": 20, "prompt_logprobs": 20, "n": 4}),
    "the prompt alone": ([5] * 60, {"max_tokens": 0, "prompt_logprobs": 20}),
    "nothing": ([5] * 60, {"max_tokens": 0}),
    "as many outputs as there may be": ([5, 6, 7], {"n": MAX_N, "seed": 1}),
    "stops everywhere": (
        [5],
        {"stop": [chr(97 + i) for i in range(MAX_STOP_STRINGS)], "ignore_eos": False},
    ),
    "every token ends it": ([5], {"stop_token_ids": ALL_IDS}),
    "every token would end it": ([5], {"stop_token_ids": ALL_IDS, "min_tokens": 12}),
    "a schema": ([5], {"structured": StructuredOutput("json_schema", json.dumps(SCHEMA))}),
    "a schema that is none": ([5], {"structured": StructuredOutput("json_schema", "{")}),
    "an expression that grows": ([5], {"structured": StructuredOutput("regex", "(a{1,90}){1,90}")}),
    "one token only": ([5], {"allowed_token_ids": [9]}),
    "bad words": ([5], {"bad_words": ["a", "the", "zzz"]}),
    "low priority and a salt": ([5] * 50, {"priority": -(1 << 31), "cache_salt": "x" * 128}),
}


@contextlib.contextmanager
def faulty_rows(engine: Engine):
    """Every step fails that has a row of the hostile request."""
    original = ModelRunner.run

    def run(self, plan, launched):
        for sequence in plan.sequences:
            if sequence.request.request_id == HOSTILE and sequence.num_output_tokens:
                raise ZeroDivisionError("of the hostile one")
        return original(self, plan, launched)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "run", run)
        yield


@contextlib.contextmanager
def faulty_text(engine: Engine):
    """Its third token has no text."""
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
    """Outputs of the other requests, beside an attack that begins while they run."""
    running = [
        asyncio.create_task(engine.generate(prompt, params)) for prompt, params in OTHERS[:16]
    ]
    attacking = asyncio.create_task(attack()) if attack is not None else None
    await asyncio.sleep(0)  # it is submitted here
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


async def ask(engine: Engine, prompt: Any, given: dict[str, Any]) -> None:
    with contextlib.suppress(RequestError):
        await engine.collect(submit(engine, prompt, params_of(**given)))


async def leave(engine: Engine, num_deltas: int) -> None:
    """Cancels the request after so many deltas; -1: as soon as it is submitted."""
    stream = submit(engine, [5] * 100, params_of(max_tokens=100, n=3))
    if num_deltas >= 0:
        await stream.accepted()
        for _ in range(num_deltas):
            await anext(stream)
    stream.abort()
    with contextlib.suppress(RequestError):
        last = [delta async for delta in stream]
        assert {delta.finish_reason.value for delta in last if delta.finish_reason} == {"abort"}


async def leave_in_its_prompt(engine: Engine) -> None:
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
    found: dict[str, Callable[[], Any]] = {
        name: lambda prompt=prompt, given=given: ask(engine, prompt, given)
        for name, (prompt, given) in ASKED.items()
    }
    for when in (-1, 0, 1, 7):
        found[f"it leaves after {when} deltas"] = lambda when=when: leave(engine, when)
    found["it leaves in its prompt"] = lambda: leave_in_its_prompt(engine)
    found["an embedding"] = lambda: embed(engine)
    return found


def test_the_others_do_not_notice() -> None:
    async def main() -> dict[str, list[int]]:
        wrong: dict[str, list[int]] = {}
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
                note(wrong, name, alone, await tokens(engine, attack))
            for fault, given in ((faulty_rows, {}), (faulty_text, {"n": 8})):
                with fault(engine):
                    beside = await tokens(
                        engine, lambda fault=fault, given=given: fail(engine, fault, **given)
                    )
                note(wrong, fault.__name__, alone, beside)
            with pytest.raises((RequestError, GenerationError)):
                await engine.generate([VOCABULARY], params_of())
            assert engine.loaded.core.num_unfinished() == 0
            assert engine.stats().pages_in_use == 0
            assert not engine.loaded.core.has_failed
        return wrong

    assert asyncio.run(asyncio.wait_for(main(), 120)) == {}


def note(wrong: dict[str, list[int]], name: str, alone: list[Any], beside: list[Any]) -> None:
    differing = [i for i, pair in enumerate(zip(alone, beside, strict=True)) if pair[0] != pair[1]]
    if differing:
        wrong[name] = differing
