"""Calls that are parted, before scripted servers: what goes on where when something fails."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, ClassVar

import aiohttp
import orjson
import pytest
from aiohttp import web

from serve.cluster.front import parting, relay, replicas
from serve.cluster.front.apart import Decision
from serve.cluster.front.front import Front
from serve.cluster.front.prompt import Lengths, Prompt
from serve.cluster.front.replicas import LOAD_HEADER, Replica
from tests.serve.cluster.front.test_apart import LOAD, load
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
    """Parts every call between the first and the second server, one after the other."""
    monkeypatch.setattr(parting, "_PATIENCE_USED", 0.0)
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
    assert front.replicas.replicas[1].handover_s < 1.0  # the hand-over was none of its troubles


def test_the_second_server_dies_before_its_token() -> None:
    first, second = Peer(stays_after(1), streams(2, end=DONE)), Peer(streams())
    status, data, front = ask(first, second)
    assert (status, data) == (200, b"data: 1\n\ndata: 2\n\n" + DONE)
    assert front.replicas.replicas[1].handover_s > 1.0


@pytest.mark.parametrize(("status", "code"), [(429, "overloaded"), (409, "continuation_differs")])
def test_the_second_server_refuses(status: int, code: str) -> None:
    first, second = Peer(stays_after(1), streams(2, end=DONE)), Peer(refuses(status, code))
    found, data, front = ask(first, second)
    assert (found, data) == (200, b"data: 1\n\ndata: 2\n\n" + DONE)
    assert front.parting.counts.num_moved == 0 and front.counts.num_failed == 0
    one, two = front.replicas.replicas
    assert one.handover_s < 0.1 and two.handover_s > 1.0
    shares = code != "continuation_differs"  # servers of other versions share nothing for a while
    for replica in (one, two):
        load = replica.sharing_load()
        assert load is not None and load.pulls_from == ({"a"} if shares else set())


def test_a_server_that_is_started_again_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Replica("a", load=load(engine="a")), Replica("b", load=load(pulls_from=["a", "c"]))
    two.bar(one)
    assert two.sharing_load() == load(pulls_from=["c"]) and one.sharing_load() == one.load
    two.load = load(pulls_from=["b"])  # the id of the other one's next start
    assert two.sharing_load() == two.load
    two.load = load(pulls_from=["a"])
    assert two.sharing_load() == load(pulls_from=[])
    later = time.monotonic() + 61.0
    monkeypatch.setattr(replicas.time, "monotonic", lambda: later)
    assert two.sharing_load() == two.load and not two.barred


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


def test_a_whole_answer_that_the_second_server_refuses() -> None:
    first = Peer(answers(kv_transfer_params=GIVEN), answers(usage=1))
    second = Peer(refuses(503, "engine_failed"))
    status, _, front = ask(first, second, body=WHOLE)
    assert status == 200 and len(second.bodies) == 1
    assert front.replicas.replicas[1].handover_s > 1.0


@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": 2000, "completion_tokens": 7},
        {"input_tokens": 500, "cache_read_input_tokens": 1500, "output_tokens": 7},
    ],
    ids=["OpenAI", "Anthropic"],
)
def test_lengths_are_learned_from_whole_answers(usage: dict[str, int]) -> None:
    servers = [Peer(answers(kv_transfer_params=GIVEN, usage=usage)) for _ in range(2)]
    _, _, front = ask(*servers, body=WHOLE)
    assert front.parting.lengths.of_byte == pytest.approx(0.5, rel=0.01)
    assert front.parting.lengths.output == 7


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"usage": None},
        {"usage": {"prompt_tokens": 5, "total_tokens": 5}},
        {"usage": {"prompt_tokens": 5, "completion_tokens": "7"}},
        {"usage": {"prompt_tokens": -5, "completion_tokens": 7}},
        {"usage": {"prompt_tokens": 5, "completion_tokens": 7}, "text": "x" * 20_000},
    ],
)
def test_nothing_is_learned_from_other_answers(more: dict[str, Any]) -> None:
    servers = [Peer(answers(**more)) for _ in range(2)]
    status, _, front = ask(*servers, body=WHOLE)
    assert status == 200 and front.parting.lengths == Lengths()


@pytest.mark.parametrize(("size", "is_read"), [(200_000, True), (300_000, False)])
def test_large_bodies_are_not_looked_into(
    monkeypatch: pytest.MonkeyPatch, size: int, is_read: bool
) -> None:
    seen: list[int] = []
    read = relay.read_prompt

    def noting(request: web.BaseRequest, body: bytes) -> Prompt:
        seen.append(len(body))
        return read(request, body)

    monkeypatch.setattr(relay, "read_prompt", noting)
    monkeypatch.setattr(parting, "decide", lambda *_: Decision(0, None, 1.0, 2.0, "does_not_pay"))
    first, second = Peer(streams(1, end=DONE)), Peer(streams(1, end=DONE))
    status, _, front = ask(first, second, body=BODY | {"prompt": "a" * size})
    assert status == 200 and bool(seen) == is_read
    reason = "does_not_pay" if is_read else "unread"
    assert front.parting.counts.num_together == {reason: 1}


def test_clients_are_not_told_what_the_hop_is_told() -> None:
    """The hop knows some addresses of /ready itself; the others it passes on."""

    class Noting(ScriptedServer):
        journals: ClassVar[dict[str, bool]] = {}

        async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
            self.journals[request.path] = "x-mergestep-journal" in request.headers
            return await super()._answer(request)

    async def during(front: Front) -> None:
        async with (
            aiohttp.ClientSession(headers={"X-Mergestep-Journal": "1"}) as session,
            session.get(front.url + "/health/ready") as response,
        ):
            assert response.status == 200

    relayed(Noting(streams(1, end=DONE)), path="/v1/completions", body=BODY, during=during)
    assert Noting.journals["/ready"] is True and Noting.journals["/health/ready"] is False


def test_no_setting_no_parting() -> None:
    """Servers that are no peers, and calls that are too unlike others, are left alone."""
    first, second = ScriptedServer(streams(1, end=DONE)), ScriptedServer(streams(2, end=DONE))
    status, _, front = relayed(first, second, path="/v1/completions", body=BODY)
    assert status == 200 and len(first.bodies + second.bodies) == 1
    assert front.parting.counts.num_together == {"no_peers": 1}
    assert "pull K/V" in front.parting.counts.last
