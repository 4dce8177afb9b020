"""Streams through the hop survive replicas that are cut off, frozen and stopped, unchanged."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from bench.cluster.cut_proxy import CutProxy
from bench.cluster.streams import StreamCall, ask, mixed_calls
from serve.cluster.front.front import Front, FrontSettings
from serve.config import DEFAULT_MODEL, EngineConfig
from serve.engine.engine import Engine
from serve.http import HttpServer, HttpSettings

MODEL = EngineConfig(model=DEFAULT_MODEL).model_name


async def started(stack: AsyncExitStack, count: int) -> list[HttpServer]:
    servers = []
    for _ in range(count):
        engine = Engine(DEFAULT_MODEL, dtype="int8", max_model_len=768, max_num_seqs=32)
        servers.append(await stack.enter_async_context(HttpServer(engine, HttpSettings(port=0))))
    return servers


async def fronted(stack: AsyncExitStack, urls: list[str], **settings: Any) -> Front:
    front = Front(FrontSettings(tuple(urls), **settings), HttpSettings(port=0))
    return await stack.enter_async_context(front)


async def answers(url: str, calls: list[StreamCall]) -> list[Any]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        results = await asyncio.gather(*(ask(session, url, call) for call in calls))
    for result in results:
        assert not result.error, result.error
    return [result.said for result in results]


async def break_in_turn(proxies: list[CutProxy], how: str) -> None:
    """Breaks one replica after another, and heals each before the next."""
    while True:
        for proxy in proxies:
            await asyncio.sleep(0.15)
            if how == "cut":
                await proxy.cut()
            else:
                proxy.freeze()
            await asyncio.sleep(0.1 if how == "cut" else 1.6)
            await proxy.heal()
            await asyncio.sleep(0.8)


@pytest.mark.exhaustive
@pytest.mark.parametrize("how", ["cut", "freeze"])
def test_no_stream_fails_or_changes(how: str) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            servers = await started(stack, 3)
            proxies = [CutProxy(int(server.url.rpartition(":")[2])) for server in servers]
            for proxy in proxies:
                await proxy.start()
                stack.push_async_callback(proxy.stop)
            front = await fronted(stack, [proxy.url for proxy in proxies], lost_after_s=0.5)
            calls = mixed_calls(64, MODEL, 300)
            expected = await answers(servers[0].url, calls)
            breaking = asyncio.create_task(break_in_turn(proxies, how))
            try:
                for _ in range(20):
                    found = await answers(front.url, calls)
                    for call, one, other in zip(calls, found, expected, strict=True):
                        assert one == other, call
                    if sum(front.counts.num_continued.values()) >= 16:
                        break
                else:
                    raise AssertionError(f"too few streams were broken: {front.counts}")
            finally:
                breaking.cancel()
                await asyncio.gather(breaking, return_exceptions=True)
            assert front.counts.num_failed == front.num_calls == 0
            for proxy in proxies:
                await proxy.heal()
            async with asyncio.timeout(5):
                while any(server.app.num_calls for server in servers):
                    await asyncio.sleep(0.05)  # answers that no hop reads are aborted

    asyncio.run(main())


def test_a_server_that_stops_hands_its_streams_over() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            servers = await started(stack, 2)
            front = await fronted(stack, [server.url for server in servers])
            calls = mixed_calls(24, MODEL, 400)
            expected = await answers(servers[0].url, calls)
            for _ in range(10):
                asking = asyncio.create_task(answers(front.url, calls))
                while not asking.done() and max(s.app.num_calls for s in servers) < 4:
                    await asyncio.sleep(0.005)
                if not asking.done():
                    break
            busiest = max(servers, key=lambda server: server.app.num_calls)
            began_s = asyncio.get_running_loop().time()
            await busiest.drain()
            assert asyncio.get_running_loop().time() - began_s < 3.0
            assert await asking == expected
            assert front.counts.num_continued["handover"] > 0

    asyncio.run(main())


async def status_of(
    session: aiohttp.ClientSession, url: str, body: object, **options: Any
) -> tuple[int, str]:
    async with session.post(url + "/v1/chat/completions", json=body, **options) as response:
        return response.status, await response.text()


def chat(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hello!"}]} | more


def test_keys_and_refusals_are_the_servers() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            engine = Engine(DEFAULT_MODEL, dtype="int8", max_model_len=256, max_num_seqs=4)
            settings = HttpSettings(port=0, api_keys=("secret-of-sixteen",))
            server = await stack.enter_async_context(HttpServer(engine, settings))
            front = await fronted(stack, [server.url])
            session = await stack.enter_async_context(aiohttp.ClientSession())
            with_key = {"headers": {"Authorization": "Bearer secret-of-sixteen"}}
            assert (await status_of(session, front.url, chat()))[0] == 401
            assert (await status_of(session, front.url, chat(), **with_key))[0] == 200
            status, text = await status_of(session, front.url, chat(n=0), **with_key)
            assert status == 400 and '"param":"n"' in text
            for method, path, expected in (
                ("GET", "/v1/models", 200),
                ("GET", "/v1/responses/resp_none", 404),
                ("DELETE", "/v1/responses/resp_none", 404),
                ("POST", "/none", 415),  # it has no JSON
                ("GET", "/health", 200),
                ("GET", "/ready", 200),
            ):
                async with session.request(method, front.url + path, **with_key) as response:
                    assert response.status == expected, path
            assert front.counts.num_continued == {}

    asyncio.run(main())


def test_a_client_that_leaves_ends_its_answer() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            (server,) = await started(stack, 1)
            front = await fronted(stack, [server.url])
            async with aiohttp.ClientSession() as session:
                body = chat(stream=True, max_tokens=700, ignore_eos=True)
                async with session.post(front.url + "/v1/chat/completions", json=body) as response:
                    assert await response.content.readany()
            async with asyncio.timeout(5):
                while server.app.num_calls or front.num_calls:
                    await asyncio.sleep(0.02)

    asyncio.run(main())


def test_without_a_server_a_call_is_refused_in_time() -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            front = await fronted(stack, ["http://127.0.0.1:9"], wait_s=0.3)
            session = await stack.enter_async_context(aiohttp.ClientSession())
            status, text = await status_of(session, front.url, chat())
            assert status == 503 and '"code":"no_replica"' in text
            assert (await session.get(front.url + "/ready")).status == 503

    asyncio.run(main())
