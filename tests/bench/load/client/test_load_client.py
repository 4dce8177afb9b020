"""The load generator's connections and requests, over real sockets."""

from __future__ import annotations

import json
import socket
import ssl
import subprocess
from pathlib import Path

import pytest
import uvloop

from bench.load.client.answer import CallError
from bench.load.client.http_client import Address
from bench.load.client.record import Record
from bench.load.client.targets import ServerSettings, ServerTarget
from bench.load.proof.fake_script import Profile, prompt_of, script_of
from bench.load.proof.fake_server import FakeServer
from bench.load.workload.work import Work
from serve.errors import ConfigError
from tests.support.http.fakes_raw_http import (
    CHUNKED,
    CLOSE,
    GOOD,
    UNTIL_CLOSED,
    RawServer,
    Reply,
    framed,
    send_all,
    with_server,
)

# ---- connections

WHOLE: Reply = [CHUNKED, framed(GOOD), b"0\r\n\r\n"]


def test_connections_are_used_again() -> None:
    _, errors, server = send_all(WHOLE, WHOLE, WHOLE, times=3)
    assert errors == ["", "", ""]
    assert server.num_connections == 1


def test_connections_that_the_server_closes_are_not() -> None:
    closing: Reply = [UNTIL_CLOSED, GOOD, CLOSE]
    _, errors, server = send_all(closing, closing, times=2)
    assert errors == ["", ""]
    assert server.num_connections == 2


def test_a_kept_connection_that_was_closed_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server closes a connection after the next request was sent, before any answer."""
    monkeypatch.setattr("bench.load.client.http_client.RACE_S", 5.0)  # this machine may be slow
    _, errors, server = send_all(WHOLE, [CLOSE], WHOLE, times=2)
    assert errors == ["", ""]
    assert server.num_connections == 2 and len(server.requests) == 3


def test_nothing_else_is_sent_twice() -> None:
    _, errors, server = send_all(WHOLE, [b"HTTP/1.1 200 OK\r\n", CLOSE], times=2)
    assert errors[1].startswith("0 connection_lost")
    assert len(server.requests) == 2


def test_after_a_failure_the_next_request_is_well() -> None:
    refused: Reply = [b"HTTP/1.1 429 X\r\nContent-Length: 2\r\n\r\n{}"]
    _, errors, server = send_all(refused, [b"garbage\r\n\r\n"], WHOLE, times=3)
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
    _, _, server = send_all(WHOLE, **settings)
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
        ("http://h:8000/v1/chat/completions", "h", 8000, ""),
        ("h:8000/v1/completions/", "h", 8000, ""),
        ("https://h/api/v1/models", "h", 443, "/api"),
        ("http://v1", "v1", 80, ""),
        ("http://[::1]:9", "::1", 9, ""),
    ],
)
def test_urls(url: str, host: str, port: int, prefix: str) -> None:
    address = Address.of(url, {})
    assert (address.host, address.port, address.prefix) == (host, port, prefix)
