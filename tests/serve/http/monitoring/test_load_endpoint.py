"""/internal/load predicts the first token from the queue, the prompt and the prefix cache."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import requests
import uvloop

from memory.kv_manager import KVManager
from ops.cpu import native_library
from serve import Engine
from serve.http import HttpServer, HttpSettings
from serve.scheduler.step_time import StepWork
from tests.support.engine.checkpoints import checkpoint
from tests.support.http.running_server import ServerThread

PROMPT = [(7 * i) % 90 + 3 for i in range(100)]
FIELDS = {
    "prompt_tokens",
    "cached_tokens",
    "predicted_ttft_seconds",
    "predicted_queue_seconds",
    "requests_running",
    "requests_waiting",
    "kv_cache_usage",
    "free_kv_tokens",
}


class Client:
    def __init__(self, url: str, key: str | None = None) -> None:
        self.url, self.headers = url, {"Authorization": f"Bearer {key}"} if key else {}

    def post(self, path: str, body: dict[str, Any]) -> requests.Response:
        return requests.post(self.url + path, json=body, headers=self.headers, timeout=30)

    def load(self, **body: Any) -> dict[str, Any]:
        answer = self.post("/internal/load", body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        assert set(found) == FIELDS
        return found


def engine(**settings: Any) -> Engine:
    return Engine(
        str(checkpoint("llama")), served_model_name="m", max_num_seqs=4, seed=1, **settings
    )


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    own = engine()
    with ServerThread(own) as server:
        client = Client(server.url)
        assert client.load(prompt_tokens=100)["predicted_ttft_seconds"] == 0, "nothing is learned"
        for _ in range(3):
            answer = client.post(
                "/v1/completions", {"model": "m", "prompt": PROMPT, "max_tokens": 20}
            )
            assert answer.status_code == 200
        for rows in (10, 40, 120) * 8:  # taught, since a busy machine's times do not show it
            work = StepWork()
            work.add(rows, 0)
            # about as fast as real steps, beside which much slower ones count little
            own.loaded.core._scheduler.chunks.model.learn(work, 1e-5 * rows)
        yield client


def test_more_rows_take_longer(client: Client) -> None:
    long, short = client.load(prompt_tokens=120), client.load(prompt_tokens=10)
    cached = client.load(prompt_tokens=120, cached_tokens=110)
    assert long["predicted_ttft_seconds"] > short["predicted_ttft_seconds"] > 0
    assert long["predicted_ttft_seconds"] > cached["predicted_ttft_seconds"] > 0
    assert long["predicted_queue_seconds"] == 0 and long["requests_running"] == 0
    assert long["free_kv_tokens"] > 100 and 0 <= long["kv_cache_usage"] <= 1
    assert (cached["prompt_tokens"], cached["cached_tokens"]) == (120, 110)


def test_a_whole_request_is_tokenized_and_looked_up(client: Client) -> None:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 5, "temperature": 0.5}
    known = client.load(**body)
    assert known["prompt_tokens"] == 100 and 64 <= known["cached_tokens"] < 100
    other = client.load(**{**body, "prompt": PROMPT[::-1]})
    assert other["cached_tokens"] == 0
    assert other["predicted_ttft_seconds"] > known["predicted_ttft_seconds"]
    salted = client.load(**{**body, "cache_salt": "s"})
    assert salted["cached_tokens"] == 0
    messages = [{"role": "user", "content": "the quick brown fox"}]
    chat = client.load(model="m", messages=messages)
    usage = client.post(
        "/v1/chat/completions", {"model": "m", "messages": messages, "max_tokens": 1}
    ).json()["usage"]
    assert chat["prompt_tokens"] == usage["prompt_tokens"]


@pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built")
@pytest.mark.parametrize("own", ["off", "quest:budget=50%"])
def test_requests_with_a_kv_policy_of_their_own_find_only_that_of_their_kind(own: str) -> None:
    settings = {"kv_policy": "quest:budget=64", "dtype": "int8", "kv_page_bytes": 4096}
    with ServerThread(engine(**settings)) as server:
        client = Client(server.url)
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 2}
        assert client.post("/v1/completions", {**body, "kv_policy": own}).status_code == 200
        assert client.load(**body, kv_policy=own)["cached_tokens"] >= 64
        assert client.load(**body)["cached_tokens"] == 0


@pytest.mark.small_pages
def test_hits_are_those_of_the_kv_policy_that_a_request_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that give scores are computed in any case: all those of h2o, the last ones of snapkv."""
    # else a hit that takes longer to map than to compute is not used
    monkeypatch.setattr(KVManager, "map_seconds", lambda self, hit: 0.0)
    with ServerThread(engine(kv_policy="h2o:budget=64", kv_page_bytes=4096)) as server:
        client = Client(server.url)
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 9, "temperature": 0}
        client.post("/v1/completions", body)
        for own in (None, "off", "snapkv:budget=50%,least=1", "h2o:budget=100%"):
            said = body | ({} if own is None else {"kv_policy": own})
            usage = client.post("/v1/completions", said).json()["usage"]
            found = usage["prompt_tokens_details"]["cached_tokens"]
            assert client.load(**said)["cached_tokens"] == found
            assert (found == 0) == (own is None)


@pytest.mark.small_pages
def test_hits_are_those_of_the_answer_that_a_key_allows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Prompt and answer stay within the budget, so that nothing is scored or dropped."""
    monkeypatch.setattr(KVManager, "map_seconds", lambda self, hit: 0.0)
    keys, key = tmp_path / "keys.toml", "key-of-a-client-aaaa"
    keys.write_text(f'[[keys]]\nname = "a"\nkey = "{key}"\nmax_tokens = 9\n')
    keys.chmod(0o600)
    settings = HttpSettings(port=0, api_key_file=str(keys))
    with ServerThread(engine(kv_policy="h2o:budget=128", kv_page_bytes=4096), settings) as server:
        client = Client(server.url, key)
        messages = [{"role": "user", "content": "the quick brown fox " * 4}]
        body = {"model": "m", "messages": messages, "temperature": 0}
        client.post("/v1/chat/completions", body)
        usage = client.post("/v1/chat/completions", body).json()["usage"]
        found = usage["prompt_tokens_details"]["cached_tokens"]
        assert client.load(**body)["cached_tokens"] == found > 0
        assert client.load(**body, max_tokens=8)["cached_tokens"] == found


def test_a_question_computes_nothing(client: Client) -> None:
    def rows() -> list[str]:
        text = requests.get(f"{client.url}/metrics", timeout=30).text
        return [line for line in text.splitlines() if line.startswith("mergestep:step_rows_total")]

    before = rows()
    client.load(model="m", prompt=PROMPT[::-1])
    client.load(prompt_tokens=50)
    assert rows() == before and before


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt_tokens"),
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"prompt_tokens": 1 << 20}, "prompt_tokens"),
        ({"prompt_tokens": 5, "cached_tokens": 6}, "cached_tokens"),
        ({"prompt_tokens": 5, "messages": []}, "messages"),
        ({"model": "m", "prompt": ["a", "b"]}, "prompt"),
        ({"model": "m", "prompt": [1] * 100_000}, "prompt"),
        ({"model": "m", "messages": []}, "messages"),
        ({"model": "x", "prompt_tokens": 5}, "model"),
    ],
)
def test_wrong_questions_are_named(client: Client, body: dict[str, Any], param: str) -> None:
    answer = client.post("/internal/load", body)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"] == param


def test_it_needs_the_key_of_the_api_and_sees_the_prefixes_of_this_key() -> None:
    keys = ("a:key-of-a-client-aaaa", "b:key-of-a-client-bbbb")
    with ServerThread(engine(), HttpSettings(port=0, api_keys=keys)) as server:
        assert Client(server.url).post("/internal/load", {"prompt_tokens": 5}).status_code == 401
        one, two = (Client(server.url, f"key-of-a-client-{n * 4}") for n in "ab")
        body = {"model": "m", "prompt": PROMPT, "max_tokens": 4}
        assert one.post("/v1/completions", body).status_code == 200
        assert one.load(**body)["cached_tokens"] > 0
        assert two.load(**body)["cached_tokens"] == 0


def test_the_queue_is_predicted_even_where_requests_are_refused() -> None:
    """A router wants the number, not the refusal that a request would get."""

    async def main() -> None:
        async with (
            HttpServer(engine(ttft_slo=1e-6), HttpSettings(port=0)) as server,
            aiohttp.ClientSession(server.url) as session,
            asyncio.timeout(60),
        ):
            body = {"model": "m", "prompt": PROMPT, "max_tokens": 100, "ignore_eos": True}

            async def complete() -> int:
                async with session.post("/v1/completions", json=body) as response:
                    return response.status

            async def load(asked: dict[str, Any]) -> dict[str, Any]:
                async with session.post("/internal/load", json=asked) as response:
                    assert response.status == 200, await response.text()
                    return await response.json()

            assert await complete() == 200
            core, resume = server.app.context.engine.loaded.core, threading.Event()
            first = asyncio.create_task(complete())
            while core.stats().num_running != 1:
                await asyncio.sleep(0)
            core.run_in_loop(resume.wait)
            try:
                assert await complete() == 429
                answer = await load({"prompt_tokens": 50})
                assert answer["requests_running"] == 1 and answer["predicted_queue_seconds"] > 0
                text = await load({"model": "m", "prompt": PROMPT[::-1]})
                assert text["prompt_tokens"] == 100 and text["predicted_ttft_seconds"] > 0
                async with session.get("/metrics") as response:
                    lines = (await response.text()).splitlines()
                name = "mergestep:predicted_queue_seconds{"
                value = next(line for line in lines if line.startswith(name))
                assert float(value.split()[-1]) > 0
            finally:
                resume.set()
            assert await first == 200
            assert server.app.context.engine.loaded.core._rejection.coming == (0.0, 0)

    uvloop.run(main())
