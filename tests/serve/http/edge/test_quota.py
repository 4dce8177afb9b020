"""Quotas of API keys, and Retry-After."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from serve.http.edge.errors import ApiError
from serve.http.edge.keys import ApiKey, KeyLimits
from serve.http.edge.quota import Quotas
from tests.support.http.api_keys import ALICE, BOB, bearer, write_keys
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.raw_requests import BODY, CHAT, RAW_BODY, request
from tests.support.http.running_server import Served, run_with_server


def key_file(tmp_path: Path, **limits: int) -> str:
    """Writes a file in which alice has the limits and bob has none."""
    keys = [{"name": "alice", "key": ALICE, **limits}, {"name": "bob", "key": BOB}]
    return write_keys(tmp_path / "keys.json", json.dumps({"keys": keys}))


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def refused(quotas: Quotas, key: ApiKey) -> dict[str, str] | None:
    try:
        quotas.enter(key)
    except ApiError as error:
        refusal = error
    else:
        return None
    assert (refusal.status, refusal.kind) == (429, "rate_limit_error")
    assert refusal.code == "rate_limit_exceeded"
    return refusal.headers


def test_the_request_quota_refills_steadily() -> None:
    clock = Clock()
    quotas = Quotas(clock)
    key = ApiKey("a", b"", KeyLimits(requests_per_minute=30))
    assert [refused(quotas, key) for _ in range(30)] == [None] * 30
    headers = refused(quotas, key)
    assert headers is not None and 2 <= int(headers["Retry-After"]) <= 3
    clock.now_s += 1.9
    assert refused(quotas, key)
    clock.now_s += 0.2
    assert refused(quotas, key) is None
    assert refused(quotas, key)
    clock.now_s += 3600  # the quota holds at most one minute's requests
    assert [refused(quotas, key) for _ in range(31)].count(None) == 30
    assert refused(quotas, ApiKey("b", b"", KeyLimits(requests_per_minute=30))) is None


def test_tokens_are_charged_after_the_answer() -> None:
    clock = Clock()
    quotas = Quotas(clock)
    key = ApiKey("a", b"", KeyLimits(tokens_per_minute=600))
    assert refused(quotas, key) is None
    quotas.leave(key, 1200)
    headers = refused(quotas, key)
    assert headers is not None and 60 <= int(headers["Retry-After"]) <= 91
    clock.now_s += 60.2
    assert refused(quotas, key) is None
    assert quotas.clients["a"].num_tokens == 1200


def test_keys_of_one_name_share_a_quota_and_new_limits_apply_at_once() -> None:
    quotas = Quotas(Clock())
    first, second = (ApiKey("a", digest, KeyLimits(max_concurrent=1)) for digest in (b"1", b"2"))
    assert refused(quotas, first) is None
    assert refused(quotas, second)
    assert refused(quotas, ApiKey("a", b"1", KeyLimits(max_concurrent=2))) is None
    quotas.leave(first, 0)
    quotas.leave(first, 0)
    assert refused(quotas, second) is None


@pytest.mark.row("A12")
def test_a_key_over_its_limit_does_not_affect_other_keys(tmp_path: Path) -> None:
    async def check(served: Served) -> None:
        async def ask(key: str) -> int:
            return (await served.post(CHAT, BODY, headers=bearer(key)))[0]

        assert [await ask(ALICE) for _ in range(3)] == [200, 200, 429]
        for _ in range(20):
            assert await ask(ALICE) == 429
            assert await ask(BOB) == 200
        async with served.session.get("/v1/models", headers=bearer(ALICE)) as response:
            assert response.status == 200  # listing models counts as no request
        async with served.session.post(CHAT, json=BODY, headers=bearer(ALICE)) as response:
            assert 1 <= int(response.headers["Retry-After"]) <= 45
            error = (await response.json())["error"]
        assert error == {
            "message": "this API key has a limit of 2 requests per minute",
            "type": "rate_limit_error",
            "param": None,
            "code": "rate_limit_exceeded",
        }

    path = key_file(tmp_path, requests_per_minute=2)
    run_with_server(FakeEngine(), check, api_key_file=path)


def test_concurrent_calls_and_tokens(tmp_path: Path) -> None:
    async def check(served: Served) -> None:
        async def ask() -> int:
            return (await served.post(CHAT, BODY, headers=bearer(ALICE)))[0]

        first = asyncio.create_task(ask())
        await served.until(lambda: len(served.engine.running) == 1)
        assert await ask() == 429
        assert await first == 200
        assert await ask() == 200
        assert await ask() == 429  # two requests had 2 prompt and 11 output tokens each
        clients = served.server.app.quotas.clients
        assert (clients["alice"].num_tokens, clients["alice"].num_running) == (26, 0)

    path = key_file(tmp_path, max_concurrent=1, tokens_per_minute=26)
    run_with_server(FakeEngine(step_s=0.02), check, api_key_file=path)


def test_a_client_that_leaves_stops_counting_as_concurrent(tmp_path: Path) -> None:
    async def check(served: Served) -> None:
        for _ in range(5):
            _, writer = await asyncio.open_connection("127.0.0.1", served.port)
            writer.write(request(RAW_BODY, f"x-api-key: {ALICE}"))
            await served.until(lambda: len(served.engine.running) == 1)
            writer.close()
            await served.until(lambda: not served.engine.running)
            await served.until(lambda: not served.server.app.context.calls)
        assert served.server.app.quotas.clients["alice"].num_running == 0

    path = key_file(tmp_path, max_concurrent=1)
    run_with_server(FakeEngine(step_s=0.02, repeat=1000), check, api_key_file=path)
