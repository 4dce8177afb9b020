"""Streams of /v1/responses and /v1/messages with clients that leave or stall, and failures."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from tests.support.http.fake_engine import FakeEngine
from tests.support.http.running_server import Served, run_with_server

USER = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/responses": {"model": "fake", "input": "hi"},
    "/v1/messages": {"model": "fake", "max_tokens": 2_000_000, "messages": USER},
}
both = pytest.mark.parametrize("path", BODIES)


def request_bytes(path: str, **fields: Any) -> bytes:
    body = json.dumps({**BODIES[path], **fields}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body


async def events_of(served: Served, path: str) -> list[tuple[str, dict[str, Any]]]:
    """Returns the name and data of each event until the server ends the stream."""
    async with served.session.post(path, json={**BODIES[path], "stream": True}) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        text = (await response.read()).decode()
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    for name, value in events:
        assert value["type"] == name
    return events


@pytest.mark.covering(1)
@both
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request(path: str, stream: bool) -> None:
    async def check(served: Served) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request_bytes(path, stream=stream))
        await served.until(lambda: len(served.engine.running) == 1)
        writer.close()
        await served.until(lambda: not served.engine.running)
        assert len(served.engine.aborted) == 1

    run_with_server(FakeEngine(repeat=1000, step_s=0.01), check)


@both
def test_the_request_of_a_stalled_reader_is_aborted(path: str) -> None:
    async def check(served: Served) -> None:
        loop = asyncio.get_running_loop()
        stalled = socket.socket()
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.setblocking(False)
        await loop.sock_connect(stalled, ("127.0.0.1", served.port))
        await loop.sock_sendall(stalled, request_bytes(path, stream=True))
        await served.until(lambda: len(served.engine.running) == 1)
        await served.until(lambda: not served.engine.running, timeout_s=10)
        assert len(served.engine.aborted) == 1
        stalled.close()

    run_with_server(FakeEngine(repeat=100_000), check, write_timeout_s=0.3)


def test_an_error_is_the_last_event_of_a_message() -> None:
    async def check(served: Served) -> None:
        events = await events_of(served, "/v1/messages")
        names = [name for name, _ in events]
        assert names == [
            "message_start",
            "ping",
            "content_block_start",
            *["content_block_delta"] * 3,
            "error",
        ]
        last_event = events[-1][1]
        assert last_event["error"]["type"] == "api_error"
        assert last_event["request_id"].startswith("req_")
        assert "bad step" not in last_event["error"]["message"]

    run_with_server(FakeEngine(fail_at=3), check)


def test_an_error_is_the_last_event_of_a_response() -> None:
    async def check(served: Served) -> None:
        events = await events_of(served, "/v1/responses")
        assert [value["sequence_number"] for _, value in events[:-2]] == list(range(7))
        (failed, response), (last, error) = events[-2:]
        assert (failed, last) == ("response.failed", "error")
        assert response["response"]["status"] == "failed"
        assert response["response"]["output"][0]["status"] == "incomplete"
        assert response["response"]["output"][0]["content"][0]["text"] == "Hel"
        assert error["error"]["code"] == error["code"] == "internal_error"
        assert response["sequence_number"] < error["sequence_number"]
        assert "bad step" not in json.dumps(events)

    run_with_server(FakeEngine(fail_at=3), check)


@both
def test_an_error_before_the_first_token_has_a_status(path: str) -> None:
    async def check(served: Served) -> None:
        status, body = await served.post(path, {**BODIES[path], "stream": True})
        assert status == 500
        assert "bad step" not in json.dumps(body)

    run_with_server(FakeEngine(fail_at=0), check)


@both
def test_a_stream_ends_with_an_error_when_the_server_stops(path: str) -> None:
    async def check(served: Served) -> None:
        task = asyncio.create_task(events_of(served, path))
        await served.until(lambda: len(served.engine.running) == 1)
        await asyncio.sleep(0.05)
        await served.engine.shutdown()
        events = await task
        assert events[-1][0] == "error"
        assert events[-1][1]["error"]["message"] == "the server is shutting down"

    run_with_server(FakeEngine(repeat=1000, step_s=0.005), check)


@both
def test_a_server_that_loads_or_stops_is_not_ready(path: str) -> None:
    async def check(served: Served) -> None:
        await served.server.drain()
        for endpoint in (path, path + ("/count_tokens" if "messages" in path else "/input_tokens")):
            async with served.session.post(endpoint, json=BODIES[path]) as response:
                assert response.status == 503
                assert response.headers["Retry-After"] == "5"

    run_with_server(FakeEngine(), check)
