"""Streams on three servers behind `serve front` while each is killed, stopped, cut off and updated.

    python -m bench.cluster.failover --streams 1000

All streams are answered once by one server alone; then by the three, which break in turn, and each
answer must say the same. Prints the answers that failed and those that changed, how often streams
went on elsewhere, and the longest time in which a client got nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import statistics
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import aiohttp

from bench.cluster.cut_proxy import CutProxy
from bench.cluster.servers import Server, start_front, until_ready
from bench.cluster.streams import StreamCall, StreamResult, ask, mixed_calls
from serve.config import DEFAULT_MODEL, EngineConfig
from serve.machine import free_port

WAYS = ("kill", "update", "stop", "cut")
FROZEN_S = 4.0
APART_S = 1.0


@dataclass
class Breaks:
    """What was done to the servers. update_s: seconds from SIGTERM to the end."""

    counts: Counter[str] = field(default_factory=Counter)
    update_s: list[float] = field(default_factory=list)

    async def break_one(self, server: Server, way: str) -> None:
        self.counts[way] += 1
        if way == "kill":
            await server.end(signal.SIGKILL)
            await server.start()
        elif way == "update":
            self.update_s.append(await server.end(signal.SIGTERM))
            await server.start()
        elif way == "stop":
            assert server.process is not None
            server.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(FROZEN_S)
            server.process.send_signal(signal.SIGCONT)
        else:
            assert server.proxy is not None
            server.proxy.freeze()
            await asyncio.sleep(FROZEN_S)
            await server.proxy.heal()

    async def run(self, servers: list[Server]) -> None:
        """Breaks one server after another, each once it is ready again."""
        number = 0
        while True:
            server = servers[number % len(servers)]
            way = WAYS[number % len(WAYS)]
            await self.break_one(server, way)
            await until_ready(server.url)
            await asyncio.sleep(APART_S)
            number += 1


async def _ask_all(url: str, calls: list[StreamCall], at_once: int) -> list[StreamResult]:
    room = asyncio.Semaphore(at_once)
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def one(call: StreamCall) -> StreamResult:
            async with room:
                return await ask(session, url, call)

        return await asyncio.gather(*map(one, calls))


async def measure(count: int, num_tokens: int, at_once: int, options: tuple[str, ...]) -> int:
    """Prints the table; returns the exit status."""
    model = EngineConfig(model=DEFAULT_MODEL).model_name
    calls = mixed_calls(count, model, num_tokens)
    async with AsyncExitStack() as stack:
        servers = []
        for _ in range(3):
            port = free_port()
            proxy = CutProxy(port)
            await proxy.start()
            stack.push_async_callback(proxy.stop)
            server = Server(port, options, proxy)
            await server.start()
            stack.callback(server.kill)
            servers.append(server)
        for server in servers:
            await until_ready(server.url)
        urls = [server.url for server in servers]
        front, url = await start_front(urls, "--lost-after-s", "2")
        stack.callback(front.kill)
        began_s = time.perf_counter()
        expected = await _ask_all(servers[0].url, calls, at_once)
        alone_s = time.perf_counter() - began_s
        breaks = Breaks()
        breaking = asyncio.create_task(breaks.run(servers))
        began_s = time.perf_counter()
        found = await _ask_all(url, calls, at_once)
        seconds = time.perf_counter() - began_s
        breaking.cancel()
        await asyncio.gather(breaking, return_exceptions=True)
        async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as response:
            metrics = await response.text()
    return _report(expected, found, breaks, metrics, alone_s, seconds)


def _report(
    expected: list[StreamResult],
    found: list[StreamResult],
    breaks: Breaks,
    metrics: str,
    alone_s: float,
    seconds: float,
) -> int:
    assert not any(result.error for result in expected), [r.error for r in expected if r.error][:3]
    failed = [result for result in found if result.error]
    changed = sum(
        not one.error and one.said != other.said for one, other in zip(found, expected, strict=True)
    )
    gaps = sorted(result.gap_s for result in found)
    firsts = [r.first_s for r in found if r.num_parts > 2]
    print(
        f"{len(found)} answers; one server alone {alone_s:.1f} s, three that break {seconds:.1f} s"
    )
    print("breaks: " + ", ".join(f"{way} {number}" for way, number in breaks.counts.items()))
    print(f"failed: {len(failed)}   changed: {changed}")
    for result in failed[:5]:
        print(f"    {result.error}")
    for reason, number in re.findall(r'continued_total{reason="(\w+)"} (\d+)', metrics):
        print(f"went on elsewhere, {reason}: {number}")
    print(
        f"longest time without a part: {gaps[-1]:.2f} s (p99 {gaps[int(0.99 * len(gaps))]:.2f} s);"
        f" first part of a stream: at most {max(firsts):.2f} s"
    )
    if breaks.update_s:
        middle, most = statistics.median(breaks.update_s), max(breaks.update_s)
        print(f"from SIGTERM to the end of the process: {middle:.2f} s, at most {most:.2f} s")
    return 1 if failed or changed else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=64)
    given = parser.parse_args()
    options = ("--dtype", "int8", "--compute-threads", "1", "--max-model-len", "1024")
    sys.exit(asyncio.run(measure(given.streams, given.tokens, given.at_once, options)))


if __name__ == "__main__":
    main()
