"""Rewrites oneOf as anyOf in a JSON schema where no value can match two of its alternatives.

The grammar library does so itself, but not for references, as the discriminated unions of Pydantic
have them, and refuses every other oneOf.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain, combinations, product
from typing import Any, NamedTuple

from serve.structured.schema_walk import DATA, NAMED, Document, Work

_NUMBERS = frozenset(("integer", "number"))
_OBJECT = frozenset(("object",))
_Scalar = tuple[str, Any]  # its type, since True equals 1 in Python, and itself


def split_choices(schema: dict[str, Any], work: Work | None = None) -> dict[str, Any]:
    """Returns a copy of the schema, or the schema itself if it refers to an alternative by its
    place in oneOf."""
    if "/oneOf/" in json.dumps(schema):
        return schema
    made: dict[str, Any] = _Splitter(Document(schema, work)).split(schema)
    return made


class _Values(NamedTuple):
    """The types of the values that a schema allows, and the values; None: all."""

    types: frozenset[str] | None
    values: frozenset[_Scalar] | None


class _Facts(NamedTuple):
    """What a value must fulfil, and its required properties if it is an object."""

    own: _Values
    properties: dict[str, _Values]


class _Splitter:
    def __init__(self, document: Document) -> None:
        self._document = document
        self._work = document.work
        # By the identity of schemas in the document: a union in many places is compared once.
        self._known: dict[int, _Facts] = {}
        self._disjoint: dict[tuple[int, ...], bool] = {}

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
            elif key == "oneOf" and "anyOf" not in node and isinstance(value, list):
                made |= self._split_one_of(value)
            else:
                made[key] = self.split(value)
        return made

    def _split_one_of(self, alternatives: list[Any]) -> dict[str, Any]:
        meant = [self._meant(item) for item in alternatives]
        facts = [self._known_facts(item) for item in meant]
        key = tuple(map(id, meant))
        if key not in self._disjoint:
            self._disjoint[key] = self._are_disjoint(facts)
        if self._disjoint[key]:
            return {"anyOf": self.split(_typed(alternatives, facts))}
        return {"oneOf": self.split(alternatives)}

    def _meant(self, node: Any) -> Any:
        """Returns what the schema refers to if it says nothing else."""
        self._work.spend()
        is_reference = (
            isinstance(node, dict) and len(node) == 1 and isinstance(node.get("$ref"), str)
        )
        return self._document.target(node["$ref"]) if is_reference else node

    def _known_facts(self, node: Any) -> _Facts:
        if id(node) not in self._known:
            self._known[id(node)] = self._facts(node)
        return self._known[id(node)]

    def _are_disjoint(self, facts: Sequence[_Facts]) -> bool:
        distinct = self._distinct(facts)
        kept = [each for index, each in enumerate(facts) if index in distinct]
        others = [each for index, each in enumerate(facts) if index not in distinct]
        pairs = chain(combinations(others, 2), product(others, kept))
        return all(self._exclude(one, other) for one, other in pairs)

    def _distinct(self, facts: Sequence[_Facts]) -> set[int]:
        """Returns the indices of alternatives that exclude each other, because the constants of the
        value itself, or of one required property, differ in all of them. This is one pass over all
        constants; of the property that tells the most apart, alternatives with a constant that an
        earlier one has are left out."""
        listed: dict[str | None, list[tuple[int, frozenset[_Scalar]]]] = {}
        for index, each in enumerate(facts):
            allowed: list[tuple[str | None, _Values]] = [(None, each.own)]
            if each.own.types in (None, _OBJECT):
                allowed += each.properties.items()
            for name, (_, values) in allowed:
                self._work.spend()
                if values is not None:
                    listed.setdefault(name, []).append((index, values))
        most: set[int] = set()
        for members in listed.values():
            if len(most) == len(facts):
                break
            found: set[int] = set()
            seen: set[_Scalar] = set()
            for index, values in members:
                self._work.spend(1 + len(values) // 8)
                if seen.isdisjoint(values):
                    seen |= values
                    found.add(index)
            most = max(most, found, key=len)
        return most

    def _exclude(self, one: _Facts, other: _Facts) -> bool:
        """Returns whether no value fulfils both, or only values that are no objects and fulfil
        both, since neither says a type."""
        if self._differ(one.own, other.own):
            return True
        types = [each for each in (one.own.types, other.own.types) if each is not None]
        if types and frozenset.intersection(*types) != _OBJECT:
            return False
        return any(
            self._differ(values, other.properties[name])
            for name, values in one.properties.items()
            if name in other.properties
        )

    def _differ(self, one: _Values, other: _Values) -> bool:
        self._work.spend()
        for mine, theirs in zip(one, other, strict=True):
            if mine is not None and theirs is not None:
                self._work.spend(min(len(mine), len(theirs)) // 8)
                if mine.isdisjoint(theirs):
                    return True
        return False

    def _facts(self, node: Any) -> _Facts:
        parts = self._conditions(node)
        names: dict[str, None] = {}
        for part in parts:
            required = part.get("required")
            if isinstance(required, list):
                names |= dict.fromkeys(name for name in required if isinstance(name, str))
        found: dict[str, _Values] = {}
        for name in names:
            inner: list[dict[str, Any]] = []
            for part in parts:
                self._work.spend()
                properties = part.get("properties")
                if isinstance(properties, dict) and name in properties:
                    inner += self._conditions(properties[name])
            found[name] = self._values(inner)
        # those with constants come first, since one of them tells the alternatives apart
        ordered = sorted(found, key=lambda name: found[name].values is None)
        return _Facts(self._values(parts), {name: found[name] for name in ordered})

    def _conditions(self, node: Any) -> list[dict[str, Any]]:
        """Returns the schemas that all apply, each once: this one, those of its allOf and of its
        $ref."""
        found: dict[int, dict[str, Any]] = {}
        left = [node]
        while left:
            self._work.spend()
            node = left.pop()
            if not isinstance(node, dict) or id(node) in found:
                continue
            found[id(node)] = node
            members = node.get("allOf")
            left += members if isinstance(members, list) else []
            if isinstance(node.get("$ref"), str):
                left.append(self._document.target(node["$ref"]))
        return list(found.values())

    def _values(self, parts: list[dict[str, Any]]) -> _Values:
        types: frozenset[str] | None = None
        values: frozenset[_Scalar] | None = None
        for part in parts:
            kind = part.get("type")
            kinds = [kind] if isinstance(kind, str) else kind
            if isinstance(kinds, list) and all(isinstance(each, str) for each in kinds):
                types = _both(types, _with_numbers(kinds))
            known = [part["const"]] if "const" in part else part.get("enum")
            scalars = [_scalar(each) for each in known] if isinstance(known, list) else [None]
            self._work.spend(len(scalars))
            named = [scalar for scalar in scalars if scalar is not None]
            if len(named) == len(scalars):
                values = frozenset(named) if values is None else values & frozenset(named)
                types = _both(types, _with_numbers([kind for kind, _ in named]))
        return _Values(types, values)


def _both(one: frozenset[str] | None, other: frozenset[str]) -> frozenset[str]:
    return other if one is None else one & other


def _with_numbers(kinds: Sequence[str]) -> frozenset[str]:
    named = frozenset(kinds)
    return named | _NUMBERS if named & _NUMBERS else named  # an integer is a number


def _scalar(value: Any) -> _Scalar | None:
    """Returns a key that is the same for equal values, such as 1 and 1.0; None for others."""
    if value is None or isinstance(value, bool):
        return ("null" if value is None else "boolean"), value
    if isinstance(value, int | float):
        return "number", value
    return ("string", value) if isinstance(value, str) else None


def _typed(alternatives: list[Any], facts: Sequence[_Facts]) -> list[Any]:
    """Returns the alternatives so that several without a type are for objects only: any other value
    matches all of these, so that oneOf refuses it."""
    untyped = [each.own.types is None for each in facts]
    return [
        {"type": "object", **item} if is_untyped and sum(untyped) > 1 else item
        for item, is_untyped in zip(alternatives, untyped, strict=True)
    ]
