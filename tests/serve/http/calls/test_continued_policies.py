"""Answers go on only at servers with the same kv_policy, and with the same tokens there."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from serve.cluster.front.answer_log import AnswerLog
from serve.config import DEFAULT_MODEL
from serve.engine.engine import Engine
from serve.http import HttpServer, HttpSettings
from tests.serve.http.calls.test_continuation import MODEL, Pair, blocks_of

PATH = "/v1/completions"
BODY = {
    "model": MODEL,
    "prompt": "Once upon a time there was a dog. " * 12,
    "max_tokens": 60,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}


def tokens_of(stream: bytes) -> list[int]:
    records = [b[9:] for b in blocks_of(stream) if b.startswith(b": tokens ")]
    return [token for record in records for token in json.loads(record)[1]]


def run_with(policies: tuple[str, str], check: Any) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            servers = []
            for policy in policies:
                engine = Engine(
                    DEFAULT_MODEL, dtype="int8", max_model_len=512, max_num_seqs=2, kv_policy=policy
                )
                server = HttpServer(engine, HttpSettings(port=0))
                servers.append(await stack.enter_async_context(server))
            session = await stack.enter_async_context(aiohttp.ClientSession())
            await check(Pair(session, servers))

    asyncio.run(main())


@pytest.mark.parametrize("policy", ["quest:budget=32,least=1", "h2o:budget=32,least=1"])
def test_a_stream_goes_on_under_a_policy(policy: str) -> None:
    async def check(pair: Pair) -> None:
        status, whole = await pair.post(0, PATH, BODY)
        assert status == 200, whole
        blocks = blocks_of(whole)
        ends = [i + 1 for i, block in enumerate(blocks) if block.startswith(b": tokens")]
        log = AnswerLog()
        cut = ends[len(ends) // 2]
        log.feed(b"".join(blocks[:cut]))
        _, rest = await pair.post(1, PATH, BODY | {"continuation": log.continuation})
        before = tokens_of(b"".join(blocks[:cut]))
        assert 0 < len(before) < 60 and before + tokens_of(rest) == tokens_of(whole)

    run_with((policy, policy), check)


def test_a_server_with_another_policy_refuses() -> None:
    async def check(pair: Pair) -> None:
        _, whole = await pair.post(0, PATH, BODY)
        log = AnswerLog()
        log.feed(b"".join(blocks_of(whole)[:20]))
        status, refusal = await pair.post(1, PATH, BODY | {"continuation": log.continuation})
        assert status == 409 and b"kv_policy differs" in refusal, refusal

    run_with(("quest:budget=32,least=1", "off"), check)
