"""Every pair of extreme but valid parameters gives an answer or a 400 on a real engine, never a
500, and leaves the engine as it was."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from typing import Any

import aiohttp
import pytest
import uvloop

from serve import Engine
from serve.http import HttpServer, HttpSettings
from serve.http.openai.requests import CHAT, COMPLETION
from tests.support.engine.checkpoints import checkpoint
from tests.support.http.pairwise import pairwise

ABSENT = object()
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
COMMON: dict[str, list[Any]] = {
    "n": [1, 3, None],
    "max_tokens": [1, 7, ABSENT],
    "min_tokens": [0, 1],
    "temperature": [0, 1e-4, 2, None],
    "top_p": [0, 1e-6, 1],
    "top_k": [-1, 1, 2**31 - 1],
    "min_p": [0, 1],
    "repetition_penalty": [0.01, 1, 100],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "seed": [-(2**63), 0, 2**63 - 1],
    "stop": [ABSENT, "a", ["e", " t", "z" * 1024]],
    "stop_token_ids": [ABSENT, [0], list(range(300))],
    "include_stop_str_in_output": [True, False],
    "ignore_eos": [True, False],
    "skip_special_tokens": [True, False],
    "logit_bias": [ABSENT, {"5": 100}, {str(i): -100 for i in range(300)}],
    "allowed_token_ids": [ABSENT, [7], list(range(320))],
    "bad_words": [ABSENT, ["a"], ["x" * 256, " the"]],
    "priority": [-(2**31), 2**31 - 1, None],
    "cache_salt": [ABSENT, "s" * 128],
    "kv_policy": [ABSENT, "off", None],
    "return_token_ids": [True, False],
    "stream": [True, False],
    "stream_options": [
        ABSENT,
        {"include_usage": True, "continuous_usage_stats": True},
        {"include_usage": False},
    ],
    "user": ["u" * 512, ""],
    "metadata": [ABSENT, {"k" * 64: "v" * 512}],
    "response_format": [
        ABSENT,
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    ],
    "structured_outputs": [ABSENT, {"regex": "[a-z]{1,5}"}, {"choice": ["a", "the fox"]}],
}
COMPLETION_VALUES: dict[str, list[Any]] = {
    **COMMON,
    "prompt": ["hello", ["a", "naïve 👍🏽"], [1, 2, 3], [[5], [6, 7]], " ", "\n\0"],
    "logprobs": [0, 5, None],
    "prompt_logprobs": [ABSENT, 0, 20],
    "best_of": [ABSENT, 20],
    "echo": [True, False],
    "truncate_prompt_tokens": [ABSENT, 1, 2**31 - 1],
    "truncation_side": ["left", "right", None],
    "add_special_tokens": [True, False],
}
CHAT_VALUES: dict[str, list[Any]] = {
    **COMMON,
    "messages": [[{"role": "user", "content": "hello"}], [{"role": "system", "content": ""}] * 3],
    "logprobs": [True, None],
    "top_logprobs": [ABSENT, 0, 20],
    "max_completion_tokens": [ABSENT, 1, 7],
    "prompt_logprobs": [ABSENT, 0, 20],
}


def _body(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the body without parameters that exclude each other."""
    body = {name: value for name, value in values.items() if value is not ABSENT}
    dropped = ["stream_options"]
    if body["stream"]:
        dropped = ["best_of", "prompt_logprobs"]
    if not body.get("logprobs"):
        dropped.append("top_logprobs")
    if "structured_outputs" in body:
        dropped.append("response_format")
    if "max_completion_tokens" in body:
        dropped.append("max_tokens")
    return {"model": "m"} | {name: item for name, item in body.items() if name not in dropped}


def _thinned(row: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    always = ("prompt", "messages", "stream")
    return {
        name: item if name in always or rng.random() < 0.5 else ABSENT for name, item in row.items()
    }


def test_pairwise_has_every_pair() -> None:
    values = {"a": [1, 2, 3], "b": [None, 5], "c": [7, 8], "d": list(range(4))}
    rows = pairwise(values)
    assert len(rows) < 20 < 3 * 2 * 2 * 4
    for a, b in itertools.combinations(values, 2):
        pairs = {(row[a], row[b]) for row in rows}
        assert pairs == set(itertools.product(values[a], values[b]))


@pytest.mark.parametrize(
    ("path", "values", "table"),
    [
        ("/v1/completions", COMPLETION_VALUES, COMPLETION),
        ("/v1/chat/completions", CHAT_VALUES, CHAT),
    ],
)
@pytest.mark.row("P29")
def test_pairs_of_extremes(path: str, values: dict[str, list[Any]], table: Any) -> None:
    assert set(values) <= set(table.fields)
    rng = random.Random(3)
    rows = pairwise(values)
    # one refused parameter hides the effect of the others, so smaller bodies are sent, too
    rows += [_thinned(row, rng) for row in rows for _ in range(3)]
    bodies = [_body(row) for row in rows]
    statuses: Counter[int] = Counter()
    at_once = asyncio.Semaphore(48)  # the server refuses more that wait for a grammar than 64

    async def main() -> None:
        engine = Engine(
            str(checkpoint("llama")), served_model_name="m", max_num_seqs=32, max_model_len=48
        )
        async with (
            HttpServer(engine, HttpSettings(port=0)) as server,
            aiohttp.ClientSession(server.url) as session,
            asyncio.timeout(60),
        ):
            before = await complete_reference(session)
            await asyncio.gather(*(call(session, body) for body in bodies))
            assert await complete_reference(session) == before
            stats = engine.stats()
            assert (stats.num_running, stats.num_waiting) == (0, 0)

    async def complete_reference(session: aiohttp.ClientSession) -> str:
        body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0}
        async with session.post("/v1/completions", json=body) as response:
            return str((await response.json())["choices"][0]["text"])

    async def call(session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        async with at_once, session.post(path, json=body) as response:
            text = await response.text()
            assert response.status in (200, 400), (body, text)
            assert '"internal_error"' not in text, (body, text)
            statuses[response.status] += 1

    uvloop.run(main())
    assert statuses[200] > len(bodies) // 4, statuses
