"""Random JSON schemas of all the kinds that structured output knows."""

from __future__ import annotations

import random
from typing import Any

Schema = dict[str, Any]
NAMES = ("a", "b", "c", "name", "city", "x1", "x2", "with space", 'q"t', "é")
LARGE = (2**63 - 1, -(2**63), 2**53, -(2**53), 2**31 - 1, -(2**31), 10**17)
ENUM = (1, 2, "a", "bc", None, True, 2.5, [1], {"k": 1}, "é\n", 2**53, -5)
CONSTANTS = (1, "x", None, False, {"a": [1, {}]}, 2**53, 'a"b')
PATTERNS = ("^[a-f0-9]{4}$", "^\\d{3}-\\d{2}$", "^(foo|bar)+$", "^[A-Z][a-z]*$", "[0-9]", "^x.*y$")
FORMATS = ("date", "ipv4", "date-time", "time")
TYPES = ("integer", "string", "null", "boolean", "number")


def random_schema(seed: int) -> Schema:
    """Returns the schema of this seed. Some are ones that no text matches."""
    return _Random(random.Random(seed)).document()


class _Random:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._references: tuple[str, ...] = ()

    def document(self) -> Schema:
        has_references = self._chance(0.4)
        self._references = ("A", "B") if has_references else ()
        schema = self._any(3)
        if not has_references:
            return schema
        return {**schema, "$defs": {"A": self._list(), "B": self._object(2)}}

    def _chance(self, probability: float) -> bool:
        return self._rng.random() < probability

    def _list(self) -> Schema:
        to_next: Schema = {"$ref": "#/$defs/A"}
        nexts = [to_next, {"anyOf": [to_next, {"type": "null"}]}, {"type": "array"}]
        after = self._rng.choice([*nexts[:2], {**nexts[2], "items": to_next}])
        properties = {"value": self._leaf(), "next": after}
        return {"type": "object", "properties": properties, "required": ["value"]}

    def _any(self, depth: int) -> Schema:
        if self._references and self._chance(0.15):
            return {"$ref": f"#/$defs/{self._rng.choice(self._references)}"}
        if depth <= 0 or self._chance(0.25):
            return self._leaf()
        make = self._rng.choice(
            (self._object, self._object, self._array, self._choice, self._tagged, self._parts)
        )
        return make(depth)

    def _object(self, depth: int) -> Schema:
        names = self._rng.sample(NAMES, self._rng.randint(0, 4))
        schema: Schema = {"type": "object"}
        if names or self._chance(0.7):
            schema["properties"] = {name: self._any(depth - 1) for name in names}
        if self._chance(0.7):
            schema["required"] = [name for name in names if self._chance(0.6)]
        if self._chance(0.35):
            schema["additionalProperties"] = self._rng.choice([False, True, self._leaf()])
        if self._chance(0.12):
            pattern = self._rng.choice(["^x", "^[a-c]{2}$", "_id$"])
            schema["patternProperties"] = {pattern: self._leaf()}
        return schema

    def _array(self, depth: int) -> Schema:
        schema: Schema = {"type": "array", "items": self._any(depth - 1)}
        if self._chance(0.6):
            schema["maxItems"] = self._rng.randint(0, 4)
        if self._chance(0.3):
            schema["minItems"] = self._rng.randint(0, schema.get("maxItems", 2))
        if self._chance(0.15):
            schema["prefixItems"] = [self._any(depth - 1)]
        return schema

    def _choice(self, depth: int) -> Schema:
        return {"anyOf": [self._any(depth - 1) for _ in range(self._rng.randint(1, 3))]}

    def _tagged(self, depth: int) -> Schema:
        return {
            "oneOf": [
                {
                    "type": "object",
                    "properties": {"kind": {"const": kind}, "value": self._any(depth - 1)},
                    "required": ["kind"],
                }
                for kind in self._rng.sample("pqr", 2)
            ]
        }

    def _parts(self, depth: int) -> Schema:
        return {"allOf": [self._object(depth - 1) for _ in range(self._rng.randint(1, 2))]}

    def _leaf(self) -> Schema:
        rng = self._rng
        match rng.randint(0, 7):
            case 0 | 1:
                return self._number("integer")
            case 2:
                return self._number("number")
            case 3:
                return self._string()
            case 4:
                return {"enum": rng.sample(ENUM, rng.randint(1, 4))}
            case 5:
                return {"const": rng.choice(CONSTANTS)}
            case 6:
                return {"type": rng.sample(TYPES, 2)}
        return {"type": rng.choice(("boolean", "null"))}

    def _number(self, kind: str) -> Schema:
        rng = self._rng
        ends: list[Any] = [rng.randint(-(10**6), 10**6), rng.randint(-20, 20), rng.choice(LARGE)]
        if kind == "number":
            ends += [round(rng.uniform(-100, 100), 3), 1e20, -1e300]
        low, high = sorted(rng.sample(ends, 2))
        names = rng.choice(
            [("minimum", "maximum"), ("exclusiveMinimum", "exclusiveMaximum"), ("minimum", ""), ""]
        )
        schema: Schema = {"type": kind}
        schema |= {name: end for name, end in zip(names, (low, high), strict=False) if name}
        if self._chance(0.2):
            schema["multipleOf"] = rng.choice((1, 2, 3, 5, 7, 10, 100))
        return schema

    def _string(self) -> Schema:
        rng = self._rng
        least = rng.randint(0, 5)
        return {
            "type": "string",
            **rng.choice(
                [
                    {},
                    {"maxLength": rng.randint(0, 12)},
                    {"minLength": least, "maxLength": least + rng.randint(0, 9)},
                    {"pattern": rng.choice(PATTERNS)},
                    {"format": rng.choice(FORMATS)},
                ]
            ),
        }
