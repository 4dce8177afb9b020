"""A oneOf that becomes anyOf allows the same values. The reference is jsonschema."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.structured.schema_choices import split_choices
from tests.support.profile import examples

Schema = dict[str, Any]
SCALARS = (1, 1.0, 2, 2.5, True, False, None, "1", "a")


def accepts(schema: Schema, value: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def tagged(kind: Any, **more: Any) -> Schema:
    return {"properties": {"kind": {"const": kind}}, "required": ["kind"], **more}


def one_of(*alternatives: Any) -> Schema:
    refs = {"Cat": tagged(1, type="object"), "Dog": tagged(2, type="object"), "Any": tagged("a")}
    return {"oneOf": list(alternatives), "$defs": refs}


CAT, DOG, ANY = ({"$ref": f"#/$defs/{name}"} for name in ("Cat", "Dog", "Any"))


@pytest.mark.parametrize(
    "alternatives",
    [
        (CAT, DOG),
        (CAT, {"type": "string"}),
        (tagged(1, type="object"), tagged(True, type="object")),
        (tagged("a"), tagged("b")),
        (ANY, tagged("b")),
        (ANY, CAT, DOG),
        tuple({"const": value} for value in (1, 2.5, True, None, "1")),
        ({"enum": [1, "a"]}, {"enum": [2, None]}, {"type": "boolean"}),
        ({"type": ["object", "null"], **tagged(1)}, {"type": ["object", "string"], **tagged(2)}),
        tuple(tagged(i, type="object") for i in range(256)),
    ],
)
def test_distinct_alternatives(alternatives):
    assert "oneOf" not in split_choices(one_of(*alternatives))


@pytest.mark.parametrize(
    "alternatives",
    [
        (CAT, CAT),
        ({"const": 1}, {"const": 1.0}),
        ({"const": 1}, {"type": "integer"}),
        ({"type": "number"}, {"type": "integer"}),
        (tagged("a"), tagged("b"), {"type": "string"}),
        ({"const": [1]}, {"const": [2]}),
        (tagged([1], type="object"), tagged([2], type="object")),
        ({"type": "string"}, True),
    ],
)
def test_other_alternatives_stay(alternatives):
    assert "oneOf" in split_choices(one_of(*alternatives))


_conditions = st.one_of(
    st.sampled_from(SCALARS).map(lambda value: {"const": value}),
    st.lists(st.sampled_from(SCALARS), min_size=1, max_size=2).map(lambda v: {"enum": v}),
    st.sampled_from(["object", "string", "integer", "number", "null"]).map(lambda t: {"type": t}),
    st.sampled_from([CAT, DOG, ANY]),
)
_objects = st.fixed_dictionaries(
    {"properties": st.dictionaries(st.sampled_from(["kind", "b"]), _conditions, max_size=2)},
    optional={
        "required": st.lists(st.sampled_from(["kind", "b"]), max_size=2, unique=True),
        "type": st.sampled_from(["object", ["object", "null"]]),
        "allOf": st.lists(_conditions, max_size=1),
    },
)
_schemas = st.lists(_objects | _objects | _conditions, min_size=2, max_size=3)
_values = st.sampled_from(SCALARS) | st.dictionaries(
    st.sampled_from(["kind", "b"]), st.sampled_from([*SCALARS, {"kind": 1}, {"kind": 2}])
)


@given(_schemas, st.lists(_values, min_size=1, max_size=10))
@examples(1000)
def test_the_same_values_are_allowed(alternatives, values):
    schema = one_of(*alternatives)
    split = split_choices(schema)
    for value in values:
        assert accepts(split, value) == accepts(schema, value), (split, value)
