"""Draws the calls of a soak: every API, tools, structured output, log-probabilities, stop strings,
several answers, and hostile bodies among them.

Texts are made of words that are themselves random, so that caches of words, prefixes, grammars,
users and stored responses always meet something new.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from bench.soak.bodies import SEEDS
from bench.soak.mutate import mutate

KEYS = tuple(f"soak-{number}:soak-key-{number:08d}" for number in range(8))
"""NAME:KEY of the clients, for the server's key file."""

MAX_ANSWER_TOKENS = 48
NUM_PREFIXES = 64
HOSTILE = "hostile: "  # begins the kinds of hostile calls
NUM_USERS = 4000
_SYLLABLES = tuple(a + b for a in "bdfgklmnprstvz" for b in ("a", "e", "i", "o", "u", "ar", "en"))


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request. kind: for the report. refusals: the codes of errors that are no failure,
    beside those of a full server. is_hostile: no refusal is one."""

    kind: str
    path: str
    body: bytes = b""
    method: str = "POST"
    headers: dict[str, str] = field(default_factory=dict)
    refusals: tuple[str, ...] = ()
    is_hostile: bool = False

    def accepts(self, status: int, code: str) -> bool:
        """Returns whether an answer is correct. code: that of its error."""
        if status in (200, 429):
            return True
        return status < 500 and (self.is_hostile or code in self.refusals)


class Calls:
    """Draws calls for the model `model` with contexts of max_model_len tokens."""

    def __init__(self, model: str, max_model_len: int, seed: int, hostile_share: float) -> None:
        self._rng = random.Random(seed)
        self._model = model
        self._max_words = max(2, min(160, max_model_len // 16))
        self._hostile_share = hostile_share
        # shared by all streams of the same seed, so that the prefix cache has hits
        shared = random.Random(0)
        self._prefixes = [_text(shared, self._max_words) for _ in range(NUM_PREFIXES)]
        self._response_ids: list[str] = []

    def draw(self) -> Call:
        rng = self._rng
        if rng.random() < self._hostile_share:
            name = rng.choice(list(_HOSTILE))
            return _HOSTILE[name](self)
        make = rng.choices(list(_VALID), list(_VALID.values()))[0]
        return make(self)

    def note_response(self, response_id: str) -> None:
        """Keeps the id of a stored response, for calls that continue, read or delete it."""
        self._response_ids = [*self._response_ids[-7:], response_id]

    # ---- parts of bodies

    def headers(self) -> dict[str, str]:
        key = self._rng.choice(KEYS).partition(":")[2]
        return {"Authorization": f"Bearer {key}", "X-Request-Id": f"soak-{self._rng.random()}"}

    def text(self, most: int | None = None) -> str:
        return _text(self._rng, most or self._max_words)

    def prompt(self) -> str:
        """Returns a text that often begins as others do."""
        if self._rng.random() < 0.5:
            return self._rng.choice(self._prefixes) + self.text(self._max_words // 4)
        return self.text()

    def sampling(self) -> dict[str, Any]:
        rng = self._rng
        chosen: dict[str, Any] = {"max_tokens": rng.randint(1, MAX_ANSWER_TOKENS)}
        options: dict[str, Any] = {
            "temperature": rng.choice([0.0, 0.7, 1.3]),
            "top_p": 0.9,
            "top_k": 20,
            "min_p": 0.05,
            "seed": rng.getrandbits(40),
            "stop": [self.text(1), ". "],
            "logit_bias": {str(rng.randrange(100, 300)): rng.uniform(-5, 5) for _ in range(8)},
            "presence_penalty": 0.5,
            "repetition_penalty": 1.1,
            "cache_salt": f"salt-{rng.randrange(64)}",
            "user": f"user-{rng.randrange(NUM_USERS)}",
            "priority": rng.randint(0, 3),
        }
        for name in rng.sample(list(options), 3):
            chosen[name] = options[name]
        return chosen

    def schema(self) -> dict[str, Any]:
        """Returns a schema that is new nearly always."""
        rng = self._rng
        kinds: list[dict[str, Any]] = [
            {"type": "integer", "minimum": 0, "maximum": rng.randrange(1000)},
            {"type": "string", "maxLength": 12},
            {"type": "boolean"},
            {"enum": [self.text(1) for _ in range(4)]},
            {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
        ]
        names = [self.text(1) for _ in range(rng.randint(1, 4))]
        return {
            "type": "object",
            "properties": {name: rng.choice(kinds) for name in names},
            "required": names,
            "additionalProperties": False,
        }

    def tool(self, number: int = 0) -> dict[str, Any]:
        name = f"{self.text(1)}_{number}"  # no two tools of a call may have the same name
        return {"name": name, "description": self.text(8), "parameters": self.schema()}

    def messages(self) -> list[dict[str, Any]]:
        turns = [{"role": "user", "content": self.prompt()}]
        if self._rng.random() < 0.3:
            turns += [{"role": "assistant", "content": self.text(20)}]
            turns += [{"role": "user", "content": self.text(20)}]
        return turns

    def call(self, kind: str, path: str, body: dict[str, Any]) -> Call:
        return Call(
            kind, path, orjson.dumps({"model": self._model, **body}), headers=self.headers()
        )

    # ---- valid calls

    def chat(self) -> Call:
        body = {"messages": self.messages(), **self.sampling()}
        return self.call("chat", "/v1/chat/completions", body)

    def chat_stream(self) -> Call:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"messages": self.messages(), **self.sampling(), **options}
        return self.call("chat, streamed", "/v1/chat/completions", body)

    def chat_choices(self) -> Call:
        options = {"n": self._rng.randint(2, 4), "logprobs": True, "top_logprobs": 5}
        body = {"messages": self.messages(), **self.sampling(), **options}
        body["stream"] = self._rng.random() < 0.5
        return self.call("chat, n and logprobs", "/v1/chat/completions", body)

    def chat_tools(self) -> Call:
        tools = [{"type": "function", "function": self.tool(number)} for number in range(2)]
        choice = self._rng.choice(["auto", "required", "none"])
        # descriptions of tools are a part of the prompt
        messages = [{"role": "user", "content": self.text(self._max_words // 2)}]
        body = {"messages": messages, **self.sampling(), "tools": tools}
        body |= {"tool_choice": choice, "stream": self._rng.random() < 0.5}
        return self.call("chat, tools", "/v1/chat/completions", body)

    def structured(self) -> Call:
        made = {"name": "answer", "schema": self.schema()}
        body = {"messages": self.messages(), **self.sampling()}
        body["response_format"] = {"type": "json_schema", "json_schema": made}
        return self.call("chat, structured", "/v1/chat/completions", body)

    def completion(self) -> Call:
        rng = self._rng
        body: dict[str, Any] = {"prompt": self.prompt(), **self.sampling()}
        body |= {"stream": rng.random() < 0.5, "stop": [self.text(1) for _ in range(3)]}
        return self.call("completion, stop strings", "/v1/completions", body)

    def completion_many(self) -> Call:
        prompts = [self.text(20) for _ in range(self._rng.randint(2, 6))]
        body: dict[str, Any] = {"prompt": prompts, **self.sampling(), "n": 2, "logprobs": 4}
        body["echo"] = self._rng.random() < 0.5
        return self.call("completion, many prompts", "/v1/completions", body)

    def response(self) -> Call:
        body: dict[str, Any] = {"input": self.prompt(), "stream": self._rng.random() < 0.5}
        body["max_output_tokens"] = self._rng.randint(16, MAX_ANSWER_TOKENS)
        refusals: tuple[str, ...] = ()
        if self._response_ids and self._rng.random() < 0.3:
            body["previous_response_id"] = self._rng.choice(self._response_ids)
            # the store may have evicted the response, or another client's key reads it
            refusals = ("previous_response_not_found", "context_length_exceeded")
        return replace(self.call("responses", "/v1/responses", body), refusals=refusals)

    def stored_response(self) -> Call:
        name = self._rng.choice(self._response_ids or ["resp_none"])
        method = self._rng.choice(["GET", "GET", "DELETE"])
        path = f"/v1/responses/{name}"
        refusals = ("response_not_found",)
        return Call("stored responses", path, b"", method, self.headers(), refusals)

    def message(self) -> Call:
        body: dict[str, Any] = {"messages": self.messages(), "stream": self._rng.random() < 0.5}
        body["max_tokens"] = self._rng.randint(1, MAX_ANSWER_TOKENS)
        if self._rng.random() < 0.5:
            tool = self.tool()
            body["tools"] = [{"name": tool["name"], "input_schema": tool["parameters"]}]
        return self.call("messages", "/v1/messages", body)

    def embeddings(self) -> Call:
        texts = [self.text(20) for _ in range(self._rng.randint(1, 16))]
        return self.call("embeddings", "/v1/embeddings", {"input": texts})

    def tokenize(self) -> Call:
        body = {"prompt": self.text(self._rng.choice([10, 1000])), "return_token_strs": True}
        return self.call("tokenize", "/tokenize", body)

    def detokenize(self) -> Call:
        tokens = [self._rng.randrange(5, 256) for _ in range(self._rng.choice([10, 1000]))]
        return self.call("detokenize", "/detokenize", {"tokens": tokens})

    def count(self) -> Call:
        return self.call("count tokens", "/v1/messages/count_tokens", {"messages": self.messages()})

    def read(self) -> Call:
        path = self._rng.choice(["/v1/models", "/health", "/metrics", "/openapi.json"])
        return Call("reads", path, b"", "GET", self.headers())

    # ---- hostile calls

    def hostile(self, kind: str, path: str, body: bytes, **changes: Any) -> Call:
        headers = changes.pop("headers", None) or self.headers()
        return Call(f"{HOSTILE}{kind}", path, body, headers=headers, is_hostile=True, **changes)

    def mutated(self) -> Call:
        path = self._rng.choice(list(SEEDS))
        body = self._rng.choice(SEEDS[path]).replace(b'"m"', orjson.dumps(self._model))
        return self.hostile("mutated bodies", path, mutate(self._rng, body))

    def large(self) -> Call:
        digits = str(self._rng.getrandbits(256)) * self._rng.choice([300, 3000])
        body = orjson.dumps({"model": self._model, "prompt": digits, "return_token_strs": True})
        return self.hostile(
            "large bodies", self._rng.choice(["/tokenize", "/v1/completions"]), body
        )

    def deep(self) -> Call:
        bracket = self._rng.choice([b"[", b'{"a":'])
        return self.hostile("deep JSON", "/v1/chat/completions", bracket * 20_000)

    def strange_route(self) -> Call:
        method = self._rng.choice(["GET", "POST", "PUT", "PATCH", "DELETE", "BREW"])
        return self.hostile("strange routes", f"/{self.text(1)}/{self.text(1)}", b"", method=method)

    def strange_names(self) -> Call:
        name = self.text(1) * self._rng.choice([1, 1000])
        body = {"model": self._model, "prompt": "a", "max_tokens": 1, name: 1}
        return self.hostile("unknown parameters", "/v1/completions", orjson.dumps(body))

    def wrong_key(self) -> Call:
        headers = {"Authorization": f"Bearer {self.text(4)}"}
        return self.hostile("wrong keys", "/v1/models", b"", method="GET", headers=headers)

    def wrong_schema(self) -> Call:
        rng = self._rng
        schema: dict[str, Any] = rng.choice(
            [
                {"type": "string", "pattern": "(a{1,200}){1,200}" + self.text(1)},
                {"enum": [self.text(3) for _ in range(2000)]},
                {"$ref": f"#/$defs/{self.text(1)}"},
                {"anyOf": [self.schema() for _ in range(40)]},
            ]
        )
        made = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        messages = [{"role": "user", "content": "a"}]
        body = {"model": self._model, "messages": messages, "max_tokens": 4}
        body["response_format"] = made
        return self.hostile("heavy grammars", "/v1/chat/completions", orjson.dumps(body))

    def beyond_limits(self) -> Call:
        limits: dict[str, Any] = self._rng.choice(
            [
                {"n": 128, "max_tokens": 1, "logprobs": 5},
                {"n": 10_000},
                {"max_tokens": 1 << 40},
                {"prompt": [[5] * 8] * 600, "max_tokens": 1},
                {"allowed_token_ids": list(range(4000)), "max_tokens": 2},
                {"bad_words": [self.text(2) for _ in range(500)], "max_tokens": 2},
                {"stop": [self.text(50)] * 40},
            ]
        )
        body = {"model": self._model, "prompt": self.text(4), **limits}
        return self.hostile("values at limits", "/v1/completions", orjson.dumps(body))


def _text(rng: random.Random, most: int) -> str:
    """Returns 1 to `most` words. Some of them are random, so that no earlier call had them."""
    words = (
        "".join(rng.choices(_SYLLABLES, k=rng.choice((1, 2, 2, 3, 5))))
        for _ in range(rng.randint(1, most))
    )
    return " ".join(words)


_VALID: dict[Callable[[Calls], Call], int] = {
    Calls.chat_stream: 6,
    Calls.chat: 3,
    Calls.chat_choices: 2,
    Calls.chat_tools: 2,
    Calls.structured: 2,
    Calls.completion: 4,
    Calls.completion_many: 1,
    Calls.response: 3,
    Calls.stored_response: 1,
    Calls.message: 3,
    Calls.embeddings: 2,
    Calls.tokenize: 2,
    Calls.detokenize: 1,
    Calls.count: 1,
    Calls.read: 1,
}
"""The calls and their weights."""

_HOSTILE: dict[str, Callable[[Calls], Call]] = {
    "mutated": Calls.mutated,
    "mutated again": Calls.mutated,
    "large": Calls.large,
    "deep": Calls.deep,
    "routes": Calls.strange_route,
    "names": Calls.strange_names,
    "keys": Calls.wrong_key,
    "schemas": Calls.wrong_schema,
    "limits": Calls.beyond_limits,
}
