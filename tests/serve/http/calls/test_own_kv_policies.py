"""The field kv_policy of all APIs, at a server that drops K/V: the answers are those of a server
with that policy."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from ops.cpu import native_library
from serve import Engine
from serve.config import DEFAULT_MODEL
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.running_server import Served, ServerThread, run_with_server

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)
SERVER, OWN = "h2o:budget=64", "window:budget=16,least=1"
TEXT = "Once upon a time there was a dog. It liked the sun and the sea. " * 8
USER = [{"role": "user", "content": TEXT}]
# Each row is a path, and a body whose answers do not depend on chance.
APIS: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": (
        "/v1/completions",
        {"prompt": TEXT, "max_tokens": 30, "temperature": 0, "ignore_eos": True},
    ),
    "chat": ("/v1/chat/completions", {"messages": USER, "max_tokens": 30, "temperature": 0}),
    "responses": ("/v1/responses", {"input": TEXT, "max_output_tokens": 30, "temperature": 0}),
    "messages": ("/v1/messages", {"messages": USER, "max_tokens": 30, "temperature": 0}),
}


def engine(kv_policy: str) -> Engine:
    return Engine(
        DEFAULT_MODEL, served_model_name="m", kv_policy=kv_policy, max_num_seqs=4, max_model_len=512
    )


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ServerThread(engine(SERVER)) as server:
        yield server.url


def post(url: str, api: str, **more: Any) -> requests.Response:
    path, body = APIS[api]
    return requests.post(url + path, json={"model": "m", **body, **more}, timeout=30)


def answer(url: str, api: str, **more: Any) -> str:
    """Returns the text of an answer."""
    found = post(url, api, **more)
    assert found.status_code == 200, found.text
    body = found.json()
    if api == "completions":
        return str(body["choices"][0]["text"])
    if api == "chat":
        return str(body["choices"][0]["message"]["content"])
    if api == "responses":
        return str(body["output"][0]["content"][0]["text"])
    return str(body["content"][0]["text"])


@functools.cache
def answers(kv_policy: str) -> dict[str, str]:
    """Returns those of a server with this policy."""
    with ServerThread(engine(kv_policy)) as server:
        return {api: answer(server.url, api) for api in APIS}


@pytest.mark.parametrize("api", APIS)
def test_answers_are_those_of_a_server_with_that_policy(url: str, api: str) -> None:
    found = {policy: answer(url, api, kv_policy=policy) for policy in (OWN, "off", SERVER)}
    assert found == {policy: answers(policy)[api] for policy in found}
    assert found[OWN] != found["off"], "the policy matters"
    assert answer(url, api) == found[SERVER]


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("quest:budget=25%", "a request may say off or NAME:budget=AMOUNT, where NAME is window,"),
        ("best:budget=25%", "kv_policy must be off or one of quest, window, h2o, snapkv,"),
        ("h2o:budget=25", "kv_policy has a budget of 25 tokens: did you mean h2o:budget=25%?"),
        ("h2o", "kv_policy needs a budget, such as h2o:budget=25%"),
        ("none", "kv_policy must be off or one of quest, window, h2o, snapkv,"),
        (5, "kv_policy must be a string"),
        ("x" * 65, "kv_policy is longer than 64 characters"),
    ],
)
def test_what_is_not_possible_is_refused(url: str, api: str, said: Any, message: str) -> None:
    found = post(url, api, kv_policy=said)
    error = found.json()["error"]
    assert (found.status_code, error["type"]) == (400, "invalid_request_error")
    assert message in error["message"]
    if api != "messages":  # whose errors have no such field
        assert error["param"] == "kv_policy"


def test_the_messages_api_hands_the_policy_on() -> None:
    async def check(served: Served) -> None:
        body = {"model": "fake", "messages": USER, "max_tokens": 9}
        for said in ("off", OWN):
            status, _ = await served.post("/v1/messages", {**body, "kv_policy": said})
            assert (status, served.engine.submitted[-1][1].kv_policy) == (200, said)
        await served.post("/v1/messages", body)
        assert served.engine.submitted[-1][1].kv_policy is None
        counted = {"model": "fake", "messages": USER, "kv_policy": OWN}
        status, _ = await served.post("/v1/messages/count_tokens", counted)
        assert status == 400, "it is no part of the prompt"

    run_with_server(FakeEngine(), check)
