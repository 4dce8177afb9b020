"""The hop before scripted servers: refusals, handovers and losses at the worst moments."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from serve.cluster.front.front import Front, FrontSettings
from serve.http.edge.errors import ERROR_CODE_HEADER
from serve.http.edge.settings import HttpSettings

STATE = b': state {"id":"a","created":1,"fingerprint":"f","seeds":[1],"prompts":["p"]}\n\n'
Script = Callable[[web.BaseRequest, dict[str, Any]], Awaitable[web.StreamResponse]]


class ScriptedServer:
    """Answers each POST by the next script; the last one again and again."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = list(scripts)
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    async def start(self, stack: AsyncExitStack) -> None:
        runner = web.ServerRunner(web.Server(self._answer), shutdown_timeout=0.1)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "GET":
            return web.Response()
        body = json.loads(await request.read())
        self.bodies.append(body)
        script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
        return await script(request, body)


def refuses(status: int, code: str, **more: Any) -> Script:
    async def script(request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        headers = {ERROR_CODE_HEADER: code}
        return web.json_response({"error": {"code": code}} | more, status=status, headers=headers)

    return script


def streams(*tokens: int, end: bytes = b"") -> Script:
    """Sends a token an event, and then `end`; without one the connection breaks."""

    async def script(request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(STATE)
        for token in tokens:
            await response.write(b"data: %d\n\n: tokens [0,[%d],null]\n\n" % (token, token))
        await asyncio.sleep(0.05)
        if not end:
            assert request.transport is not None
            request.transport.abort()
            return response
        await response.write(end)
        await response.write_eof()
        return response

    return script


async def says_nothing(request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


DONE = b"data: [DONE]\n\n"
HANDOVER = b": handover\n\n"
EMPTY = {"state": json.loads(STATE[8:]), "answers": [], "num_events": 0}


def relayed(
    *servers: ScriptedServer,
    path: str = "/v1/chat/completions",
    body: dict[str, Any] | bytes | None = None,
    http: HttpSettings | None = None,
    during: Callable[[Front], Awaitable[None]] | None = None,
) -> tuple[int, bytes, Front]:
    """Returns status and body of one call through a hop, which asks the servers in their order."""

    async def main() -> tuple[int, bytes, Front]:
        async with AsyncExitStack() as stack:
            for server in servers:
                await server.start(stack)
            urls = tuple(server.url for server in servers)
            settings = FrontSettings(urls, wait_s=1.0, routing="round-robin")
            front = await stack.enter_async_context(Front(settings, http or HttpSettings(port=0)))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            asking = asyncio.create_task(post(session, front.url + path, body or {"a": 1}))
            if during is not None:
                await during(front)
            async with asyncio.timeout(20):
                status, data = await asking
            assert front.num_calls == 0
            return status, data, front

    return asyncio.run(main())


async def post(session: aiohttp.ClientSession, url: str, body: Any) -> tuple[int, bytes]:
    given = body if isinstance(body, bytes) else json.dumps(body)
    headers = {"Content-Type": "application/json"}
    async with session.post(url, data=given, headers=headers) as response:
        return response.status, await response.read()


def test_a_stream_goes_on_after_its_tokens() -> None:
    first, second = ScriptedServer(streams(1, 2)), ScriptedServer(streams(3, end=DONE))
    status, data, front = relayed(first, second)
    assert (status, data) == (200, b"data: 1\n\ndata: 2\n\ndata: 3\n\n" + DONE)
    (asked,) = second.bodies
    assert asked["a"] == 1
    assert asked["continuation"] == EMPTY | {
        "answers": [{"token_ids": [1, 2], "finish_reason": None}],
        "num_events": 2,
    }
    assert front.counts.num_continued == {"broken": 1}


def test_two_handovers_repeat_nothing() -> None:
    """The first server had not begun, so its continuation is empty."""
    first = ScriptedServer(refuses(503, "handed_over", continuation=EMPTY))
    second = ScriptedServer(streams(1, 2, end=HANDOVER))
    third = ScriptedServer(streams(3, end=DONE))
    status, data, front = relayed(first, second, third)
    assert (status, data) == (200, b"data: 1\n\ndata: 2\n\ndata: 3\n\n" + DONE)
    assert second.bodies[0]["continuation"] == EMPTY
    assert third.bodies[0]["continuation"]["answers"][0]["token_ids"] == [1, 2]
    assert front.counts.num_continued == {"handover": 2}


def test_what_the_client_has_not_got_leaves_no_trace() -> None:
    async def begins(request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(STATE.replace(b'"a"', b'"lost"') + b"data: 9\n\n")
        await asyncio.sleep(0.05)
        assert request.transport is not None
        request.transport.abort()
        return response

    servers = [ScriptedServer(each) for each in (begins, streams(1), streams(2, end=DONE))]
    status, data, _ = relayed(*servers)
    assert (status, data) == (200, b"data: 1\n\ndata: 2\n\n" + DONE)
    assert "continuation" not in servers[1].bodies[0]
    assert servers[2].bodies[0]["continuation"]["state"]["id"] == "a"


def test_a_server_that_is_lost_before_it_answers() -> None:
    async def lose(front: Front) -> None:
        await asyncio.sleep(0.2)
        (asked,) = [replica for replica in front.replicas.replicas if replica.num_calls]
        front.replicas.lost(asked, "test")

    first, second = ScriptedServer(says_nothing), ScriptedServer(streams(1, end=DONE))
    assert relayed(first, second, during=lose)[:2] == (200, b"data: 1\n\n" + DONE)


def test_a_server_that_is_taken_away_is_left_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve.cluster.front.replicas._LEAVE_S", 0.1)

    async def take_away(front: Front) -> None:
        await asyncio.sleep(0.2)
        front.replicas.use([r.url for r in front.replicas.replicas if not r.num_calls])

    first, second = ScriptedServer(says_nothing), ScriptedServer(streams(1, end=DONE))
    assert relayed(first, second, during=take_away)[:2] == (200, b"data: 1\n\n" + DONE)


@pytest.mark.parametrize("status", [429, 400, 401, 500])
def test_a_refusal_in_mid_stream_is_an_event(status: int) -> None:
    first, second = ScriptedServer(streams(1)), ScriptedServer(refuses(status, "some_code"))
    first._scripts.append(refuses(status, "some_code"))
    found, data, front = relayed(first, second)
    assert found == 200 and b"HTTP/1.1" not in data
    assert data.startswith(b"data: 1\n\n") and b'"code":"no_replica"' in data
    assert front.counts.num_failed == 1


@pytest.mark.parametrize(
    ("status", "code"), [(529, "overloaded"), (503, "draining"), (503, "weights_lost")]
)
def test_a_refusal_without_a_code_in_its_body(status: int, code: str) -> None:
    async def refuse(request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        headers = {ERROR_CODE_HEADER: code}
        return web.json_response({"type": "error"}, status=status, headers=headers)

    first, second = ScriptedServer(refuse), ScriptedServer(streams(1, end=DONE))
    assert relayed(first, second, path="/v1/messages")[0] == 200


def test_all_are_too_busy() -> None:
    servers = [ScriptedServer(refuses(429, "overloaded")) for _ in range(2)]
    status, _, _ = relayed(*servers)
    assert status == 429 and [len(server.bodies) for server in servers] == [1, 1]


def test_a_call_that_breaks_every_server_is_given_up() -> None:
    async def breaks(request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    server = ScriptedServer(breaks)
    status, data, front = relayed(server)
    assert status == 503 and b"no_replica" in data
    assert len(server.bodies) <= 8 and front.counts.num_failed == 1


def test_the_hop_refuses_a_continuation_of_the_client() -> None:
    server = ScriptedServer(streams(1, end=DONE))
    status, data, _ = relayed(server, body={"continuation": {}})
    assert status == 400 and b'"param":"continuation"' in data and not server.bodies
    assert relayed(server, body={"prompt": "a continuation"})[0] == 200


@pytest.mark.parametrize("name", [rb"\u0063ontinuation", rb"continu\u0061ti\u006Fn"])
def test_the_hop_sees_a_continuation_whose_name_is_escaped(name: bytes) -> None:
    server = ScriptedServer(streams(1, end=DONE))
    status, data, _ = relayed(server, body=b'{"%s": {}}' % name)
    assert status == 400 and b'"param":"continuation"' in data and not server.bodies
