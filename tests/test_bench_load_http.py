"""The load generator's HTTP client, with every oddity of servers, over real sockets."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from bench.load.answer import CallError, call_error
from bench.load.fake_script import Profile, prompt_of, script_of
from bench.load.fake_server import FakeServer
from bench.load.http_client import Address
from bench.load.record import Record
from bench.load.server_metrics import read_metrics
from bench.load.sse import EventStream
from bench.load.targets import ServerSettings, ServerTarget
from bench.load.work import Work
from serve.errors import ConfigError

CLOSE = "close"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = STREAM + b"Transfer-Encoding: chunked\r\n\r\n"
UNTIL_CLOSED = STREAM + b"Connection: close\r\n\r\n"

Reply = list[bytes | float | str]


def framed(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


def text(value: str, finish: str | None = None) -> bytes:
    return json.dumps({"choices": [{"text": value, "finish_reason": finish}]}).encode()


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


USAGE = json.dumps(
    {
        "choices": [],
        "usage": {
            "prompt_tokens": 5,
            "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
).encode()
DONE = event(b"[DONE]")
GOOD = event(text("a")) + event(text("b", "stop")) + event(USAGE) + DONE


class RawServer:
    """Answers the requests it gets, over all connections, with the replies in turn; a number is a
    pause, CLOSE closes the connection."""

    def __init__(self, *replies: Reply, tls: ssl.SSLContext | None = None) -> None:
        self.replies = list(replies)
        self.requests: list[tuple[bytes, Any]] = []
        self.num_connections = 0
        self._tls = tls
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> RawServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"{'https' if self._tls else 'http'}://localhost:{port}"
        if self._tls is None:
            self.url = f"http://127.0.0.1:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self._writers.append(writer)
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                size = 0
                for line in head.split(b"\r\n"):
                    if line.lower().startswith(b"content-length:"):
                        size = int(line[15:])
                body = await reader.readexactly(size)
                self.requests.append((head, json.loads(body) if body else None))
                for part in self.replies.pop(0):
                    if part == CLOSE:
                        writer.close()
                        return
                    if isinstance(part, float):
                        await asyncio.sleep(part)
                    else:
                        assert isinstance(part, bytes)
                        writer.write(part)
                        await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, IndexError):
            writer.close()


def with_server(
    server: RawServer, use: Callable[[ServerTarget], Awaitable[Any]], **settings: Any
) -> Any:
    async def run() -> Any:
        async with server:
            given = ServerSettings(server.url, **{"model": "m", **settings})
            async with ServerTarget(given) as target:
                return await use(target)

    return uvloop.run(run())


def ask(
    *replies: Reply, times: int = 1, **settings: Any
) -> tuple[list[Record], list[str], RawServer]:
    """The records of so many requests, one after the other, and what went wrong."""
    server = RawServer(*replies)
    records: list[Record] = []
    errors: list[str] = []

    async def use(target: ServerTarget) -> None:
        for number in range(times):
            records.append(Record(number, 0.0))
            try:
                await target.send(target.prepare(Work(prompt="Hi", max_tokens=3)), records[-1])
                errors.append("")
            except CallError as exc:
                errors.append(f"{exc.status} {exc.code}: {exc}")
            await asyncio.sleep(0.02)  # a close by the server is seen

    with_server(server, use, **settings)
    return records, errors, server


def one(*parts: bytes | float | str, **settings: Any) -> tuple[Record, str]:
    records, errors, _ = ask(list(parts), **settings)
    return records[0], errors[0]


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
        [b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream;charset=utf-8\r\n\r\n", GOOD, CLOSE],
        [
            CHUNKED,
            framed(event(b'{"choices": [{"text": "", "finish_reason": null}]}') + GOOD),
            b"0\r\n\r\n",
        ],
    ],
)
def test_good_answers(parts: Reply) -> None:
    record, error = one(*parts)
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
    record, error = one(*parts)
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
    record, error = one(CHUNKED, framed(*events, DONE), b"0\r\n\r\n")
    assert error == "" and len(record.chunks_s) == 1


def test_times_are_those_of_the_reads() -> None:
    first, second = event(text("a")), event(text("b", "stop"))
    parts = [0.1, CHUNKED, framed(first), 0.15, framed(second + second), b"0\r\n\r\n"]
    record, error = one(*parts)
    assert error == ""
    assert 0.09 < record.chunks_s[0] - record.sent_s < 0.5
    assert 0.14 < record.chunks_s[1] - record.chunks_s[0] < 0.6
    assert record.chunks_s[1] == record.chunks_s[2]  # of one read


def test_without_usage_the_tokens_are_unknown() -> None:
    record, error = one(CHUNKED, framed(event(text("a", "stop")), DONE), b"0\r\n\r\n")
    assert error == "" and record.output_tokens is None and record.prompt_tokens is None


def test_a_server_that_does_not_stream() -> None:
    body = json.dumps(
        {
            "choices": [{"message": {"content": "x"}, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1},
        }
    ).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    record, error = one(head % len(body), body)
    assert error == "" and len(record.chunks_s) == 1 and record.output_tokens == 1


# ---- failures


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([CHUNKED, framed(event(text("a"))), CLOSE], "0 connection_lost"),
        ([CHUNKED, framed(event(text("a", "stop"))), CLOSE], "0 connection_lost"),
        ([CHUNKED, framed(event(text("a"))), b"0\r\n\r\n"], "0 stream_broken"),
        ([UNTIL_CLOSED, event(text("a")), CLOSE], "0 stream_broken"),
        ([STREAM, b"Content-Length: 900\r\n\r\n", GOOD, CLOSE], "0 connection_lost"),
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
    _, error = one(*parts)
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
        (b"", "http_400", "an error without words"),
        (b"[]", "http_400", "[]"),
    ],
)
def test_error_bodies(body: bytes, code: str, message: str) -> None:
    error = call_error(400, body)
    assert (error.status, error.code, str(error)) == (400, code, message)


def test_a_time_limit() -> None:
    _, error = one(CHUNKED, framed(event(text("a"))), 5.0, timeout_s=0.1)
    assert error == "0 timeout: no whole answer within 0.1 s"


# ---- connections

WHOLE: Reply = [CHUNKED, framed(GOOD), b"0\r\n\r\n"]


def test_connections_are_used_again() -> None:
    _, errors, server = ask(WHOLE, WHOLE, WHOLE, times=3)
    assert errors == ["", "", ""]
    assert server.num_connections == 1


def test_connections_that_the_server_closes_are_not() -> None:
    closing: Reply = [UNTIL_CLOSED, GOOD, CLOSE]
    _, errors, server = ask(closing, closing, times=2)
    assert errors == ["", ""]
    assert server.num_connections == 2


def test_a_kept_connection_that_was_closed_is_made_anew() -> None:
    """The server closes it when the next request is on its way, before any answer."""
    _, errors, server = ask(WHOLE, [CLOSE], WHOLE, times=2)
    assert errors == ["", ""]
    assert server.num_connections == 2 and len(server.requests) == 3


def test_nothing_else_is_sent_twice() -> None:
    _, errors, server = ask(WHOLE, [b"HTTP/1.1 200 OK\r\n", CLOSE], times=2)
    assert errors[1].startswith("0 connection_lost")
    assert len(server.requests) == 2


def test_after_a_failure_the_next_request_is_well() -> None:
    refused: Reply = [b"HTTP/1.1 429 X\r\nContent-Length: 2\r\n\r\n{}"]
    _, errors, server = ask(refused, [b"garbage\r\n\r\n"], WHOLE, times=3)
    assert errors[0].startswith("429") and "not HTTP" in errors[1] and errors[2] == ""
    assert server.num_connections == 2


def test_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 here")

    profile = Profile(first_s=(0.0, 0.0), chunks=(2, 2))

    async def ask_it(url: str) -> Record:
        async with ServerTarget(ServerSettings(url)) as target:
            record = Record(0, 0.0)
            await target.send(target.prepare(Work(prompt=prompt_of(3))), record)
            return record

    async def run() -> Record:
        async with FakeServer(profile, host="::1") as server:
            return await ask_it(server.url + "/v1/")

    record = uvloop.run(run())
    assert len(record.chunks_s) == 2
    assert record.output_tokens == sum(script_of(profile, 3).chunk_tokens)


def test_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-keyout", str(key), "-out", str(certificate), "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no openssl here")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    async def use(target: ServerTarget) -> Record:
        record = Record(0, 0.0)
        await target.send(target.prepare(Work(prompt="Hi")), record)
        return record

    with pytest.raises(CallError, match=r"cannot reach https://.*certificate verify failed"):
        with_server(RawServer(WHOLE, tls=context), use)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert len(with_server(RawServer(WHOLE, tls=context), use).chunks_s) == 2


# ---- requests


def test_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    settings = {"headers": {"X-Team": "a"}, "extra": {"top_k": 1}}
    _, _, server = ask(WHOLE, **settings)
    head, body = server.requests[0]
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nAuthorization: Bearer secret\r\n" in head and b"\r\nX-Team: a\r\n" in head
    assert body == {
        "model": "m",
        "prompt": "Hi",
        "max_tokens": 3,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_k": 1,
    }
    assert "secret" not in repr(ServerSettings("x", api_key="secret", headers={"A": "secret"}))


def test_chat_and_clients() -> None:
    server = RawServer(WHOLE)
    messages = [{"role": "user", "content": "Hi"}]

    async def use(target: ServerTarget) -> None:
        work = Work(messages=messages, ignore_eos=True, client="me")
        await target.send(target.prepare(work), Record(0, 0.0))

    with_server(server, use)
    head, body = server.requests[0]
    assert head.startswith(b"POST /v1/chat/completions ")
    assert body["messages"] == messages and body["ignore_eos"] and body["user"] == "me"


def refusal(message: str) -> Reply:
    body = json.dumps({"error": {"message": message, "type": "invalid_request_error"}}).encode()
    return [b"HTTP/1.1 400 X\r\nContent-Length: %d\r\n\r\n" % len(body), body]


@pytest.mark.parametrize(
    ("refusals", "left_out"),
    [
        ([], []),
        (["Unrecognized request argument supplied: ignore_eos"], ["ignore_eos"]),
        (["bad request", "bad request"], ["ignore_eos", "stream_options"]),
        (["unsupported: stream_options"], ["stream_options"]),
    ],
)
def test_fields_that_are_refused_are_left_out(refusals: list[str], left_out: list[str]) -> None:
    server = RawServer(*map(refusal, refusals), WHOLE, WHOLE)
    work = Work(prompt="a long prompt", max_tokens=50, ignore_eos=True)

    async def use(target: ServerTarget) -> list[str]:
        notes = await target.check(work)
        await target.send(target.prepare(work), Record(0, 0.0))
        return notes

    notes = with_server(server, use)
    assert [note.split("'")[1] for note in notes] == left_out
    checked, sent = server.requests[-2][1], server.requests[-1][1]
    assert checked["max_tokens"] == 1 and sent["max_tokens"] == 50
    for name in ("ignore_eos", "stream_options"):
        assert (name in sent) is (name not in left_out)


def test_the_newer_name_of_max_tokens() -> None:
    message = "'max_tokens' is not supported. Use 'max_completion_tokens' instead."
    server = RawServer(refusal(message), WHOLE)
    with_server(server, lambda target: target.check(Work(prompt="x", max_tokens=9)))
    body = server.requests[-1][1]
    assert "max_tokens" not in body and body["max_completion_tokens"] == 1


def test_a_check_that_fails_is_an_error() -> None:
    server = RawServer(refusal("no"), refusal("no"), refusal("no"))
    with pytest.raises(CallError, match="no"):
        with_server(server, lambda target: target.check(Work(prompt="x")))


@pytest.mark.parametrize("body", [b"{}", b'{"data": []}', b"[]", b"<html>", b'{"data": [{}]}'])
def test_a_server_without_the_api(body: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)

    async def use(target: ServerTarget) -> None:
        raise AssertionError("it opened")

    with pytest.raises(CallError, match="does not answer as an OpenAI API does"):
        with_server(RawServer([head + body]), use, model=None)


@pytest.mark.parametrize(
    "url", ["ftp://x", "http://", "http://a:b", "http://[::1", "http://u:p@h", "http://h/?a=b", ""]
)
def test_bad_urls(url: str) -> None:
    with pytest.raises(ConfigError, match="url"):
        Address.of(url, {})


@pytest.mark.parametrize("headers", [{"a b": "c"}, {"a": "b\r\nc: d"}, {"a": "\u4e00"}, {"": "x"}])
def test_bad_headers(headers: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="header"):
        Address.of("http://h", headers)


@pytest.mark.parametrize(
    ("url", "host", "port", "prefix"),
    [
        ("h", "h", 80, ""),
        ("h:8000/v1", "h", 8000, ""),
        ("https://h/api/v1/", "h", 443, "/api"),
        ("http://[::1]:9", "::1", 9, ""),
    ],
)
def test_urls(url: str, host: str, port: int, prefix: str) -> None:
    address = Address.of(url, {})
    assert (address.host, address.port, address.prefix) == (host, port, prefix)


# ---- what servers tell about themselves


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
