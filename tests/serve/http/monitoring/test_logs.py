"""The access log has the key, route and result of a request, and no text of clients or models."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from serve.cli.log_format import JsonFormatter, TextFormatter, use_format
from serve.errors import ConfigError
from serve.http.edge.connection import LOG_INTERVAL_S, LimitedLog
from serve.http.edge.keys import load_keys
from tests.support.http.api_keys import ALICE
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.raw_requests import BODY, CHAT, RAW_BODY, request
from tests.support.http.running_server import Served, run_with_server

CANARY = "CANARY7f3a"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """Collects what is logged at every level."""
    text = io.StringIO()
    handler = logging.StreamHandler(text)
    root = logging.getLogger()
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield text
    root.removeHandler(handler)
    root.setLevel(level)


def set_formatter(lines: io.StringIO, formatter: logging.Formatter) -> None:
    handler = next(
        handler
        for handler in logging.getLogger().handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream is lines
    )
    handler.setFormatter(formatter)


def access_lines(lines: io.StringIO) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in lines.getvalue().splitlines()]
    return [line for line in records if line["logger"] == "serve.access"]


@pytest.mark.row("A6")
def test_a_line_for_each_request(lines: io.StringIO) -> None:
    set_formatter(lines, JsonFormatter())

    async def check(served: Served) -> None:
        await served.raw(request(RAW_BODY, f"x-api-key: {ALICE}", "X-Request-Id: mine"))
        headers = {"x-api-key": ALICE}
        async with served.session.post(
            CHAT, json={**BODY, "stream": True}, headers=headers
        ) as response:
            await response.read()
        await served.raw(request(b"{", f"x-api-key: {ALICE}"))
        await served.raw(request())
        await served.raw(request(first="POST /secret/path?with=query HTTP/1.1"))
        await served.raw(request(b"", first="GET /health HTTP/1.1", kind=None, length=None))

    run_with_server(FakeEngine(), check, api_keys=(f"alice:{ALICE}",))
    logged = access_lines(lines)
    whole, stream, bad, no_key, _, health = logged
    assert re.fullmatch("req_[0-9a-f]{24}", whole.pop("id"))
    assert whole.pop("time").endswith("Z")
    assert 0 < whole.pop("ttft") <= whole.pop("seconds") < 5
    assert whole.pop("bytes") > 100
    assert whole == {
        "level": "info",
        "logger": "serve.access",
        "key": "alice",
        "method": "POST",
        "route": CHAT,
        "status": 200,
        "client_id": "mine",
        "prompt_tokens": 2,
        "completion_tokens": 11,
        "finish": "stop",
    }
    assert (stream["status"], stream["completion_tokens"]) == (200, 11)
    assert stream["bytes"] > 1000
    assert (bad["status"], bad["error"], bad["key"]) == (400, "invalid_json", "alice")
    assert (no_key["status"], no_key["error"], no_key["key"]) == (401, "invalid_api_key", None)
    assert logged[4]["route"] is None
    assert (health["route"], health["status"], health["key"]) == ("/health", 200, None)
    assert "secret" not in lines.getvalue()


@pytest.mark.row("C4")
def test_a_client_that_leaves_is_logged_as_499(lines: io.StringIO) -> None:
    set_formatter(lines, JsonFormatter())

    async def check(served: Served) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(request(RAW_BODY.replace(b"{", b'{"stream":true,', 1)))
        await served.until(lambda: len(served.engine.running) == 1)
        await asyncio.sleep(0.1)
        writer.close()
        await served.until(lambda: not served.engine.running)
        _, incomplete = await asyncio.open_connection("127.0.0.1", served.port)
        incomplete.write(request(RAW_BODY[:9], length="100"))
        await asyncio.sleep(0.05)
        incomplete.close()
        await served.until(lambda: len(access_lines(lines)) == 2)

    run_with_server(FakeEngine(step_s=0.02, repeat=1000), check)
    disconnected, incomplete = access_lines(lines)
    assert (disconnected["status"], disconnected["finish"]) == (499, "abort")
    assert disconnected["completion_tokens"] > 0
    assert incomplete["status"] == 499
    assert "Traceback" not in lines.getvalue()


def test_the_access_log_can_be_off(lines: io.StringIO) -> None:
    async def check(served: Served) -> None:
        await served.post(CHAT, BODY)

    run_with_server(FakeEngine(), check, access_log=False)
    assert "route=" not in lines.getvalue()


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()])
@pytest.mark.row("A16")
def test_nothing_that_a_client_says_is_logged(
    lines: io.StringIO, formatter: logging.Formatter, capfd: pytest.CaptureFixture[str]
) -> None:
    """No level logs keys, prompts, tools, headers, paths or names of fields, even on errors."""
    set_formatter(lines, formatter)
    tool = {"type": "function", "function": {"name": CANARY, "parameters": {"title": CANARY}}}
    bodies: list[dict[str, Any]] = [
        BODY,
        {**BODY, "stream": True},
        {**BODY, "messages": [{"role": "user", "content": CANARY}], "user": CANARY},
        {**BODY, "messages": [{"role": CANARY, "content": CANARY}]},
        {**BODY, "tools": [tool]},
        {**BODY, "model": CANARY},
        {**BODY, CANARY: CANARY},
        {**BODY, "stop": [CANARY], "metadata": {CANARY: CANARY}},
        {**BODY, "temperature": CANARY},
        {**BODY, "response_format": {"type": CANARY}},
    ]
    head = [f"X-{CANARY}: {CANARY}", f"User-Agent: {CANARY}", f"X-Forwarded-For: {CANARY}"]

    async def check(served: Served) -> None:
        for key in (ALICE, CANARY * 3):
            for body in bodies:
                data = json.dumps(body).encode()
                await served.raw(request(data, *head, f"Authorization: Bearer {key}"))
        for first in (f"GET /{CANARY} HTTP/1.1", f"{CANARY} / HTTP/1.1", f"POST {CHAT}?a={CANARY}"):
            await served.raw(request(b"", *head, f"x-api-key: {ALICE}", first=first))
        for data in (f"{CANARY}\r\n\r\n".encode(), f"GET / HTTP/1.1\r\n{CANARY}\r\n\r\n".encode()):
            await served.raw(data)
        served.engine.fail_at = 0
        await served.raw(request(RAW_BODY, *head, f"x-api-key: {ALICE}"))
        served.engine.submit_chat = None  # type: ignore[assignment]  # a bug of the server
        data = json.dumps(bodies[2]).encode()
        assert (await served.raw(request(data, f"x-api-key: {ALICE}"))).status == 500

    run_with_server(FakeEngine(reply=CANARY), check, api_keys=(f"alice:{ALICE}",))
    out, err = capfd.readouterr()
    text = lines.getvalue() + out + err
    assert "alice" in text
    assert "Traceback" in text
    assert CANARY not in text
    assert ALICE not in text


@pytest.mark.row("A16")
def test_one_record_is_one_line() -> None:
    message = "a\nb\r\x1b[31mred\x00\u2028\u202eend"
    record = logging.LogRecord("n", logging.INFO, "f", 1, "%s", (message,), None)
    text = TextFormatter().format(record)
    assert text.endswith("a\\x0ab\\x0d\\x1b[31mred\\x00\\u2028\\u202eend")
    assert len(text.splitlines()) == 1
    line = JsonFormatter().format(record)
    assert json.loads(line)["message"] == message
    assert line.isascii() and len(line.splitlines()) == 1


def test_tracebacks() -> None:
    try:
        raise ValueError("x\ny")
    except ValueError:
        record = logging.LogRecord("n", logging.ERROR, "f", 1, "failed", (), sys.exc_info())
    assert "ValueError" in json.loads(JsonFormatter().format(record))["exception"]
    first, *rest = TextFormatter().format(record).split("\n")
    assert first.endswith("failed")
    assert all(line.startswith("    ") for line in rest)


def test_use_format(lines: io.StringIO) -> None:
    use_format("json")
    try:
        logging.getLogger("x").info("hello")
        assert json.loads(lines.getvalue())["message"] == "hello"
    finally:
        use_format("text")


def test_repeated_warnings_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    now_s = [0.0]
    log = LimitedLog(logging.getLogger("x"), lambda: now_s[0])
    for _ in range(1000):
        log.warning("too many of %d", 3)
        log.warning("something else")
    now_s[0] += LOG_INTERVAL_S
    log.warning("too many of %d", 4)
    assert [record.getMessage() for record in caplog.records] == [
        "too many of 3",
        "something else",
        "too many of 4 (and 999 more times)",
    ]


def test_the_name_of_a_key_has_no_line_break() -> None:
    with pytest.raises(ConfigError):
        load_keys(None, (f"a\nb:{ALICE}",))
