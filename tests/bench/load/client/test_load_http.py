"""How the load generator reads answers with every oddity, over real sockets."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from bench.load.client.answer import call_error
from bench.load.client.server_metrics import read_metrics
from bench.load.client.sse import EventStream
from tests.support.http.fakes_raw_http import (
    CHUNKED,
    CLOSE,
    DONE,
    GOOD,
    STREAM,
    UNTIL_CLOSED,
    Reply,
    event,
    framed,
    send_one,
    text,
)

pytestmark = pytest.mark.timing

# ---- server-sent events


def test_events_split_anywhere() -> None:
    data = b": ping\n\ndata: one\n\ndata:two\r\n\r\nevent: x\ndata: three\ndata: more\n\n\n"
    data += b"data: four\r\r"
    expected = [b"one", b"two", b"three\nmore", b"four"]
    rng = random.Random(0)
    for _ in range(300):
        stream, found, rest = EventStream(), [], data
        while rest:
            size = rng.randint(1, 9)
            found += stream.feed(rest[:size])
            rest = rest[size:]
        assert found + stream.finish() == expected


def test_events_of_one_read() -> None:
    assert EventStream().feed(b"\xef\xbb\xbfdata: a\n\ndata: b\n\n") == [b"a", b"b"]


def test_the_last_event_may_lack_its_end() -> None:
    stream = EventStream()
    assert stream.feed(b"data: a\n\ndata: b") == [b"a"]
    assert stream.finish() == [b"b"]
    assert stream.finish() == []


def test_an_error_field_is_data() -> None:
    assert EventStream().feed(b'error: {"message": "x"}\n\n') == [b'{"error": {"message": "x"}}']


# ---- answers


@pytest.mark.parametrize(
    "parts",
    [
        [CHUNKED, framed(GOOD), b"0\r\n\r\n"],
        [CHUNKED, framed(*(bytes([byte]) for byte in GOOD)), b"0\r\n\r\n"],
        [CHUNKED, framed(GOOD.replace(b"\n", b"\r\n")), b"0\r\n\r\n"],
        [CHUNKED, framed(b": ping\n\n", GOOD, b": ping\n\n"), b"0\r\n\r\n"],
        [CHUNKED, framed(GOOD.replace(b"data: ", b"data:")), b"0\r\n\r\n"],
        [STREAM, b"Content-Length: %d\r\n\r\n" % len(GOOD), GOOD],
        [UNTIL_CLOSED, GOOD, CLOSE],
        [b"HTTP/1.1 100 Continue\r\n\r\n", CHUNKED, framed(GOOD), b"0\r\n\r\n"],
        [CHUNKED, framed(GOOD.removesuffix(DONE)), b"0\r\n\r\n"],
        [CHUNKED, framed(GOOD), b"0\r\nX-Trailer: 1\r\n\r\n"],
        [CHUNKED, framed(GOOD), CLOSE],
        [b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream;charset=utf-8\r\n\r\n", GOOD, CLOSE],
        [
            CHUNKED,
            framed(event(b'{"choices": [{"text": "", "finish_reason": null}]}') + GOOD),
            b"0\r\n\r\n",
        ],
    ],
)
def test_good_answers(parts: Reply) -> None:
    record, error = send_one(*parts)
    assert error == ""
    assert len(record.chunks_s) == 2
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (5, 3, 2)
    assert record.finish_reason == "stop"
    assert record.sent_s <= record.chunks_s[0] <= record.chunks_s[1] <= record.finished_s


def test_every_byte_in_a_read_of_its_own() -> None:
    answer = CHUNKED + framed(GOOD) + b"0\r\n\r\n"
    parts: Reply = []
    for byte in answer:
        parts += [bytes([byte]), 0.0]
    record, error = send_one(*parts)
    assert error == "" and len(record.chunks_s) == 2


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "x"},
        {"reasoning_content": "x"},
        {"tool_calls": [{"index": 0, "function": {"arguments": "x"}}]},
    ],
)
def test_what_carries_text_is_a_chunk(delta: dict[str, Any]) -> None:
    chunks = [{"role": "assistant", "content": ""}, delta, {}]
    events = [event(json.dumps({"choices": [{"delta": value}]}).encode()) for value in chunks]
    record, error = send_one(CHUNKED, framed(*events, DONE), b"0\r\n\r\n")
    assert error == "" and len(record.chunks_s) == 1


def test_times_are_those_of_the_reads() -> None:
    first, second = event(text("a")), event(text("b", "stop"))
    parts = [0.1, CHUNKED, framed(first), 0.15, framed(second + second), b"0\r\n\r\n"]
    record, error = send_one(*parts)
    assert error == ""
    assert 0.09 < record.chunks_s[0] - record.sent_s < 0.5
    assert 0.14 < record.chunks_s[1] - record.chunks_s[0] < 0.6
    assert record.chunks_s[1] == record.chunks_s[2]  # of one read


def test_without_usage_the_tokens_are_unknown() -> None:
    record, error = send_one(CHUNKED, framed(event(text("a", "stop")), DONE), b"0\r\n\r\n")
    assert error == "" and record.output_tokens is None and record.prompt_tokens is None


def test_a_server_that_does_not_stream() -> None:
    body = json.dumps(
        {
            "choices": [{"message": {"content": "x"}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1},
        }
    ).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    record, error = send_one(head % len(body), body)
    assert error == "" and len(record.chunks_s) == 1 and record.output_tokens == 1


# ---- failures


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([CHUNKED, framed(event(text("a"))), CLOSE], "0 connection_lost"),
        ([CHUNKED, framed(event(text("a", "stop"))), CLOSE], "0 connection_lost"),
        ([CHUNKED, framed(event(text("a"))), b"0\r\n\r\n"], "0 stream_broken"),
        ([UNTIL_CLOSED, event(text("a")), CLOSE], "0 stream_broken"),
        (
            [STREAM, b"Content-Length: 900\r\n\r\n", event(text("a", "stop")), CLOSE],
            "0 connection_lost",
        ),
        ([CLOSE], "0 connection_lost"),
        ([b"SSH-2.0-x\r\n"], "0 connection_lost: the answer is not HTTP"),
        ([CHUNKED, framed(event(b"not JSON"), DONE), b"0\r\n\r\n"], "0 bad_answer"),
        ([CHUNKED, framed(event(b"[1]"), DONE), b"0\r\n\r\n"], "0 bad_answer"),
        (
            [CHUNKED, framed(event(b'{"error": {"code": "c", "message": "m"}}')), b"0\r\n\r\n"],
            "0 c: m",
        ),
        (
            [
                CHUNKED,
                framed(event(text("a")), b'error: {"code": 500, "message": "m"}\n\n'),
                b"0\r\n\r\n",
            ],
            "0 500: m",
        ),
        ([b"HTTP/1.1 503 X\r\nContent-Length: 0\r\n\r\n"], "503 http_503"),
        ([b"HTTP/1.1 500 X\r\nContent-Length: 4\r\n\r\n", b"oops"], "500 http_500: oops"),
        (
            [b"HTTP/1.1 502 X\r\nContent-Length: 99\r\n\r\n", b"<html>", CLOSE],
            "502 http_502: <html>",
        ),
    ],
)
def test_failures(parts: Reply, expected: str) -> None:
    _, error = send_one(*parts)
    assert error.startswith(expected)


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        (b'{"error": {"message": "m", "type": "t", "code": null}}', "t", "m"),
        (b'{"error": {"message": "m", "type": "t", "code": "c"}}', "c", "m"),
        (b'{"object": "error", "message": "m", "code": 400}', "400", "m"),
        (b'{"detail": [{"loc": ["body", "x"]}]}', "http_400", '[{"loc":["body","x"]}]'),
        (b'{"error": "plain"}', "http_400", "plain"),
        (b"<h1>\n Bad</h1>", "http_400", "<h1> Bad</h1>"),
        (b"", "http_400", "the error has no message"),
        (b"[]", "http_400", "[]"),
    ],
)
def test_error_bodies(body: bytes, code: str, message: str) -> None:
    error = call_error(400, body)
    assert (error.status, error.code, str(error)) == (400, code, message)


def test_a_time_limit() -> None:
    _, error = send_one(CHUNKED, framed(event(text("a"))), 5.0, timeout_s=0.1)
    assert error == "0 timeout: no whole answer within 0.1 s"


# ---- metrics of servers


def test_metrics_of_vllm() -> None:
    body = b"""# HELP vllm:num_requests_running x
vllm:num_requests_running{engine="0",model_name="a b"} 3.0
vllm:num_requests_running{engine="1"} 1.0
vllm:num_requests_waiting{engine="0"} 2.0
vllm:num_requests_waiting_total{engine="0"} 9.0
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.75
"""
    sample = read_metrics(body, 1.0)
    assert sample is not None
    assert (sample.num_running, sample.num_waiting, sample.kv_usage) == (4, 2, 0.5)


def test_metrics_of_llama_cpp() -> None:
    sample = read_metrics(b"llamacpp:requests_processing 1\nllamacpp:requests_deferred 2\n", 1.0)
    assert sample is not None
    assert (sample.num_running, sample.num_waiting, sample.kv_usage) == (1, 2, None)


def test_metrics_of_something_else() -> None:
    assert read_metrics(b"go_gc_duration_seconds 1\n", 1.0) is None
    assert read_metrics(b"", 1.0) is None
