"""Calls through Ray Serve whose replica is lost, without Ray: replicas are scripted."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from serve.cluster.ray_serve import continuing
from serve.cluster.ray_serve.app import call_of
from serve.cluster.ray_serve.choice import PredictedChoice, ReplicaStats
from serve.cluster.ray_serve.continuing import ContinuedCall

EVENTS = [("content-type", "text/event-stream; charset=utf-8")]
JSON = [("Content-Type", "application/json")]
STATE = b': state {"id":"a","created":1,"fingerprint":"f","seeds":[1],"prompts":["p"]}\n\n'
DONE = b"data: [DONE]\n\n"
BODY = {"prompt": "x", "stream": True}
Script = Callable[[], AsyncIterator[Any]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuing, "_PAUSE_S", 0.001)


def streams(*tokens: int, end: bytes = b"", cut: bool = False) -> Script:
    """Sends a token an event, and then `end`; without one the replica is lost. cut: in the middle
    of an event, and all in pieces."""

    async def script() -> AsyncIterator[Any]:
        yield 200, EVENTS
        data = STATE
        for token in tokens:
            data += b"data: %d\n\n: tokens [0,[%d],null]\n\n" % (token, token)
        data += end or b"data: lost"
        for at in range(0, len(data), 7 if cut else len(data)):
            yield data[at : at + (7 if cut else len(data))]
        if not end:
            raise OSError("the connection to the server broke")

    return script


def says(status: int, value: Any, *, breaks: bool = False) -> Script:
    async def script() -> AsyncIterator[Any]:
        yield status, JSON
        if breaks:
            raise OSError("the connection to the server broke")
        data = json.dumps(value).encode()
        yield data[:5]
        yield data[5:]

    return script


async def is_lost() -> AsyncIterator[Any]:
    raise RuntimeError("the actor died")
    yield


class Replicas:
    """Answers one call after the other by the next script; the last one again and again."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []

    def send(self, body: bytes, headers: list[tuple[str, str]]) -> AsyncIterator[Any]:
        self.bodies.append(json.loads(body))
        self.headers.append(dict(headers))
        script = self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]
        return script()


def asked(
    *scripts: Script, body: dict[str, Any] = BODY, path: str = "/v1/completions"
) -> tuple[int, bytes, Replicas]:
    replicas = Replicas(*scripts)

    async def main() -> tuple[int, bytes]:
        call = ContinuedCall(replicas.send, path, [("X-Own", "1")], json.dumps(body).encode())
        head = await call.head()
        return head.status, b"".join([part async for part in call.rest()])

    status, data = asyncio.run(main())
    assert all(given["X-Own"] == "1" for given in replicas.headers)
    assert all(given["x-mergestep-journal"] == "1" for given in replicas.headers)
    return status, data, replicas


@pytest.mark.parametrize("cut", [False, True])
def test_a_stream_goes_on_after_its_last_token(cut: bool) -> None:
    status, data, replicas = asked(streams(1, 2, cut=cut), streams(3, end=DONE, cut=cut))
    assert (status, data) == (200, b"data: 1\n\ndata: 2\n\ndata: 3\n\n" + DONE)
    continuation = replicas.bodies[1].pop("continuation")
    assert replicas.bodies == [BODY, BODY] and continuation["num_events"] == 2
    assert continuation["answers"] == [{"token_ids": [1, 2], "finish_reason": None}]
    assert continuation["state"]["id"] == "a"


@pytest.mark.parametrize(
    "end", [b": handover\n\n", b": error engine_failed\n\ndata: x\n\n"], ids=["stops", "fails"]
)
def test_a_server_that_stops_or_fails(end: bytes) -> None:
    status, data, replicas = asked(streams(1, end=end), streams(2, end=DONE))
    assert (status, data) == (200, b"data: 1\n\ndata: 2\n\n" + DONE)
    assert len(replicas.bodies) == 2


def test_an_error_of_the_call_itself_is_passed_on() -> None:
    end = b': error invalid_schema\n\ndata: {"error":1}\n\n'
    _, data, replicas = asked(streams(1, end=end))
    assert data == b'data: 1\n\ndata: {"error":1}\n\n' and len(replicas.bodies) == 1


@pytest.mark.parametrize("first", [is_lost, streams()], ids=["actor", "server"])
def test_a_replica_that_is_lost_before_a_token(first: Script) -> None:
    status, data, replicas = asked(first, streams(1, end=DONE))
    assert (status, data) == (200, b"data: 1\n\n" + DONE)
    assert replicas.bodies == [BODY, BODY], "it begins anew"


def test_a_whole_answer_begins_anew_where_its_replica_is_lost() -> None:
    body = {"prompt": "x"}
    status, data, replicas = asked(says(200, 0, breaks=True), is_lost, says(200, [1]), body=body)
    assert (status, json.loads(data)) == (200, [1]) and replicas.bodies == [body] * 3


def test_a_whole_answer_goes_on_where_its_server_stops() -> None:
    body = {"prompt": "x"}
    given = {"state": {"id": "a"}, "answers": [{"token_ids": [5], "finish_reason": None}]}
    handed = says(503, {"error": {"code": "handed_over"}, "continuation": given})
    status, data, replicas = asked(handed, says(200, [1]), body=body)
    assert (status, json.loads(data)) == (200, [1])
    assert replicas.bodies == [body, body | {"continuation": given}]


@pytest.mark.parametrize(("status", "code"), [(429, "overloaded"), (503, "draining")])
def test_a_replica_that_cannot_answer_now(status: int, code: str) -> None:
    found, data, _ = asked(says(status, {"error": {"code": code}}), streams(1, end=DONE))
    assert (found, data) == (200, b"data: 1\n\n" + DONE)
    found, data, replicas = asked(says(status, {"error": {"code": code}}))
    assert found == status and json.loads(data)["error"]["code"] == code
    assert len(replicas.bodies) == continuing.MAX_BREAKS


@pytest.mark.parametrize(("status", "code"), [(400, "invalid"), (429, "rate_limit_exceeded")])
def test_other_refusals_are_passed_on(status: int, code: str) -> None:
    found, data, replicas = asked(says(status, {"error": {"code": code}}))
    assert found == status and json.loads(data)["error"]["code"] == code
    assert len(replicas.bodies) == 1


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/completions", b'data: {"error":'),
        ("/v1/messages", b"event: error\ndata: "),
        ("/v1/responses", b"event: error\ndata: "),
    ],
)
def test_a_stream_that_nobody_goes_on_with(path: str, last: bytes) -> None:
    status, data, replicas = asked(streams(1), is_lost, path=path)
    assert status == 200 and data.startswith(b"data: 1\n\n" + last) and b"no server is left" in data
    assert len(replicas.bodies) == continuing.MAX_BREAKS


def test_a_call_that_nobody_answers() -> None:
    with pytest.raises(RuntimeError, match="the actor died"):
        asked(is_lost)


def test_tokens_between_breaks_count() -> None:
    """A long stream may be broken often."""
    scripts = [streams(number) for number in range(3 * continuing.MAX_BREAKS)]
    status, data, _ = asked(*scripts, streams(99, end=DONE))
    assert status == 200 and data.count(b"data: ") == len(scripts) + 2


def test_which_calls_go_on() -> None:
    body = json.dumps(BODY).encode()
    calls = [call_of("POST", "/v1/completions", [], body)["call"] for _ in range(2)]
    assert calls[0] and calls[1] and calls[0] != calls[1]
    journal = [("X-Mergestep-Journal", "1")]
    own = json.dumps(BODY | {"continuation": {}}).encode()
    for given in (
        call_of("GET", "/v1/models", [], b""),
        call_of("POST", "/v1/completions", [], b"[1]"),
        call_of("POST", "/v1/completions", [], b"{"),
        call_of("POST", "/v1/completions", journal, body),
        call_of("POST", "/v1/completions", [], own),
    ):
        assert given["call"] == ""


def test_replicas_where_a_call_has_been_come_last() -> None:
    choice, stats = PredictedChoice(), {name: ReplicaStats() for name in "abc"}
    names = [b"1", b"2", b"3", b"4"]
    choice.sent("b", stats["b"], names, "call")
    stats = {name: ReplicaStats(1) for name in "abc"}  # the next report has counted it
    assert choice.rank(stats, names)[0] == "b", "it has the prompt"
    assert choice.rank(stats, names, "other")[0] == "b"
    assert choice.rank(stats, names, "call")[-1] == "b"
    choice.sent("a", stats["a"], names, "call")
    assert choice.rank(stats, names, "call")[0] == "c"
    assert choice.rank({"a": stats["a"]}, names, "call") == ["a"], "if there is no other"
    for number in range(2000):
        choice.sent("c", stats["c"], [], f"{number}")
    assert len(choice._tried) <= 1024
