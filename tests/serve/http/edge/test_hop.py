"""Calls of the operator's hop are known by its secret; what they go on with has been counted."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from yarl import URL

from serve.cluster.front.answer_log import AnswerLog
from serve.cluster.front.front import Front, FrontSettings
from serve.config import DEFAULT_MODEL, EngineConfig
from serve.engine.engine import Engine
from serve.errors import ConfigError
from serve.http import HttpServer, HttpSettings
from serve.http.calls.continuation import AnswerState, Continuation
from serve.http.calls.key_policy import KeyPolicy
from serve.http.edge.errors import ApiError
from serve.http.edge.hop import (
    HOP_HEADER,
    is_of_hop,
    is_prompt_counted,
    load_hop_token,
    prompt_token,
)
from serve.http.edge.keys import ApiKey, KeyLimits
from serve.http.edge.quota import Quotas
from serve.request import RequestMetrics
from serve.sampling_params import AnswerSoFar, SamplingParams
from tests.serve.cluster.front.test_relay import ScriptedServer, streams

MODEL = EngineConfig(model=DEFAULT_MODEL).model_name
KEY = "secret-of-sixteen"
ALICE = ApiKey("alice", b"", KeyLimits(1, 1, 1))


def written(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def test_the_secret_itself_is_not_sent(tmp_path: Path) -> None:
    path = written(tmp_path / "a", "a secret of the operator\n")
    token = load_hop_token(path)
    assert len(token) == 64 and token == load_hop_token(path)
    assert token != load_hop_token(written(tmp_path / "b", "a secret of somebody"))
    assert load_hop_token(None) == ""


@pytest.mark.parametrize("text", ["", "too short", "x" * ((1 << 16) + 1)])
def test_a_wrong_secret_names_the_setting(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="hop_key_file"):
        load_hop_token(written(tmp_path / "key", text))
    with pytest.raises(ConfigError, match="hop_key_file"):
        load_hop_token(str(tmp_path / "none"))


class Stream:
    """One of 110 tokens of a prompt, of which 40 were cached, and 20 of an answer."""

    metrics = RequestMetrics(0.0, num_cached_tokens=40, num_prompt_tokens=110, num_output_tokens=20)


@pytest.mark.parametrize(
    ("is_of_hop", "so_far", "expected"),
    [(True, 15, 5), (True, 30, 0), (False, 15, 130), (True, None, 130), (False, None, 130)],
)
def test_what_counts_of_a_call(is_of_hop: bool, so_far: int | None, expected: int) -> None:
    policy = KeyPolicy(ALICE)
    policy.submitted(Stream())  # type: ignore[arg-type]
    policy.is_of_hop = is_of_hop
    if so_far is not None:
        state = AnswerState("a", 0, "f", (1,), ("p",))
        policy.continuation = Continuation(state, (AnswerSoFar((7,) * so_far),))
    assert policy.num_charged == expected


@pytest.mark.parametrize(("is_told", "expected"), [(True, 90), (False, 130)])
def test_a_prompt_that_another_server_has_computed_counts_there(
    is_told: bool, expected: int
) -> None:
    """But for what had to be computed here. Anyone may say so, so only the hop is believed."""
    policy = KeyPolicy(ALICE)
    policy.is_prompt_counted = is_told
    policy.allowed(SamplingParams(awaits_prefill=True))
    policy.submitted(Stream())  # type: ignore[arg-type]
    assert policy.num_charged == expected


def of_hop(value: str | None, token: str) -> tuple[bool, bool]:
    headers = {} if value is None else {HOP_HEADER: value}
    request: Any = SimpleNamespace(headers=headers)
    return is_of_hop(request, token), is_prompt_counted(request, token)


def test_only_the_secret_opens() -> None:
    token = "a" * 64
    assert of_hop(token, token) == (True, False)
    assert of_hop(prompt_token(token), token) == (False, True), "the call itself is counted"
    for given in (None, "", "b" * 64, token[:-1], "\udcff", "é"):
        assert of_hop(given, token) == (False, False)
        assert of_hop(given, "") == (False, False), "a server without a secret knows no hop"
    assert of_hop(prompt_token(""), "") == (False, False)


@pytest.mark.covering(1)
@pytest.mark.parametrize("header", [None, b"0" * 64, b"\xff\xfe", "é".encode()])
@pytest.mark.parametrize("kind", ["plain", "continuation", "remote_prefill"])
def test_a_client_without_the_secret_gains_nothing(
    tmp_path: Path, header: bytes | None, kind: str
) -> None:
    """Its second call finds the prompt in the cache, and counts as much as the first one."""
    hop = written(tmp_path / "hop", "a secret of the operator")

    async def main() -> None:
        engine = Engine(DEFAULT_MODEL, dtype="int8", max_model_len=512, max_num_seqs=2)
        settings = HttpSettings(port=0, api_keys=(f"alice:{KEY}",), hop_key_file=hop)
        async with HttpServer(engine, settings) as server:
            body: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time " * 60}
            body |= {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
            _, whole = await sent(server, body, b"x-mergestep-journal: 1")
            client = server.app.quotas.clients["alice"]
            (first,) = {client.num_tokens}
            assert first > 200
            if kind == "continuation":
                log = AnswerLog()
                log.feed(b"".join(part + b"\n\n" for part in whole.split(b"\n\n")[:4]))
                body["continuation"] = log.continuation
                assert log.continuation is not None
            elif kind == "remote_prefill":
                body["kv_transfer_params"] = {"do_remote_prefill": True}
            line = b"" if header is None else HOP_HEADER.encode() + b": " + header
            status, text = await sent(server, body, line)
            assert status == 200, text
            assert (client.num_tokens, client.num_requests) == (2 * first, 2)

    asyncio.run(main())


async def sent(server: HttpServer, body: dict[str, Any], header: bytes) -> tuple[int, bytes]:
    """Sends a call with a line of its head as it is. Returns the status and what follows."""
    content = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", URL(server.url).port)
    lines = [b"POST /v1/completions HTTP/1.1", b"Host: 127.0.0.1", b"Connection: close"]
    lines += [b"Content-Type: application/json", b"Authorization: Bearer " + KEY.encode()]
    lines += [b"Content-Length: %d" % len(content), *([header] if header else [])]
    writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + content)
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    head, _, chunks = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), re.sub(rb"(?:^|\r\n)[0-9a-f]+\r\n", b"", chunks)


def test_a_call_that_goes_on_is_never_refused_for_a_quota() -> None:
    quotas = Quotas()
    quotas.enter(ALICE)
    with pytest.raises(ApiError):
        quotas.enter(ALICE)
    quotas.enter(ALICE, goes_on=True)
    client = quotas.clients["alice"]
    assert (client.num_running, client.num_requests) == (2, 1)
    quotas.leave(ALICE, 3)
    quotas.leave(ALICE, 0)
    assert (client.num_running, client.num_tokens) == (0, 3)


@pytest.mark.parametrize("has_secret", [True, False])
def test_a_stream_that_moves_counts_once(tmp_path: Path, has_secret: bool) -> None:
    """Between two real servers, the second one of which finds nothing in its cache."""
    more: dict[str, Any] = {}
    if has_secret:
        more["hop_key_file"] = written(tmp_path / "hop", "a secret of the operator")

    async def main() -> None:
        async with AsyncExitStack() as stack:
            servers = []
            for _ in range(2):
                engine = Engine(DEFAULT_MODEL, dtype="int8", max_model_len=768, max_num_seqs=4)
                settings = HttpSettings(port=0, api_keys=(f"alice:{KEY}",), **more)
                servers.append(await stack.enter_async_context(HttpServer(engine, settings)))
            urls = tuple(server.url for server in servers)
            front = Front(FrontSettings(urls), HttpSettings(port=0, **more))
            await stack.enter_async_context(front)
            headers = {"Authorization": f"Bearer {KEY}", HOP_HEADER: "0" * 64}
            session = await stack.enter_async_context(aiohttp.ClientSession(headers=headers))
            body = {"model": MODEL, "prompt": "Once upon a time " * 20, "max_tokens": 500}
            body |= {"stream": True, "temperature": 0, "ignore_eos": True}
            body["stream_options"] = {"include_usage": True}
            async with session.post(front.url + "/v1/completions", json=body) as response:
                assert response.status == 200
                await response.content.readany()
                (at,) = [n for n, server in enumerate(servers) if server.app.num_calls]
                await servers[at].drain()
                text = await response.text()
            assert front.counts.num_continued == {"handover": 1}
            assert '"completion_tokens":500' in text
            prompt = int(text.rpartition('"prompt_tokens":')[2].partition(",")[0])
            counted = [server.app.quotas.clients["alice"].num_tokens for server in servers]
            requests = [server.app.quotas.clients["alice"].num_requests for server in servers]
            if has_secret:
                # the first server may have computed some that were not sent any more
                assert prompt + 500 <= sum(counted) < prompt + 500 + prompt // 2
                assert sum(requests) == 1
            else:
                assert sum(counted) > 2 * prompt + 500
                assert sum(requests) == 2

    asyncio.run(main())


def test_the_hop_shows_its_secret_only_where_it_goes_on(tmp_path: Path) -> None:
    more = {"hop_key_file": written(tmp_path / "hop", "a secret of the operator")}
    seen: list[str | None] = []

    class Noting(ScriptedServer):
        async def _answer(self, request: Any) -> Any:
            if request.method == "POST":
                seen.append(request.headers.get(HOP_HEADER))
            return await super()._answer(request)

    async def main() -> None:
        async with AsyncExitStack() as stack:
            servers = [Noting(streams(1)), Noting(streams(2, end=b"data: [DONE]\n\n"))]
            for server in servers:
                await server.start(stack)
            settings = FrontSettings(tuple(server.url for server in servers))
            front = await stack.enter_async_context(Front(settings, HttpSettings(port=0, **more)))
            headers = {HOP_HEADER: "of a client"}
            session = await stack.enter_async_context(aiohttp.ClientSession(headers=headers))
            async with session.post(front.url + "/v1/completions", json={"stream": True}) as it:
                assert b"data: 2" in await it.read()

    asyncio.run(main())
    assert seen == [None, load_hop_token(more["hop_key_file"])]
