"""Rewrites oneOf as anyOf in a JSON schema where no value can match two of its alternatives.

The grammar library does so itself, but not for references, as the discriminated unions of Pydantic
have them, and refuses every other oneOf.
"""

from __future__ import annotations

import json
from itertools import combinations
from typing import Any

from serve.structured.schema_walk import DATA, NAMED, target

_MAX_STEPS = 16  # of references that lead to references
_MAX_PAIRS = 20_000  # that are compared in all; a oneOf beyond them stays
_NUMBERS = frozenset(("integer", "number"))


def split_choices(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a copy of the schema, or the schema itself if it refers to an alternative by its
    place in oneOf."""
    if "/oneOf/" in json.dumps(schema):
        return schema
    made: dict[str, Any] = _Splitter(schema).split(schema)
    return made


class _Splitter:
    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._pairs_left = _MAX_PAIRS

    def split(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.split(item) for item in node]
        if not isinstance(node, dict):
            return node
        made: dict[str, Any] = {}
        for key, value in node.items():
            if key in DATA:
                made[key] = value
            elif key in NAMED and isinstance(value, dict):
                made[key] = {name: self.split(item) for name, item in value.items()}
            elif key == "oneOf" and "anyOf" not in node and self._are_disjoint(value):
                made["anyOf"] = self.split(value)
            else:
                made[key] = self.split(value)
        return made

    def _are_disjoint(self, alternatives: Any) -> bool:
        if not isinstance(alternatives, list):
            return False
        pairs = len(alternatives) * (len(alternatives) - 1) // 2
        self._pairs_left -= pairs
        if self._pairs_left < 0:
            return False
        facts = [self._facts(item) for item in alternatives]
        return all(_exclude(one, other) for one, other in combinations(facts, 2))

    def _facts(self, node: Any) -> dict[str, Any]:
        """Returns what a value must fulfil: "" -> the value's own facts, name -> those of a
        required property. Each is the set of its types, or of its values as JSON."""
        parts = self._conditions(node, 0)
        facts: dict[str, Any] = {"": _values(parts)}
        required = [part["required"] for part in parts if isinstance(part.get("required"), list)]
        if facts[""][0] != {"object"}:  # another value has no properties
            return facts
        for name in {name for names in required for name in names if isinstance(name, str)}:
            inner: list[dict[str, Any]] = []
            for part in parts:
                properties = part.get("properties")
                if isinstance(properties, dict) and name in properties:
                    inner += self._conditions(properties[name], 0)
            facts["." + name] = _values(inner)
        return facts

    def _conditions(self, node: Any, steps: int) -> list[dict[str, Any]]:
        """Returns the schemas that all apply: this one, those of its allOf and of its $ref."""
        if not isinstance(node, dict) or steps > _MAX_STEPS:
            return []
        found = [node]
        members = node.get("allOf")
        for member in members if isinstance(members, list) else []:
            found += self._conditions(member, steps + 1)
        if isinstance(node.get("$ref"), str):
            found += self._conditions(target(self._root, node["$ref"]), steps + 1)
        return found


_Values = tuple[frozenset[str] | None, frozenset[str] | None]  # types, and values as JSON


def _values(parts: list[dict[str, Any]]) -> _Values:
    """Returns the types and the values that these parts allow; None: all."""
    types: frozenset[str] | None = None
    values: frozenset[str] | None = None
    for part in parts:
        kind = part.get("type")
        if isinstance(kind, str) or (
            isinstance(kind, list) and all(isinstance(k, str) for k in kind)
        ):
            named = frozenset([kind] if isinstance(kind, str) else kind)
            named |= _NUMBERS if named & _NUMBERS else frozenset()  # an integer is a number
            types = named if types is None else types & named
        known = [part["const"]] if "const" in part else part.get("enum")
        if isinstance(known, list) and all(isinstance(k, str) for k in known):
            texts = frozenset(json.dumps(k) for k in known)
            values = texts if values is None else values & texts
            types = frozenset(("string",)) if types is None else types & {"string"}
    return types, values


def _exclude(one: dict[str, _Values], other: dict[str, _Values]) -> bool:
    """Returns whether no value fulfils both."""
    for name in one.keys() & other.keys():
        for mine, theirs in zip(one[name], other[name], strict=True):
            if mine is not None and theirs is not None and not mine & theirs:
                return True
    return False
