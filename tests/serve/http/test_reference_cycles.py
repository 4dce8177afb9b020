"""A call leaves nothing to the garbage collector, however it ends.

A reference cycle would keep the call's body until the next collection: 60 refused bodies of 7 MB
kept 900 MB.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from aiohttp import web
from yarl import URL

import serve
from serve import Engine
from serve.engine.request_stream import RequestStream
from serve.engine.request_table import RequestState
from serve.http import HttpServer, HttpSettings
from serve.http.calls.context import Call
from serve.http.edge.connection import Connection
from serve.text.chat_parser.calls import ToolCallParser
from tests.support.engine.checkpoints import checkpoint

OURS = (Call, Connection, RequestState, RequestStream, ToolCallParser, web.BaseRequest)
SOURCE = str(Path(serve.__file__).parent)
LONG = b"a b c " * 5000
DEEP = b"[" * 5000
MESSAGES = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "string", "pattern": "(a{1,200}){1,200}"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
STRUCTURED = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
CASES: dict[str, tuple[str, Any]] = {
    "a completion": ("/v1/completions", {"prompt": "a"}),
    "a chat with tools": ("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL]}),
    "a stream": ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}),
    "not JSON": ("/v1/completions", b'{"prompt": "' + LONG + b'",,'),
    "not UTF-8": ("/v1/completions", b'{"prompt": "' + LONG + b'\xff"}'),
    "deep JSON": ("/v1/completions", DEEP),
    "a wrong field": ("/v1/completions", {"prompt": "a", "top_k": "no"}),
    "another model": ("/v1/completions", {"model": "none", "prompt": "a"}),
    "a long prompt": ("/v1/completions", {"prompt": LONG.decode()}),
    "a long chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": LONG.decode()}]},
    ),
    "a refused grammar": (
        "/v1/chat/completions",
        {"messages": MESSAGES, "response_format": STRUCTURED},
    ),
    "a missing response": ("/v1/responses", {"input": "a", "previous_response_id": "resp_none"}),
    "no route": ("/none", {}),
}
RAW = {
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "two lengths": b"GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    "a long line": b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
}


def is_ours(frame: types.FrameType) -> bool:
    return frame.f_code.co_filename.startswith(SOURCE)


async def leave_answer(url: URL, data: bytes) -> None:
    """Sends a request and leaves when its answer has begun."""
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(data)
    await reader.read(64)
    writer.transport.abort()


async def leave_body(url: URL, data: bytes) -> None:
    """Sends a request with a part of its body, and leaves after an early answer or none."""
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(data)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.05):
            await reader.read(64)
    writer.transport.abort()


def request(path: str, body: bytes, size: int | None = None) -> bytes:
    length = len(body) if size is None else size
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {length}\r\n\r\n".encode() + body


ENDLESS = b'{"model": "m", "prompt": "a", "max_tokens": 200, "ignore_eos": true, "stream": true}'
LARGE = b'{"model": "m", "prompt": "' + LONG * 20 + b'", "return_token_strs": true}'
LEFT = {
    "a left stream": (leave_answer, request("/v1/completions", ENDLESS)),
    "a large answer": (leave_answer, request("/tokenize", LARGE)),
    "a body's first part": (leave_body, request("/v1/completions", LONG, 200_000)),
    "the body of a refused request": (leave_body, request("/none", LONG, 200_000)),
}


@contextlib.contextmanager
def collected() -> Iterator[Counter[str]]:
    """Counts our objects that only the garbage collector frees, from the block's begin to its end.
    A frame of our code counts under its function's name."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        for item in gc.garbage:
            if isinstance(item, OURS):
                found[type(item).__name__] += 1
            elif isinstance(item, types.FrameType) and is_ours(item):
                found[item.f_code.co_qualname] += 1
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def send(session: aiohttp.ClientSession, path: str, body: Any) -> None:
    if isinstance(body, dict):
        async with session.post(path, json={"model": "m", "max_tokens": 4, **body}) as response:
            await response.read()
        return
    headers = {"Content-Type": "application/json"}
    async with session.post(path, data=body, headers=headers) as response:
        await response.read()


async def send_raw(url: URL, data: bytes, *, waits: bool) -> None:
    reader, writer = await asyncio.open_connection(url.host, url.port)
    writer.write(data)
    if waits:
        with contextlib.suppress(OSError):
            await reader.read()
    writer.transport.abort()


@pytest.fixture(scope="module")
def results() -> dict[str, Counter[str]]:
    """Sends each case to one server, a first time before it counts."""

    async def main() -> dict[str, Counter[str]]:
        found: dict[str, Counter[str]] = {}
        engine = Engine(str(checkpoint("llama")), served_model_name="m", max_num_seqs=4)
        async with HttpServer(engine, HttpSettings(port=0)) as server:
            for name, (path, body) in CASES.items():
                async with aiohttp.ClientSession(server.url) as session:
                    await send(session, path, body)
                    with collected() as found[name]:
                        for _ in range(3):
                            await send(session, path, body)
                        await asyncio.sleep(0.05)  # the end of a call follows its answer
            url = URL(server.url)
            for name, (leave, data) in LEFT.items():
                await leave(url, data)
                with collected() as found[name]:
                    for _ in range(3):
                        await leave(url, data)
                    await asyncio.sleep(0.2)
            for name, data in RAW.items():
                for waits in (True, False):
                    with collected() as found[f"{name}, {waits}"]:
                        for _ in range(3):
                            await send_raw(url, data, waits=waits)
                        await asyncio.sleep(0.05)
        return found

    gc.collect()
    gc.freeze()  # what other tests have left would take a second of each collection
    try:
        return uvloop.run(main())
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(
    "name", [*CASES, *LEFT, *(f"{n}, {w}" for n in RAW for w in (True, False))]
)
def test_a_call_is_freed_at_its_end(results: dict[str, Counter[str]], name: str) -> None:
    assert results[name] == Counter()
