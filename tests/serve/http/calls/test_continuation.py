"""A server goes on with an answer from wherever another one has left it."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from bench.cluster.streams import said
from serve.cluster.front.answer_log import AnswerLog
from serve.config import DEFAULT_MODEL, EngineConfig
from serve.engine.engine import Engine
from serve.http import HttpServer, HttpSettings
from serve.http.calls.continuation import AnswerState, Continuation
from serve.http.calls.key_policy import KeyPolicy
from serve.http.edge.keys import ApiKey
from serve.request import RequestMetrics
from tests.support.profile import THOROUGH

MODEL = EngineConfig(model=DEFAULT_MODEL).model_name
CHAT = "/v1/chat/completions"
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
ASK = [{"role": "user", "content": "What is 2 plus 3?"}]
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": ASK, "seed": 3, "max_tokens": 24, "n": 2}),
    "tools": (
        CHAT,
        {
            "messages": ASK,
            "temperature": 0,
            "max_tokens": 60,
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}],
            "stream_options": {"include_usage": True},
        },
    ),
    "responses": (
        "/v1/responses",
        {
            "input": "What is 2 plus 3?",
            "max_output_tokens": 60,
            "tool_choice": "required",
            "tools": [{"type": "function", "name": "add", "parameters": PARAMETERS}],
        },
    ),
    "scores": (
        "/v1/responses",
        {"input": "A dog", "max_output_tokens": 16, "top_logprobs": 2, "temperature": 0},
    ),
    "messages": (
        "/v1/messages",
        {
            "messages": ASK,
            "max_tokens": 60,
            "tool_choice": {"type": "any"},
            "tools": [{"name": "add", "input_schema": PARAMETERS}],
        },
    ),
    "prompts": ("/v1/completions", {"prompt": ["A dog", "A boat"], "max_tokens": 12, "echo": True}),
    "schema": (
        CHAT,
        {
            "messages": ASK,
            "seed": 5,
            "max_tokens": 30,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "sum", "schema": PARAMETERS},
            },
        },
    ),
}


class Pair:
    """Two servers of the same model."""

    def __init__(self, session: aiohttp.ClientSession, servers: list[HttpServer]) -> None:
        self.session = session
        self.servers = servers

    async def post(
        self, number: int, path: str, body: dict[str, Any], *, journal: bool = True
    ) -> tuple[int, bytes]:
        headers = {"x-mergestep-journal": "1"} if journal else {}
        url = self.servers[number].url + path
        async with self.session.post(url, json=body, headers=headers) as response:
            return response.status, await response.read()


def run(check: Any, **settings: Any) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            servers = []
            for _ in range(2):
                engine = Engine(DEFAULT_MODEL, dtype="int8", max_model_len=512, max_num_seqs=16)
                server = HttpServer(engine, HttpSettings(port=0, **settings))
                servers.append(await stack.enter_async_context(server))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            await check(Pair(session, servers))

    asyncio.run(main())


def blocks_of(stream: bytes) -> list[bytes]:
    return [block + b"\n\n" for block in stream.split(b"\n\n") if block]


def events_of(stream: bytes) -> list[Any]:
    """Returns the events' data, without the pieces' borders and what the clock gives."""
    text = "\n\n".join(b for b in stream.decode().split("\n\n") if b and not b.startswith(":"))
    found: list[Any] = [said(text + "\n\n", streams=True)]
    arguments: dict[Any, str] = {}
    for block in text.split("\n\n"):
        data = block.rpartition("data: ")[2]
        if data == "[DONE]":
            continue
        event = json.loads(data)
        for choice in event.get("choices", ()):
            for call in choice.get("delta", {}).get("tool_calls") or ():
                key = choice["index"], call["index"]
                arguments[key] = arguments.get(key, call.get("id", "")) + str(call["function"])
        kind = event.get("type", "")
        if kind in ("content_block_start", "response.output_item.added", "message_delta"):
            found.append(event | {"usage": None, "sequence_number": None})
        if kind in ("response.completed", "response.incomplete"):
            response = event["response"]
            found.append(response["output"])
            assert response["usage"]["output_tokens"] > 0
    pieces = "".join(arguments.values()).replace("{'arguments': '", "").replace("'}", "")
    return [*found, pieces]


@pytest.mark.property
@pytest.mark.parametrize("name", CALLS)
def test_each_token_may_be_the_last_of_the_first_server(name: str) -> None:
    path, more = CALLS[name]
    body = {"model": MODEL, "stream": True, "temperature": 0.8, **more}

    async def check(pair: Pair) -> None:
        for _ in range(10):  # a busy machine sends many tokens at once
            status, whole = await pair.post(0, path, body)
            assert status == 200, whole
            blocks = blocks_of(whole)
            cuts = [i + 1 for i, block in enumerate(blocks) if block.startswith(b": tokens")]
            if len(cuts) >= 3:
                break
        assert len(cuts) >= 3
        for cut in cuts if THOROUGH else (cuts[0], cuts[len(cuts) // 2], cuts[-1]):
            log = AnswerLog()
            sent = log.feed(b"".join(blocks[:cut]))
            assert log.continuation is not None
            again = json.loads(json.dumps({"continuation": log.continuation, **body}))
            status, rest = await pair.post(1, path, again)
            assert status == 200, rest
            log.begin_stream()
            sent += log.feed(rest) + log.end()
            assert events_of(sent) == events_of(whole), cut
            status, alone = await pair.post(1, path, again, journal=False)
            assert status == 200 and b'"error":{' not in alone, alone

    run(check)


def test_a_whole_answer_is_handed_over() -> None:
    body = {"model": MODEL, "messages": ASK, "seed": 1, "max_tokens": 400, "ignore_eos": True}

    async def check(pair: Pair) -> None:
        expected = json.loads((await pair.post(1, CHAT, body))[1])
        asking = asyncio.create_task(pair.post(0, CHAT, body))
        while not pair.servers[0].app.is_computing:
            await asyncio.sleep(0.005)
        (policy,) = pair.servers[0].app.context.calls
        while sum(metrics.num_output_tokens for metrics in policy.usage()) < 20:
            await asyncio.sleep(0.001)
        await pair.servers[0].drain()
        status, answer = await asking
        error = json.loads(answer)
        assert status == 503 and error["error"]["code"] == "handed_over"
        (so_far,) = error["continuation"]["answers"]
        assert 0 < len(so_far["token_ids"]) < 400 and so_far["finish_reason"] is None
        again = body | {"continuation": error["continuation"]}
        status, answer = await pair.post(1, CHAT, again)
        found = json.loads(answer)
        assert status == 200 and found["choices"] == expected["choices"]
        assert found["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]

    run(check)


def test_a_call_without_a_hop_is_not_handed_over() -> None:
    body = {"model": MODEL, "messages": ASK, "max_tokens": 200, "ignore_eos": True}

    async def check(pair: Pair) -> None:
        asking = asyncio.create_task(pair.post(0, CHAT, body, journal=False))
        while not pair.servers[0].app.is_computing:
            await asyncio.sleep(0.005)
        await pair.servers[0].drain()
        assert (await asking)[0] == 200

    run(check)


def test_what_does_not_fit_is_refused() -> None:
    path, more = CALLS["schema"]
    body: dict[str, Any] = {"model": MODEL, "stream": True, **more}

    async def check(pair: Pair) -> None:
        _, whole = await pair.post(0, path, body)
        log = AnswerLog()
        log.feed(b"".join(blocks_of(whole)[:9]))
        good = log.continuation
        assert good is not None
        state, (answer,) = good["state"], good["answers"]
        tokens = answer["token_ids"]
        wrong: list[tuple[Any, int, str | None]] = [
            (3, 400, "invalid_continuation"),
            ({}, 400, "invalid_continuation"),
            (good | {"answers": [answer] * 2}, 400, "invalid_continuation"),
            (good | {"answers": [{"token_ids": "x"}]}, 400, "invalid_continuation"),
            (good | {"answers": [{"token_ids": [-1]}]}, 400, None),
            (good | {"answers": [{"token_ids": [1 << 40]}]}, 400, None),
            (good | {"answers": [{"token_ids": [True]}]}, 400, None),
            (good | {"answers": [{"token_ids": tokens * 9}]}, 400, None),
            (good | {"answers": [{"token_ids": tokens[::-1]}]}, 400, None),
            (good | {"answers": [answer | {"finish_reason": "no"}]}, 400, None),
            (good | {"answers": [answer | {"scores": 3}]}, 400, "invalid_continuation"),
            (good | {"answers": [answer | {"scores": [[0.0, 1, []]]}]}, 400, None),
            *(
                (good | {"answers": [answer | {"scores": [one] * len(tokens)}]}, 400, None)
                for one in ([], [0.0, 1], ["x", 1, []], [0.0, 1, [[1]]], [0.0, 1, [[-1, 0.0]]])
            ),
            (good | {"state": state | {"seeds": []}}, 400, "invalid_continuation"),
            (good | {"state": state | {"seeds": ["x"]}}, 400, None),
            (good | {"state": state | {"id": "a\nb"}}, 400, "invalid_continuation"),
            (good | {"state": state | {"created": -1}}, 400, None),
            (good | {"num_events": -1}, 400, None),
            (good | {"state": state | {"fingerprint": "fp_0"}}, 409, "continuation_differs"),
            (good | {"state": state | {"prompts": ["0"]}}, 409, "continuation_differs"),
        ]
        for value, status, code in wrong:
            found, text = await pair.post(1, path, body | {"continuation": value})
            error = json.loads(text)["error"]
            assert found == status, (value, text)
            assert code is None or error["code"] == code, (value, text)
            assert error["param"] in ("continuation", "continuation.num_events"), (value, text)
        assert pair.servers[1].app.num_calls == 0

    run(check)


@pytest.mark.parametrize("goes_on", [False, True])
def test_whoever_sends_a_continuation_pays_for_all_of_it(goes_on: bool) -> None:
    """Cached or not, as for calls that begin here: anyone may send one."""

    class Stream:
        metrics = RequestMetrics(
            0.0, num_cached_tokens=100, num_prompt_tokens=110, num_output_tokens=20
        )

    policy = KeyPolicy(ApiKey("alice", b""))
    policy.submitted(Stream())  # type: ignore[arg-type]
    if goes_on:
        state = AnswerState("a", 0, "f", (1,), ("p",))
        policy.continuation = Continuation(state, ())
    assert policy.num_charged == 130
