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
                found = await answers(front.url, calls)
            finally:
                breaking.cancel()
                await asyncio.gather(breaking, return_exceptions=True)
            for call, one, other in zip(calls, found, expected, strict=True):
                assert one == other, call
            assert sum(front.counts.num_continued.values()) >= 8, front.counts
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
            asking = asyncio.create_task(answers(front.url, calls))
            await asyncio.sleep(0.5)
            began_s = asyncio.get_running_loop().time()
            await servers[0].drain()
            assert asyncio.get_running_loop().time() - began_s < 1.0
            assert await asking == expected
            assert front.counts.num_continued["handover"] > 0

    asyncio.run(main())
