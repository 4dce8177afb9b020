"""A hundred JSON schemas with many features; random tokens under their masks soon complete them."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]

WORD: Json = {"type": "string", "maxLength": 6}
SMALL: Json = {"type": "integer", "minimum": -5, "maximum": 99}
FLAG: Json = {"type": "boolean"}


def closed(required: list[str] | None = None, **properties: Any) -> Json:
    """Returns the schema of an object with only these properties, by default all required."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def array_of(items: Any, max_items: int = 3, min_items: int = 0) -> Json:
    return {"type": "array", "items": items, "minItems": min_items, "maxItems": max_items}


SCALARS: list[Json] = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": ["boolean", "null"]},
    {"type": "integer", "minimum": 0, "maximum": 9},
    {"type": "integer", "minimum": -100, "maximum": 100},
    {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 6},
    {"type": "integer", "minimum": 10_000, "maximum": 99_999},
    {"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": 5},
    {"type": "number", "minimum": 1, "maximum": 1},
    {"type": "string", "maxLength": 0},
    {"type": "string", "minLength": 1, "maxLength": 1},
    {"type": "string", "maxLength": 20},
    {"type": "string", "minLength": 10, "maxLength": 12},
    {"const": "yes"},
    {"const": 5},
    {"const": None},
    {"const": {"a": [1, 2, {"b": "c"}]}},
    {"const": 'quotes " and \\ and \n and é and 漢'},
    {"enum": ["red", "green", "blue"]},
    {"enum": [1, 2.5, "three", None, True, [4], {"five": 5}]},
    {"enum": ["a", "ab", "abc", "abcd"]},
    {"type": "string", "enum": ["x y", "z\tw", ""]},
]
PATTERNS: list[Json] = [
    {"type": "string", "pattern": "^[a-f0-9]{8}$"},
    {"type": "string", "pattern": "^\\d{4}-\\d{2}-\\d{2}$"},
    {"type": "string", "pattern": "^(foo|bar)+$", "maxLength": 12},
    {"type": "string", "pattern": "^[A-Z][a-z]{0,5}$"},
    {"type": "string", "pattern": "^[^a-z]{2}$"},
    {"type": "string", "pattern": "^\\w{1,4}@\\w{1,4}\\.(com|org)$"},
    {"type": "string", "pattern": "^a?b?c?$"},
    {"type": "string", "pattern": "^(a{1,3}b){2}$"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "uuid"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "time"},
]
OBJECTS: list[Json] = [
    closed(),
    closed(a=FLAG),
    closed(a=FLAG, b=SMALL, c=WORD),
    closed([], a=FLAG, b=SMALL),
    closed(["b"], a=FLAG, b=SMALL, c=FLAG),
    closed(["a"], a=FLAG, b=FLAG, c=FLAG, d=FLAG, e=FLAG),
    closed(**{f"p{i}": FLAG for i in range(20)}),
    closed(outer=closed(inner=closed(innermost=SMALL))),
    closed(user=closed(name=WORD, age=SMALL), tags=array_of(WORD)),
    closed(**{"with space": FLAG, 'q"uote': FLAG, "é": FLAG, "": FLAG}),
    {"type": "object", "properties": {}, "additionalProperties": False},
    {"type": "object", "maxProperties": 0},
    closed(kind={"const": "circle"}, radius=SMALL),
    closed(id={"type": "string", "pattern": "^[0-9]{3}$"}, status={"enum": ["on", "off"]}),
    {"title": "t", "description": "d", "default": {}, "examples": [{}], **closed(a=FLAG)},
    {"$schema": "https://json-schema.org/draft/2020-12/schema", **closed(a=SMALL)},
    closed(point=closed(x=SMALL, y=SMALL), box=closed(w=SMALL, h=SMALL)),
    closed(maybe={"type": ["integer", "null"], "minimum": 0, "maximum": 5}),
    closed(level={"enum": [1, 2, 3]}, on=FLAG, note={"type": "string", "maxLength": 8}),
    closed(a=closed(b=closed(c=closed(d=closed(e=closed(f={"type": "null"})))))),
]
ARRAYS: list[Json] = [
    array_of(FLAG),
    array_of(FLAG, 5, 5),
    array_of(SMALL, 4, 2),
    array_of(WORD, 2, 1),
    array_of(array_of(FLAG, 2), 2),
    array_of(closed(a=FLAG), 2, 1),
    array_of({"enum": ["a", "b"]}, 6),
    {"type": "array", "maxItems": 0},
    {"type": "array", "prefixItems": [FLAG, SMALL], "items": False, "minItems": 2},
    {"type": "array", "prefixItems": [FLAG, WORD], "items": False, "minItems": 1},
    {"type": "array", "prefixItems": [FLAG], "items": SMALL, "minItems": 2, "maxItems": 3},
    array_of({"type": ["boolean", "null"]}, 3, 3),
    array_of(array_of(array_of(FLAG, 1, 1), 1, 1), 1, 1),
    array_of({"const": "x"}, 4, 4),
]
COMBINED: list[Json] = [
    {"anyOf": [FLAG, SMALL]},
    {"anyOf": [closed(a=FLAG), closed(b=SMALL)]},
    {"anyOf": [{"type": "null"}, WORD]},
    {"anyOf": [{"const": "a"}, {"const": "b"}, array_of(FLAG, 1)]},
    closed(shape={"anyOf": [closed(r=SMALL), closed(w=SMALL, h=SMALL)]}),
    {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    {"oneOf": [closed(kind={"const": "a"}, x=SMALL), closed(kind={"const": "b"}, y=FLAG)]},
    {"allOf": [{"type": "integer", "minimum": 2}, {"type": "integer", "maximum": 7}]},
    {"allOf": [SMALL]},
    {"anyOf": [SMALL], "description": "one branch"},
    {"type": "integer", "anyOf": [{"minimum": 0, "maximum": 1}, {"minimum": 5, "maximum": 6}]},
    closed(v={"anyOf": [array_of(SMALL, 2), {"type": "null"}, closed([], a=FLAG)]}),
    array_of({"anyOf": [FLAG, SMALL, {"const": "z"}]}, 3, 1),
    {"anyOf": [{"enum": ["a", "b"]}, {"enum": [1, 2]}]},
]
REFERENCES: list[Json] = [
    {"$ref": "#/$defs/flag", "$defs": {"flag": FLAG}},
    {**closed(a={"$ref": "#/$defs/n"}, b={"$ref": "#/$defs/n"}), "$defs": {"n": SMALL}},
    {**closed(a={"$ref": "#/definitions/w"}), "definitions": {"w": WORD}},
    {
        "$ref": "#/$defs/node",
        "$defs": {"node": closed(["v"], v=FLAG, next={"$ref": "#/$defs/leaf"}), "leaf": SMALL},
    },
    {
        **closed(first={"$ref": "#/$defs/a"}),
        "$defs": {"a": closed(b={"$ref": "#/$defs/b"}), "b": array_of({"$ref": "#/$defs/c"}, 2)}
        | {"c": {"enum": ["p", "q"]}},
    },
    closed(a=SMALL, b={"$ref": "#/properties/a"}),
    {**array_of({"$ref": "#/$defs/a~1b"}, 2, 1), "$defs": {"a/b": FLAG}},
    {"anyOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}], "$defs": {"x": FLAG, "y": SMALL}},
]
BIGGER: list[Json] = [
    closed(
        name=WORD,
        age={"type": "integer", "minimum": 0, "maximum": 150},
        email={"type": "string", "pattern": "^[a-z]{1,5}@[a-z]{1,5}\\.com$"},
        address=closed(["city"], street=WORD, city=WORD, zip={"type": "string", "maxLength": 5}),
        tags=array_of(WORD, 2),
    ),
    closed(**{f"field_{i}": {"enum": [f"{i}a", f"{i}b"]} for i in range(15)}),
    closed(name={"const": "get_weather"}, arguments=closed(city=WORD, unit={"enum": ["C", "F"]})),
    array_of(closed(id=SMALL, done=FLAG, title=WORD), 2, 1),
    closed(matrix=array_of(array_of(SMALL, 2, 2), 2, 2)),
    closed(steps=array_of(closed(explanation=WORD, output=WORD), 2), answer=WORD),
    {"enum": [f"value-{i * 7919 % 1000}" for i in range(500)]},
    closed(**{f"k{i}": {"type": ["null", "boolean"]} for i in range(15)}),
    {"anyOf": [closed(**{f"only_{i}": FLAG}) for i in range(40)]},
    closed(date={"type": "string", "format": "date"}, when={"type": "string", "format": "time"}),
]

SCHEMAS = [*SCALARS, *PATTERNS, *OBJECTS, *ARRAYS, *COMBINED, *REFERENCES, *BIGGER]
