"""The files and headers of the page, and the snapshots of /live."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
import uvloop

from bench.common.instant import InstantRunner, load_instant
from serve import Engine, SamplingParams
from serve.http import HttpServer, HttpSettings
from serve.http.app import ServerState
from serve.http.monitoring import live
from serve.http.monitoring.live import Snapshots
from serve.http.monitoring.page_files import DIRECTORY, read_page
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.running_server import Served, run_with_server

KEY = "page-0123456789abcdef"
SECRET = "zebra-quartz"
BODY = {"prompt": f"Once {SECRET}", "max_tokens": 400, "ignore_eos": True, "user": "client-name"}
FORBIDDEN = (
    *("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "new Function"),
    *("localStorage", "javascript:", 'setAttribute("style'),
)
Check = Callable[[HttpServer, aiohttp.ClientSession], Awaitable[None]]


def make_engine(device_s: float = 0.002, num_pages: int = 4096, **settings: Any) -> Engine:
    def make_runner(kv: Any) -> InstantRunner:
        runner = InstantRunner(kv, lambda s: 97 + len(s.token_ids) % 26)
        runner.reset(device_s)
        return runner

    load = functools.partial(load_instant, make_runner=make_runner, num_pages=num_pages)
    return Engine(load=load, served_model_name="m", **({"max_num_seqs": 8} | settings))


def with_live(check: Check, **settings: Any) -> None:
    async def main() -> None:
        async with (
            HttpServer(make_engine(), HttpSettings(port=0, **settings)) as server,
            aiohttp.ClientSession(server.url) as session,
            asyncio.timeout(20),
        ):
            await check(server, session)

    uvloop.run(main())


async def snapshots(session: aiohttp.ClientSession, count: int, **options: Any) -> list[Any]:
    frames = []
    async with session.get("/live", **options) as response:
        assert response.status == 200, await response.text()
        assert response.content_type == "text/event-stream"
        async for line in response.content:
            if line.startswith(b"data: "):
                frames.append(json.loads(line[6:]))
                if len(frames) == count:
                    return frames
    return frames


# ---- files


def test_files_are_public_and_strict() -> None:
    async def check(served: Served) -> None:
        files = read_page()
        assert set(files) >= {"/", "/page/page.css", "/page/chat.js", "/page/live.js"}
        for path, file in files.items():
            async with served.session.get(path) as response:
                assert response.status == 200
                assert await response.read() == file.body
                assert response.headers["Content-Type"] == file.content_type
                headers = response.headers
            policy = headers["Content-Security-Policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy
            assert "frame-ancestors 'none'" in policy and "http" not in policy
            assert headers["X-Frame-Options"] == "DENY"
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert headers["Cache-Control"] == "no-cache"
            cached = {"If-None-Match": f'"other", W/{headers["ETag"]}'}
            async with served.session.get(path, headers=cached) as response:
                assert response.status == 304 and await response.read() == b""
            async with served.session.get(path, headers={"If-None-Match": '"x"'}) as response:
                assert response.status == 200
            async with served.session.post(path) as response:
                assert response.status == 405

    run_with_server(FakeEngine(), check, api_keys=(f"a:{KEY}",))


@pytest.mark.parametrize(
    "path",
    ["/page/", "/page/x.js", "/page/../sse.py", "/page/%2e%2e/sse.py", "/page/index.html", "//"],
)
def test_other_files_are_not_served(path: str) -> None:
    async def check(served: Served) -> None:
        answer = await served.raw(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert answer.status == 404 and answer.error()["code"] == "unknown_url"

    run_with_server(FakeEngine(), check)


def test_files_conform_to_the_content_security_policy() -> None:
    for path in sorted(DIRECTORY.iterdir()):
        text = path.read_text(encoding="utf-8")
        for word in FORBIDDEN:
            assert word not in text, (path.name, word)
        assert not re.search(r"\son\w+=|\sstyle=", text), path.name
        assert re.findall(r"https?://[^\s\"']+", text) in ([], ["http://www.w3.org/2000/svg"])
        assert len(text.splitlines()) <= 400, path.name
    page = (DIRECTORY / "index.html").read_text(encoding="utf-8")
    assert "<script>" not in page and "<style" not in page


# ---- /live


def test_snapshots_follow_the_engine() -> None:
    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        assert (await snapshots(session, 1))[0]["running"] == 0
        body = {**BODY, "model": "m"}
        calls = [asyncio.create_task(session.post("/v1/completions", json=body)) for _ in "ab"]
        await asyncio.sleep(0.2)
        frames = await snapshots(session, 3)
        last = frames[-1]
        assert last["running"] == 2 and last["waiting"] == 0
        assert last["num_steps"] > 10 and last["per_s"]["generated"] > 20
        assert 0 < len(last["steps"]) <= live.MAX_STEPS
        assert all(ms > 0 and decode + prefill > 0 for ms, decode, prefill in last["steps"])
        assert {decode for _, decode, _ in last["steps"]} == {2}
        assert set(last["busy"]) == set(last["queued"]) == {"tokenize", "compute", "output"}
        assert 0.3 < last["busy"]["compute"] <= 1
        pages = last["pages"]
        numbers = [sequence[0] for sequence in last["sequences"]]
        assert numbers == [s[0] for s in frames[1]["sequences"]] and len(set(numbers)) == 2
        assert sum(s[1] for s in last["sequences"]) == pages["in_use"] > 0
        for _, num_pages, tokens, prompt, computed in last["sequences"]:
            assert prompt < computed <= tokens
            assert (num_pages + 1) * pages["tokens"] >= computed, (
                "the engine continues while a snapshot is taken"
            )
        text = json.dumps(frames)
        for private in (SECRET, "client-name", "req_", "Once"):
            assert private not in text
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)

    with_live(check)


def test_steps_are_traced_only_while_a_client_watches() -> None:
    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        context, view = server.app.context, server.app.context.engine.loaded.core.view
        assert view.traces.open == ()
        trace = context.engine.trace_steps(5)
        async with session.get("/live") as first, session.get("/live") as second:
            await first.content.readline()
            await second.content.readline()
            assert len(view.traces.open) == 2 and context.counters.num_watchers == 2
        while context.counters.num_watchers:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.01)
        assert view.traces.open == (trace,)
        assert len(await snapshots(session, 2)) == 2, "a later watcher gets snapshots again"

    with_live(check)


def test_the_view_needs_a_key() -> None:
    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        async with session.get("/live") as response:
            assert response.status == 401
        assert await snapshots(session, 1, headers={"Authorization": f"Bearer {KEY}"})

    with_live(check, api_keys=(f"a:{KEY}",))


def test_head_requests_of_the_view_start_no_watcher() -> None:
    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        for _ in range(2):  # both on one connection
            async with session.head("/live") as response:
                assert response.status == 200 and response.content_type == "text/event-stream"
        assert server.app.context.counters.num_watchers == 0

    with_live(check)


def test_watchers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "MAX_WATCHERS", 2)

    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        async with (
            session.get("/live"),
            session.get("/live"),
            session.get("/live") as response,
        ):
            assert response.status == 429 and response.headers["Retry-After"] == "5"
            assert (await response.json())["error"]["code"] == "too_many_watchers"
        while server.app.context.counters.num_watchers:
            await asyncio.sleep(0.01)
        assert await snapshots(session, 1)

    with_live(check)


def test_a_stalled_watcher_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PERIOD_S", 0.005)

    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        port = int(server.url.rpartition(":")[2])
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(sock, ("127.0.0.1", port))
            await loop.sock_sendall(sock, b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n")
            async with session.get("/live") as healthy:
                counters = server.app.context.counters
                while counters.num_watchers != 2:
                    assert await healthy.content.readline()
                while counters.num_watchers == 2:
                    assert await healthy.content.readline()
                assert counters.num_watchers == 1 and await healthy.content.readline()

    with_live(check, send_buffer_bytes=4096)


def test_draining_ends_the_view() -> None:
    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        watcher = asyncio.create_task(snapshots(session, 10_000))
        await asyncio.sleep(0.1)
        assert not server.app.is_computing, "a watcher does not delay the drain"
        server.app.state = ServerState.DRAINING
        assert len(await asyncio.wait_for(watcher, 2)) >= 1
        async with session.get("/live") as response:
            assert response.status == 503

    with_live(check)


@pytest.mark.timing
def test_a_snapshot_takes_less_than_two_milliseconds() -> None:
    async def main() -> tuple[float, dict[str, Any]]:
        async with make_engine(0.005, 1 << 15, max_num_seqs=200) as engine:
            params = SamplingParams(max_tokens=900, ignore_eos=True)
            streams = [engine.submit([number, 2, 3], params) for number in range(200)]
            while engine.stats().num_running < 200:
                await asyncio.sleep(0.01)
            source = Snapshots(engine)
            times = []
            for _ in range(9):
                await asyncio.sleep(0.02)
                start_s = time.perf_counter()
                frame = source.take()
                times.append(time.perf_counter() - start_s)
            source.close()
            for stream in streams:
                stream.abort()
            return min(times), frame

    took_s, frame = asyncio.run(main())
    assert took_s < 2e-3, f"{1e3 * took_s:.2f} ms"
    assert len(frame["sequences"]) == live.MAX_SEQUENCES and frame["running"] == 200


def test_a_watcher_that_leaves_counts_as_a_success() -> None:
    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        async with aiohttp.ClientSession(server.url) as visitor:
            await snapshots(visitor, 1)
        counters = server.app.context.counters
        while not counters.answers:
            await asyncio.sleep(0.01)
        assert dict(counters.answers) == {("/live", "GET", "2xx"): 1}

    with_live(check)
