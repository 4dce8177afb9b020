"""`serve front` before two servers that are K/V peers: prompts at one, answers at the other."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from bench.cluster.cut_proxy import CutProxy
from bench.cluster.streams import StreamCall, ask
from serve.cluster.front import parting
from serve.cluster.front.apart import Decision
from serve.cluster.front.front import Front, FrontSettings
from serve.engine.engine import Engine
from serve.http import HttpServer, HttpSettings
from serve.machine import free_port
from tests.support.engine.checkpoints import checkpoint
from tests.support.memory.peer_settings import SERVED

COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"


class Pair:
    """Two servers that pull from one another, the hop before them, and a client."""

    def __init__(
        self,
        engines: list[Engine],
        proxies: list[CutProxy],
        front: Front,
        session: aiohttp.ClientSession,
    ) -> None:
        self.engines = engines
        self.proxies = proxies
        self.urls = [proxy.url for proxy in proxies]
        self.front = front
        self.session = session

    @property
    def pulled(self) -> list[int]:
        return [_pulled(engine) for engine in self.engines]

    async def said(self, url: str, call: StreamCall) -> Any:
        result = await ask(self.session, url, call)
        assert not result.error, result.error
        return result.said


def _pulled(engine: Engine) -> int:
    peers = engine.stats().kv_peers
    assert peers is not None
    return sum(pull.pulled for pull in peers.pulls.values())


async def started(stack: AsyncExitStack, key_file: Path) -> Pair:
    ports = [free_port(), free_port()]
    engines, proxies = [], []
    for port in ports:
        engine = Engine(
            str(checkpoint("llama")),
            **SERVED,
            kv_listen=f"tcp://127.0.0.1:{port}",
            kv_peers=[f"tcp://127.0.0.1:{port}" for port in ports],
            kv_peer_key_file=key_file,
        )
        server = await stack.enter_async_context(HttpServer(engine, HttpSettings(port=0)))
        engines.append(engine)
        proxies.append(CutProxy(int(server.url.rpartition(":")[2])))
        await proxies[-1].start()
        stack.push_async_callback(proxies[-1].stop)
    async with asyncio.timeout(10.0):
        while not all(any(p.is_connected for p in _pulls(engine)) for engine in engines):
            await asyncio.sleep(0.01)
    urls = tuple(proxy.url for proxy in proxies)
    front = Front(FrontSettings(urls, lost_after_s=1.0), HttpSettings(port=0))
    await stack.enter_async_context(front)
    session = await stack.enter_async_context(aiohttp.ClientSession())
    return Pair(engines, proxies, front, session)


def _pulls(engine: Engine) -> Any:
    peers = engine.stats().kv_peers
    assert peers is not None
    return peers.pulls.values()


def run(main: Callable[[AsyncExitStack], Awaitable[None]]) -> None:
    async def entered() -> None:
        async with AsyncExitStack() as stack:
            await main(stack)

    uvloop.run(entered())


@pytest.fixture
def always_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts every call that can be parted: the prompt at the first server, the answer at the
    other one."""
    monkeypatch.setattr(parting, "decide", lambda *_: Decision(0, 1, 2.0, 1.0, ""))
    monkeypatch.setattr(parting, "next_server", lambda candidates, at, *_: 1 - at)


def calls(first: int, *, stream: bool) -> list[StreamCall]:
    """Calls with prompts of their own, from which every server makes the same answer."""
    found = []
    for number in range(first, first + 4):
        prompt = [(5 * i + 7 * number) % 90 + 3 for i in range(200)]
        common = {"model": "m", "max_tokens": 16, "seed": number, "ignore_eos": True}
        body = common | {"prompt": prompt, "stream": stream}
        words = " ".join("abcdefg"[(i * number) % 7] for i in range(60))
        chat = common | {"messages": [{"role": "user", "content": words}], "stream": stream}
        found.append(StreamCall(COMPLETION, body | {"temperature": 0}))
        found.append(StreamCall(COMPLETION, body | {"n": 2, "temperature": 1.0, "logprobs": 2}))
        found.append(StreamCall(CHAT, chat | {"logprobs": True}))
    return found


@pytest.mark.parametrize("stream", [True, False], ids=["streams", "whole"])
def test_answers_are_those_of_one_server(key_file: Path, always_apart: None, stream: bool) -> None:
    async def main(stack: AsyncExitStack) -> None:
        pair = await started(stack, key_file)
        asked = calls(1, stream=stream)
        for call in asked:
            found = await pair.said(pair.front.url, call)
            # the first server has the prompt's K/V, and has pulled nothing
            assert found == await pair.said(pair.urls[0], call), call
        pulled = pair.pulled
        assert pulled[0] == 0 and pulled[1] >= 3 * len({str(c.body.get("prompt")) for c in asked})
        assert pair.front.parting.counts.num_apart == len(asked)
        if stream:
            # a hand-over is not counted where the second server's first token is read first
            assert 0 < pair.front.parting.counts.num_moved <= len(asked)
            assert 0.0 < pair.front.parting.counts.handover_s < 60.0
        assert not pair.front.counts.num_continued and not pair.front.counts.num_failed
        assert all(replica.num_streams == 0 for replica in pair.front.replicas.replicas)
        health = await (await pair.session.get(pair.front.url + "/health")).json()
        assert health["prefill_apart"]["apart"] == len(asked)
        assert "apart from its answer" in health["prefill_apart"]["last"]
        metrics = await (await pair.session.get(pair.front.url + "/metrics")).text()
        assert f"mergestep:front_apart_total {len(asked)}\n" in metrics

    run(main)


@pytest.mark.parametrize("stream", [True, False], ids=["streams", "whole"])
def test_the_server_with_the_prompt_dies(key_file: Path, always_apart: None, stream: bool) -> None:
    """The call goes on as one that nothing has parted."""

    async def main(stack: AsyncExitStack) -> None:
        pair = await started(stack, key_file)
        call = calls(5, stream=stream)[0]
        expected = await pair.said(pair.urls[1], call)
        await pair.proxies[0].cut()
        assert await pair.said(pair.front.url, call) == expected
        assert pair.front.counts.num_failed == 0

    run(main)


def test_what_cannot_be_parted_goes_to_one_server(key_file: Path) -> None:
    async def main(stack: AsyncExitStack) -> None:
        pair = await started(stack, key_file)
        for call in calls(9, stream=True)[:1]:
            short = StreamCall(call.path, call.body | {"prompt": call.body["prompt"][:20]})
            several = StreamCall(call.path, call.body | {"prompt": ["a b", "c d"]})
            echo = StreamCall(call.path, call.body | {"echo": True})
            for one in (short, several, echo):
                await pair.said(pair.front.url, one)
        counts = pair.front.parting.counts
        assert counts.num_apart == 0 and counts.num_together == {"short": 1, "unread": 2}
        assert pair.pulled == [0, 0]
        load, other = (replica.load for replica in pair.front.replicas.replicas)
        assert load is not None and other is not None
        assert load.listens and load.prompts and not math.isnan(load.prompt_s)
        assert load.pulls_from == {other.engine} and other.pulls_from == {load.engine}

    run(main)


def test_what_everybody_may_read_depends_on_no_key(key_file: Path) -> None:
    """Whoever guesses the key of the peers must not be able to test guesses by the header."""

    async def main(stack: AsyncExitStack) -> None:
        pair = await started(stack, key_file)
        names = set()
        for engine in pair.engines:
            report = engine.load_report()
            assert report is not None
            peers = engine.stats().kv_peers
            assert peers is not None and report["engine"] == peers.engine_id
            assert report["prompt_s"] == round(report["prompt_s"], 1)
            assert [n for n, value in report.items() if isinstance(value, str)] == ["engine"]
            names.add(report["engine"])
            names.update(report["pulls_from"])
        assert len(names) == 2  # each names itself and the other one

    run(main)
