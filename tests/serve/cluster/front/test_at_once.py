"""Calls that two servers get at once: one computes the prompt, the other one waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from serve.cluster.front import parting
from serve.cluster.front.apart import Decision
from serve.cluster.front.front import Front
from serve.cluster.front.parting import Parting
from serve.cluster.front.prompt import Prompt
from serve.cluster.front.replicas import Choice, Replica, ReplicaSet
from serve.http.edge.hop import HOP_HEADER, load_hop_token, prompt_token
from serve.http.edge.settings import HttpSettings
from tests.serve.cluster.front.test_apart import load
from tests.serve.cluster.front.test_moves import (
    BODY,
    GIVEN,
    WHOLE,
    Peer,
    answers,
    stays_after,
    tokens,
)
from tests.serve.cluster.front.test_relay import DONE, EMPTY, Script, refuses, relayed, streams

AWAITS = {"do_remote_prefill": True}


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts every call between the first and the second server."""
    monkeypatch.setattr(parting, "decide", lambda *_: Decision(0, 1, 2.0, 1.0, ""))
    monkeypatch.setattr(parting, "next_server", lambda candidates, at, *_: 1 if at == 0 else None)


@pytest.fixture
def is_computed() -> asyncio.Event:
    """Set when the first server has answered."""
    return asyncio.Event()


def computes(is_computed: asyncio.Event, seconds: float = 0.05) -> Script:
    async def script(request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        await asyncio.sleep(seconds)
        is_computed.set()
        return web.json_response({"choices": [], "kv_transfer_params": GIVEN})

    return script


def waits(is_computed: asyncio.Event, then: Script) -> Script:
    async def script(request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        async with asyncio.timeout(10):
            await is_computed.wait()
        await asyncio.sleep(0.02)
        return await then(request, body)

    return script


def ask(*servers: Peer, body: dict[str, Any] = BODY) -> tuple[int, bytes, Front]:
    return relayed(*servers, path="/v1/completions", body=body)


def at_rest(front: Front) -> bool:
    return all(r.num_calls == r.num_streams == r.sent_s == 0 for r in front.replicas.replicas)


def test_a_stream_begins_at_the_second_server(is_computed: asyncio.Event) -> None:
    """The second one has the call before the prompt is computed, or it would wait in vain here."""
    first = Peer(computes(is_computed))
    second = Peer(waits(is_computed, streams(1, 2, end=DONE)))
    status, data, front = ask(first, second)
    assert (status, data) == (200, b"data: 1\n\ndata: 2\n\n" + DONE)
    (asked,) = first.bodies
    assert asked["max_tokens"] == 1 and "stream" not in asked
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    assert second.bodies == [BODY | {"kv_transfer_params": AWAITS}]
    counts = front.parting.counts
    assert (counts.num_apart, counts.num_moved) == (1, 1) and 0.0 < counts.handover_s < 1.0
    assert not front.counts.num_continued and at_rest(front)


def test_a_whole_answer_is_made_by_the_second_server(is_computed: asyncio.Event) -> None:
    first, second = Peer(computes(is_computed)), Peer(waits(is_computed, answers(usage=1)))
    status, data, front = ask(first, second, body=WHOLE)
    assert status == 200 and orjson.loads(data) == {"choices": [], "usage": 1}
    assert second.bodies == [WHOLE | {"kv_transfer_params": AWAITS}] and at_rest(front)


@pytest.mark.parametrize("first", [refuses(500, "failed"), streams()], ids=["refuses", "dies"])
@pytest.mark.parametrize("body", [BODY, WHOLE], ids=["stream", "whole"])
def test_the_first_server_fails(first: Script, body: dict[str, Any]) -> None:
    """The second one does not wait for long, and computes the prompt."""
    answer = streams(1, end=DONE) if body is BODY else answers(usage=1)
    second = Peer(answer)
    status, _, front = ask(Peer(first), second, body=body)
    assert status == 200 and len(second.bodies) == 1
    assert front.parting.counts.num_moved == 0 and front.counts.num_failed == 0


@pytest.mark.parametrize("body", [BODY, WHOLE], ids=["stream", "whole"])
@pytest.mark.parametrize(
    ("first", "is_left_out"),
    [
        (refuses(500, "failed"), True),
        (refuses(429, "overloaded"), True),
        (streams(), True),
        (refuses(429, "rate_limit_exceeded"), False),
        (refuses(400, "invalid_value"), False),
    ],
    ids=["failed", "overloaded", "dies", "quota", "wrong"],
)
def test_nobody_waits_again_for_a_server_that_fails(
    first: Script, is_left_out: bool, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It gets no calls until the next check. What a client has done wrong is no failure."""
    left_out = []
    is_refused = asyncio.Event()

    def refused(self: ReplicaSet, replica: Replica) -> None:
        left_out.append(replica.url)
        is_refused.set()

    monkeypatch.setattr(ReplicaSet, "refused", refused)
    answer = streams(1, end=DONE) if body is BODY else answers(usage=1)

    async def after(request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(is_refused.wait(), 5.0 if is_left_out else 0.1)
        return await answer(request, body)

    failing, second = Peer(first), Peer(after)
    status, _, _ = ask(failing, second, body=body)
    assert status == 200 and left_out == ([failing.url] if is_left_out else [])


def test_the_hop_tells_where_a_prompt_is_counted(
    is_computed: asyncio.Event, tmp_path: Path
) -> None:
    """The second server is to count the call, but not the prompt again; the first one all of it."""
    key = tmp_path / "key"
    key.write_text("a secret of the operator")
    key.chmod(0o600)
    seen: list[str | None] = []

    class Noting(Peer):
        async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
            if request.method == "POST":
                seen.append(request.headers.get(HOP_HEADER))
            return await super()._answer(request)

    first = Noting(computes(is_computed))
    second = Noting(waits(is_computed, streams(1, end=DONE)))
    http = HttpSettings(port=0, hop_key_file=str(key))
    status, _, _ = relayed(first, second, path="/v1/completions", body=BODY, http=http)
    told = prompt_token(load_hop_token(str(key)))
    assert status == 200 and sorted(seen, key=str) == sorted([None, told], key=str)


@pytest.mark.parametrize("code", ["overloaded", "engine_failed"])
def test_the_second_server_refuses(is_computed: asyncio.Event, code: str) -> None:
    first = Peer(computes(is_computed), streams(1, end=DONE))
    status, data, front = ask(first, Peer(refuses(429 if code == "overloaded" else 503, code)))
    assert (status, data) == (200, b"data: 1\n\n" + DONE)
    assert first.bodies[1] == BODY, "nobody computes the prompt for it"
    one, two = front.replicas.replicas
    assert one.handover_s < 0.1 and two.handover_s > 1.0


def test_the_second_server_dies_after_some_tokens(is_computed: asyncio.Event) -> None:
    first = Peer(computes(is_computed), streams(3, end=DONE))
    second = Peer(waits(is_computed, streams(1, 2)))
    status, data, front = ask(first, second)
    assert (status, data) == (200, b"data: 1\n\ndata: 2\n\ndata: 3\n\n" + DONE)
    going_on = {"continuation": EMPTY | {"answers": tokens(1, 2), "num_events": 2}}
    assert first.bodies[1] == BODY | going_on, "the prompt is awaited once"
    assert front.replicas.replicas[1].handover_s < 1.0 and at_rest(front)


def test_what_is_not_needed_any_more_is_ended() -> None:
    """The second server has answered without waiting: the first one's call is closed."""
    is_gone = asyncio.Event()

    async def hangs(request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        async with asyncio.timeout(10):
            while request.transport is not None and not request.transport.is_closing():
                await asyncio.sleep(0.01)
        is_gone.set()
        return web.Response()

    async def during(front: Front) -> None:
        async with asyncio.timeout(10):
            await is_gone.wait()

    first, second = Peer(hangs), Peer(streams(1, end=DONE))
    status, data, front = relayed(first, second, path="/v1/completions", body=BODY, during=during)
    assert (status, data) == (200, b"data: 1\n\n" + DONE)
    assert front.parting.counts.num_moved == 0 and at_rest(front)
    assert front.replicas.replicas[1].handover_s == pytest.approx(0.05), "nothing is learned of it"


def test_other_apis_go_on_after_the_first_token() -> None:
    """Their calls cannot say that a prompt is computed elsewhere."""
    body = {"messages": [{"role": "user", "content": "a" * 4000}], "stream": True}
    first, second = Peer(stays_after(1)), Peer(streams(2, end=DONE))
    status, data, _ = relayed(first, second, path="/v1/messages", body=body)
    assert (status, data) == (200, b"data: 1\n\ndata: 2\n\n" + DONE)
    assert first.bodies == [body] and second.bodies[0]["continuation"]["answers"] == tokens(1)


@pytest.mark.parametrize(
    ("queue_s", "cost_s", "is_soon"),
    [(0.0, 0.5, True), (0.5, 0.5, False), (0.0, 3.0, False)],
)
def test_nobody_waits_for_a_server_that_is_busy(
    queue_s: float, cost_s: float, is_soon: bool
) -> None:
    """A prompt of 128 tokens takes 0.3 s: the second server waits for 1 s."""
    replicas = ReplicaSet(["http://a", "http://b"], lost_after_s=1.0)
    found = Parting(replicas, is_on=True)
    second = Replica("b", load=load())
    choice = Choice(Replica("a"), queue_s, 8, cost_s, 0)
    prompt = Prompt([], 128, True, True, None, True)
    assert found.is_soon(prompt, choice, second) is is_soon
    assert not found.is_soon(prompt, choice, Replica("c")), "it pulls nothing"
    longer = prompt._replace(size=1024)  # 2.4 s: it waits for 4.8 s
    assert found.is_soon(longer, choice._replace(cost_s=2.5), second)
