"""Parameters outside their range, on a real engine, get the exact status, type, parameter and code.

The numbers are those of the catalogue of bad inputs (P1 to P27). Errors that the parser alone finds
are tested in openai/test_refused.py, combinations in schema/test_pairs.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import requests

from serve import Engine
from serve.models import read_spec
from tests.support.engine.checkpoints import checkpoint
from tests.support.http.running_server import ServerThread

USER = {"role": "user", "content": "hi"}
COMPLETION = ("/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 2})
CHAT = ("/v1/chat/completions", {"model": "m", "messages": [USER], "max_tokens": 2})
VOCAB = read_spec(checkpoint("llama")).vocab_size
VALUE, TYPE, MISSING = "invalid_value", "invalid_type", "missing_required_parameter"
LONG, MANY = "string_above_max_length", "array_above_max_length"
UNSUPPORTED = "unsupported_parameter"
NO_MODEL = "model_not_found"
SCHEMA = "invalid_schema"
CONTEXT = "context_length_exceeded"
BIG_BIAS = {"logit_bias": dict.fromkeys(map(str, range(100_000)), 1)}
BAD_USAGE = {"stream": True, "stream_options": {"include_usage": 5}}
NO_FORMAT = {"response_format": {"type": "x"}}
NO_SCHEMA = {"response_format": {"type": "json_schema"}}
NO_INNER = {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}}
KEYWORD = {"name": "a", "strict": True, "schema": {"type": "object", "not": {}}}
STRICT = {"response_format": {"type": "json_schema", "json_schema": KEYWORD}}
WORDLESS = {"role": "assistant"}
ODD_PART = {"role": "user", "content": [{"type": "x"}]}
PICTURE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://a/"}}]}
BAD_SCHEMA = {"name": "a", "schema": {"type": "strnig"}}
NO_TYPE = {"response_format": {"type": "json_schema", "json_schema": BAD_SCHEMA}}
BIG_METADATA = {"metadata": dict.fromkeys(map(str, range(17)), "x")}

# Each row holds its number in the catalogue, endpoints, change, status, param and code.
ROWS: list[tuple[str, Any, dict[str, Any], int, str, str]] = [
    ("P1", (COMPLETION, CHAT), {"model": None}, 400, "model", MISSING),
    ("P1", (COMPLETION, CHAT), {"model": ""}, 400, "model", MISSING),
    ("P1", (COMPLETION, CHAT), {"model": 7}, 400, "model", TYPE),
    ("P1", (COMPLETION, CHAT), {"model": "m" * 10_000}, 400, "model", LONG),
    ("P2", (COMPLETION, CHAT), {"model": "other"}, 404, "model", NO_MODEL),
    ("P2", (COMPLETION, CHAT), {"model": "../../etc/passwd"}, 404, "model", NO_MODEL),
    ("P2", (COMPLETION, CHAT), {"model": "/etc/passwd"}, 404, "model", NO_MODEL),
    ("P2", (COMPLETION, CHAT), {"model": "m%2fx"}, 404, "model", NO_MODEL),
    ("P2", (COMPLETION, CHAT), {"model": "М"}, 404, "model", NO_MODEL),
    ("P3", (CHAT,), {"messages": None}, 400, "messages", MISSING),
    ("P3", (CHAT,), {"messages": []}, 400, "messages", VALUE),
    ("P3", (CHAT,), {"messages": {}}, 400, "messages", TYPE),
    ("P3", (CHAT,), {"messages": [USER] * 100_000}, 400, "messages", MANY),
    ("P4", (CHAT,), {"messages": [USER, {**USER, "role": "x"}]}, 400, "messages[1].role", VALUE),
    ("P4", (CHAT,), {"messages": [{**USER, "role": "SYSTEM"}]}, 400, "messages[0].role", VALUE),
    ("P4", (CHAT,), {"messages": [{"content": "x"}]}, 400, "messages[0].role", MISSING),
    ("P4", (CHAT,), {"messages": [{"role": "user"}]}, 400, "messages[0].content", MISSING),
    ("P4", (CHAT,), {"messages": [{**USER, "content": 5}]}, 400, "messages[0].content", TYPE),
    ("P4", (CHAT,), {"messages": [USER, WORDLESS]}, 400, "messages[1].content", MISSING),
    ("P4", (CHAT,), {"messages": [ODD_PART]}, 400, "messages[0].content[0].type", VALUE),
    ("P5", (CHAT,), {"messages": [PICTURE]}, 400, "messages[0].content[0].type", UNSUPPORTED),
    ("P6", (COMPLETION, CHAT), {"temperature": -0.1}, 400, "temperature", VALUE),
    ("P6", (COMPLETION, CHAT), {"temperature": 2.0001}, 400, "temperature", VALUE),
    ("P6", (COMPLETION, CHAT), {"temperature": "hot"}, 400, "temperature", TYPE),
    ("P6", (COMPLETION, CHAT), {"temperature": "NaN"}, 400, "temperature", TYPE),
    ("P6", (COMPLETION, CHAT), {"temperature": True}, 400, "temperature", TYPE),
    ("P7", (COMPLETION, CHAT), {"top_p": -1}, 400, "top_p", VALUE),
    ("P7", (COMPLETION, CHAT), {"top_p": 1.1}, 400, "top_p", VALUE),
    ("P7", (COMPLETION, CHAT), {"min_p": 1.1}, 400, "min_p", VALUE),
    ("P7", (COMPLETION, CHAT), {"min_p": -0.1}, 400, "min_p", VALUE),
    ("P7", (COMPLETION, CHAT), {"top_k": -5}, 400, "top_k", VALUE),
    ("P7", (COMPLETION, CHAT), {"top_k": 1e9}, 400, "top_k", TYPE),
    ("P7", (COMPLETION, CHAT), {"top_k": 1.5}, 400, "top_k", TYPE),
    ("P8", (COMPLETION, CHAT), {"presence_penalty": 2.1}, 400, "presence_penalty", VALUE),
    ("P8", (COMPLETION, CHAT), {"frequency_penalty": -2.1}, 400, "frequency_penalty", VALUE),
    ("P8", (COMPLETION, CHAT), {"repetition_penalty": 0}, 400, "repetition_penalty", VALUE),
    ("P8", (COMPLETION, CHAT), {"repetition_penalty": -1}, 400, "repetition_penalty", VALUE),
    ("P8", (COMPLETION, CHAT), {"repetition_penalty": 1e308}, 400, "repetition_penalty", VALUE),
    ("P9", (COMPLETION, CHAT), {"max_tokens": -1}, 400, "max_tokens", VALUE),
    ("P9", (COMPLETION, CHAT), {"max_tokens": 1.5}, 400, "max_tokens", TYPE),
    ("P9", (COMPLETION, CHAT), {"max_tokens": 10**9}, 400, "max_tokens", CONTEXT),
    ("P9", (COMPLETION, CHAT), {"max_tokens": 2**63}, 400, "max_tokens", VALUE),
    ("P9", (COMPLETION, CHAT), {"max_tokens": 64}, 400, "max_tokens", CONTEXT),
    ("P9", (CHAT,), {"max_completion_tokens": -1}, 400, "max_completion_tokens", VALUE),
    ("P9", (CHAT,), {"max_completion_tokens": 3}, 400, "max_completion_tokens", VALUE),
    ("P10", (CHAT,), {"max_tokens": 0}, 400, "max_tokens", VALUE),
    ("P11", (COMPLETION, CHAT), {"n": 0}, 400, "n", VALUE),
    ("P11", (COMPLETION, CHAT), {"n": 129}, 400, "n", VALUE),
    ("P11", (COMPLETION, CHAT), {"n": 10_000}, 400, "n", VALUE),
    ("P11", (COMPLETION, CHAT), {"n": 10**18}, 400, "n", VALUE),
    ("P11", (COMPLETION,), {"n": 128, "prompt": ["a"] * 9}, 400, "n", MANY),
    ("P12", (COMPLETION,), {"best_of": 2, "n": 3}, 400, "best_of", VALUE),
    ("P12", (COMPLETION,), {"best_of": 21}, 400, "best_of", VALUE),
    ("P12", (COMPLETION,), {"best_of": 2, "stream": True}, 400, "best_of", VALUE),
    ("P13", (COMPLETION,), {"logprobs": 6}, 400, "logprobs", VALUE),
    ("P13", (CHAT,), {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", VALUE),
    ("P13", (CHAT,), {"top_logprobs": 2}, 400, "top_logprobs", VALUE),
    ("P13", (COMPLETION, CHAT), {"prompt_logprobs": VOCAB}, 400, "prompt_logprobs", VALUE),
    ("P14", (COMPLETION, CHAT), {"logit_bias": {"abc": 1}}, 400, "logit_bias", VALUE),
    ("P14", (COMPLETION, CHAT), {"logit_bias": {"-1": 1}}, 400, "logit_bias", VALUE),
    ("P14", (COMPLETION, CHAT), {"logit_bias": {str(VOCAB): 1}}, 400, "logit_bias", VALUE),
    ("P14", (COMPLETION, CHAT), {"logit_bias": {str(VOCAB + 64): 1}}, 400, "logit_bias", VALUE),
    ("P14", (COMPLETION, CHAT), {"logit_bias": {"1000000000": 1}}, 400, "logit_bias", VALUE),
    ("P14", (COMPLETION, CHAT), {"logit_bias": {"1": 101}}, 400, "logit_bias", VALUE),
    ("P14", (COMPLETION, CHAT), {"logit_bias": {"1": None}}, 400, "logit_bias", TYPE),
    ("P14", (COMPLETION, CHAT), {"logit_bias": []}, 400, "logit_bias", TYPE),
    ("P14", (COMPLETION,), BIG_BIAS, 400, "logit_bias", MANY),
    ("P15", (COMPLETION, CHAT), {"allowed_token_ids": [VOCAB]}, 400, "allowed_token_ids", VALUE),
    ("P15", (COMPLETION, CHAT), {"allowed_token_ids": []}, 400, "allowed_token_ids", VALUE),
    ("P15", (COMPLETION,), {"allowed_token_ids": [1] * 200_000}, 400, "allowed_token_ids", MANY),
    ("P15", (COMPLETION, CHAT), {"stop_token_ids": [VOCAB]}, 400, "stop_token_ids", VALUE),
    ("P15", (COMPLETION,), {"stop_token_ids": [1] * 200_000}, 400, "stop_token_ids", MANY),
    ("P15", (COMPLETION,), {"bad_words": ["a"] * 200_000}, 400, "bad_words", MANY),
    ("P15", (COMPLETION, CHAT), {"bad_words": [""]}, 400, "bad_words", VALUE),
    ("P16", (COMPLETION, CHAT), {"stop": ["a"] * 17}, 400, "stop", MANY),
    ("P16", (COMPLETION, CHAT), {"stop": ""}, 400, "stop", VALUE),
    ("P16", (COMPLETION, CHAT), {"stop": "x" * 10_000}, 400, "stop", LONG),
    ("P16", (COMPLETION, CHAT), {"stop": 5}, 400, "stop", TYPE),
    ("P16", (COMPLETION, CHAT), {"stop": [["a"]]}, 400, "stop", TYPE),
    ("P17", (COMPLETION, CHAT), {"seed": 2**63}, 400, "seed", VALUE),
    ("P17", (COMPLETION, CHAT), {"seed": -(2**63) - 1}, 400, "seed", VALUE),
    ("P17", (COMPLETION, CHAT), {"seed": 1.5}, 400, "seed", TYPE),
    ("P18", (COMPLETION, CHAT), {"stream": "yes"}, 400, "stream", TYPE),
    ("P18", (COMPLETION, CHAT), {"stream_options": {}}, 400, "stream_options", VALUE),
    ("P18", (COMPLETION, CHAT), BAD_USAGE, 400, "stream_options.include_usage", TYPE),
    ("P21", (COMPLETION, CHAT), NO_FORMAT, 400, "response_format.type", VALUE),
    ("P21", (COMPLETION, CHAT), NO_SCHEMA, 400, "response_format.json_schema", MISSING),
    ("P21", (COMPLETION, CHAT), NO_INNER, 400, "response_format.json_schema.schema", MISSING),
    ("P21", (COMPLETION, CHAT), STRICT, 400, "response_format", "invalid_schema"),
    ("P22", (COMPLETION, CHAT), BIG_METADATA, 400, "metadata", MANY),
    ("P22", (COMPLETION, CHAT), {"metadata": {"k" * 65: "v"}}, 400, "metadata", VALUE),
    ("P22", (COMPLETION, CHAT), {"metadata": {"k": "v" * 513}}, 400, "metadata", LONG),
    ("P22", (COMPLETION, CHAT), {"user": "u" * 10_000}, 400, "user", LONG),
    ("P23", (COMPLETION, CHAT), {"min_tokens": 3}, 400, "min_tokens", VALUE),
    ("P24", (COMPLETION, CHAT), {"priority": -(10**18)}, 400, "priority", VALUE),
    ("P25", (COMPLETION, CHAT), {"cache_salt": ""}, 400, "cache_salt", VALUE),
    ("P25", (COMPLETION, CHAT), {"cache_salt": "x" * 10**6}, 400, "cache_salt", LONG),
    ("P25", (COMPLETION, CHAT), {"cache_salt": "a\u0007"}, 400, "cache_salt", VALUE),
    ("P25", (COMPLETION, CHAT), {"cache_salt": 5}, 400, "cache_salt", TYPE),
    ("P25", (COMPLETION, CHAT), {"cache_salt": ["a"]}, 400, "cache_salt", TYPE),
    ("P26", (COMPLETION, CHAT), {"suffix": "x"}, 400, "suffix", UNSUPPORTED),
    ("P27", (COMPLETION,), {"functions": [{"name": "f"}]}, 400, "functions", UNSUPPORTED),
    ("T1", (COMPLETION,), {"prompt": []}, 400, "prompt", "invalid_prompt"),
    ("T3", (COMPLETION,), {"prompt": [VOCAB]}, 400, "prompt", VALUE),
    ("T3", (COMPLETION,), {"prompt": [VOCAB - 1, 2**63]}, 400, "prompt", VALUE),
    ("G1", (COMPLETION, CHAT), NO_TYPE, 400, "response_format", SCHEMA),
    ("G1", (COMPLETION, CHAT), {"guided_json": {"type": ["x", 5]}}, 400, "guided_json", SCHEMA),
    ("G5", (COMPLETION, CHAT), {"guided_regex": "(a"}, 400, "guided_regex", SCHEMA),
    ("G5", (COMPLETION, CHAT), {"guided_regex": "(?<=a)b"}, 400, "guided_regex", SCHEMA),
    ("G2", (COMPLETION, CHAT), {"guided_grammar": "start: ("}, 400, "guided_grammar", SCHEMA),
    ("G5", (CHAT,), {"structured_outputs": {"regex": "["}}, 400, "structured_outputs", SCHEMA),
    ("J18", (COMPLETION, CHAT), {"foo": 1}, 400, "foo", "unknown_parameter"),
    ("J19", (COMPLETION, CHAT), {"__proto__": {}}, 400, "__proto__", "unknown_parameter"),
    ("J19", (COMPLETION, CHAT), {"constructor": {}}, 400, "constructor", "unknown_parameter"),
    ("J20", (COMPLETION, CHAT), {"k" * 10**6: 1}, 400, "k" * 512, "unknown_parameter"),
]
ACCEPTED: list[tuple[str, Any, dict[str, Any]]] = [
    ("P10", (COMPLETION,), {"max_tokens": 0}),
    ("P12", (COMPLETION,), {"best_of": 1, "stream": True}),
    ("P17", (COMPLETION, CHAT), {"seed": -(2**63)}),
    ("P23", (COMPLETION, CHAT), {"ignore_eos": True, "max_tokens": None}),
    ("P26", (COMPLETION,), {"echo": True, "logprobs": 1, "max_tokens": 0}),
    ("P26", (COMPLETION, CHAT), {"suffix": None}),
    ("P21", (COMPLETION, CHAT), {"response_format": {"type": "json_object"}}),
    ("P21", (COMPLETION, CHAT), {"guided_choice": ["a", "b"]}),
    ("P21", (COMPLETION, CHAT), {"structured_outputs": {"regex": "[a-z]+"}}),
    ("P15", (COMPLETION, CHAT), {"allowed_token_ids": [VOCAB - 1], "bad_words": ["x"]}),
    ("P27", (COMPLETION, CHAT), {"functions": None, "function_call": None}),
    ("T1", (COMPLETION,), {"prompt": ""}),  # this model has a BOS token
    ("P7", (COMPLETION, CHAT), {"top_k": 10**9}),  # above the vocabulary, so no token is cut off
    ("P15", (COMPLETION, CHAT), {"stop_token_ids": [], "bad_words": []}),  # empty lists are valid
    ("T3", (COMPLETION,), {"prompt": [VOCAB - 1]}),
]


def _cases(rows: list[Any]) -> list[Any]:
    cases = []
    for row, endpoints, change, *expected in rows:
        for path, body in endpoints:
            name = f"{row}-{path[4:8]}-{next(iter(change))[:20]}"
            cases.append(pytest.param(path, {**body, **change}, *expected, id=name))
    return cases


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    engine = Engine(
        str(checkpoint("llama")), served_model_name="m", max_num_seqs=8, max_model_len=64
    )
    with ServerThread(engine) as server:
        yield server.url
        stats = engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.pages_in_use) == (0, 0, 0)


@pytest.mark.parametrize(("path", "body", "status", "param", "code"), _cases(ROWS))
@pytest.mark.row("P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8", "P9", "P10", "P11", "P12", "P13")
@pytest.mark.row("P14", "P15", "P16", "P17", "P18", "P21", "P22", "P23", "P24", "P25", "P26", "P27")
@pytest.mark.row("T1", "T3", "J18", "J19", "J20", "G1", "G2", "G5")
def test_refused(url: str, path: str, body: Any, status: int, param: str, code: str) -> None:
    answer = requests.post(url + path, json=body, timeout=20)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code)
    assert error["type"] == "invalid_request_error"
    assert set(error) == {"message", "type", "param", "code"}
    assert len(error["message"]) < 1000 and answer.headers["x-request-id"]


@pytest.mark.parametrize(("path", "body"), _cases(ACCEPTED))
@pytest.mark.row("P7", "P10", "P12", "P15", "P17", "P21", "P23", "P26", "P27", "T1", "T3")
def test_accepted(url: str, path: str, body: Any) -> None:
    answer = requests.post(url + path, json=body, timeout=20)
    assert answer.status_code == 200, answer.text
    assert '"error"' not in answer.text


@pytest.mark.parametrize(("test", "rows"), [(test_refused, ROWS), (test_accepted, ACCEPTED)])
def test_the_marks_equal_the_rows_of_the_tables(test: Any, rows: list[Any]) -> None:
    marked = [name for mark in test.pytestmark if mark.name == "row" for name in mark.args]
    assert sorted(marked) == sorted({row for row, *_ in rows})


@pytest.mark.row("J21")
def test_every_optional_field_may_be_null(url: str) -> None:
    """The fields are those of the OpenAPI description."""
    paths = requests.get(f"{url}/openapi.json", timeout=20).json()["paths"]
    for path, body in (COMPLETION, CHAT):
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        nulls = {name: None for name in schema["properties"] if name not in schema["required"]}
        assert len(nulls) > 40
        answer = requests.post(url + path, json={**body, **nulls, "max_tokens": 2}, timeout=20)
        assert answer.status_code == 200, answer.text
