"""Several models in processes of their own behind `serve run A B`."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from serve.config import EngineConfig
from serve.server_url import server_root
from tests.support.http.serve_process import serve_run

pytestmark = pytest.mark.process

CHAT = "/v1/chat/completions"
Check = Callable[[aiohttp.ClientSession, int], Awaitable[None]]


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A directory with three models: the embedded one by other names."""
    for name in "abc":
        (tmp_path / name).symlink_to(EngineConfig().model_path)
    return tmp_path


@pytest.fixture(autouse=True)
def no_packed_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MERGESTEP_PACKED_CACHE", "off")


def run(check: Check, models: Path, *options: str) -> None:
    given = [str(models), "--kv-cache-bytes", "16MiB", "--memory-budget", "600MiB", *options]
    with serve_run(*given) as (process, url):

        async def live() -> None:
            async with aiohttp.ClientSession(server_root(url)) as session, asyncio.timeout(90):
                await until_up(session)
                await check(session, process.pid)

        asyncio.run(live())
        children = children_of(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(15) == 0
        wait_until_gone(children)


async def until_up(session: aiohttp.ClientSession) -> None:
    while True:
        try:
            async with session.get("/ready") as answer:
                assert answer.status == 200
                return
        except aiohttp.ClientConnectionError:
            await asyncio.sleep(0.05)


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_until_gone(pids: list[int]) -> None:
    due_s = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < due_s, "a model's process has outlived the front"
        time.sleep(0.05)


async def chat(session: aiohttp.ClientSession, model: str, **more: Any) -> dict[str, Any]:
    body = {"model": model, "messages": [{"role": "user", "content": "Hello!"}]}
    async with session.post(CHAT, json=body | {"max_tokens": 12, "temperature": 0} | more) as got:
        answer: dict[str, Any] = await got.json()
        return answer


async def states(session: aiohttp.ClientSession) -> dict[str, str]:
    async with session.get("/v1/models") as answer:
        return {each["id"]: each["state"] for each in (await answer.json())["data"]}


def test_models_take_turns_in_memory_for_one(models: Path) -> None:
    async def check(session: aiohttp.ClientSession, pid: int) -> None:
        assert await states(session) == dict.fromkeys("abc", "stopped")
        answers = await asyncio.gather(*(chat(session, name) for name in "abcab"))
        texts = {each["choices"][0]["message"]["content"] for each in answers}
        assert len(texts) == 1, "all are the same model"
        assert sorted(each["model"] for each in answers) == sorted("abcab")
        assert list((await states(session)).values()).count("ready") == 1

    run(check, models, "--memory-budget", "300MiB")


def test_a_killed_model_is_told_and_started_again(models: Path) -> None:
    async def check(session: aiohttp.ClientSession, pid: int) -> None:
        await chat(session, "a")
        (child,) = children_of(pid)
        body = {"model": "a", "prompt": "Once", "max_tokens": 800, "stream": True}
        body["ignore_eos"] = True
        async with session.post("/v1/completions", json=body) as answer:
            await answer.content.readuntil(b"\n\n")
            os.kill(child, signal.SIGKILL)
            rest = await answer.content.read()
        last = json.loads(rest.rpartition(b"data: ")[2])
        assert last["error"]["code"] == "model_failed"
        assert "model a" in last["error"]["message"]
        assert "choices" in await chat(session, "a")
        assert children_of(pid) != [child]

    run(check, models)


def test_idle_models_sleep_and_wake(models: Path) -> None:
    async def check(session: aiohttp.ClientSession, pid: int) -> None:
        before = await chat(session, "b")
        children = children_of(pid)
        while (await states(session))["b"] != "asleep":
            await asyncio.sleep(0.05)
        began_s = time.monotonic()
        after = await chat(session, "b")
        assert after["choices"] == before["choices"] and children_of(pid) == children
        assert time.monotonic() - began_s < 1.5, "a wake is no start"

    run(check, models, "--idle-seconds", "0.3")


def test_children_end_with_a_killed_front(models: Path) -> None:
    with serve_run(str(models), "--kv-cache-bytes", "16MiB") as (process, url):

        async def live() -> None:
            async with aiohttp.ClientSession(server_root(url)) as session:
                await until_up(session)
                await chat(session, "a")

        asyncio.run(live())
        children = children_of(process.pid)
        assert len(children) == 1
        process.kill()
        process.wait()
        wait_until_gone(children)
