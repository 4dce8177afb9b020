"""Shapes, streams and errors of completions and chat over the scripted engine."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from tests.support.http.fake_engine import FakeEngine
from tests.support.http.running_server import Served, run_with_server

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
COMPLETION_BODY: dict[str, Any] = {"model": "fake", "prompt": "hi", "max_tokens": 100}
CHAT_BODY: dict[str, Any] = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
HARD_TEXT = 'a\n\ndata: [DONE]\r\n"\\ \u2028 naïve 👍🏽 日本語 \x00 </s>'
USAGE = {"stream_options": {"include_usage": True}}


USAGE_OF_2_AND_11 = {
    "prompt_tokens": 2,
    "completion_tokens": 11,
    "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0},
}


def test_completion_shape() -> None:
    async def check(served: Served) -> None:
        status, answer = await served.post(COMPLETIONS, COMPLETION_BODY)
        assert status == 200
        assert answer.pop("id").startswith("cmpl-")
        assert answer.pop("created") > 1_600_000_000
        assert answer.pop("system_fingerprint").startswith("fp_")
        choice = {
            "index": 0,
            "text": "Hello there",
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
        assert answer == {
            "object": "text_completion",
            "model": "fake",
            "choices": [choice],
            "usage": USAGE_OF_2_AND_11,
        }

    run_with_server(FakeEngine(), check)


def test_chat_shape() -> None:
    async def check(served: Served) -> None:
        status, answer = await served.post(CHAT, {**CHAT_BODY, "max_tokens": 5})
        assert status == 200
        assert answer["id"].startswith("chatcmpl-")
        assert answer["object"] == "chat.completion"
        assert answer["choices"] == [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ]
        assert answer["usage"]["completion_tokens"] == 5

    run_with_server(FakeEngine(), check)


def test_many_prompts_and_n() -> None:
    async def check(served: Served) -> None:
        body = {**COMPLETION_BODY, "prompt": ["a", "bb", "ccc"], "n": 2}
        _, answer = await served.post(COMPLETIONS, body)
        assert [choice["index"] for choice in answer["choices"]] == list(range(6))
        assert {choice["text"] for choice in answer["choices"]} == {"Hello there"}
        assert answer["usage"] == {
            "prompt_tokens": 6,
            "completion_tokens": 66,
            "total_tokens": 72,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        }
        events = await served.events(COMPLETIONS, {**body, **USAGE})
        texts = [""] * 6
        reasons: dict[int, str] = {}
        for event in events[:-2]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
                if choice["finish_reason"]:
                    reasons[choice["index"]] = choice["finish_reason"]
        assert texts == ["Hello there"] * 6
        assert reasons == dict.fromkeys(range(6), "stop")
        assert events[-2]["usage"] == answer["usage"]

    run_with_server(FakeEngine(), check)


def test_streamed_chat() -> None:
    async def check(served: Served) -> None:
        events = await served.events(CHAT, CHAT_BODY)
        assert events[-1] == "[DONE]"
        chunks = events[:-1]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert all("usage" not in chunk for chunk in chunks)
        assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:])
        assert chunks[-1]["choices"][0] == {
            "index": 0,
            "delta": {},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])

    run_with_server(FakeEngine(), check)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_include_usage(path: str) -> None:
    async def check(served: Served) -> None:
        body = COMPLETION_BODY if path == COMPLETIONS else CHAT_BODY
        *chunks, usage, done = await served.events(path, {**body, **USAGE})
        assert done == "[DONE]"
        assert usage["choices"] == []
        details = {"completion_tokens_details": {"reasoning_tokens": 0}} if path == CHAT else {}
        assert usage["usage"] == {**USAGE_OF_2_AND_11, **details}
        assert all(chunk["usage"] is None for chunk in chunks)

    run_with_server(FakeEngine(), check)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("logprobs", [False, True])
def test_streamed_text_is_the_whole_text(path: str, logprobs: bool) -> None:
    """The stream preserves newlines, quotes, separators and text that looks like an event."""

    async def check(served: Served) -> None:
        if path == CHAT:
            body = {**CHAT_BODY, **({"logprobs": True, "top_logprobs": 2} if logprobs else {})}
        else:
            body = {**COMPLETION_BODY, **({"logprobs": 2} if logprobs else {})}
        _, answer = await served.post(path, body)
        events = await served.events(path, body)
        assert events.pop() == "[DONE]"
        choices = [event["choices"][0] for event in events]
        if path == CHAT:
            assert answer["choices"][0]["message"]["content"] == HARD_TEXT
            assert "".join(c["delta"].get("content", "") for c in choices) == HARD_TEXT
        else:
            assert answer["choices"][0]["text"] == HARD_TEXT
            assert "".join(c["text"] for c in choices) == HARD_TEXT
        whole = answer["choices"][0]["logprobs"]
        assert (whole is not None) == logprobs
        if whole is not None:
            for name in whole:
                if name != "refusal":
                    parts = [c["logprobs"][name] for c in choices if c["logprobs"]]
                    assert [item for part in parts for item in part] == whole[name]

    run_with_server(FakeEngine(reply=HARD_TEXT), check)


def test_logprob_shapes() -> None:
    async def check(served: Served) -> None:
        _, answer = await served.post(COMPLETIONS, {**COMPLETION_BODY, "logprobs": 2})
        assert answer["choices"][0]["logprobs"] == {
            "tokens": ["o", "k"],
            "token_logprobs": [-0.5, -0.5],
            "top_logprobs": [{"o": -0.5, "n": -1.5}, {"k": -0.5, "j": -1.5}],
            "text_offset": [0, 1],
        }
        _, answer = await served.post(CHAT, {**CHAT_BODY, "logprobs": True, "top_logprobs": 1})
        top = {"token": "o", "logprob": -0.5, "bytes": [111]}
        assert answer["choices"][0]["logprobs"]["content"][0] == {**top, "top_logprobs": [top]}

    run_with_server(FakeEngine(reply="ok"), check)


def test_zero_tokens() -> None:
    async def check(served: Served) -> None:
        status, answer = await served.post(COMPLETIONS, {**COMPLETION_BODY, "max_tokens": 0})
        assert status == 200
        assert answer["choices"][0]["text"] == ""
        events = await served.events(COMPLETIONS, {**COMPLETION_BODY, "max_tokens": 0})
        assert events[0]["choices"][0]["finish_reason"] == "length"

    run_with_server(FakeEngine(), check)


def test_models() -> None:
    async def check(served: Served) -> None:
        async with served.session.get("/v1/models") as response:
            (model,) = (await response.json())["data"]
        assert (model["id"], model["object"]) == ("org/fake", "model")
        for name in ("org/fake", "org%2Ffake"):
            async with served.session.get(f"/v1/models/{name}") as response:
                assert await response.json() == model
        for name in ("other", "../../../etc/passwd", "%2e%2e/x", "org/fake/", "%ff", "ORG/FAKE"):
            answer = await served.raw(
                f"GET /v1/models/{name} HTTP/1.1\r\nHost: [::1]\r\n\r\n".encode()
            )
            assert answer.status == 404
            assert answer.error()["code"] == "model_not_found"

    run_with_server(FakeEngine(model_name="org/fake"), check)


def test_every_answer_has_a_request_id_and_a_server_header() -> None:
    async def check(served: Served) -> None:
        seen = set()
        requests = [("GET", "/health"), ("GET", "/nowhere"), ("POST", CHAT), ("PUT", CHAT)]
        for method, path in requests:
            headers = {"x-request-id": "mine"}
            async with served.session.request(method, path, headers=headers) as response:
                request_id = response.headers["x-request-id"]
                assert re.fullmatch(r"req_[0-9a-f]{24}", request_id)
                assert response.headers["Server"] == "mergestep"
                seen.add(request_id)
        body = {**CHAT_BODY, "stream": True}
        async with served.session.post(CHAT, json=body) as response:
            seen.add(response.headers["x-request-id"])
            assert response.headers["Server"] == "mergestep"
        assert len(seen) == len(requests) + 1

    run_with_server(FakeEngine(), check)


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "allow"),
    [
        ("GET", "/v1", 404, "unknown_url", None),
        ("GET", "/nowhere", 404, "unknown_url", None),
        ("GET", "//v1/models", 404, "unknown_url", None),
        ("GET", "/v1/./models", 404, "unknown_url", None),
        ("GET", "/v1/%2e%2e/x", 404, "unknown_url", None),
        ("GET", "/V1/models", 404, "unknown_url", None),
        ("GET", "/v1/models/", 404, "unknown_url", None),
        ("GET", "/v1/models;a=b", 404, "unknown_url", None),
        ("GET", "/v1/models%00", 404, "unknown_url", None),
        ("GET", "/" + "x" * 5000, 404, "unknown_url", None),
        ("GET", CHAT, 405, "method_not_allowed", "POST"),
        ("PUT", COMPLETIONS, 405, "method_not_allowed", "POST"),
        ("TRACE", CHAT, 405, "method_not_allowed", "POST"),
        ("PROPFIND", CHAT, 405, "method_not_allowed", "POST"),
        ("OPTIONS", CHAT, 405, "method_not_allowed", "POST"),
        ("POST", "/v1/models", 405, "method_not_allowed", "GET, HEAD"),
        ("DELETE", "/health", 405, "method_not_allowed", "GET, HEAD"),
    ],
)
def test_routing_errors(method: str, path: str, status: int, code: str, allow: str | None) -> None:
    async def check(served: Served) -> None:
        answer = await served.raw(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert answer.status == status
        assert answer.error()["code"] == code
        assert len(answer.error()["message"]) < 250
        assert answer.headers.get("allow") == allow

    run_with_server(FakeEngine(), check)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        (CHAT, {**CHAT_BODY, "temperature": 3}, 400, "temperature", "invalid_value"),
        (CHAT, {**CHAT_BODY, "foo": 1}, 400, "foo", "unknown_parameter"),
        (CHAT, {**CHAT_BODY, "model": "gpt"}, 404, "model", "model_not_found"),
        (CHAT, {**CHAT_BODY, "model": "../../etc/passwd"}, 404, "model", "model_not_found"),
        (CHAT, {**CHAT_BODY, "max_tokens": 10**9}, 400, "messages", "context_length_exceeded"),
        (CHAT, {**CHAT_BODY, "logit_bias": {"999": 1}}, 400, "logit_bias", "invalid_value"),
        (COMPLETIONS, {**COMPLETION_BODY, "prompt": ""}, 400, "prompt", "invalid_prompt"),
        (COMPLETIONS, {**COMPLETION_BODY, "prompt": ["a", ""]}, 400, "prompt", "invalid_prompt"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_refused_requests(
    path: str, body: dict[str, Any], status: int, param: str, code: str, stream: bool
) -> None:
    """A refusal is a plain answer, also with stream: true, and leaves no request behind."""

    async def check(served: Served) -> None:
        answer_status, answer = await served.post(path, {**body, "stream": stream})
        error = answer["error"]
        assert (answer_status, error["param"], error["code"]) == (status, param, code)
        assert error["type"] == "invalid_request_error"
        assert not served.engine.running
        assert not served.engine.waiting

    run_with_server(FakeEngine(), check)


@pytest.mark.row("A13")
def test_overload_is_429_with_retry_after() -> None:
    async def check(served: Served) -> None:
        tasks = [asyncio.create_task(served.post(CHAT, CHAT_BODY)) for _ in range(2)]
        await served.until(lambda: len(served.engine.waiting) == 1)
        async with served.session.post(CHAT, json={**CHAT_BODY, "stream": True}) as response:
            assert response.status == 429
            assert response.headers["Retry-After"] in ("2", "3")  # 1.5 s and a random addition
            error = (await response.json())["error"]
            assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        body = {**COMPLETION_BODY, "prompt": ["a", "b", "c"]}
        assert (await served.post(COMPLETIONS, body))[0] == 429
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200, 200]

    run_with_server(FakeEngine(slots=1, max_waiting=1, step_s=0.02), check)


def test_an_engine_failure_is_a_500_without_details() -> None:
    async def check(served: Served) -> None:
        for stream in (False, True):
            status, answer = await served.post(CHAT, {**CHAT_BODY, "stream": stream})
            assert status == 500
            assert answer["error"]["type"] == "server_error"
            assert answer["error"]["code"] == "internal_error"
            assert "bad step" not in answer["error"]["message"]

    run_with_server(FakeEngine(fail_at=0), check)


def test_a_failure_in_a_stream_is_its_last_event() -> None:
    async def check(served: Served) -> None:
        async with served.session.post(CHAT, json={**CHAT_BODY, "stream": True}) as response:
            assert response.status == 200
            body = await response.read()
        assert b"[DONE]" not in body
        last = body.rstrip().rpartition(b"\n\n")[2]
        assert last.startswith(b'data: {"error":{')
        assert b'"code":"internal_error"' in last

    run_with_server(FakeEngine(fail_at=3), check)


def test_a_bug_is_a_500_and_the_server_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(served: Served) -> None:
        def broken(*_: object, **__: object) -> None:
            raise KeyError("/secret/path")

        with monkeypatch.context() as patch:
            patch.setattr(served.engine, "submit_chat", broken)
            status, answer = await served.post(CHAT, CHAT_BODY)
        assert status == 500
        assert "secret" not in str(answer)
        assert (await served.post(CHAT, CHAT_BODY))[0] == 200

    run_with_server(FakeEngine(), check)
