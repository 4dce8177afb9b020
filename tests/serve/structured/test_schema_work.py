"""Schemas whose references make large graphs of small texts: the work to prepare them is bounded
and all of it is counted. The server's own process does it, without a deadline."""

from __future__ import annotations

import json
import random
import sys
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.errors import RequestError
from serve.structured.grammar_source import grammar_of
from serve.structured.schema_choices import split_choices
from serve.structured.schema_closing import close_objects
from serve.structured.schema_ends import has_finite_text, shortest_sizes
from serve.structured.schema_walk import MAX_WORK, Work
from serve.structured_output import StructuredOutput
from tests.support.profile import examples

Schema = dict[str, Any]
_CALLS_PER_STEP = 40  # of functions, Python's own among them


def prepared(schema: Schema, work: Work, *, closed: bool = True) -> None:
    has_finite_text(schema, work)
    made = close_objects(split_choices(schema, work), work, every=closed)
    shortest_sizes(made, len, work)


def steps_of(schema: Schema) -> int:
    work = Work(10 * MAX_WORK)
    prepared(schema, work)
    return 10 * MAX_WORK - work.left


def ref(name: object) -> Schema:
    return {"$ref": f"#/$defs/{name}"}


def diamonds(levels: int, width: int) -> Schema:
    """Each level has all of the next one `width` times."""
    defs: Schema = {f"d{i}": {"allOf": [ref(f"d{i + 1}")] * width} for i in range(levels)}
    defs[f"d{levels}"] = {"type": "object"}
    return {"$defs": defs, "oneOf": [ref("d0"), {"type": "string"}]}


def chain(levels: int, width: int) -> Schema:
    """Each definition requires the next one and may have any other."""
    defs: Schema = {"end": {"type": "null"}}
    for i in range(levels):
        properties = {f"o{j}": ref(j) for j in range(width)}
        after = ref(i + 1 if i + 1 < levels else "end")
        defs[str(i)] = {"type": "object", "properties": {**properties, "n": after}}
        defs[str(i)]["required"] = ["n"]
    return {**ref(0), "$defs": defs}


def nests(count: int, depth: int) -> Schema:
    """Definitions of nested allOf that end in the next definition."""
    defs: Schema = {}
    for i in range(count):
        node: Schema = ref(i + 1) if i + 1 < count else {"properties": {"a": {}}}
        for _ in range(depth):
            node = {"allOf": [node]}
        defs[str(i)] = node
    return {"type": "object", "properties": {"a": ref(0)}, "$defs": defs}


def spellings(count: int) -> Schema:
    """One definition, which requires itself, behind as many references."""
    name = "abcdefghijklmnop"
    spelled = [
        "".join(f"%{ord(char):02x}" if i >> bit & 1 else char for bit, char in enumerate(name))
        for i in range(count)
    ]
    node = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
    properties = {f"p{i}": {"$ref": f"#/{each}"} for i, each in enumerate(spelled)}
    return {"type": "object", "properties": properties, name: node}


def distinct(count: int, width: int) -> Schema:
    """Alternatives with many constants in common."""
    names = [f"e{i}" for i in range(width)]
    values = [f"v{i}" for i in range(900)]
    shared = {"properties": {name: {"enum": values} for name in names}, "required": names}
    alternatives = [
        {"allOf": [ref("D")], "properties": {"k": {"const": i}}, "required": ["k"]}
        for i in range(count)
    ]
    return {"$defs": {"D": shared | {"type": "object"}}, "oneOf": alternatives}


def labels(places: int, count: int) -> Schema:
    """Properties with constants that have titles."""
    each = [{"const": f"c{i}", "title": f"Title {i}"} for i in range(count)]
    properties = {f"p{i}": {"oneOf": each} for i in range(places)}
    return {"type": "object", "properties": properties}


def unions(places: int, tags: list[Schema], *others: Schema) -> Schema:
    """One union of a model for each of the tags, written out in many places."""
    defs: Schema = {}
    for i, constants in enumerate(tags):
        properties = {name: {"const": value} for name, value in constants.items()}
        properties["text"] = {"type": "string"}
        defs[f"M{i}"] = {"type": "object", "properties": properties, "required": list(properties)}
    union = {"oneOf": [*map(ref, defs), *others]}
    return {"type": "object", "properties": {f"p{i}": union for i in range(places)}, "$defs": defs}


def kinds(count: int) -> list[Schema]:
    return [{"kind": f"k{i}"} for i in range(count)]


@pytest.mark.parametrize(
    ("schema", "most"),
    [
        (diamonds(7, 10), 2_000),  # once 10^7
        (diamonds(7, 40), 6_000),
        (chain(60, 20), 60_000),
        (chain(60, 60), 160_000),  # once 5 million
        (spellings(200), 30_000),
    ],
    ids=["diamonds", "wide diamonds", "a chain", "a wide chain", "spellings"],
)
def test_what_is_met_on_many_paths_counts_once(schema, most):
    assert steps_of(schema) < most


@pytest.mark.parametrize(
    ("schema", "most"),
    [
        (labels(12, 250), 60_000),  # once 404,000 in pairs, and refused
        (unions(26, kinds(100)), 85_000),  # once 360,000
        (unions(70, kinds(60)), 130_000),  # once 411,000
        (unions(70, kinds(60), {"type": "null"}), 160_000),
        (unions(10, [{"a": i // 16, "b": i % 16} for i in range(240)]), 150_000),
    ],
    ids=["labels", "100 models", "60 models", "60 models or null", "two tags"],
)
def test_alternatives_with_other_constants_are_not_compared_in_pairs(schema, most):
    source = json.dumps(schema, separators=(",", ":"))
    assert '"oneOf"' not in grammar_of(StructuredOutput("json_schema", source), closed=True)
    assert steps_of(json.loads(source)) < most


def test_the_work_to_find_ends_is_linear():
    def steps(width: int) -> int:
        work = Work()
        assert has_finite_text(chain(60, width), work)
        return MAX_WORK - work.left

    assert steps(60) < 2.2 * steps(30)
    assert steps(60) < 30_000


@pytest.mark.parametrize(("count", "depth"), [(20, 25), (60, 29)])
@pytest.mark.parametrize("closed", [False, True])
def test_nested_parts_do_not_overflow_the_stack(count, depth, closed):
    """The client heard that the prompt could not be tokenized: RecursionError."""
    source = json.dumps(nests(count, depth))
    assert grammar_of(StructuredOutput("json_schema", source), closed=closed)


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("json_schema", json.dumps(distinct(200, 8))),
        ("grammar", "start: " + " | ".join(["%json " + json.dumps(distinct(30, 8))] * 2)),
    ],
)
def test_too_much_work_is_refused(kind, source):
    with pytest.raises(RequestError, match="too complicated") as caught:
        grammar_of(StructuredOutput(kind, source), closed=True)
    assert (caught.value.param, caught.value.code) == ("structured", "invalid_schema")


def test_an_ordinary_schema_needs_a_small_part_of_the_work():
    models: Schema = {}
    for i in range(130):
        properties: Schema = {f"field_{j}": {"type": "string"} for j in range(8)}
        properties["next"] = {"anyOf": [ref(f"M{(7 * i + 1) % 130}"), {"type": "null"}]}
        required = list(properties)[:8]
        models[f"M{i}"] = {"type": "object", "properties": properties, "required": required}
    root = {f"m{i}": ref(f"M{i}") for i in range(130)}
    assert steps_of({"type": "object", "properties": root, "$defs": models}) < MAX_WORK / 8


# -- random graphs


def hostile(rng: random.Random) -> Schema:
    """Returns a schema whose definitions refer to each other, mostly many times."""
    count, width = rng.randint(1, 12), rng.choice((1, 2, 8))

    def reference() -> Schema:
        name = str(rng.randrange(count))
        return {"$ref": rng.choice(("#", *[f"#/$defs/{name}"] * 6, f"#/%24defs/{name}"))}

    def node(depth: int) -> Schema:
        made: Schema = reference() if rng.random() < 0.3 else {}
        for key in rng.sample(("allOf", "anyOf", "oneOf", "properties", "items", "type"), 2):
            inner = [
                node(depth - 1) if depth and rng.random() < 0.4 else reference()
                for _ in range(rng.randint(1, width))
            ]
            if key == "properties":
                made[key] = {f"p{i}": item for i, item in enumerate(inner)}
                made["required"] = rng.sample(list(made[key]), rng.randint(0, len(inner)))
            elif key == "type":
                made[key] = rng.choice(("object", "array", "string"))
            else:
                made[key] = inner[0] if key == "items" else inner
        return made

    return {**node(1), "$defs": {str(i): node(2) for i in range(count)}}


@given(st.integers(0, 1 << 32))
@examples(300)
def test_all_work_is_counted(seed):
    """The functions called are a bounded number for each step and each value of the schema."""
    schema = hostile(random.Random(seed))
    work = Work(5_000)
    num_calls = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        with suppress(RequestError):
            prepared(schema, work, closed=seed % 2 == 0)
    finally:
        sys.setprofile(before)
    num_values = json.dumps(schema).count(":")
    assert num_calls < _CALLS_PER_STEP * (5_000 - max(work.left, 0) + num_values)
