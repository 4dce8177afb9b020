"""SIGTERM to `serve run` under 64 streams loses no stream, and new requests are refused."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import time

import aiohttp
import pytest

from tests.support.http.serve_process import serve_run

pytestmark = pytest.mark.process

NUM_STREAMS = 64
NUM_TOKENS = 60


async def ready(session: aiohttp.ClientSession) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(aiohttp.ClientConnectionError):
            async with session.get("/ready") as response:
                if response.status == 200:
                    return
        await asyncio.sleep(0.05)
    raise AssertionError("the server does not get ready")


async def model_of(session: aiohttp.ClientSession) -> str:
    async with session.get("/v1/models") as response:
        name: str = (await response.json())["data"][0]["id"]
        return name


class Stream:
    """One streamed completion. has_begun: a part of it has arrived."""

    def __init__(self, session: aiohttp.ClientSession, model: str, num_tokens: int) -> None:
        self.has_begun = False
        self.text = b""
        self._session, self._model, self._num_tokens = session, model, num_tokens

    async def run(self) -> None:
        body = {
            "model": self._model,
            "prompt": [5, 6, 7, 8],
            "max_tokens": self._num_tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with self._session.post("/v1/completions", json=body) as response:
            assert response.status == 200
            async for part in response.content.iter_any():
                self.text += part
                self.has_begun = True

    @property
    def num_tokens(self) -> int:
        """The completion tokens that the end of a complete stream reports."""
        assert self.text.endswith(b"data: [DONE]\n\n"), self.text[-200:]
        usage = json.loads(self.text.split(b"\n\n")[-3].removeprefix(b"data: "))["usage"]
        count: int = usage["completion_tokens"]
        return count


async def wait_begun(streams: list[Stream]) -> None:
    while not all(stream.has_begun for stream in streams):
        await asyncio.sleep(0.01)


def session_of(url: str) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0))


async def exit_code(process: subprocess.Popen[bytes], limit_s: float) -> int:
    return await asyncio.to_thread(process.wait, limit_s)


def test_sigterm_under_64_streams_loses_none() -> None:
    async def main(process: subprocess.Popen[bytes], url: str) -> None:
        async with session_of(url) as session, session_of(url) as others:
            await ready(session)
            model = await model_of(session)
            streams = [Stream(session, model, NUM_TOKENS) for _ in range(NUM_STREAMS)]
            running = [asyncio.create_task(stream.run()) for stream in streams]
            await wait_begun(streams)
            assert not any(task.done() for task in running)
            process.send_signal(signal.SIGTERM)
            refused = 0
            while process.poll() is None and not all(task.done() for task in running):
                try:
                    async with others.get("/v1/models") as response:
                        is_new = response.status == 200
                        assert not is_new or not refused, "accepted after another was refused"
                        refused += not is_new
                        if not is_new:
                            assert response.status == 503
                            assert (await response.json())["error"]["code"] == "draining"
                except aiohttp.ClientConnectionError:
                    refused += 1
                await asyncio.sleep(0.02)
            await asyncio.gather(*running)
            assert refused
            assert [stream.num_tokens for stream in streams] == [NUM_TOKENS] * NUM_STREAMS
            assert await exit_code(process, 10) == 0

    with serve_run("--max-num-seqs", "64") as (process, url):
        asyncio.run(main(process, url))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(number: signal.Signals) -> None:
    async def main(process: subprocess.Popen[bytes], url: str) -> None:
        async with session_of(url) as session:
            await ready(session)
            model = await model_of(session)
            # so many that they take seconds, also while this process waits for a processor
            streams = [Stream(session, model, 1000) for _ in range(NUM_STREAMS)]
            running = [asyncio.create_task(stream.run()) for stream in streams]
            await wait_begun(streams)
            process.send_signal(number)
            await asyncio.sleep(0.2)
            assert process.poll() is None
            began = time.monotonic()
            process.send_signal(number)
            assert await exit_code(process, 10) == 0
            assert time.monotonic() - began < 5
            await asyncio.gather(*running, return_exceptions=True)
            for stream in streams:
                assert b"[DONE]" not in stream.text
                assert b'"code":"draining"' in stream.text

    with serve_run("--max-num-seqs", "64") as (process, url):
        asyncio.run(main(process, url))
