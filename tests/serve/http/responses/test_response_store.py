"""Kept responses: bounded in number and bytes, the least recently used go first, one owner each."""

from __future__ import annotations

import random

import aiohttp
import orjson
import uvloop

from serve.http import HttpServer, HttpSettings
from serve.http.responses.store import ENTRY_BYTES, ResponseStore, StoredResponse
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.running_server import Served, run_with_server


def stored(owner: str = "", size: int = 100, item_id: str = "") -> StoredResponse:
    body = orjson.dumps({"output": [{"id": item_id}] if item_id else []})
    item_ids = (item_id,) if item_id else ()
    return StoredResponse(owner, body, (b" " * (size - 15) + b"[]",), item_ids)


def test_the_least_recently_used_go_first() -> None:
    store = ResponseStore(max_entries=2, max_bytes=1 << 20)
    store.put("a", stored())
    store.put("b", stored())
    assert store.get("a", "") is not None
    store.put("c", stored())
    assert store.get("b", "") is None
    assert store.get("a", "") is not None
    assert len(store) == 2


def test_what_is_too_large_is_not_kept() -> None:
    store = ResponseStore(max_entries=9, max_bytes=2 * (ENTRY_BYTES + 200))
    store.put("a", stored(size=200))
    store.put("b", stored(size=5000))
    assert store.get("b", "") is None
    assert store.get("a", "") is not None
    for settings in ((0, 1 << 20), (9, 0)):
        none = ResponseStore(*settings)
        none.put("a", stored())
        assert (len(none), none.size_bytes) == (0, 0)


def test_only_its_owner_sees_one() -> None:
    store = ResponseStore(max_entries=9, max_bytes=1 << 20)
    store.put("a", stored("alice"))
    assert store.get("a", "bob") is None
    assert store.get("a", "") is None
    assert not store.delete("a", "bob")
    assert store.delete("a", "alice")
    assert store.size_bytes == 0


def test_who_keeps_much_pushes_out_nobody_else() -> None:
    """By number, and by bytes."""
    store = ResponseStore(max_entries=4, max_bytes=1 << 20)
    store.put("mine", stored("alice"))
    for name in "abcdefgh":
        store.put(name, stored("bob"))
    assert store.get("mine", "alice") is not None
    assert [name for name in "abcdefgh" if store.get(name, "bob")] == ["f", "g", "h"]
    store = ResponseStore(max_entries=99, max_bytes=10 * (ENTRY_BYTES + 100))
    store.put("mine", stored("alice"))
    for number in range(20):
        store.put(f"large-{number}", stored("bob", size=3000))
    assert store.get("mine", "alice") is not None
    assert store.size_bytes <= 10 * (ENTRY_BYTES + 100)


def test_items_are_found_while_their_response_is_kept() -> None:
    store = ResponseStore(max_entries=2, max_bytes=1 << 20)
    for name in "abc":
        store.put(name, stored("alice", item_id=f"msg_{name}"))
    found = store.of_item("msg_b", "alice")
    assert found is not None
    assert found.output() == [{"id": "msg_b"}]
    assert store.of_item("msg_a", "alice") is None
    assert store.of_item("msg_b", "bob") is None
    assert store.of_item("msg_x", "alice") is None
    store.delete("b", "alice")
    assert store.of_item("msg_b", "alice") is None


def test_the_bounds_hold_whatever_happens() -> None:
    rng = random.Random(3)
    store = ResponseStore(max_entries=20, max_bytes=20_000)
    sizes: dict[str, int] = {}
    for step in range(2000):
        name = f"r{rng.randrange(40)}"
        action = rng.random()
        if action < 0.5:
            name = f"r{step}"
            entry = stored(size=rng.choice((20, 300, 4000)))
            sizes[name] = entry.size_bytes
            store.put(name, entry)
        elif action < 0.8:
            store.get(name, "")
        else:
            store.delete(rng.choice(list(sizes) or [name]), "")
        assert len(store) <= 20
        assert store.size_bytes <= 20_000
        held = [size for name, size in sizes.items() if store.get(name, "") is not None]
        assert (len(held), sum(held)) == (len(store), store.size_bytes)


def test_what_follows_shares_what_came_before() -> None:
    first = StoredResponse("", orjson.dumps({"output": [{"a": 1}]}), (b"[0]",))
    before = first.continued()
    assert before == (b"[0]", b'[{"a":1}]')
    assert before[0] is first.history[0]


def test_the_settings_bound_what_is_kept() -> None:
    async def check(served: Served) -> None:
        names = []
        for _ in range(3):
            _, answer = await served.post("/v1/responses", {"model": "fake", "input": "hi"})
            names.append(answer["id"])
        statuses = []
        for name in names:
            async with served.session.get(f"/v1/responses/{name}") as response:
                statuses.append(response.status)
        assert statuses == [404, 200, 200]

    run_with_server(FakeEngine(), check, max_responses=2)


def test_a_key_sees_only_its_own() -> None:
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
                name = (await response.json())["id"]
            for method, path in (
                ("GET", ""),
                ("DELETE", ""),
                ("GET", "/input_items"),
                ("POST", "/cancel"),
            ):
                url = f"/v1/responses/{name}{path}"
                async with session.request(method, url, headers=bob) as response:
                    assert response.status == 404
            more = {**body, "previous_response_id": name}
            async with session.post("/v1/responses", json=more, headers=bob) as response:
                assert response.status == 400
            async with session.get(f"/v1/responses/{name}", headers=alice) as response:
                assert response.status == 200

    uvloop.run(main())
