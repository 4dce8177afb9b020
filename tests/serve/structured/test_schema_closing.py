"""What a closed schema allows: only what the schema allows, and all of it that has only properties
that the schema names. The reference for the second is unevaluatedProperties of jsonschema.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice, product
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.structured.schema_closing import close_objects
from tests.support.profile import examples

NAMES = ("a", "b", "c", "d")
UNEVALUATED = "unevaluatedProperties"
Schema = dict[str, Any]


def accepts(schema: Schema, value: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def tree() -> Schema:
    return {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "next": {"$ref": "#/$defs/Tree"}},
        "required": ["x"],
    }


CASES: list[tuple[str, Schema, list[Any], list[Any]]] = [
    # name, schema, what it still allows, what it no longer allows
    ("named", {"properties": {"a": {}}}, [{}, {"a": 1}], [{"b": 1}, 5]),
    ("none named", {"type": "object"}, [{"b": 1}], []),
    ("an empty list of names", {"type": "object", "properties": {}}, [{}], [{"b": 1}]),
    ("said", {"properties": {"a": {}}, "additionalProperties": True}, [{"b": 1}], []),
    ("a dictionary", {"additionalProperties": {"type": "integer"}}, [{"b": 1}], []),
    ("patterns", {"patternProperties": {"^x": {}}}, [{"x1": 1}], [{"y": 1}]),
    (
        "required names",
        {"properties": {"a": {}}, "required": ["b"]},
        [{"a": 1, "b": 2}],
        [{"b": 1, "c": 1}],
    ),
    (
        "allOf",
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        [{"a": 1, "b": 2}],
        [{"a": 1, "c": 2}],
    ),
    (
        "an inherited definition",
        {"allOf": [{"$ref": "#/$defs/Tree"}, {"properties": {"y": {}}}], "$defs": {"Tree": tree()}},
        [{"x": 1, "y": 2, "next": {"x": 1}}],
        [{"x": 1, "z": 2}, {"x": 1, "next": {"x": 1, "y": 1}}],
    ),
    (
        "one inherited definition",
        {"allOf": [{"$ref": "#/$defs/Tree"}], "$defs": {"Tree": tree()}},
        [{"x": 1, "next": {"x": 1}}],
        [{"x": 1, "y": 2}],
    ),
    (
        "alternatives",
        {
            "properties": {"k": {}},
            "anyOf": [
                {"properties": {"a": {}}, "required": ["a"]},
                {"properties": {"b": {}}, "required": ["b"]},
            ],
        },
        [{"k": 1, "a": 1}, {"b": 1}],
        [{"a": 1, "b": 1}, {"a": 1, "c": 1}],
    ),
    (
        "an optional definition",
        {"anyOf": [{"$ref": "#/$defs/Tree"}, {"type": "null"}], "$defs": {"Tree": tree()}},
        [None, {"x": 1}],
        [{"x": 1, "y": 2}],
    ),
    (
        "an alternative that says",
        {"anyOf": [{"properties": {"a": {}}, "additionalProperties": True}, {"properties": {}}]},
        [{"z": 1}],
        [],
    ),
    (
        "an object in two parts",
        {
            "allOf": [
                {"properties": {"at": {"properties": {"x": {}}, "required": ["x"]}}},
                {"properties": {"at": {"properties": {"y": {}}, "required": ["y"]}}},
            ]
        },
        [{"at": {"x": 1, "y": 1}}],
        [{"b": 1}],
    ),
    (
        "objects in an array",
        {"type": "array", "items": {"type": "object", "properties": {"a": {}}}},
        [[{"a": 1}]],
        [[{"b": 1}]],
    ),
    (
        "constants are no schemas",
        {"properties": {"a": {"const": {"properties": {}}}}},
        [{"a": {"properties": {}}}],
        [{"b": 1}],
    ),
    (
        "definitions elsewhere",
        {"$ref": "#/components/schemas/Tree", "components": {"schemas": {"Tree": tree()}}},
        [{"x": 1}],
        [{"x": 1, "y": 1}],
    ),
    (
        "unevaluatedProperties",
        {"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": {"type": "integer"}},
        [{"a": "", "b": 1}],
        [],
    ),
]


@pytest.mark.parametrize(
    ("schema", "allowed", "refused"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_cases(schema, allowed, refused):
    before = copy.deepcopy(schema)
    closed = close_objects(schema)
    assert schema == before
    for value in allowed:
        assert accepts(schema, value)
        assert accepts(closed, value)
    for value in refused:
        assert accepts(schema, value)
        assert not accepts(closed, value)


def test_only_unevaluated_properties_close_by_the_letter():
    schema = {
        "properties": {"a": {"properties": {"x": {}}}, "b": {"$ref": "#/$defs/Tree"}},
        "anyOf": [{"properties": {"c": {}}}, {"required": ["a"]}],
        "unevaluatedProperties": False,
        "$defs": {"Tree": tree()},
    }
    closed = close_objects(schema, every=False)
    assert "unevaluatedProperties" not in str(closed)
    assert accepts(closed, {"a": {"y": 1}, "b": {"x": 1, "y": 1}})
    assert not accepts(closed, {"a": {}, "d": 1})


def test_the_keyword_stays_where_the_alternatives_are_further_away():
    """The compiler refuses it: closing all alternatives together would allow more than it does."""
    alternatives = {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}
    schema = {"$ref": "#/$defs/A", "unevaluatedProperties": False, "$defs": {"A": alternatives}}
    assert close_objects(schema, every=False)["unevaluatedProperties"] is False


# -- any schema

_leaves = st.sampled_from([{"type": "integer"}, {"type": "string"}, True])


def _objects(inner: st.SearchStrategy[Any], *, full: bool) -> st.SearchStrategy[Schema]:
    properties = st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
    fields: dict[str, st.SearchStrategy[Any]] = {
        "properties": properties,
        "required": st.lists(st.sampled_from(NAMES), max_size=2, unique=True),
        "additionalProperties": st.sampled_from([True, False, {"type": "integer"}]),
        "unevaluatedProperties": st.sampled_from([True, False, {"type": "integer"}]),
        "$ref": st.sampled_from(["#/$defs/A", "#/$defs/B", "#"]),
    }
    if full:
        members = st.lists(_objects(inner, full=False), min_size=1, max_size=2)
        fields |= {"allOf": members, "anyOf": members, "oneOf": members}
    usual = ("properties", "required") if not full else ("properties", "required", "allOf", "anyOf")
    keys = st.lists(st.sampled_from([*fields, *usual * 3]), max_size=3, unique=True)
    return keys.flatmap(
        lambda names: st.fixed_dictionaries({name: fields[name] for name in names})
    ).map(lambda made: {"type": "object", **made})


_inner = st.one_of(_leaves, _leaves, _objects(_leaves, full=False))
_schemas = st.tuples(
    _objects(_inner, full=True), _objects(_inner, full=True), _objects(_inner, full=False)
)
_values = st.recursive(
    st.integers(0, 1) | st.just(""),
    lambda inner: st.dictionaries(st.sampled_from((*NAMES, "z")), inner, max_size=3),
    max_leaves=6,
)
_documents = st.dictionaries(st.sampled_from((*NAMES, "z")), _values, max_size=4)


def _document(parts: tuple[Schema, Schema, Schema]) -> Schema:
    root, first, second = parts
    return {**root, "$defs": {"A": first, "B": second}}


def _is_endless(schema: Schema) -> bool:
    """Whether parts of a place refer to one another in a circle, which no validator ends."""

    def refers(node: Any, seen: frozenset[str]) -> bool:
        if not isinstance(node, dict):
            return False
        for key in ("allOf", "anyOf", "oneOf"):
            if any(refers(item, seen) for item in node.get(key, [])):
                return True
        name = node.get("$ref")
        if name is None:
            return False
        if name in seen:
            return True
        target = schema if name == "#" else schema["$defs"][name[-1]]
        return refers(target, seen | {name})

    return any(refers({"$ref": name}, frozenset()) for name in ("#", "#/$defs/A", "#/$defs/B"))


def _asks(schema: Schema, node: Any, seen: frozenset[str] = frozenset()) -> tuple[bool, bool]:
    """Whether the parts of a place name properties, and whether one that applies to all of its
    values says which others there may be."""
    if not isinstance(node, dict):
        return False, False
    names, says = "properties" in node, bool({*node} & {"additionalProperties", UNEVALUATED})
    choices = [part for key in ("anyOf", "oneOf") for part in node.get(key, [])]
    parts = list(node.get("allOf", []))
    reference = node.get("$ref")
    if reference is not None and reference not in seen:
        seen |= {reference}
        parts.append(schema if reference == "#" else schema["$defs"][reference[-1]])
    for part in (*parts, *choices):
        found = _asks(schema, part, seen)
        names |= found[0]
        says |= found[1] and part not in choices
    return names, says


def _choices(node: Any) -> Iterator[Any]:
    """Yields the schema with one alternative for each anyOf. The place names properties if another
    alternative does."""
    if isinstance(node, list):
        yield from map(list, product(*map(_choices, node)))
    elif isinstance(node, dict):
        for values in product(*map(_choices, node.values())):
            made = dict(zip(node, values, strict=True))
            alternatives = made.pop("anyOf", None)
            if alternatives is None:
                yield made
                continue
            for alternative in alternatives:
                parts = [*made.get("allOf", []), alternative, {"properties": {}}]
                yield {**made, "allOf": parts}
    else:
        yield node


def _strict(schema: Schema, node: Any, *, is_place: bool = True) -> Any:
    """Puts unevaluatedProperties at every place that names properties, unless a part says."""
    if not isinstance(node, dict):
        return node
    made = dict(node)
    for key in ("properties", "$defs"):
        if key in node:
            inner = node[key].items()
            made[key] = {
                name: _strict(schema, item, is_place=key == "properties") for name, item in inner
            }
    for key in ("allOf", "anyOf", "oneOf"):
        if key in node:
            made[key] = [_strict(schema, item, is_place=False) for item in node[key]]
    if is_place and _asks(schema, node) == (True, False):
        made[UNEVALUATED] = False
    return made


@given(_schemas, st.lists(_documents, min_size=1, max_size=8), st.booleans())
@examples(1000)
def test_nothing_is_allowed_that_the_schema_refuses(parts, documents, every):
    schema = _document(parts)
    if _is_endless(schema):
        return
    closed = close_objects(schema, every=every)
    for document in documents:
        if accepts(closed, document):
            assert accepts(schema, document), closed


@given(_schemas, st.lists(_documents, min_size=1, max_size=8))
@examples(1000)
def test_all_is_allowed_that_has_only_named_properties(parts, documents):
    """Those of one alternative of each anyOf: it does not mix the names of several."""
    schema = _document(parts)
    if _is_endless(schema):
        return
    closed = close_objects(schema)
    if UNEVALUATED in str(closed):
        return  # the compiler refuses it
    for chosen in islice(_choices(schema), 64):
        strict = _strict(chosen, chosen)
        for document in documents:
            if accepts(schema, document) and accepts(strict, document):
                assert accepts(closed, document), closed


def test_references_from_many_places_are_copied_up_to_a_bound() -> None:
    """A schema of 64 KB became one of 6 MB, in the server's process."""
    part: Schema = {"properties": {}}
    definitions: dict[str, Any] = {f"d{i}": part for i in range(250)}
    definitions["all"] = {"allOf": [{"$ref": f"#/$defs/d{i}"} for i in range(250)]}
    places = {
        f"p{i}": {
            "properties": {f"u{i}": part},
            "allOf": [{"properties": {f"u{i}": part}}, {"$ref": "#/$defs/all"}],
        }
        for i in range(250)
    }
    schema = {"type": "object", "properties": places, "$defs": definitions}
    assert close_objects(schema) == schema
