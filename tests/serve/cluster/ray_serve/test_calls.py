"""Calls to a replica's server, without Ray: paths, what is refused, what the server tells."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import pytest
from aiohttp import web

from serve.cluster.ray_serve import server_replica
from serve.cluster.ray_serve.app import Ingress, build_app, call_of, path_of
from serve.cluster.ray_serve.choice import BLOCK_TOKENS, PredictedChoice, ReplicaStats
from serve.cluster.ray_serve.policy import QUEUE
from serve.cluster.ray_serve.server_replica import ServerReplica, StatusError, url_at
from serve.errors import ConfigError, RequestError

Answer = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[str]:
    """Yields the address of a server that gives this answer to all calls."""
    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


class Process:
    """Stands for the process of a server that runs elsewhere."""

    def __init__(self, url: str, spec: Any) -> None:
        self.url, self.spec = url, spec

    def status(self) -> int | None:
        return None

    def take_lines(self) -> list[str]:
        return []

    def send_signal(self, number: int) -> None:
        self.status = lambda: 0  # type: ignore[method-assign]

    def kill(self) -> None:
        pass


@asynccontextmanager
async def replica_of(url: str, **settings: Any) -> AsyncIterator[ServerReplica]:
    """Yields a replica whose server is at an address."""
    with mock.patch.object(server_replica, "RankProcess", lambda spec: Process(url, spec)):
        replica = ServerReplica(settings)
    try:
        yield replica
    finally:
        await replica._client().close()


async def call(replica: ServerReplica, path: str) -> tuple[int, bytes]:
    answer = replica.call(call_of("GET", path, [("Authorization", "Bearer secret")], b""))
    status, _ = await anext(answer)
    return status, b"".join([content async for content in answer])


async def told(request: web.BaseRequest) -> web.Response:
    return web.Response(text=request.raw_path)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/org%2Fname?x=%26a&y=1+2%2B",
        "/a/../b",
        "/a/%2e%2e/./b//c",
        "/x%0d%0aHost:%20elsewhere",
        "/v1/models/na%C3%AFve%3F",
        "/@127.0.0.1:1/x",
        "/?url=//127.0.0.1:1/x",
    ],
)
def test_the_server_gets_the_path_as_the_client_has_sent_it(path: str) -> None:
    raw, _, query = path.encode().partition(b"?")
    scope = {"raw_path": raw, "path": "/not this", "query_string": query}

    async def run() -> None:
        async with answering(told) as url, replica_of(url) as replica:
            assert await call(replica, path_of(scope)) == (200, path.encode())

    asyncio.run(run())


def test_a_path_without_escapes_gets_them() -> None:
    assert path_of({"path": "/a b/100%?", "query_string": b""}) == "/a%20b/100%25%3F"
    scope = {"raw_path": "/ä b".encode(), "path": "", "query_string": b"c=\r\n"}
    assert path_of(scope) == "/%C3%A4%20b?c=%0D%0A"


def test_no_path_leads_to_another_host() -> None:
    reached = []

    async def other(request: web.BaseRequest) -> web.Response:
        reached.append(request.headers.get("Authorization"))
        return web.Response()

    async def run() -> None:
        async with (
            answering(other) as elsewhere,
            answering(told) as url,
            replica_of(url) as replica,
        ):
            address = elsewhere.removeprefix("http:")
            for path in (f"{address}/x", f"/{address}", elsewhere, "*", "", "x", address[2:]):
                for attempt in (
                    lambda path=path: path_of({"raw_path": path.encode(), "path": path}),
                    lambda path=path: url_at(url, path),
                ):
                    with pytest.raises(RequestError, match="begin with exactly one /"):
                        attempt()
                with pytest.raises(RequestError):
                    await call(replica, path)
            assert not reached

    asyncio.run(run())


def test_an_address_is_joined_as_text() -> None:
    assert str(url_at("http://127.0.0.1:8000", "/a/../b?c")) == "http://127.0.0.1:8000/a/../b?c"


def test_the_ingress_refuses_what_is_no_path() -> None:
    pytest.importorskip("starlette")
    from starlette.requests import Request

    scope = {"type": "http", "method": "GET", "headers": [], "query_string": b""}
    scope |= {"path": "//127.0.0.1:1/x", "raw_path": b"//127.0.0.1:1/x"}
    answer = asyncio.run(Ingress(None)(Request(scope)))
    assert answer.status_code == 400
    assert json.loads(answer.body)["error"]["code"] == "invalid_path"


# -- what a server tells

LOAD = {"predicted_queue_seconds": 0.5, "predicted_ttft_seconds": 2.5}
PULLS = "mergestep:kv_peer_pull_seconds_total 4.0\nmergestep:kv_peer_pulled_pages_total 100.0\n"
PULLS += 'vllm:cache_config_info{block_size="16"} 1.0\n'


class Telling:
    """A server's answers: the statuses of its load and metrics, and the tokens of its context."""

    def __init__(self) -> None:
        self.load = self.metrics = 200
        self.context = 4096
        self.asked: list[int] = []

    async def __call__(self, request: web.BaseRequest) -> web.Response:
        if request.path == "/metrics":
            return web.Response(status=self.metrics, text=PULLS)
        self.asked.append((await request.json())["prompt_tokens"])
        status = 400 if self.asked[-1] > self.context else self.load
        return web.json_response(LOAD, status=status)


def test_a_server_that_tells_no_load_is_avoided() -> None:
    server = Telling()

    async def run() -> None:
        async with answering(server) as url, replica_of(url) as replica:
            first = ReplicaStats.from_json(await replica.record_routing_stats())
            assert first.queue_s == 0.5
            assert await replica.record_autoscaling_stats() == {QUEUE: 0.5}
            for status in (400, 429, 500, 503):
                server.load = status
                stats = ReplicaStats.from_json(await replica.record_routing_stats())
                assert stats.number > first.number
                busy = {"refuses": stats, "busy": ReplicaStats(1, 600.0, 0.1)}
                assert PredictedChoice().rank(busy, [])[0] == "busy", status
                if status == 429:
                    found = await replica.record_autoscaling_stats()
                    assert found[QUEUE] > 600.0, "another replica would help"
                else:
                    with pytest.raises(StatusError, match=f"/internal/load: {status}"):
                        await replica.record_autoscaling_stats()
            server.load = 200
            stats = ReplicaStats.from_json(await replica.record_routing_stats())
            assert stats.queue_s == 0.5 and stats.block_s == first.block_s
        async with replica_of(url) as replica:
            stats = ReplicaStats.from_json(await replica.record_routing_stats())
            assert stats.queue_s > 600.0, "it cannot be reached"

    asyncio.run(run())


def test_a_short_context_is_asked_for_fewer_tokens() -> None:
    server = Telling()
    server.context = 200

    async def run() -> None:
        async with answering(server) as url, replica_of(url) as replica:
            for _ in range(2):
                stats = ReplicaStats.from_json(await replica.record_routing_stats())
                assert stats.queue_s == 0.5
                assert stats.block_s == pytest.approx(2.0 / 128 * BLOCK_TOKENS)
            assert server.asked == [512, 256, 128, 128]

    asyncio.run(run())


def test_a_server_without_metrics_tells_its_wait() -> None:
    server = Telling()

    async def run() -> None:
        async with answering(server) as url, replica_of(url) as replica:
            first = ReplicaStats.from_json(await replica.record_routing_stats())
            server.metrics = 404
            stats = ReplicaStats.from_json(await replica.record_routing_stats())
            assert stats.queue_s == 0.5 and stats.pull_s == first.pull_s is not None

    asyncio.run(run())


# -- keys of the environment


@pytest.mark.parametrize(
    "name", ["MERGESTEP_API_KEYS", "MERGESTEP_API_KEY", "MERGESTEP_API_KEY_FILE"]
)
def test_keys_of_the_environment_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "hidden")
    for begin in (build_app, ServerReplica):
        with pytest.raises(ConfigError, match=f"^{name} of the environment .*api_key_file") as told:
            begin({"model": "default"})
        assert "hidden" not in str(told.value)


def test_a_file_of_keys_makes_one_for_the_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MERGESTEP_API_KEY_FILE", "elsewhere")
    monkeypatch.setenv("MERGESTEP_API_KEY", "")
    sent: list[str | None] = []

    async def answer(request: web.BaseRequest) -> web.Response:
        sent.append(request.headers.get("Authorization"))
        return web.Response()

    async def run() -> None:
        async with answering(answer) as url, replica_of(url, api_key_file="keys") as replica:
            await replica.check_health()
            spec = replica._process.spec  # type: ignore[attr-defined]
            name, key = spec.secrets["MERGESTEP_API_KEYS"].split(":")
            assert 'api_key_file = "keys"' in spec.settings and name == "mergestep-ray"
            assert sent == [f"Bearer {key}"]

    asyncio.run(run())
