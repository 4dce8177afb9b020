"""The calls of the memory storms, whose answers or work are far larger than their bodies.

At a scale of 1 their bodies are about as large as the server's limits allow. Bodies that need
stored responses make them when they are built.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from serve.errors import MergestepError

JSON_TYPE = {"Content-Type": "application/json"}
_ANSWER_S = 300.0


@dataclass(frozen=True, slots=True)
class Server:
    pid: int
    host: str
    port: int
    model: str
    max_model_len: int

    def connect(self, timeout_s: float = _ANSWER_S) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)

    def get(self, path: str) -> bytes:
        return self._answer("GET", path)[1]

    def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Returns the status and the whole answer."""
        return self._answer("POST", path, body)

    def _answer(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        connection = self.connect()
        try:
            connection.request(method, path, body, JSON_TYPE)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()


Body = dict[str, Any]
DIGITS = "0123456789"


def _tokenize(server: Server, scale: float) -> Body:
    return {"prompt": DIGITS * int(1e5 * scale)}


def _detokenize(server: Server, scale: float) -> Body:
    return {"tokens": [300 + i % 500 for i in range(int(262_144 * scale))]}


def _chat(server: Server, scale: float) -> Body:
    """It fills half of the context, at one token for each digit."""
    text = DIGITS * (server.max_model_len // 20)
    return {"model": server.model, "messages": [{"role": "user", "content": text}]}


def _messages(server: Server, scale: float) -> Body:
    """They are too long for the context, which only their text shows."""
    roles = "user", "assistant"
    messages = [{"role": roles[i % 2], "content": DIGITS} for i in range(int(8000 * scale) | 1)]
    return {"model": server.model, "messages": messages}


def _items(server: Server, scale: float) -> Body:
    items = [{"role": "user", "content": DIGITS} for _ in range(int(8000 * scale))]
    return {"model": server.model, "input": items}


def _long_prompt(server: Server, scale: float) -> Body:
    """It has as many characters as a prompt may have, and far too many tokens."""
    return {"model": server.model, "prompt": DIGITS * int(8e5 * scale), "max_tokens": 1}


def _tokenized_prompt(server: Server, scale: float) -> Body:
    """It has too many tokens for any context, but not too many to be tokenized beside others."""
    return {"model": server.model, "prompt": DIGITS * int(2e5 * scale), "max_tokens": 1}


def _continued(server: Server, scale: float) -> Body:
    """It continues three stored responses of 5 MB each. Their texts are thoughts, which the model's
    template leaves out, so that the prompt is short."""
    thought = {"type": "reasoning_text", "text": DIGITS * int(5e5 * scale)}
    items = [{"type": "reasoning", "content": [thought]}, {"role": "user", "content": "hello"}]
    body: Body = {"model": server.model, "input": items, "max_output_tokens": 16}
    for _ in range(3):
        status, answer = server.post("/v1/responses", json.dumps(body).encode())
        if status != 200:
            raise MergestepError(f"a response was not stored: {status} {answer[:300]!r}")
        body["previous_response_id"] = json.loads(answer)["id"]
    return body | {"input": "go on", "store": False}


def _counted(server: Server, scale: float) -> Body:
    fields = "model", "input", "previous_response_id"
    return {name: value for name, value in _continued(server, scale).items() if name in fields}


def _embeddings(server: Server, scale: float) -> Body:
    return {"model": server.model, "input": [f"text {i}" for i in range(int(120 * scale))]}


def _prompt_logprobs(server: Server, scale: float) -> Body:
    size = min(256, server.max_model_len // 2)
    count = max(1, int(250_000 * scale) // (size * 6))
    prompts = [[300 + i % 500 for i in range(size)]] * count
    body = {"prompt": prompts, "max_tokens": 1, "logprobs": 5, "echo": True}
    return {"model": server.model, **body}


def _logprobs(server: Server, scale: float) -> Body:
    body = {"n": max(1, int(128 * scale)), "logprobs": True, "top_logprobs": 20, "max_tokens": 64}
    messages = [{"role": "user", "content": "hello"}]
    return {"model": server.model, "messages": messages, **body}


class Kind(NamedTuple):
    """A kind of call. status: that of an answer that is not refused for lack of memory. is_long: it
    goes to the server with the long context."""

    path: str
    body: Callable[[Server, float], Body]
    more: Body | None = None
    status: int = 200
    is_long: bool = False


_STRINGS = {"return_token_strs": True}
KINDS = {
    "tokenize": Kind("/tokenize", _tokenize),
    "token strings": Kind("/tokenize", _tokenize, _STRINGS),
    "tokenize a chat": Kind("/tokenize", _chat, _STRINGS, is_long=True),
    "detokenize": Kind("/detokenize", _detokenize),
    "count long messages": Kind("/v1/messages/count_tokens", _chat, is_long=True),
    "count messages": Kind("/v1/messages/count_tokens", _messages, status=400),
    "count items": Kind("/v1/responses/input_tokens", _items, status=400),
    "count a history": Kind("/v1/responses/input_tokens", _counted),
    "continue a history": Kind("/v1/responses", _continued),
    "long prompts": Kind("/v1/completions", _long_prompt, status=400),
    "long prompts, tokenized": Kind("/v1/completions", _long_prompt, status=400, is_long=True),
    "prompts, tokenized": Kind("/v1/completions", _tokenized_prompt, status=400, is_long=True),
    "embeddings": Kind("/v1/embeddings", _embeddings),
    "echo with logprobs": Kind("/v1/completions", _prompt_logprobs),
    "n with logprobs": Kind("/v1/chat/completions", _logprobs),
}
