"""Rows of the catalogue about structured output, on a real engine and compiler."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest
import requests

from serve import Engine
from serve.errors import RequestError
from serve.structured.compiler import MAX_CACHE_BYTES, MAX_GRAMMARS, GrammarCache, GrammarCompiler
from serve.structured_output import StructuredOutput
from serve.text.tokenizer import Tokenizer
from tests.support.engine.checkpoints import checkpoint
from tests.support.http.running_server import ServerThread

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
INVALID = (400, "invalid_schema")


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = Engine(
        str(checkpoint("llama")), served_model_name="m", max_num_seqs=8, max_model_len=256
    )
    with ServerThread(engine) as server:
        yield server.url
        assert engine.is_ready
        assert engine.stats().pages_in_use == 0


def ask(url: str, path: str = COMPLETIONS, **fields: Any) -> requests.Response:
    body = {"model": "m", "max_tokens": 40, "temperature": 1, "seed": 1, **fields}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": "a"}]
    else:
        body["prompt"] = "a"
    return requests.post(url + path, json=body, timeout=30)


def json_schema(schema: Any) -> dict[str, Any]:
    named = {"name": "a", "strict": True, "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def regex(pattern: str) -> dict[str, Any]:
    return {"structured_outputs": {"regex": pattern}}


def grammar(source: str) -> dict[str, Any]:
    return {"structured_outputs": {"grammar": source}}


def property_schema(schema: Any) -> dict[str, Any]:
    """Returns the format of an object whose only property has the schema."""
    return json_schema({"type": "object", "properties": {"a": schema}, "required": ["a"]})


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def outcome(answer: requests.Response) -> tuple[int, str]:
    if answer.status_code == 200:
        return 200, answer.json()["choices"][0]["finish_reason"]
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    field = "structured_outputs|response_format|guided"
    assert re.match(field, error["param"]), error
    assert len(error["message"]) < 500
    assert "Traceback" not in error["message"]
    return answer.status_code, error["code"]


CYCLE = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("G1", property_schema({"type": "strnig"})),
    ("G1", property_schema({"type": ["object", 5]})),
    ("G1", property_schema({"type": {}})),
    ("G1", property_schema(5)),
    ("G1", json_schema(5)),
    ("G1", json_schema("")),
    ("G1", json_schema([])),
    ("G1", regex("(")),
    ("G1", regex("[z-a]")),
    ("G1", grammar("start: nothing")),
    ("G2", {"guided_json": json.dumps(nested(40))}),
    ("G2", grammar("start: " + "(" * 30_000 + '"a"' + ")" * 30_000)),
    ("G2", grammar("start: " + "(" * 2000 + '"a"' + ")" * 2000)),
    ("G2", regex("(" * 1000 + "a" + ")" * 1000)),
    ("G3", json_schema(CYCLE)),
    ("G3", property_schema({"$ref": "http://169.254.169.254/"})),
    ("G3", property_schema({"$ref": "file:///etc/passwd"})),
    ("G3", property_schema({"$ref": "#/nowhere"})),
    ("G4", property_schema({"enum": [str(i) for i in range(100_000)]})),
    ("G4", property_schema({"enum": list(range(2000))})),
    ("G4", json_schema({"type": "object", "properties": {f"p{i}": {} for i in range(10_000)}})),
    ("G4", json_schema({"type": "object", "properties": {f"p{i}": {} for i in range(300)}})),
    ("G4", property_schema({"oneOf": [{"const": i} for i in range(1000)]})),
    ("G4", property_schema({"anyOf": [{"const": i} for i in range(1000)]})),
    ("G4", property_schema({"description": "x" * 1_000_000})),
    ("G5", property_schema({"type": "string", "pattern": "a{1,1000000}"})),
    ("G5", property_schema({"type": "string", "pattern": "(?<=a)b"})),
    ("G5", property_schema({"type": "string", "pattern": r"(a)\1"})),
    ("G5", regex("(a{1,99}){1,99}")),
    ("G6", property_schema({"type": "array", "maxItems": 10**9})),
    ("G6", property_schema({"type": "string", "minLength": 10**9})),
    ("G6", property_schema({"type": "integer", "minimum": 5, "maximum": 4})),
    ("G6", property_schema({"type": "string", "minLength": -1})),
    ("G6", property_schema({"type": "array", "minItems": 1.5})),
    ("G8", property_schema({"enum": []})),
    ("G8", property_schema({"type": "string", "minLength": 5, "maxLength": 2})),
    ("G8", json_schema(False)),
    ("G8", property_schema({"allOf": [{"type": "string"}, {"type": "integer"}]})),
    ("G8", regex("[^\\s\\S]")),
]


def _id(row: tuple[str, dict[str, Any]]) -> str:
    return f"{row[0]} {str(row[1])[-60:]}"


@pytest.mark.row("G1", "G2", "G3", "G4", "G5", "G6", "G8")
@pytest.mark.parametrize(("row", "fields"), REFUSED, ids=map(_id, REFUSED))
def test_refused(url: str, row: str, fields: dict[str, Any]) -> None:
    for path in (COMPLETIONS, CHAT):
        began_s = time.monotonic()
        assert outcome(ask(url, path, **fields)) == INVALID
        assert time.monotonic() - began_s < 5
    assert ask(url, max_tokens=1).status_code == 200


@pytest.mark.row("G1")
def test_an_empty_source_is_an_error_of_its_field(url: str) -> None:
    for kind in ("regex", "grammar", "choice"):
        empty: Any = [] if kind == "choice" else ""
        answer = ask(url, structured_outputs={kind: empty})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == f"structured_outputs.{kind}"
        assert answer.json()["error"]["code"] == "invalid_value"


@pytest.mark.row("G2")
def test_two_hundred_levels_are_refused_as_json(url: str) -> None:
    """The body's own depth limit refuses the schema first."""
    answer = ask(url, **json_schema(nested(200)))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.row("G5")
@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*", "^(([a-z])+.)+[A-Z]([a-z])+$", "(x+x+)+y"])
def test_patterns_of_catastrophic_backtracking(url: str, pattern: str) -> None:
    """The matcher does not backtrack, so the pattern is accepted and the answer is quick."""
    began_s = time.monotonic()
    for fields in (regex(pattern), property_schema({"type": "string", "pattern": pattern})):
        answer = ask(url, **fields, max_tokens=200)
        assert outcome(answer) in ((200, "stop"), (200, "length"))
    assert time.monotonic() - began_s < 10


@pytest.mark.row("G8")
def test_max_tokens_ends_an_endless_grammar(url: str) -> None:
    """No answer completes the grammar, so max_tokens ends it."""
    answer = ask(url, **grammar("start: A start\nA: /[a-z]/"), max_tokens=60)
    assert outcome(answer) == (200, "length")
    answer = ask(url, **regex("a{2000}"), max_tokens=60)
    assert outcome(answer) == (200, "length")


@pytest.mark.row("G8")
def test_no_token_is_allowed(url: str) -> None:
    """A whole answer is a 400, and a stream ends with an error event."""
    fields = {**regex("b{2,9}"), "bad_words": ["b", "bb"]}
    answer = ask(url, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    data = ask(url, **fields, stream=True)
    assert '"error":{' in data.text
    assert "[DONE]" not in data.text
    answer = ask(url, **regex("b+"), allowed_token_ids=[5])
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("allowed_token_ids", "invalid_value")


# ---- the cost of compilation


def make_compiler() -> GrammarCompiler:
    tokenizer = Tokenizer.load(checkpoint("llama"))
    return GrammarCompiler(tokenizer, 320, [2])


@pytest.mark.row("G7")
def test_the_cache_of_grammars_is_bounded() -> None:
    """The cache is bounded in number and bytes, and keeps the latest grammar."""
    cache = GrammarCache()
    for number in range(10_000):
        cache.put(StructuredOutput("regex", f"a{number}" + "x" * (number % 300)), "wrong")
        assert cache.num_bytes <= MAX_CACHE_BYTES
    assert len(cache) <= MAX_GRAMMARS
    assert cache.get(StructuredOutput("regex", "a9999" + "x" * (9999 % 300))) == "wrong"
    small_cache = GrammarCache(max_entries=1000, max_bytes=1 << 20)
    for number in range(1000):
        small_cache.put(StructuredOutput("regex", f"{number}"), "x" * 10_000)
        assert small_cache.num_bytes <= 1 << 20


@pytest.mark.row("G7")
def test_many_schemas() -> None:
    compiler = make_compiler()
    try:
        for number in range(MAX_GRAMMARS + 50):
            schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"}}}
            compiler.compile(StructuredOutput("json_schema", json.dumps(schema)))
        assert len(compiler.cache) == MAX_GRAMMARS
    finally:
        compiler.close()


@pytest.mark.row("G10")
@pytest.mark.parametrize("bound", ["time", "memory"])
def test_too_expensive_grammars_are_refused(url: str, bound: str, monkeypatch: Any) -> None:
    """The process that compiles the grammar is ended, and the next request starts a new one."""
    if bound == "time":
        monkeypatch.setattr("serve.structured.compiler.COMPILE_TIMEOUT_S", 1e-4)
    else:
        monkeypatch.setattr("serve.structured.compiler.COMPILE_MEMORY_BYTES", 1 << 20)
    source = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(200)}}
    compiler = make_compiler()
    try:
        with pytest.raises(RequestError, match=r"complex|memory") as caught:
            compiler.compile(StructuredOutput("json_schema", json.dumps(source)))
        assert caught.value.code == "invalid_schema"
        monkeypatch.undo()
        assert compiler._worker._child is None or compiler._worker._child.is_alive
    finally:
        compiler.close()


BOMBS: list[dict[str, Any]] = [
    regex("(a|b)*a(a|b){400}"),
    regex("([a-z]{1,20}|[0-9]{1,20}){1,50}"),
    json_schema(
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(256)}}
    ),
    property_schema({"type": "string", "pattern": ".*".join("abcdefghijklmnop")}),
    grammar("start: a a a a\na: b b b b\nb: c c c c\nc: d d d d\nd: /[a-z]{1,64}/ | /[a-m]*/"),
    property_schema({"type": "array", "items": {"enum": list(range(1000))}, "maxItems": 10_000}),
]


@pytest.mark.row("G10")
def test_plain_requests_continue_while_bombs_are_compiled(url: str) -> None:
    """Bombs are refused or answered, and plain requests are answered meanwhile."""
    with ThreadPoolExecutor(len(BOMBS)) as pool:
        bombs = [pool.submit(ask, url, max_tokens=20, **fields) for fields in BOMBS]
        num_plain = 0
        while not all(bomb.done() for bomb in bombs):
            assert ask(url, max_tokens=2).status_code == 200
            num_plain += 1
        for bomb in bombs:
            assert outcome(bomb.result()) in (INVALID, (200, "stop"), (200, "length"))
    assert num_plain >= 1


@pytest.mark.row("G11")
def test_a_grammar_with_biases_and_penalties(url: str) -> None:
    """Biases and penalties choose among the tokens that the grammar allows."""
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    bias = {str(token): 100 if token % 2 else -100 for token in range(300)}
    answer = ask(
        url,
        **json_schema(schema),
        logit_bias=bias,
        n=3,
        presence_penalty=2,
        repetition_penalty=3,
        min_p=0.5,
        bad_words=["q"],
        max_tokens=200,
    )
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        if choice["finish_reason"] == "stop":
            jsonschema.validate(json.loads(choice["text"]), schema)
        else:
            assert choice["finish_reason"] == "length"
