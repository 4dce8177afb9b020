"""Errors of /v1/messages, as Anthropic's official client raises them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from serve.errors import GenerationError
from serve.http import HttpSettings
from serve.text.chat_parser.syntax.parts import Part, Text
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.official_clients import anthropic_client
from tests.support.http.running_server import ServerThread
from tests.support.http.scripted_chat import script_answers

USER: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def fake() -> Iterator[anthropic.Anthropic]:
    engine = FakeEngine(model_name="m")
    with ServerThread(engine) as server, anthropic_client(server) as client:
        yield client


@pytest.mark.parametrize(
    ("change", "error", "kind", "status"),
    [
        ({"model": "x"}, anthropic.NotFoundError, "not_found_error", 404),
        ({"max_tokens": -1}, anthropic.BadRequestError, "invalid_request_error", 400),
    ],
)
def test_errors_raise_the_clients_classes(
    fake: anthropic.Anthropic,
    change: dict[str, Any],
    error: type[anthropic.APIStatusError],
    kind: str,
    status: int,
) -> None:
    with pytest.raises(error) as caught:
        fake.messages.create(**{"model": "m", "max_tokens": 9, "messages": USER, **change})
    assert (caught.value.type, caught.value.status_code) == (kind, status)
    assert caught.value.request_id is not None


def test_a_full_queue_is_overloaded() -> None:
    engine = FakeEngine(model_name="m", max_waiting=0)
    with (
        ServerThread(engine) as server,
        anthropic_client(server) as client,
        pytest.raises(anthropic._exceptions.OverloadedError) as caught,
    ):
        client.messages.create(model="m", max_tokens=9, messages=USER)
    assert caught.value.type == "overloaded_error"
    assert caught.value.response.headers["retry-after"] in ("2", "3")


def test_keys_and_their_limits(tmp_path: Path) -> None:
    secret, path = "k" * 20, tmp_path / "keys.json"
    keys = [{"name": "alice", "key": secret, "requests_per_minute": 2, "max_tokens": 500}]
    path.write_text(json.dumps({"keys": keys}))
    path.chmod(0o600)
    options: Any = {"model": "m", "max_tokens": 99, "messages": USER}
    settings = HttpSettings(port=0, api_key_file=str(path))
    with ServerThread(FakeEngine(model_name="m"), settings) as server:
        with (
            anthropic_client(server) as client,
            pytest.raises(anthropic.AuthenticationError) as denied,
        ):
            client.messages.create(**options)
        assert denied.value.type == "authentication_error"
        assert denied.value.request_id is not None
        with anthropic_client(server).with_options(api_key=secret) as client:
            with pytest.raises(anthropic.BadRequestError, match="max_tokens is above 500"):
                client.messages.create(**{**options, "max_tokens": 501})
            assert client.messages.create(**options).stop_reason == "end_turn"
            with pytest.raises(anthropic.RateLimitError) as limited:
                client.messages.create(**options)
    assert limited.value.type == "rate_limit_error"
    assert int(limited.value.response.headers["retry-after"]) >= 1


def test_a_request_that_times_out() -> None:
    engine = FakeEngine(model_name="m", step_s=0.02, repeat=100)
    options: Any = {"model": "m", "max_tokens": 999, "messages": USER}
    options["extra_headers"] = {"X-Request-Timeout": "0.2"}
    with ServerThread(engine) as server, anthropic_client(server) as client:
        with pytest.raises(anthropic.APIStatusError) as timed_out:
            client.messages.create(**options)
        assert (timed_out.value.status_code, timed_out.value.type) == (504, "timeout_error")
        with (
            pytest.raises(anthropic.APIStatusError) as in_stream,
            client.messages.stream(**options) as stream,
        ):
            stream.until_done()
        assert (in_stream.value.status_code, in_stream.value.type) == (200, "timeout_error")


@pytest.mark.parametrize("is_early", [True, False])
def test_an_error_of_the_engine(
    fake: anthropic.Anthropic, monkeypatch: pytest.MonkeyPatch, is_early: bool
) -> None:
    """The error is the whole answer before the first token, and the last event after it."""
    parts: list[list[Part] | Exception] = [] if is_early else [[Text("o")]]
    script_answers(monkeypatch, [*parts, GenerationError("a bad step")])
    texts: list[str] = []
    with (
        pytest.raises(anthropic.APIStatusError) as caught,
        fake.messages.stream(model="m", max_tokens=9, messages=USER) as stream,
    ):
        texts.extend(stream.text_stream)
    assert texts == ([] if is_early else ["o"])
    assert caught.value.type == "api_error"
    assert caught.value.status_code == (500 if is_early else 200)
    assert "bad step" not in str(caught.value)
