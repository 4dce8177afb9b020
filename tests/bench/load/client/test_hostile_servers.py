"""The load generator against servers that hang, flood, lie, or echo requests."""

from __future__ import annotations

import asyncio
import json
import math
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from bench.cli.load import _target
from bench.load.client.answer import CallError, call_error, count
from bench.load.client.health import health_notes
from bench.load.client.http_client import Address
from bench.load.client.record import Outcome, ProcessHealth, RunResult
from bench.load.client.redact import hider
from bench.load.client.run import offer
from bench.load.client.server_metrics import read_metrics
from bench.load.client.sse import MAX_EVENT, EventStream, EventTooLongError
from bench.load.client.targets import EngineTarget, ServerTarget
from bench.load.workload.offered_load import LoadOptions
from bench.load.workload.online_options import OnlineOptions
from bench.load.workload.work import Schedule, Work
from serve.engine.step_trace import StepTrace, TracedStep
from serve.errors import ConfigError
from serve.scheduler.step_time import StepWork
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.fakes_raw_http import (
    CHUNKED,
    CLOSE,
    DONE,
    GOOD,
    UNTIL_CLOSED,
    RawServer,
    Reply,
    event,
    framed,
    send_all,
    send_one,
    text,
    with_server,
)

WHOLE: Reply = [CHUNKED, framed(GOOD), b"0\r\n\r\n"]
KEY = "abcd-my-own-key"


# ---- what is sent again


def test_a_late_close_is_a_failure() -> None:
    """A request is not repeated after the server has had it for a while."""
    _, errors, server = send_all(WHOLE, [0.1, CLOSE], WHOLE, times=2)
    assert errors[1].startswith("0 connection_lost")
    assert len(server.requests) == 2


def test_what_is_sent_again_keeps_its_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.load.client.http_client.RACE_S", 5.0)
    records, errors, _ = send_all(WHOLE, [0.1, CLOSE], WHOLE, times=2)
    assert errors == ["", ""]
    assert records[1].chunks_s[0] - records[1].sent_s > 0.09


def test_a_request_is_sent_again_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.load.client.http_client.RACE_S", 5.0)
    _, errors, server = send_all(WHOLE, [CLOSE], [CLOSE], WHOLE, times=2)
    assert errors[1].startswith("0 connection_lost") and len(server.requests) == 3


def offered(server: RawServer, options: LoadOptions | None = None, **settings: Any) -> RunResult:
    """Offers one request, without samples of the server's metrics."""

    async def use(target: ServerTarget) -> RunResult:
        target._has_metrics = False
        return await offer(Schedule(1.0, [Work(prompt="Hi")], [0.0]), target, options)

    result: RunResult = with_server(server, use, **settings)
    return result


def test_resent_requests_are_counted_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.load.client.http_client.RACE_S", 5.0)
    result = offered(RawServer(WHOLE, [CLOSE], WHOLE))  # the first is the check
    assert result.records[0].outcome is Outcome.OK
    assert result.health[0].num_resent == 1
    assert any("sent 1 requests again" in note for note in result.notes)
    health = ProcessHealth(2, 10, 0.5, 0.0, 0.001, 0.002, 0, 90)
    assert health_notes(health, None) == []
    (note,) = health_notes(replace(health, num_resent=3), None)
    assert note.startswith("client process 2 sent 3 requests again")


# ---- numbers


@pytest.mark.parametrize("value", [b"+Inf", b"NaN", b"-Inf", b"1e999", b"1.2.3", b"x"])
def test_metrics_that_are_no_numbers(value: bytes) -> None:
    body = b"vllm:num_requests_running %s\nvllm:num_requests_waiting 2\n" % value
    assert read_metrics(body, 1.0) is None
    sample = read_metrics(body + b'vllm:num_requests_running{engine="1"} 3\n', 1.0)
    assert sample is not None and (sample.num_running, sample.num_waiting) == (3, 2)


@pytest.mark.parametrize("value", [1e30, 1 << 31, -5, 1.5, math.nan, math.inf, "7", True, None])
def test_counts_that_are_none(value: Any) -> None:
    assert count(value) is None


def test_counts() -> None:
    assert (count(0), count(7), count(7.0), count((1 << 31) - 1)) == (0, 7, 7, (1 << 31) - 1)
    usage = event(b'{"choices": [], "usage": {"prompt_tokens": -1, "completion_tokens": 1e30}}')
    record, error = send_one(CHUNKED, framed(event(text("a", "stop")), usage, DONE), b"0\r\n\r\n")
    assert error == "" and record.prompt_tokens is None and record.output_tokens is None


def engine_run(engine: Any) -> RunResult:
    async def run() -> RunResult:
        async with EngineTarget(engine) as target:
            work = Work(token_ids=[40] * 7, max_tokens=20, ignore_eos=True)
            return await offer(Schedule(1.0, [work], [0.0]), target)

    return uvloop.run(run())


def fake_engine() -> Any:
    engine: Any = FakeEngine(repeat=2, step_s=0.001)
    engine.tokenizer.vocab_size = 256
    engine.tokenizer.special_ids = frozenset({0})
    engine.stats = lambda: SimpleNamespace(
        num_running=3, num_waiting=1, pages_in_use=5, pages_total=10
    )
    return engine


def test_samples_that_fail_are_a_note() -> None:
    engine = fake_engine()
    engine.stats = lambda: int("\x1b[31mno number")
    engine.trace_steps = lambda max_steps=1: StepTrace(max_steps)
    result = engine_run(engine)
    assert result.records[0].outcome is Outcome.OK and result.samples == []
    (note,) = [note for note in result.notes if "no number" in note]
    assert "own figures end early" in note and "\x1b" not in note


# ---- memory


def test_an_event_has_a_limit() -> None:
    for part in (b"x" * 4096, b"data: " + b"x" * 4000 + b"\n", b"data:\n"):
        stream = EventStream()
        for _ in range(MAX_EVENT // len(part)):
            assert stream.feed(part) == []
        with pytest.raises(EventTooLongError):
            stream.feed(part)
    stream = EventStream()
    for _ in range(600):  # many events, comments and empty lines have none
        assert len(stream.feed(b": " + b"c" * 4096 + b"\n\ndata: " + b"x" * 4096 + b"\n\n")) == 1


@pytest.mark.timing
def test_a_long_line_costs_as_much_as_it_is_long() -> None:
    """If each read copied the whole line, these would be 17 GB."""
    stream, began_s = EventStream(), time.process_time()
    for _ in range((1 << 15) - 1):
        stream.feed(b"x" * 32)
    assert time.process_time() - began_s < 1.0
    assert stream.feed(b"\ndata: a\n\n") == [b"a"]


FLOOD = [framed(b"x" * 65536)] * 17


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ([CHUNKED, *FLOOD, 9.0], "0 bad_answer: an event of the stream is longer than 1 MiB"),
        (
            [CHUNKED.replace(b"text/event-stream", b"application/json"), *FLOOD, 9.0],
            "0 bad_answer: the answer is longer than 1 MiB",
        ),
        ([CHUNKED.replace(b"200", b"500"), *FLOOD, 9.0], "500 http_500: xxx"),
        ([b"HTTP/1.1 200 OK\r\nX-A: ", b"a" * 140_000, 9.0], "0 connection_lost: the answer has"),
        ([b"HTTP/1.1 100 C\r\n\r\n" * 9000, 9.0], "0 connection_lost: the answer has a head"),
        (
            [CHUNKED, framed(event(text("a"))), 0.05, b"0\r\nX-A: ", b"a" * 140_000, 9.0],
            "0 connection_lost: the answer has",
        ),
    ],
)
def test_floods_end_the_connection(reply: Reply, expected: str) -> None:
    _, errors, server = send_all(reply, WHOLE, times=2, timeout_s=3.0)
    assert errors[0].startswith(expected)
    assert errors[1] == "" and server.num_connections == 2


def test_a_document_has_a_limit() -> None:
    async def use(target: ServerTarget) -> None:
        raise AssertionError("it opened")

    flood: Reply = [UNTIL_CLOSED, *[b" " * 65536] * 17, 9.0]
    with pytest.raises(CallError, match="longer than 1048576 bytes"):
        with_server(RawServer(flood), use, model=None)


# ---- silence


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.load.client.targets.GET_TIMEOUT_S", 0.1)
    monkeypatch.setattr("bench.load.client.targets.WARM_UP_TIMEOUT_S", 0.1)


def silent(server: RawServer, use: Any, **settings: Any) -> Any:
    """Raises TimeoutError where a run would hang."""

    async def bounded(target: ServerTarget) -> Any:
        async with asyncio.timeout(3.0):
            return await use(target)

    return with_server(server, bounded, **settings)


@pytest.mark.usefixtures("short_limits")
def test_a_silent_server_is_an_error() -> None:
    with pytest.raises(CallError, match=r"http://.*/v1/models did not answer within 0.1 s"):
        with_server(RawServer([9.0]), lambda target: target.sample(), model=None)
    with pytest.raises(CallError, match=r"http://.*/v1/completions gave no .* within 0.1 s"):
        silent(RawServer([9.0]), lambda target: target.check(Work(prompt="x")))
    assert silent(RawServer([9.0]), lambda target: target.sample()) is None
    options = LoadOptions(warmup=[Work(messages=[{"role": "user", "content": "x"}])])
    with pytest.raises(CallError, match=r"http://.*/v1/chat/completions gave no whole answer"):
        offered(RawServer(WHOLE, [9.0]), options)


def test_a_given_time_limit_goes_first() -> None:
    with pytest.raises(CallError, match=r"/v1/models did not answer within 0.2 s"):
        with_server(RawServer([9.0]), lambda target: target.sample(), model=None, timeout_s=0.2)
    with pytest.raises(CallError, match=r"gave no whole answer within 0.2 s"):
        silent(RawServer([9.0]), lambda t: t.check(Work(prompt="x")), timeout_s=0.2)


# ---- errors in words


def test_errors_do_not_command_a_terminal() -> None:
    body = {"error": {"message": "a\x1b]0;t\x07b\nc\u202ed\x9be f", "code": "x\x1b[2J"}}
    error = call_error(400, json.dumps(body).encode())
    assert (str(error), error.code) == ("a]0;tb cde f", "x[2J")
    assert str(call_error(500, b"\x1b[31mno \x00words\r\n")) == "[31mno words"
    _, error_text = send_one(CHUNKED, framed(event(b"\x1b[31m"), DONE), b"0\r\n\r\n")
    assert "bad_answer" in error_text and "\x1b" not in error_text


@pytest.mark.parametrize(
    "url",
    [
        "http://user:my-secret@host:99999",
        "user:my-secret@host:99999",
        "http://user:my-secret@",
        "http://user:a/my-secret@host",
        "http://host/?sub=my-secret",
        "ftp://my-secret@host",
    ],
)
def test_urls_in_errors_have_no_secrets(url: str) -> None:
    with pytest.raises(ConfigError, match="url") as info:
        Address.of(url, {})
    assert "secret" not in str(info.value)


@pytest.mark.parametrize("header", ["Authorization Bearer my-secret", ": my-secret"])
def test_headers_in_errors_have_no_secrets(header: str) -> None:
    options = OnlineOptions(model="m", url="http://h", header=["A: b", header])
    with pytest.raises(ConfigError, match="number 2 is not") as info:
        _target(options)
    assert "secret" not in str(info.value)
    with pytest.raises(ConfigError, match="header") as info:
        Address.of("http://h", {"Bearer my-secret": "x"})
    assert "secret" not in str(info.value)


def refused(body: bytes) -> Reply:
    return [b"HTTP/1.1 401 X\r\nContent-Length: %d\r\n\r\n" % len(body), body]


@pytest.mark.parametrize(
    "reply",
    [
        refused(json.dumps({"error": {"message": f"bad key: {KEY}.", "code": KEY}}).encode()),
        refused(json.dumps({"detail": {"given": f"Bearer {KEY}"}}).encode()),
        refused(json.dumps({"error": f"x-token {KEY}2"}).encode()),
        refused(b"." * 150 + KEY.encode()),  # the text is cut in its middle
        refused(b" " * 393 + KEY.encode()),
        [CHUNKED, framed(event(b"no JSON: " + KEY.encode()), DONE), b"0\r\n\r\n"],
        [CHUNKED, framed(event(b'{"error": "%s"}' % KEY.encode())), b"0\r\n\r\n"],
    ],
)
def test_a_key_that_is_echoed_is_hidden(reply: Reply) -> None:
    _, error = send_one(*reply, api_key=KEY, headers={"X-Token": KEY + "2"})
    assert "***" in error and "abcd" not in error

    async def use(target: ServerTarget) -> None:
        await target.warm_up(Work(prompt="x"))

    with pytest.raises(CallError) as info:
        with_server(RawServer(reply), use, headers={"Authorization": f"Bearer {KEY}"})
    assert "abcd" not in f"{info.value.code} {info.value}"


def test_the_key_is_hidden_where_models_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with pytest.raises(CallError, match=r"bad: \*\*\*"):
        with_server(RawServer(refused(b"bad: " + KEY.encode())), lambda t: t.sample(), model=None)


def test_short_values_are_not_hidden() -> None:
    assert hider(["a", "", "abcd", "abcdef"])("a banana abcdefg abcd") == "a banana ***g ***"


# ---- steps


def test_the_trace_ends_with_the_run() -> None:
    """A note says how many steps are lost."""
    engine, asked = fake_engine(), []

    def trace_steps(max_steps: int = 2) -> StepTrace:
        asked.append(max_steps)
        trace = StepTrace(max_steps)
        trace.steps.extend(
            [TracedStep(0.0, 1.0, StepWork(num_decodes=1, num_rows=1), 4, 5, 6)] * max_steps
        )
        trace.num_lost = 7
        return trace

    engine.trace_steps = trace_steps
    result = engine_run(engine)
    assert asked == [2, 0]
    assert [(row.num_running, row.pages_in_use) for row in result.steps] == [(4, 6)] * 2
    assert any("the first 7 steps are missing" in note for note in result.notes)
