"""Prefill on one server and decoding on another one, through kv_transfer_params."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import aiohttp
import pytest
import uvloop

from serve.engine.engine import Engine
from serve.http import HttpServer, HttpSettings
from tests.support.engine.checkpoints import checkpoint
from tests.support.memory.peer_settings import SERVED

PROMPT = [5 * i % 90 + 3 for i in range(220)]
BODY = {"model": "m", "prompt": PROMPT, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
# as a router sends it to the engine for prefill
ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


@contextlib.asynccontextmanager
async def serving(**settings: Any):
    """Yields an engine and a client of its server."""
    engine = Engine(str(checkpoint("llama")), **(SERVED | settings))
    async with (
        HttpServer(engine, HttpSettings(port=0)) as server,
        aiohttp.ClientSession(server.url) as session,
    ):
        yield engine, session


async def answer(session: aiohttp.ClientSession, path: str, body: dict) -> dict:
    async with session.post(path, json=body) as response:
        found = await response.json()
        assert response.status == 200, found
        return found


async def connected(engine: Engine) -> None:
    async with asyncio.timeout(5.0):
        while not all(pull.is_connected for pull in engine.stats().kv_peers.pulls.values()):
            await asyncio.sleep(0.01)


def test_the_decoding_engine_pulls_what_the_other_one_computed(key_file):
    async def check() -> None:
        listen = {"kv_listen": "tcp://127.0.0.1:0", "kv_peer_key_file": key_file}
        async with serving(**listen) as (prefill, at_prefill):
            body = BODY | {"max_tokens": 1, "kv_transfer_params": ASKED}
            first = await answer(at_prefill, "/v1/completions", body)
            given = first["kv_transfer_params"]
            assert set(given) >= set(ASKED) | {"remote_request_id", "tp_size"}
            assert (given["do_remote_prefill"], given["do_remote_decode"]) == (True, False)
            assert given["remote_host"] == "127.0.0.1"
            assert len(given["remote_block_ids"]) >= 3
            url = f"tcp://{given['remote_host']}:{given['remote_port']}"
            alone = await answer(at_prefill, "/v1/completions", BODY)
            pull = {"kv_peers": [url], "kv_peer_key_file": key_file}
            async with serving(**pull) as (decode, at_decode):
                await connected(decode)
                body = BODY | {"kv_transfer_params": given}
                second = await answer(at_decode, "/v1/completions", body)
                assert second["choices"][0]["text"] == alone["choices"][0]["text"]
                assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
                assert "kv_transfer_params" not in second
                assert decode.stats().kv_peers.pulls[url].pulled >= 3
                assert prefill.stats().kv_peers.serves.served >= 3

    uvloop.run(check())


def test_an_engine_that_a_request_names_is_a_peer_if_the_settings_allow_it(key_file):
    async def check() -> None:
        listen = {"kv_listen": "tcp://127.0.0.1:0", "kv_peer_key_file": key_file}
        async with serving(**listen) as (prefill, at_prefill):
            body = BODY | {"max_tokens": 1, "kv_transfer_params": ASKED}
            given = (await answer(at_prefill, "/v1/completions", body))["kv_transfer_params"]
            body = BODY | {"kv_transfer_params": given}
            any_peer = {"kv_peers": ["tcp://*"], "kv_peer_key_file": key_file}
            async with serving(**any_peer) as (decode, at_decode):
                found = await answer(at_decode, "/v1/completions", body)
                assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
                assert decode.stats().kv_peers.pulls["tcp://*"].pulled >= 3
                served = prefill.stats().kv_peers.serves.served
            nobody = {"kv_peers": ["tcp://127.0.0.1:9"], "kv_peer_key_file": key_file}
            async with serving(**nobody) as (decode, at_decode):
                found = await answer(at_decode, "/v1/completions", body)
                assert found["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
                assert list(decode.stats().kv_peers.pulls) == nobody["kv_peers"]
            assert prefill.stats().kv_peers.serves.served == served

    uvloop.run(check())


def test_both_engines_get_the_request_at_once(key_file, slow_steps):
    async def check() -> None:
        listen = {"kv_listen": "tcp://127.0.0.1:0", "kv_peer_key_file": key_file}
        async with serving(**listen) as (prefill, at_prefill):
            alone = await answer(at_prefill, "/v1/completions", BODY)
            others = BODY | {"prompt": PROMPT[::-1]}
            expected = await answer(at_prefill, "/v1/completions", others)
            url = prefill.stats().kv_peers.url
            pull = {"kv_peers": [url], "kv_peer_key_file": key_file}
            async with serving(**pull) as (decode, at_decode):
                await connected(decode)
                slow_steps(prefill, 0.1)
                given = {"do_remote_prefill": True}
                body = BODY | {"prompt": [7, *PROMPT], "kv_transfer_params": given}
                asked = body | {"max_tokens": 1, "kv_transfer_params": ASKED}
                first, second = await asyncio.gather(
                    answer(at_prefill, "/v1/completions", asked),
                    answer(at_decode, "/v1/completions", body),
                )
                assert first["choices"][0]["text"] == second["choices"][0]["text"][:1]
                assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= 128
                found = await answer(at_decode, "/v1/completions", others)
                assert found["choices"][0]["text"] == expected["choices"][0]["text"]
                assert alone["choices"][0]["text"]

    uvloop.run(check())


def test_chats_and_engines_that_nobody_pulls_from(key_file):
    async def check() -> None:
        messages = [{"role": "user", "content": "a b c"}]
        chat = {"model": "m", "messages": messages, "max_tokens": 1, "kv_transfer_params": ASKED}
        listen = {"kv_listen": "tcp://0.0.0.0:0", "kv_peer_key_file": key_file}
        async with serving(**listen) as (engine, session):
            found = await answer(session, "/v1/chat/completions", chat)
            given = found["kv_transfer_params"]
            assert given["remote_engine_id"] == engine.stats().kv_peers.engine_id
            assert given["remote_host"] not in ("", "0.0.0.0")
            body = BODY | {"kv_transfer_params": given}  # it is its own decoding engine, too
            assert (await answer(session, "/v1/completions", body))["choices"]
        async with serving() as (_, session):
            found = await answer(session, "/v1/chat/completions", chat)
            assert "kv_transfer_params" not in found

    uvloop.run(check())


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("text", "kv_transfer_params"),
        ({"do_remote_decode": 1}, "kv_transfer_params.do_remote_decode"),
        ({"remote_port": 70_000}, "kv_transfer_params.remote_port"),
        ({"remote_host": 5}, "kv_transfer_params.remote_host"),
        ({"remote_host": "h/path@x"}, "kv_transfer_params.remote_host"),
        ({"do_remote_decode": True, "do_remote_prefill": True}, "kv_transfer_params"),
        ({"remote_block_ids": list(range(10**5))}, "kv_transfer_params"),
    ],
)
def test_wrong_parameters_are_refused(given, param):
    async def check() -> None:
        async with serving() as (_, session):
            body = BODY | {"kv_transfer_params": given}
            async with session.post("/v1/completions", json=body) as response:
                found = await response.json()
                assert response.status == 400, found
                assert found["error"]["param"] == param

    uvloop.run(check())
