"""/sleep gives the model's memory back, and /wake_up serves the same answers again."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from serve.engine.engine import Engine
from serve.errors import ModelLoadError
from serve.http import HttpServer, HttpSettings
from serve.models.decoder import Decoder
from serve.models.packed_cache.cache import PackedCache
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.running_server import Served, run_with_server

CHAT = "/v1/chat/completions"
NAME = "mergestep-default"
Check = Callable[[HttpServer, aiohttp.ClientSession], Awaitable[None]]


def run(check: Check, *, is_enabled: bool = True, **engine_settings: Any) -> None:
    async def live() -> None:
        settings = HttpSettings(port=0, enable_sleep_mode=is_enabled, access_log=False)
        engine = Engine(kv_cache_bytes=16 << 20, **engine_settings)
        server = HttpServer(engine, settings)
        async with server, aiohttp.ClientSession(server.url) as session, asyncio.timeout(60):
            await check(server, session)

    uvloop.run(live())


async def post(session: aiohttp.ClientSession, path: str, body: Any = None) -> tuple[int, Any]:
    async with session.post(path, json=body) as answer:
        return answer.status, await answer.json() if await answer.read() else None


async def get(session: aiohttp.ClientSession, path: str) -> tuple[int, Any]:
    async with session.get(path) as answer:
        return answer.status, await answer.json()


def chat(text: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": NAME, "messages": messages, "max_tokens": 12, "temperature": 0, **more}


def decoders() -> list[Decoder]:
    gc.unfreeze()  # frozen objects are not listed
    return [each for each in gc.get_objects() if type(each) is Decoder]


def parts_of(engine: Engine, others: list[weakref.ref[Decoder]]) -> list[weakref.ref[Any]]:
    """Returns the core, the K/V and the models of an engine. others: models of other tests."""
    loaded, known = engine.loaded, {id(other()) for other in others}
    own = [each for each in decoders() if id(each) not in known]
    assert own
    return [weakref.ref(part) for part in (loaded.core, loaded.kv, *own)]


def holders(part: weakref.ref[Any]) -> list[str]:
    return [str(type(each)) for each in gc.get_referrers(part())]


def code(answer: tuple[int, Any]) -> tuple[int, str]:
    return answer[0], answer[1]["error"]["code"]


def test_asleep_the_server_lives_without_a_model() -> None:
    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        before = await post(session, CHAT, chat("Tell me a joke"))
        stored = await post(session, "/v1/responses", {"model": NAME, "input": "hi"})
        for level in (1, 2):
            parts = parts_of(server.app.context.engine, others)
            assert (await post(session, f"/sleep?level={level}"))[0] == 200
            assert await get(session, "/is_sleeping") == (200, {"is_sleeping": True})
            for _ in range(100):  # a thread that has just ended may still have them in its frame
                left = [part for part in parts if part() is not None]
                if not left:
                    break
                await asyncio.sleep(0.05)
            assert not left, [(part, holders(part)) for part in left]
            assert (await post(session, "/sleep"))[0] == 200, "again does nothing"
            assert (await get(session, "/health"))[0] == 200
            for path in ("/ready", "/v1/models", "/metrics", "/live"):
                assert code(await get(session, path)) == (503, "model_asleep")
            for path in (CHAT, "/v1/completions", "/v1/responses", "/tokenize"):
                assert code(await post(session, path, chat("hi"))) == (503, "model_asleep")
            assert (await post(session, "/wake_up"))[0] == 200
            assert await get(session, "/is_sleeping") == (200, {"is_sleeping": False})
            after = await post(session, CHAT, chat("Tell me a joke"))
            assert after[0] == 200 and after[1]["choices"] == before[1]["choices"]
        assert (await get(session, f"/v1/responses/{stored[1]['id']}"))[0] == 200

    others = [weakref.ref(each) for each in decoders()]
    run(check)
    gc.unfreeze()


@pytest.mark.exhaustive
def test_prefixes_on_disk_are_found_after_the_sleep(tmp_path: Path) -> None:
    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        text = "one two three four five six seven eight nine ten. " * 12
        await post(session, CHAT, chat(text))
        await post(session, "/sleep")
        await post(session, "/wake_up")
        _, answer = await post(session, CHAT, chat(text))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 32

    run(check, kv_cache_dir=str(tmp_path / "kv"))
    gc.unfreeze()


def test_requests_that_run_are_finished_first() -> None:
    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        body = chat("Tell me a long story", max_tokens=400, ignore_eos=True)
        running = asyncio.create_task(post(session, CHAT, body))
        while not server.app.is_computing:
            await asyncio.sleep(0.001)
        sleeping = [asyncio.create_task(post(session, "/sleep")) for _ in range(2)]
        status, answer = await running
        assert (status, answer["usage"]["completion_tokens"]) == (200, 400)
        assert [(await each)[0] for each in sleeping] == [200, 200]
        waking = await asyncio.gather(*(post(session, "/wake_up") for _ in range(3)))
        assert [status for status, _ in waking] == [200] * 3
        assert (await post(session, CHAT, chat("hi")))[0] == 200

    run(check)
    gc.unfreeze()


@pytest.mark.exhaustive
def test_packed_weights_are_kept_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that still writes them would hold them in memory, and a stop would lose them."""
    kept = []

    def slow(*arguments: object) -> None:
        time.sleep(0.3)
        kept.append(len(arguments))

    monkeypatch.setattr(PackedCache, "_keep", slow)

    async def check(server: HttpServer, session: aiohttp.ClientSession) -> None:
        assert (await post(session, "/sleep"))[0] == 200
        assert kept

    run(check)
    gc.unfreeze()


class SleepingEngine(FakeEngine):
    """A fake engine whose second start fails."""

    num_starts = 0

    async def start(self) -> None:
        self.num_starts += 1
        if self.num_starts == 2:
            raise ModelLoadError("a file is gone")
        await super().start()

    async def unload(self, *, drain_s: float = 0.0) -> None:
        await asyncio.sleep(0)


@pytest.mark.exhaustive
def test_a_wake_that_fails_can_be_tried_again() -> None:
    async def check(served: Served) -> None:
        session = served.session
        await post(session, "/sleep")
        assert (await post(session, "/wake_up"))[0] == 500
        assert code(await get(session, "/ready")) == (503, "model_asleep")
        assert (await post(session, "/wake_up"))[0] == 200
        assert (await get(session, "/ready"))[0] == 200
        for wrong in ("/sleep?level=0", "/sleep?level=x", "/wake_up?tags=lora"):
            assert code(await post(session, wrong)) == (400, "invalid_value")

    run_with_server(SleepingEngine(), check, enable_sleep_mode=True)
    gc.unfreeze()


@pytest.mark.parametrize("path", ["/sleep", "/wake_up", "/is_sleeping"])
def test_without_the_setting_there_is_no_sleep(path: str) -> None:
    async def check(served: Served) -> None:
        assert code(await post(served.session, path)) == (404, "unknown_url")

    run_with_server(FakeEngine(), check)
