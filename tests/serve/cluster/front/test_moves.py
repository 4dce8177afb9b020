"""Calls that are parted, before scripted servers: what goes on where when something fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import orjson
import pytest
from aiohttp import web

from serve.cluster.front import parting
from serve.cluster.front.apart import Decision
from serve.cluster.front.front import Front
from serve.cluster.front.replicas import LOAD_HEADER
from tests.serve.cluster.front.test_apart import LOAD
from tests.serve.cluster.front.test_relay import (
    DONE,
    EMPTY,
    STATE,
    Script,
    ScriptedServer,
    refuses,
    relayed,
    streams,
)

BODY = {"prompt": "a" * 4000, "stream": True, "max_tokens": 9}
WHOLE = BODY | {"stream": False, "logprobs": 1}
GIVEN = {"do_remote_prefill": True, "remote_host": "h", "remote_port": 7}


class Peer(ScriptedServer):
    """One that says that it can pull K/V."""

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET":
            return web.Response(headers={LOAD_HEADER: orjson.dumps(LOAD).decode()})
        return await super()._answer(request)


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts every call between the first and the second server."""
    monkeypatch.setattr(parting, "decide", lambda *_: Decision(0, 1, 2.0, 1.0, ""))
    monkeypatch.setattr(parting, "next_server", lambda candidates, at, *_: 1 if at == 0 else None)


def stays_after(token: int) -> Script:
    """Sends a token, and nothing more until the hop has gone."""

    async def script(request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(STATE + b"data: %d\n\n: tokens [0,[%d],null]\n\n" % (token, token))
        async with asyncio.timeout(10):
            while request.transport is not None and not request.transport.is_closing():
                await asyncio.sleep(0.01)
        return response

    return script


def answers(**fields: Any) -> Script:
    async def script(request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response({"choices": []} | fields)

    return script


def ask(*servers: Peer, body: dict[str, Any] = BODY) -> tuple[int, bytes, Front]:
    return relayed(*servers, path="/v1/completions", body=body)


def tokens(*ids: int) -> list[dict[str, Any]]:
    return [{"token_ids": list(ids), "finish_reason": None}]


def test_a_stream_goes_on_after_its_first_token() -> None:
    first, second = Peer(stays_after(1)), Peer(streams(2, end=DONE))
    status, data, front = ask(first, second)
    assert (status, data) == (200, b"data: 1\n\ndata: 2\n\n" + DONE)
    assert second.bodies[0]["continuation"] == EMPTY | {"answers": tokens(1), "num_events": 1}
    counts = front.parting.counts
    assert (counts.num_apart, counts.num_moved) == (1, 1) and counts.handover_s > 0.0
    assert not front.counts.num_continued and not front.counts.num_replayed_tokens
    assert all(r.num_streams == r.num_calls == 0 for r in front.replicas.replicas)


def test_the_second_server_dies_after_the_hand_over() -> None:
    first, second = Peer(stays_after(1), streams(3, end=DONE)), Peer(streams(2))
    status, data, front = ask(first, second)
    assert (status, data) == (200, b"data: 1\n\ndata: 2\n\ndata: 3\n\n" + DONE)
    assert first.bodies[1]["continuation"]["answers"] == tokens(1, 2)
    assert front.counts.num_continued == {"broken": 1}


@pytest.mark.parametrize(("status", "code"), [(429, "overloaded"), (409, "continuation_differs")])
def test_the_second_server_refuses(status: int, code: str) -> None:
    first, second = Peer(stays_after(1), streams(2, end=DONE)), Peer(refuses(status, code))
    found, data, front = ask(first, second)
    assert (found, data) == (200, b"data: 1\n\ndata: 2\n\n" + DONE)
    assert front.parting.counts.num_moved == 0 and front.counts.num_failed == 0


def test_the_first_server_dies_before_its_token() -> None:
    first, second = Peer(streams()), Peer(streams(1, 2, end=DONE))
    status, data, front = ask(first, second)
    assert (status, data) == (200, b"data: 1\n\ndata: 2\n\n" + DONE)
    assert "continuation" not in second.bodies[0]
    assert front.parting.counts.num_moved == 0


def test_an_answer_of_one_token_moves_nowhere() -> None:
    first = Peer(_ends_with(b'data: 1\n\n: tokens [0,[1],"stop"]\n\n' + DONE))
    second = Peer(streams(2, end=DONE))
    assert ask(first, second)[:2] == (200, b"data: 1\n\n" + DONE) and not second.bodies


def _ends_with(events: bytes) -> Script:
    async def script(request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(STATE + events)
        await response.write_eof()
        return response

    return script


def test_a_whole_answer_has_its_prompt_computed_first() -> None:
    first, second = Peer(answers(kv_transfer_params=GIVEN)), Peer(answers(usage=1))
    status, data, front = ask(first, second, body=WHOLE)
    assert status == 200 and json.loads(data) == {"choices": [], "usage": 1}
    (asked,) = first.bodies
    assert asked["max_tokens"] == 1 and asked["kv_transfer_params"]["do_remote_decode"] is True
    assert not {"stream", "logprobs"} & set(asked)
    assert second.bodies == [WHOLE | {"kv_transfer_params": GIVEN}]
    assert all(r.num_calls == 0 and r.sent_s == 0.0 for r in front.replicas.replicas)


@pytest.mark.parametrize("first", [refuses(500, "failed"), streams()], ids=["refuses", "dies"])
def test_a_whole_answer_whose_prompt_is_not_computed(first: Script) -> None:
    """It is a call as any other then."""
    servers = Peer(first, answers(usage=1)), Peer(answers(usage=2))
    status, data, _ = ask(*servers, body=WHOLE)
    assert status == 200 and json.loads(data)["usage"] in (1, 2)
    assert (servers[0].bodies + servers[1].bodies)[-1] == WHOLE


def test_no_setting_no_parting() -> None:
    """Servers that are no peers, and calls that are too unlike others, are left alone."""
    first, second = ScriptedServer(streams(1, end=DONE)), ScriptedServer(streams(2, end=DONE))
    status, _, front = relayed(first, second, path="/v1/completions", body=BODY)
    assert status == 200 and len(first.bodies + second.bodies) == 1
    assert front.parting.counts.num_together == {"no_peers": 1}
    assert "pull K/V" in front.parting.counts.last
