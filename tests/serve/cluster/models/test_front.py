"""The front forwards requests byte by byte, and answers what concerns all models."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from serve.cluster.models.metrics import FRONT_METRICS
from serve.cluster.models.model import State
from serve.cluster.models.routing import BY_BODY, BY_QUERY, LIVE
from serve.http.calls.context import ApiContext
from serve.http.edge.settings import HttpSettings
from serve.http.routes import all_routes
from tests.support.cluster.front_rig import KEY, Front, Handler, running_front
from tests.support.http.fake_engine import FakeEngine

ROOT = Path(__file__).parents[4]
CHAT = "/v1/chat/completions"
CLIENT_KEY = "client:0123456789abcdef"
EVENT = b'data: {"x": 1}\n\n'


async def echo(request: web.BaseRequest) -> web.StreamResponse:
    return web.json_response({"ok": True}, headers={"x-request-id": "req_behind"})


def run(check: Callable[[Front], Awaitable[None]], handler: Handler = echo, **given: Any) -> None:
    async def live() -> None:
        async with asyncio.timeout(20), running_front(handler, "a", "b", "c", **given) as front:
            await check(front)

    asyncio.run(live())


async def break_off(request: web.BaseRequest, sent: bytes) -> web.StreamResponse:
    """Begins a stream, and loses its connection."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(sent)
    await asyncio.sleep(0.05)
    assert request.transport is not None
    request.transport.abort()
    return response


def code(answer: tuple[int, Any]) -> tuple[int, str]:
    return answer[0], answer[1]["error"]["code"]


def test_a_body_arrives_as_it_was_sent() -> None:
    body = b'{"model" : "b",\n "n":1.0, "text": "\xc3\xa4\\u00e4"}'

    async def check(front: Front) -> None:
        headers = {"Content-Type": "application/json", "X-Request-Id": "mine", "Connection": "x-a"}
        headers["x-a"] = "of this connection"
        url = f"{front.url}{CHAT}?q=%20"
        async with front.session.post(url, data=body, headers=headers) as answer:
            assert (answer.status, await answer.json()) == (200, {"ok": True})
            assert answer.headers["x-request-id"] == "req_behind"
        method, path, seen, arrived = front.seen[0]
        assert (method, path, arrived) == ("POST", f"{CHAT}?q=%20", body)
        assert seen["Authorization"] == f"Bearer {KEY}"
        assert seen["X-Request-Id"] == "mine" and "x-a" not in seen
        assert [model.state for model in front.pool.models.values()] == [
            State.STOPPED,
            State.READY,
            State.STOPPED,
        ]

    run(check)


def test_a_stream_is_not_held_up() -> None:
    may_go_on = asyncio.Event()

    async def stream(request: web.BaseRequest) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(3):
            await response.write(EVENT)
            await may_go_on.wait()
            may_go_on.clear()
        return response

    async def check(front: Front) -> None:
        async with front.session.post(front.url + CHAT, json={"model": "a"}) as answer:
            for _ in range(3):
                assert await answer.content.readexactly(len(EVENT)) == EVENT
                may_go_on.set()
            assert await answer.content.read() == b""

    run(check, stream)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_a_stream_that_breaks_off_ends_with_an_error(path: str) -> None:
    async def check(front: Front) -> None:
        status, text = await front.post(path, {"model": "a"})
        last = text.removeprefix(EVENT)
        assert status == 200 and last.count(b"\n\n") == 1
        error = json.loads(last.partition(b"data: ")[2])["error"]
        assert "the model a cannot be served" in error["message"]
        assert last.startswith(b"event: error\n") == (path == "/v1/messages")
        assert error["type"] == ("api_error" if path == "/v1/messages" else "server_error")
        assert front.pool.num_running == 0

    run(check, lambda request: break_off(request, EVENT))


def test_half_an_event_is_not_completed() -> None:
    async def check(front: Front) -> None:
        with pytest.raises(aiohttp.ClientPayloadError):
            await front.post(CHAT, {"model": "a"})
        assert front.pool.num_running == 0

    run(check, lambda request: break_off(request, EVENT + b'data: {"x"'))


def test_a_process_that_does_not_answer_is_an_error_of_its_model() -> None:
    async def gone(request: web.BaseRequest) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        await asyncio.sleep(1)
        raise AssertionError

    async def check(front: Front) -> None:
        assert code(await front.post(CHAT, {"model": "b"})) == (503, "model_failed")
        status, answer = await front.post("/v1/messages", {"model": "b"})
        assert (status, answer["error"]["type"]) == (503, "api_error")
        assert front.pool.models["b"].refused == {"model_failed": 2}

    run(check, gone)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_request_after_the_error_of_a_dying_process_is_served(is_stream: bool) -> None:
    """Its connections end before it does: the client hears of the error when both have."""
    deaths = 1

    async def dying(request: web.BaseRequest) -> web.StreamResponse:
        nonlocal deaths
        if not deaths:
            return await echo(request)
        deaths -= 1
        if is_stream:
            return await break_off(request, EVENT)
        assert request.transport is not None
        request.transport.abort()
        await asyncio.sleep(1)
        raise AssertionError

    async def check(front: Front) -> None:
        await front.pool.acquire(front.pool.models["a"], 1.0)
        front.pool.release(front.pool.models["a"])
        child: Any = front.pool.models["a"].child
        child.end_s = 0.2
        status, answer = await front.post(CHAT, {"model": "a"})
        assert status == (200 if is_stream else 503)
        assert b"model_failed" in (answer if is_stream else json.dumps(answer).encode())
        assert front.pool.models["a"].state is State.STOPPED
        assert (await front.post(CHAT, {"model": "a"}))[0] == 200
        assert front.switches.log == ["start a", "start a"]

    run(check, dying)


def test_a_process_that_has_ended_unseen_is_started_again() -> None:
    async def check(front: Front) -> None:
        await front.post(CHAT, {"model": "a"})
        child = front.pool.models["a"].child
        assert child is not None
        child.url = "http://127.0.0.1:9"  # nothing listens there
        assert (await front.post(CHAT, {"model": "a"}))[0] == 200
        assert front.switches.log == ["start a", "start a"]
        front.switches.url = child.url
        assert (await front.post(CHAT, {"model": "b"}))[0] == 503

    run(check)


def test_a_client_that_leaves_ends_the_request_behind() -> None:
    ended = asyncio.Event()

    async def slow(request: web.BaseRequest) -> web.StreamResponse:
        try:
            await asyncio.sleep(30)
        finally:
            ended.set()
        raise AssertionError

    async def check(front: Front) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await front.post(CHAT, {"model": "a"})
        await asyncio.wait_for(ended.wait(), 5)
        while front.pool.num_running:
            await asyncio.sleep(0.01)

    run(check, slow)


def test_which_model() -> None:
    async def check(front: Front) -> None:
        assert code(await front.post(CHAT, {"model": "x"})) == (404, "model_not_found")
        assert code(await front.post(CHAT, {"model": 5})) == (404, "model_not_found")
        assert code(await front.post("/v1/nothing", {})) == (404, "unknown_url")
        assert code(await front.get(CHAT)) == (405, "method_not_allowed")
        assert front.switches.log == [], "nothing is started for a wrong request"
        assert (await front.post("/tokenize", {"prompt": "x"}))[0] == 200
        assert (await front.get("/openapi.json?model=c"))[0] == 200
        assert front.switches.log == ["start a", "start c"]

    run(check)


def test_bodies_that_are_refused() -> None:
    async def check(front: Front) -> None:
        headers = {"Content-Type": "application/json"}
        for body, expected in ((b"{", 400), (b"[]", 400), (b'{"model": "' + b"a" * 500, 413)):
            post = front.session.post(front.url + CHAT, data=body, headers=headers)
            async with post as answer:
                assert answer.status == expected
        async with front.session.post(front.url + CHAT, data=b"{}") as answer:
            assert answer.status == 415
        assert front.seen == []

    run(check, max_body_bytes=200)


def test_keys_are_checked_in_front_and_passed_on() -> None:
    async def check(front: Front) -> None:
        assert code(await front.post(CHAT, {"model": "a"})) == (401, "invalid_api_key")
        assert (await front.get("/v1/models"))[0] == 401
        assert (await front.get("/health"))[0] == 200
        key = f"Bearer {CLIENT_KEY.partition(':')[2]}"
        assert (await front.post(CHAT, {"model": "a"}, Authorization=key))[0] == 200
        assert front.seen[0][2]["Authorization"] == key

    run(check, api_keys=(CLIENT_KEY,))


def test_the_time_that_a_request_has_waited_is_taken_from_its_own() -> None:
    async def check(front: Front) -> None:
        front.switches.switch_s = 0.3
        await front.post(CHAT, {"model": "a"}, **{"X-Request-Timeout": "5"})
        assert 4 < float(front.seen[0][2]["X-Request-Timeout"]) < 4.75
        late = await front.post(CHAT, {"model": "b"}, **{"X-Request-Timeout": "0.1"})
        assert code(late) == (504, "model_wait_timeout")

    run(check)


def test_a_stored_response_is_asked_from_its_model() -> None:
    async def respond(request: web.BaseRequest) -> web.StreamResponse:
        return web.json_response({"id": "resp_12", "model": "?"})

    async def check(front: Front) -> None:
        await front.post("/v1/responses", {"model": "c"})
        await front.get("/v1/responses/resp_12")
        assert front.switches.log == ["start c"]
        await front.get("/v1/responses/resp_unknown")
        assert front.switches.log == ["start c", "start a"]

    run(check, respond)


def test_what_the_front_says_of_its_models() -> None:
    async def check(front: Front) -> None:
        await front.post(CHAT, {"model": "a"})
        _, listed = await front.get("/v1/models")
        states = {each["id"]: each["state"] for each in listed["data"]}
        assert states == {"a": "ready", "b": "stopped", "c": "stopped"}
        assert (await front.get("/v1/models/a"))[1]["memory_bytes"] == 100
        assert code(await front.get("/v1/models/x")) == (404, "model_not_found")
        assert (await front.get("/ready"))[0] == 200
        assert b"<html" in (await front.get("/"))[1]
        assert (await front.get("/metrics?model=a"))[1] == b"its own\n"
        assert code(await front.get("/metrics?model=b")) == (503, "model_asleep")
        assert code(await front.get("/live?model=b")) == (503, "model_asleep")
        text = (await front.get("/metrics"))[1].decode()
        assert 'mergestep:model_state{model_name="a",state="ready"} 1.0' in text
        assert 'mergestep:model_switch_seconds_count{model_name="a",switch="start"} 1.0' in text
        front.app.is_draining = True
        assert code(await front.post(CHAT, {"model": "a"})) == (503, "draining")
        assert code(await front.get("/ready")) == (503, "draining")

    run(check)


def test_sleep_and_wake_up() -> None:
    async def check(front: Front) -> None:
        await front.post(CHAT, {"model": "a"})
        assert (await front.get("/is_sleeping"))[1] == {"is_sleeping": False}
        assert (await front.post("/sleep?level=2", None))[0] == 200
        assert (await front.get("/is_sleeping"))[1] == {"is_sleeping": True}
        assert (await front.post("/wake_up?model=a", None))[0] == 200
        assert code(await front.post("/sleep?level=3", None)) == (400, "invalid_value")
        assert front.switches.log == ["start a", "sleep a", "wake a"]

    run(check, enable_sleep_mode=True)


def test_sleep_is_not_for_everybody() -> None:
    async def check(front: Front) -> None:
        assert code(await front.post("/sleep", None)) == (404, "unknown_url")

    run(check)


def test_every_route_of_a_server_is_known() -> None:
    """What a server of one model answers, the front forwards or answers itself."""
    engine: Any = FakeEngine()
    routes = all_routes(ApiContext(engine, HttpSettings(enable_sleep_mode=True)))
    stored = "/v1/responses/{response_id}"
    own = {"/v1/models", "/v1/models/{id}", "/version", "/metrics", "/is_sleeping", "/sleep"}
    own |= {"/wake_up", stored, f"{stored}/input_items", f"{stored}/cancel"}
    private = {route.path for route in routes if not route.is_public}
    assert private == {*BY_BODY, *BY_QUERY, LIVE, *own}

    async def check(front: Front) -> None:
        for route in routes:
            if route.is_public:
                assert (await front.get(route.path))[0] == 200

    run(check)


def test_the_metrics_are_documented() -> None:
    section = (ROOT / "docs" / "metrics.md").read_text().partition("## Several models")[2]
    rows = re.findall(r"^\| `mergestep:(\w+?)(?:_total)?` \| (\w+) \|", section, flags=re.M)
    assert rows == [(each.name, each.kind) for each in FRONT_METRICS]
    assert all(each.about in section for each in FRONT_METRICS)
