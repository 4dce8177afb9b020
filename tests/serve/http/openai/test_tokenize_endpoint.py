"""/tokenize and /detokenize on a real tokenizer, and /version."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
import requests
import uvloop

from serve import Engine, __version__
from serve.http import HttpServer, HttpSettings
from serve.text.tokenizer import Tokenizer
from tests.support.engine.checkpoints import checkpoint
from tests.support.http.running_server import ServerThread

TEXT = "the quick brown fox, naïve 👍🏽 日本語"
MESSAGES = [{"role": "user", "content": "hello"}]


class Client:
    def __init__(self, url: str, session: requests.Session) -> None:
        self._url, self._session = url, session

    def get(self, path: str) -> requests.Response:
        return self._session.get(self._url + path, timeout=30)

    def post(self, path: str, json: Any) -> requests.Response:
        return self._session.post(self._url + path, json=json, timeout=30)


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    engine = Engine(str(checkpoint("llama")), served_model_name="m", max_num_seqs=8)
    with ServerThread(engine) as server, requests.Session() as session:
        yield Client(server.url, session)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(checkpoint("llama"))


def test_tokenize_and_detokenize(client: Client, tokenizer: Tokenizer) -> None:
    answer = client.post("/tokenize", json={"model": "m", "prompt": TEXT}).json()
    assert answer["tokens"] == tokenizer.encode(TEXT)
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] > 0
    assert answer["token_strs"] is None
    body = {"prompt": TEXT, "add_special_tokens": False}
    plain = client.post("/tokenize", json=body).json()
    assert plain["tokens"] == tokenizer.encode(TEXT, add_special_tokens=False)
    body = {"model": "m", "tokens": plain["tokens"]}
    assert client.post("/detokenize", json=body).json() == {"prompt": TEXT}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_token_strings(client: Client, tokenizer: Tokenizer) -> None:
    body = {"prompt": "the quick fox", "return_token_strs": True}
    answer = client.post("/tokenize", json=body).json()
    assert answer["token_strs"] == [tokenizer.token_text(token) for token in answer["tokens"]]


def test_a_conversation_has_as_many_tokens_as_in_a_chat(client: Client) -> None:
    answer = client.post("/tokenize", json={"messages": MESSAGES}).json()
    body = {"model": "m", "messages": MESSAGES, "max_tokens": 1}
    chat = client.post("/v1/chat/completions", json=body).json()
    assert answer["count"] == chat["usage"]["prompt_tokens"]
    text = client.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"]
    assert text.endswith("user: hello\nassistant: ")


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "code"),
    [
        ("/tokenize", {}, 400, "prompt", "missing_required_parameter"),
        ("/tokenize", {"prompt": 5}, 400, "prompt", "invalid_type"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt", "invalid_type"),
        ("/tokenize", {"prompt": "x" * 1_100_000}, 400, "prompt", "string_above_max_length"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt", "invalid_value"),
        ("/tokenize", {"prompt": "a", "zap": 1}, 400, "zap", "unknown_parameter"),
        ("/tokenize", {"prompt": "a", "return_token_strs": 1}, 400, "return_token_strs", None),
        ("/tokenize", {"messages": []}, 400, "messages", "invalid_value"),
        ("/tokenize", {"prompt": "a", "model": "x"}, 404, "model", "model_not_found"),
        ("/detokenize", {}, 400, "tokens", "missing_required_parameter"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [10**6]}, 400, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [2**31]}, 400, "tokens", "invalid_value"),
        ("/detokenize", {"tokens": [True]}, 400, "tokens", "invalid_type"),
        ("/detokenize", {"tokens": [1] * 300_000}, 400, "tokens", "array_above_max_length"),
        ("/detokenize", {"tokens": [1], "model": "x"}, 404, "model", "model_not_found"),
    ],
)
def test_refused(
    client: Client, path: str, body: Any, status: int, param: str, code: str | None
) -> None:
    answer = client.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param)
    assert code is None or error["code"] == code


def test_every_id_of_the_model_can_be_detokenized(client: Client) -> None:
    """Ids without a text in the tokenizer are valid too."""
    size = client.get("/v1/models/m").json()["vocab_size"]
    answer = client.post("/detokenize", json={"tokens": list(range(size))})
    assert answer.status_code == 200
    assert client.post("/detokenize", json={"tokens": [size]}).status_code == 400


def test_a_long_text_does_not_block_the_event_loop() -> None:
    async def main() -> None:
        engine = Engine(str(checkpoint("llama")), served_model_name="m", max_num_seqs=8)
        async with (
            HttpServer(engine, HttpSettings(port=0)) as server,
            aiohttp.ClientSession(server.url) as session,
        ):
            body = {"prompt": "word naïve " * 50_000}
            call = asyncio.create_task(_count(session, body))
            worst_s = 0.0
            while not call.done():
                start_s = time.perf_counter()
                await asyncio.sleep(0.005)
                worst_s = max(worst_s, time.perf_counter() - start_s)
            assert await call > 50_000
            assert worst_s < 0.5

    async def _count(session: aiohttp.ClientSession, body: Any) -> int:
        async with session.post("/tokenize", json=body) as response:
            return int((await response.json())["count"])

    uvloop.run(main())


def test_version(client: Client) -> None:
    assert client.get("/version").json() == {"version": __version__}


def test_tokenizer_info(client: Client, tokenizer: Tokenizer) -> None:
    """lm-eval counts tokens with it where it does not have the tokenizer's files."""
    answer = client.get("/tokenizer_info").json()
    assert answer["eos_token"] == tokenizer.named_tokens["eos_token"]
    assert answer["pad_token"] == tokenizer.named_tokens.get("pad_token")
    assert answer["chat_template"] == tokenizer.chat_template
    tokens = client.post("/tokenize", json={"prompt": answer["eos_token"]}).json()["tokens"]
    assert tokenizer.eos_token_id in tokens
    assert client.get("/v1/models/m").json()["max_model_len"] == answer["model_max_length"]
