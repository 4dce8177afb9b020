"""Stored responses have bounds in number and bytes, LRU eviction and owners."""

from __future__ import annotations

import random

import aiohttp
import orjson
import pytest
import uvloop

from serve.http import HttpServer, HttpSettings
from serve.http.responses import store
from serve.http.responses.store import ENTRY_BYTES, ResponseStore, StoredResponse
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.running_server import Served, run_with_server


def make_response(owner: str = "", size: int = 100, item_id: str = "") -> StoredResponse:
    body = orjson.dumps({"output": [{"id": item_id}] if item_id else []})
    item_ids = (item_id,) if item_id else ()
    return StoredResponse(owner, body, (b" " * (size - 15) + b"[]",), item_ids)


def test_the_least_recently_used_is_evicted() -> None:
    store = ResponseStore(max_entries=2, max_bytes=1 << 20)
    store.put("a", make_response())
    store.put("b", make_response())
    assert store.get("a", "") is not None
    store.put("c", make_response())
    assert store.get("b", "") is None
    assert store.get("a", "") is not None
    assert len(store) == 2


def test_too_large_responses_are_not_stored() -> None:
    store = ResponseStore(max_entries=9, max_bytes=2 * (ENTRY_BYTES + 200))
    store.put("a", make_response(size=200))
    store.put("b", make_response(size=5000))
    assert store.get("b", "") is None
    assert store.get("a", "") is not None
    for settings in ((0, 1 << 20), (9, 0)):
        empty_store = ResponseStore(*settings)
        empty_store.put("a", make_response())
        assert (len(empty_store), empty_store.size_bytes) == (0, 0)


def test_only_the_owner_sees_a_response() -> None:
    store = ResponseStore(max_entries=9, max_bytes=1 << 20)
    store.put("a", make_response("alice"))
    assert store.get("a", "bob") is None
    assert store.get("a", "") is None
    assert not store.delete("a", "bob")
    assert store.delete("a", "alice")
    assert store.size_bytes == 0


def test_an_owner_of_many_responses_evicts_only_its_own() -> None:
    """The store evicts responses of the owner with the largest share, in number or bytes."""
    store = ResponseStore(max_entries=4, max_bytes=1 << 20)
    store.put("mine", make_response("alice"))
    for response_id in "abcdefgh":
        store.put(response_id, make_response("bob"))
    assert store.get("mine", "alice") is not None
    assert "".join(name for name in "abcdefgh" if store.get(name, "bob")) == "fgh"
    store = ResponseStore(max_entries=99, max_bytes=10 * (ENTRY_BYTES + 100))
    store.put("mine", make_response("alice"))
    for number in range(20):
        store.put(f"large-{number}", make_response("bob", size=3000))
    assert store.get("mine", "alice") is not None
    assert store.size_bytes <= 10 * (ENTRY_BYTES + 100)


def test_items_are_found_while_their_response_is_stored() -> None:
    store = ResponseStore(max_entries=2, max_bytes=1 << 20)
    for response_id in "abc":
        store.put(response_id, make_response("alice", item_id=f"msg_{response_id}"))
    response = store.of_item("msg_b", "alice")
    assert response is not None
    assert response.output() == [{"id": "msg_b"}]
    assert store.of_item("msg_a", "alice") is None
    assert store.of_item("msg_b", "bob") is None
    assert store.of_item("msg_x", "alice") is None
    store.delete("b", "alice")
    assert store.of_item("msg_b", "alice") is None


def test_the_bounds_hold_under_random_operations() -> None:
    rng = random.Random(3)
    store = ResponseStore(max_entries=20, max_bytes=20_000)
    sizes: dict[str, int] = {}
    for step in range(2000):
        response_id = f"r{rng.randrange(40)}"
        action = rng.random()
        if action < 0.5:
            response_id = f"r{step}"
            entry = make_response(size=rng.choice((20, 300, 4000)))
            sizes[response_id] = entry.size_bytes
            store.put(response_id, entry)
        elif action < 0.8:
            store.get(response_id, "")
        else:
            store.delete(rng.choice(list(sizes) or [response_id]), "")
        assert len(store) <= 20
        assert store.size_bytes <= 20_000
        kept_sizes = [size for name, size in sizes.items() if store.get(name, "") is not None]
        assert (len(kept_sizes), sum(kept_sizes)) == (len(store), store.size_bytes)


def test_a_continuation_shares_the_history() -> None:
    first = StoredResponse("", orjson.dumps({"output": [{"a": 1}]}), (b"[0]",))
    before = first.continued()
    assert before == (b"[0]", b'[{"a":1}]')
    assert before[0] is first.history[0]


def test_the_settings_bound_the_store() -> None:
    async def check(served: Served) -> None:
        response_ids = []
        for _ in range(3):
            _, answer = await served.post("/v1/responses", {"model": "fake", "input": "hi"})
            response_ids.append(answer["id"])
        statuses = []
        for response_id in response_ids:
            async with served.session.get(f"/v1/responses/{response_id}") as response:
                statuses.append(response.status)
        assert statuses == [404, 200, 200]

    run_with_server(FakeEngine(), check, max_responses=2)


def test_a_key_sees_only_its_own_responses() -> None:
    keys = ("alice:" + "a" * 20, "bob:" + "b" * 20)

    async def main() -> None:
        settings = HttpSettings(port=0, api_keys=keys)
        engine = FakeEngine()
        async with (
            HttpServer(engine, settings) as server,  # type: ignore[arg-type]
            aiohttp.ClientSession(server.url) as session,
        ):
            alice, bob = ({"Authorization": f"Bearer {letter * 20}"} for letter in "ab")
            body = {"model": "fake", "input": "hi"}
            async with session.post("/v1/responses", json=body, headers=alice) as response:
                response_id = (await response.json())["id"]
            for method, path in (
                ("GET", ""),
                ("DELETE", ""),
                ("GET", "/input_items"),
                ("POST", "/cancel"),
            ):
                url = f"/v1/responses/{response_id}{path}"
                async with session.request(method, url, headers=bob) as response:
                    assert response.status == 404
            continuation = {**body, "previous_response_id": response_id}
            async with session.post("/v1/responses", json=continuation, headers=bob) as response:
                assert response.status == 400
            async with session.get(f"/v1/responses/{response_id}", headers=alice) as response:
                assert response.status == 200

    uvloop.run(main())


def test_a_large_response_is_continued_without_parsing_it(monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"type": "output_text", "text": "hi", "annotations": [], "logprobs": [{"a": 1}]}
    response = {"output": [{"id": "msg_1", "type": "message", "content": [part]}]}
    small = StoredResponse.of("", response, (b"[0]",))
    monkeypatch.setattr(store, "PARSED_BYTES", 10)
    large = StoredResponse.of("", response, (b"[0]",))
    assert small.kept is None and large.kept is not None
    assert large.continued() == small.continued()
    assert large.size_bytes == small.size_bytes + len(large.kept)
    assert small.continued_bytes == len(small.body) + len(b"[0]")
    assert large.continued_bytes == len(large.kept) + len(b"[0]")
