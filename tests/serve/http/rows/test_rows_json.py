"""Rows of the catalogue about JSON, sent as bytes to every endpoint that takes a body."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from typing import Any

import pytest

from serve.http.edge.json_body import parse_object
from serve.http.openai.requests import CHAT as CHAT_BODY
from serve.http.openai.requests import COMPLETION as COMPLETION_BODY
from serve.http.schema.fields import FieldType, Integer, Number
from tests.serve.http.edge.test_json_body import REFUSED
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.raw_requests import BODY, CHAT, request
from tests.support.http.running_server import RawAnswer, Served, run_with_server

pytestmark = pytest.mark.usefixtures("nothing_in_the_log")

USER = {"role": "user", "content": "hi"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "fake", "prompt": "hi"},
    CHAT: BODY,
    "/v1/responses": {"model": "fake", "input": "hi"},
    "/v1/messages": {**BODY, "max_tokens": 5},
    "/v1/messages/count_tokens": BODY,
    "/v1/embeddings": {"model": "fake", "input": "hi"},
    "/tokenize": {"model": "fake", "prompt": "hi"},
    "/detokenize": {"model": "fake", "tokens": [65]},
}
# Errors of these endpoints have Anthropic's shape, without a parameter or code.
ANTHROPIC = ("/v1/messages", "/v1/messages/count_tokens")


async def post(served: Served, path: str, body: bytes) -> RawAnswer:
    return await served.raw(request(body, first=f"POST {path} HTTP/1.1"), timeout_s=10)


def refusal(path: str, answer: RawAnswer) -> tuple[str | None, str | None]:
    """Returns the param and code of a 400 whose connection stays open."""
    assert answer.status == 400, (path, answer)
    assert not answer.is_closed
    assert answer.headers["content-type"].startswith("application/json")
    if path in ANTHROPIC:
        body = json.loads(answer.body)
        assert body["type"] == "error"
        assert body["error"]["type"] == "invalid_request_error"
        return None, None
    error = answer.error()
    assert error["type"] == "invalid_request_error"
    return error["param"], error["code"]


@pytest.mark.row("J1", "J2", "J3", "J4", "J5", "J6", "J7", "J8", "J9", "J10", "J11", "J12", "J13")
def test_invalid_json_is_refused_everywhere() -> None:
    async def check(served: Served) -> None:
        for path in BODIES:
            for name, (body, code) in REFUSED.items():
                param, error = refusal(path, await post(served, path, body))
                assert param is None
                assert path in ANTHROPIC or code in (None, error), name
        assert served.engine.submitted == []
        assert (await served.post(CHAT, BODY))[0] == 200

    run_with_server(FakeEngine(), check)


@pytest.mark.timing
@pytest.mark.row("J14")
def test_many_tiny_objects_do_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread parses the list while the event loop continues. The interpreter switches
    threads every 5 ms, and freeing the objects, which it cannot interrupt, takes less than 10 ms.
    The best of five counts, since all threads are late at times on a busy machine. A body with
    more than JSON_CONTAINERS objects is refused without parsing."""
    threads: list[int] = []
    worst_s: list[float] = []

    def recording_parse(body: bytes, *marks: Any) -> dict[str, Any]:
        threads.append(threading.get_ident())
        return parse_object(body, *marks)

    monkeypatch.setattr("serve.http.edge.body.parse_object", recording_parse)

    async def measure_delays() -> None:
        while True:
            before_s = time.perf_counter()
            await asyncio.sleep(0.001)
            worst_s[-1] = max(worst_s[-1], time.perf_counter() - before_s)

    async def check(served: Served) -> None:
        measuring = asyncio.create_task(measure_delays())
        for count in (300_000, *[100_000] * 5):
            worst_s.append(0.0)
            body = b'{"model":"fake","messages":[' + b",".join([b"{}"] * count) + b"]}"
            error = refusal(CHAT, await post(served, CHAT, body))
            expected = ("messages", "array_above_max_length")
            assert error == ((None, "invalid_json") if count > 131_072 else expected)
        measuring.cancel()
        assert served.engine.submitted == []

    run_with_server(FakeEngine(), check)
    assert len(threads) == 6
    assert threading.get_ident() not in threads
    assert worst_s[0] < 0.2 and min(worst_s[1:]) < 0.06


@pytest.mark.row("J15")
def test_nul_is_valid_in_texts_and_invalid_in_names() -> None:
    async def check(served: Served) -> None:
        content = {**BODY, "messages": [{"role": "user", "content": "a\0b"}]}
        assert (await served.post(CHAT, content))[0] == 200
        assert served.engine.submitted[-1][0][0]["content"] == "a\0b"
        prompt = {"model": "fake", "prompt": "a\0b"}
        assert (await served.post("/v1/completions", prompt))[0] == 200
        count = len(served.engine.submitted)
        for path in ("/v1/completions", CHAT):
            for name, value in (("model", "fa\0ke"), ("user", "\0"), ("stop", ["a\0"])):
                body = json.dumps({**BODIES[path], name: value}).encode()
                assert refusal(path, await post(served, path, body)) == (name, "invalid_value")
        assert len(served.engine.submitted) == count

    run_with_server(FakeEngine(), check)


def _numbers(fields: dict[str, FieldType], kind: type) -> list[str]:
    return [name for name, field in fields.items() if isinstance(field, kind)]


NUMBERS = [
    (path, name, kind is Integer)
    for path, table in (("/v1/completions", COMPLETION_BODY), (CHAT, CHAT_BODY))
    for kind in (Integer, Number)
    for name in _numbers(table.fields, kind)
]


@pytest.mark.row("J16", "J17")
def test_only_numbers_are_accepted_as_numbers() -> None:
    """Strings and booleans are no numbers, and 1.0 is no integer."""

    async def check(served: Served) -> None:
        for path, name, is_integer in NUMBERS:
            values: list[Any] = [True, False, "1", "0.7", "", [1], {"a": 1}]
            values += [1.0, 1.5, 1e3] if is_integer else []
            for value in values:
                body = json.dumps({**BODIES[path], name: value}).encode()
                error = refusal(path, await post(served, path, body))
                assert error == (name, "invalid_type"), (path, name, value)
        assert served.engine.submitted == []

    assert len(NUMBERS) > 25
    run_with_server(FakeEngine(), check)


@pytest.mark.row("J18", "J19")
@pytest.mark.parametrize("name", ["foo", "__proto__", "__class__", "constructor", "", "модель"])
def test_an_unknown_name_is_refused_everywhere(name: str) -> None:
    async def check(served: Served) -> None:
        for path, body in BODIES.items():
            answer = await post(served, path, json.dumps({**body, name: {}}).encode())
            error = refusal(path, answer)
            if path not in ANTHROPIC:
                assert error == (name, "unknown_parameter")
        assert served.engine.submitted == []

    run_with_server(FakeEngine(), check)


@pytest.mark.row("J20")
def test_long_names_and_long_strings() -> None:
    async def check(served: Served) -> None:
        for path, body in BODIES.items():
            answer = await post(served, path, json.dumps({**body, "k" * 10**6: 1}).encode())
            param, code = refusal(path, answer)
            assert len(answer.body) < 1500
            if path not in ANTHROPIC:
                assert (param, code) == ("k" * 512, "unknown_parameter")
            data = json.dumps({**body, "user": "x" * 10_000_000}).encode()
            answer = await post(served, path, data[: 1 << 16].ljust(len(data)))
            assert (answer.status, answer.is_closed) == (413, True)
            if path not in ANTHROPIC:
                assert answer.error()["code"] == "request_too_large"
        assert served.engine.submitted == []

    run_with_server(FakeEngine(), check)
