"""JSON with bounds: what the embedded model writes at temperature 1 parses, validates and ends, for
schemas of every kind; without bounds the letter of the schema holds."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from serve import LLM, SamplingParams
from serve.config import default_model_path
from serve.errors import RequestError
from serve.structured.schema_ends import has_finite_text
from serve.structured_output import StructuredOutput
from tests.support.http.json_schemas import closed
from tests.support.http.random_schemas import random_schema
from tests.support.profile import THOROUGH

Schema = dict[str, Any]
INT64 = {"minimum": -(1 << 63), "maximum": (1 << 63) - 1}
INTEGERS: list[Schema] = [
    {},
    INT64,
    {"exclusiveMinimum": -(1 << 63), "exclusiveMaximum": 1 << 63},
    {"minimum": 1 << 62},
    {"maximum": -(1 << 62)},
    {"minimum": 0, "maximum": 1 << 80},
    {"minimum": 0, "maximum": 1e20},
    {"minimum": (1 << 53) + 1},
    {"minimum": 0.5, "maximum": 1.5},
    {"exclusiveMinimum": 6, "exclusiveMaximum": 8},
    {"multipleOf": 7},
    {"multipleOf": 10, "minimum": 15},
    {"multipleOf": 3, "minimum": 10, "maximum": 12},
    {"minimum": -999, "maximum": -100},
]
NUMBERS: list[Schema] = [
    {},
    {"minimum": 0, "maximum": 1},
    {"exclusiveMinimum": 0, "exclusiveMaximum": 0.25},
    {"minimum": -1.5},
    {"maximum": 1e20},
    {"minimum": -1e300, "maximum": 1e300},
    {"minimum": 1e15},
    {"multipleOf": 10},
    {"multipleOf": 5, "maximum": 0},
]
OPEN: list[Schema] = [
    {"type": "string"},
    {"type": "array", "items": {"type": "string"}},
    {"type": "array", "items": {"type": "integer"}, "minItems": 3},
    {"type": "string", "pattern": "[0-9]"},
    {"type": "string", "pattern": "^x.*_end$"},
    {"type": "string", "minLength": 30},
    {"type": "object"},
    {"type": "object", "additionalProperties": {"type": "integer"}},
    {"type": "object", "additionalProperties": {"type": "string", "minLength": 4, "maxLength": 4}},
    {"type": "object", "properties": {"a": {"type": "boolean"}}, "additionalProperties": True},
    {"type": "object", "patternProperties": {"^[a-c]{2}$": {"type": "boolean"}}},
    {"type": "object", "properties": {}, "patternProperties": {"_id$": {"type": "integer"}}},
    {"type": "object", "required": ["first name", "b"]},
    {"enum": ["a", 1, None, {"k": [1]}]},
    {"const": {"a": [1, {"b": None}]}},
    {"anyOf": [{"type": "string"}, closed(a={"type": "number"})]},
    {
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "$defs": {
            "cat": {"properties": {"kind": {"const": "cat"}, "name": {"type": "string"}}}
            | {"type": "object", "required": ["kind", "name"]},
            "dog": {"properties": {"kind": {"const": "dog"}, "barks": {"type": "boolean"}}}
            | {"type": "object", "required": ["kind", "barks"]},
        },
    },
    {
        "$ref": "#/$defs/tree",
        "$defs": {
            "tree": {
                "type": "object",
                "properties": {
                    "value": {"type": "string"},
                    "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
                },
                "required": ["value", "children"],
            }
        },
    },
    {
        "$ref": "#/$defs/list",
        "$defs": {
            "list": {
                "type": "object",
                "properties": {
                    "value": {"type": "number"},
                    "next": {"anyOf": [{"$ref": "#/$defs/list"}, {"type": "null"}]},
                },
                "required": ["value", "next"],
            }
        },
    },
    closed(a=closed(b=closed(c={"type": "array", "items": closed(d={"type": "string"})}))),
]


@pytest.fixture(scope="module")
def llm():
    with LLM(str(default_model_path()), max_num_seqs=32, max_model_len=256) as llm:
        yield llm


def answers(
    llm: LLM, schemas: list[Schema], *, seed: int = 0, bounded: bool | None = None, **options: Any
) -> list[Any]:
    params = [
        SamplingParams(
            temperature=1.0,
            seed=seed + i,
            structured=StructuredOutput("json_schema", json.dumps(schema), bounded=bounded),
            **{"max_tokens": None, **options},
        )
        for i, schema in enumerate(schemas)
    ]
    results = llm.generate([f"Say {i}:" for i in range(len(schemas))], params, use_tqdm=False)
    return [result.outputs[0] for result in results]


def refusal(llm: LLM, schema: Schema) -> RequestError | None:
    """Returns why the schema is refused, or None if it is not."""
    try:
        answers(llm, [schema], max_tokens=1)
    except RequestError as error:
        return error
    return None


def definitions(schema: Schema) -> list[Schema]:
    """Returns a schema of each definition."""
    named = schema.get("$defs", {})
    return [{"$ref": f"#/$defs/{name}", "$defs": named} for name in named]


def checked(schema: Schema, output: Any) -> Any:
    value = json.loads(output.text)
    jsonschema.Draft202012Validator(schema).validate(value)
    return value


@pytest.mark.parametrize("kind", ["integer", "number"])
def test_numbers(llm: LLM, kind: str) -> None:
    schemas = [{"type": kind, **bounds} for bounds in (INTEGERS, NUMBERS)[kind == "number"]]
    for seed in range(0, 400, 100):
        for schema, output in zip(schemas, answers(llm, schemas, seed=seed), strict=True):
            value = checked(schema, output)
            assert output.finish_reason == "stop", schema
            assert len(output.text) <= 50  # of 17 digits and zeros
            if kind == "integer":
                assert isinstance(value, int) and -(1 << 63) <= value < 1 << 63
            else:
                assert abs(float(value)) < float("inf")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": 1 << 63}, "range of numbers"),
        ({"type": "integer", "maximum": -(1 << 64)}, "range of numbers"),
        ({"type": "integer", "minimum": (1 << 60) + 1, "maximum": (1 << 60) + 2}, "range of num"),
        ({"const": (1 << 53) + 1}, "constant 9007199254740993"),
    ],
)
def test_what_the_library_cannot_express_is_said(llm: LLM, schema: Schema, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        answers(llm, [schema])
    assert (caught.value.code, caught.value.param) == ("invalid_schema", "structured")


@pytest.mark.parametrize("max_tokens", [None, 90])
def test_texts_without_bounds_end(llm: LLM, max_tokens: int | None) -> None:
    """They end before the tokens run out; it is a limit only if the client has set it."""
    reasons = set()
    for seed in range(0, 300, 100):
        outputs = answers(llm, OPEN, seed=seed, max_tokens=max_tokens)
        for schema, output in zip(OPEN, outputs, strict=True):
            checked(schema, output)
            assert len(output.token_ids) <= (max_tokens or 256)
            reasons.add(output.finish_reason)
    assert reasons == ({"stop"} if max_tokens is None else {"stop", "length"})


def test_no_property_is_invented(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "null"}}}
    for output in answers(llm, [schema] * 8):
        assert set(checked(schema, output)) <= {"a", "b"}
    schema = schema | {"additionalProperties": {"type": "boolean"}, "required": ["c"]}
    for output in answers(llm, [schema] * 8):
        assert "c" in checked(schema, output)


def test_white_space_is_bounded(llm: LLM) -> None:
    """At most one space comes after a comma or a colon, even for a model that likes spaces."""
    bias = {token: 100.0 for token, piece in enumerate(llm.tokenizer.pieces) if piece == b" "}
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 3}
    (output,) = answers(llm, [schema], logit_bias=bias)
    checked(schema, output)
    assert ", " in output.text and " " not in output.text.replace(", ", ",")


def test_without_bounds_the_letter_holds(llm: LLM) -> None:
    digits = {
        token: 100.0 for token, piece in enumerate(llm.tokenizer.pieces) if piece in (b"1", b"7")
    }
    (output,) = answers(llm, [{"type": "integer"}], logit_bias=digits, bounded=False)
    assert output.finish_reason == "length" and int(output.text) > 10**100
    (output,) = answers(llm, [{"type": "integer"}], logit_bias=digits)
    assert output.finish_reason == "stop" and int(output.text) < 1 << 63
    schema = {"type": "object", "properties": {"a": {"type": "null"}}}
    outputs = answers(llm, [schema] * 8, bounded=False)
    assert any('{"a"' not in output.text[:4] and output.text[:2] == '{"' for output in outputs)
    assert all(output.finish_reason == "length" for output in outputs if '"b"' in output.text)


@pytest.mark.parametrize("begin", range(0, 400 if THOROUGH else 40, 20))
def test_random_schemas(llm: LLM, begin: int) -> None:
    schemas: list[Schema] = []
    for seed in range(begin, begin + 20):
        schema = random_schema(seed)
        if not all(map(has_finite_text, definitions(schema))):
            continue  # once the model has begun with such a part, there is no end
        problem = refusal(llm, schema)
        assert problem is None or problem.code == "invalid_schema"
        if problem is None:
            schemas.append(schema)
    assert len(schemas) > 10
    for schema, output in zip(schemas, answers(llm, schemas, seed=begin), strict=True):
        checked(schema, output)
        assert output.finish_reason == "stop", schema
