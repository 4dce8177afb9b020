"""Closes the objects of a JSON schema: no property is generated that the schema does not name.

By the letter of JSON Schema an object without additionalProperties may have any others, and models
invent them without end. A *place* is where a value stands in the document. The schemas that apply
at a place are its *parts*: the keywords there, the members of allOf, the alternatives of anyOf and
of oneOf, and the target of $ref. What one part names is no additional property for the others, so
a place is closed once, for the names of all its parts, or each alternative of anyOf for its own
names and those of the other parts. (The alternatives of oneOf stay as they are, with all in them:
a value could match one that is closed where by the letter it matches two.) A place stays open if a
part says additionalProperties itself, and if no part has properties.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from serve.structured.schema_walk import CHOICES, IN_PLACE, LISTED, NAMED, SINGLE, Document, Work

_MAX_ADDED = 20_000  # names in all; places beyond them stay open
_MAX_STEPS = 100  # of parts that are parts of parts, also behind references
_MAX_MADE = 60_000  # schemas; copies of references may be as many as places times references
_TYPED = ("type", "enum", "const", "$ref", *IN_PLACE)
_HOLDS = ("properties", "patternProperties", *LISTED, *SINGLE, "$ref")
_ASKED = "unevaluatedProperties"
_ITEMS, _REST = "\0items", "\0rest"  # of an array; of an object, beside `properties`
_NONE: frozenset[str] = frozenset()
_LETTER = frozenset(("\0letter",))  # in the place of `shared`: a copy in which nothing is closed


@dataclass(slots=True)
class _Names:
    """The properties that parts name. has_any: a part has `properties` or `patternProperties`,
    perhaps without any. is_said: a part says itself which others there may be. has_choices: the
    names are those of alternatives, or one of them says which others there may be."""

    names: dict[str, None] = field(default_factory=dict)
    patterns: dict[str, None] = field(default_factory=dict)
    required: dict[str, None] = field(default_factory=dict)
    has_any: bool = False
    is_said: bool = False
    has_choices: bool = False

    def __bool__(self) -> bool:
        return bool(self.has_any or self.required)

    def __len__(self) -> int:
        return len(self.names) + len(self.patterns) + len(self.required)


def close_objects(
    schema: dict[str, Any], work: Work | None = None, *, every: bool = True
) -> dict[str, Any]:
    """Returns a copy of the schema whose objects are closed. With every=False only those are that
    have unevaluatedProperties, a keyword that the grammar library does not know. A schema whose
    copies of what it refers to are too many is returned as it is."""
    return _Closer(Document(schema, work), every).close()


class _Closer:
    def __init__(self, document: Document, every: bool) -> None:
        self._document = document
        self._root = document.root
        self._every = every
        self._parts_of_root = _PartNames(document)
        self._copies: dict[tuple[str, frozenset[str] | None], str] = {}
        self._left: list[tuple[str, frozenset[str] | None]] = []
        self._num_added = 0
        self._num_made = 0

    def close(self) -> dict[str, Any]:
        schema: dict[str, Any] = self._place(self._root)
        made: dict[str, Any] = {}
        while self._left:
            if self._num_made > _MAX_MADE:
                return self._root
            key = self._left.pop()
            reference, shared = key
            node = self._document.target(reference)
            if shared is None:
                made[self._copies[key]] = self._place(node)
            elif shared is _LETTER:
                made[self._copies[key]] = self._by_letter(node)
            else:
                made[self._copies[key]] = self._part(node, shared)
        if made:
            schema["$defs"] = {**schema.get("$defs", {}), **made}
        return schema

    # -- a place

    def _place(
        self,
        node: Any,
        others: _Names | None = None,
        shared: frozenset[str] = _NONE,
        rest: Any = None,
    ) -> Any:
        """Returns the schema of a place, closed, or that of an alternative. others: what the parts
        around the alternative name; rest: the unevaluatedProperties around it; shared: see _part.
        """
        self._num_made += 1
        self._document.work.spend()
        if not isinstance(node, dict):
            return node
        rest = node.get(_ASKED, rest)
        parts = self._parts_of_root.of(node)
        shared |= self._parts_of_root.shared(node)
        others = others or _Names()
        total = self._parts_of_root.union([others, *(names for _, names in parts)])
        has_group = any(key == "anyOf" and names.has_any for key, names in parts)
        beside = [names for key, names in parts if not (has_group and key == "anyOf")]
        said = [names for names in beside if names.is_said]
        if rest not in (None, True) and any(names.has_choices for names in said):
            return self._part(node, shared) | {_ASKED: rest}  # the compiler refuses the keyword
        if (
            (rest is None and not (self._every and total.has_any))
            or rest is True
            or said
            or not _may_be_object(node)
        ):
            return self._part(node, shared)
        if rest is not None and any(n.has_choices for key, n in parts if key != "anyOf"):
            return self._part(node, shared) | {_ASKED: rest}
        if has_group:
            around = self._parts_of_root.union([others, *beside])
            made: dict[str, Any] = self._part(node, shared, ("anyOf",))
            made["anyOf"] = [
                self._in_place(item, shared)
                if self._parts_of_root.all_of(item).is_said
                else self._place(item, around, shared, rest)
                for item in node["anyOf"]
            ]
            return made
        naming = [key for key, names in parts if names]
        if rest is None and not others and naming in (["$ref"], ["allOf"]):
            return self._close_only(node, shared)
        return self._close_here(self._part(node, shared), total, rest)

    def _close_only(self, node: dict[str, Any], shared: frozenset[str]) -> dict[str, Any]:
        """Closes a place by the one part that names properties, a reference or a member of allOf,
        which keeps recursive schemas free of intersections."""
        made: dict[str, Any] = self._part(node, shared, ("$ref", "allOf"))
        if self._parts_of_root.all_of({"$ref": node.get("$ref")}):
            made["$ref"] = self._closed(node["$ref"])
        if "allOf" in node:
            made["allOf"] = [self._place(item, None, shared) for item in node["allOf"]]
        return made

    def _close_here(self, made: dict[str, Any], total: _Names, rest: Any) -> dict[str, Any]:
        own = made.get("properties", {})
        for named in (own, made.get("patternProperties", {})):
            if not isinstance(named, dict):  # the grammar library refuses it
                return made
        self._document.work.spend(len(total) // 16)
        names = total.names | (total.required if rest is None else {})
        added = [name for name in names if name not in own]
        self._num_added += len(added)
        if self._num_added > _MAX_ADDED:
            return made
        if self._every and "properties" in made and not any(key in made for key in _TYPED):
            made["type"] = "object"
        made["properties"] = own | dict.fromkeys(added, True)
        if total.patterns:
            patterns: dict[str, Any] = dict.fromkeys(total.patterns, True)
            made["patternProperties"] = patterns | made.get("patternProperties", {})
        made["additionalProperties"] = self._place(rest) if isinstance(rest, dict) else False
        return made

    # -- a part of a place, which is not closed itself

    def _in_place(self, node: Any, shared: frozenset[str]) -> Any:
        is_asked = isinstance(node, dict) and _ASKED in node
        return self._place(node) if is_asked else self._part(node, shared)

    def _part(self, node: Any, shared: frozenset[str], but: Collection[str] = ()) -> Any:
        """Returns the part with the places in it closed, but for those of the properties in
        `shared`: several parts describe them, and neither may exclude what the other names. but:
        keywords that are left as they are."""
        self._num_made += 1
        self._document.work.spend()
        if not isinstance(node, dict):
            return node
        made: dict[str, Any] = {}
        for key, value in node.items():
            if key in but:
                made[key] = value
            elif key == "oneOf" and self._every and not self._asks(value):
                made[key] = self._by_letter(value)
            elif key in IN_PLACE and isinstance(value, list):
                made[key] = [self._in_place(item, shared) for item in value]
            elif key in NAMED and isinstance(value, dict):
                self._document.work.spend(len(value) // 8)
                made[key] = {
                    name: item if _name(key, name) in shared else self._place(item)
                    for name, item in value.items()
                }
            elif key in (*LISTED, *SINGLE):
                is_left = _name(key) in shared
                if isinstance(value, list) and not is_left:
                    made[key] = [self._place(item) for item in value]
                else:
                    made[key] = value if is_left else self._place(value)
            elif key == "$ref" and isinstance(value, str):
                names = self._parts_of_root.all_of({"$ref": value})
                is_open = self._every and names.has_any and not names.is_said
                made[key] = self._copy(value, shared) if is_open else self._closed(value)
            elif key != _ASKED:
                made[key] = value
        return made

    def _asks(self, value: Any) -> bool:
        """Returns whether unevaluatedProperties is somewhere in a schema or in a list of them."""
        self._document.work.spend()
        if isinstance(value, list):
            return any(map(self._asks, value))
        is_dict = isinstance(value, dict)
        return is_dict and (_ASKED in value or any(map(self._asks, value.values())))

    def _by_letter(self, value: Any) -> Any:
        """Returns a schema, or a list of them, with nothing closed in it or behind references."""
        self._num_made += 1
        self._document.work.spend()
        if isinstance(value, list):
            return [self._by_letter(item) for item in value]
        if not isinstance(value, dict):
            return value
        made = dict(value)
        for key, inner in value.items():
            if key in NAMED and isinstance(inner, dict):
                made[key] = {name: self._by_letter(item) for name, item in inner.items()}
            elif key in (*IN_PLACE, *LISTED, *SINGLE):
                made[key] = self._by_letter(inner)
        reference = value.get("$ref")
        if isinstance(reference, str) and isinstance(self._document.target(reference), dict):
            made["$ref"] = self._copy(reference, _LETTER)
        return made

    def _closed(self, reference: str) -> str:
        """Returns a reference to the closed place: where it is, unless it is outside of what the
        schema's keywords lead to, or is a part."""
        node = self._document.target(reference)
        if not isinstance(node, dict) or self._document.is_place(reference):
            return reference
        return self._copy(reference, None)

    def _copy(self, reference: str, shared: frozenset[str] | None) -> str:
        """Returns a reference to a copy that is a part, or with shared=None a closed place."""
        key = reference, shared
        if key not in self._copies:
            name = f"closed-{len(self._copies)}"
            while name in self._root.get("$defs", ()):
                name += "-"
            self._copies[key] = name
            self._left.append(key)
        return f"#/$defs/{self._copies[key]}"


class _PartNames:
    """What the parts of places name, in one document."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._work = document.work
        self._known: dict[str, _Names] = {}
        self._counted: dict[str, Counter[str]] = {}

    def union(self, names: Iterable[_Names]) -> _Names:
        total = _Names()
        for each in names:
            self._work.spend(1 + len(each) // 16)
            total.names |= each.names
            total.patterns |= each.patterns
            total.required |= each.required
            total.has_any |= each.has_any
            total.is_said |= each.is_said
            total.has_choices |= each.has_choices
        return total

    def of(self, node: dict[str, Any], steps: int = 0) -> list[tuple[str, _Names]]:
        """Returns the names of each part, with the keyword that it is under; "" is the schema's own
        keywords."""
        parts = [("", _own(node))]
        for key in IN_PLACE:
            members = node.get(key)
            if isinstance(members, list):
                names = [self.all_of(member, steps + 1) for member in members]
                if key in CHOICES:
                    names = [self.union(names)]
                    names[0].has_choices = names[0].has_any or names[0].is_said
                parts += [(key, each) for each in names]
        reference = node.get("$ref")
        if isinstance(reference, str):
            parts.append(("$ref", self._referred(reference, steps + 1)))
        return parts

    def all_of(self, node: Any, steps: int = 0) -> _Names:
        """Returns what the parts of this schema name together."""
        if not isinstance(node, dict):
            return _Names()
        if steps > _MAX_STEPS:
            return _Names(is_said=True)
        total = self.union(names for _, names in self.of(node, steps))
        total.is_said |= _ASKED in node
        return total

    def _referred(self, reference: str, steps: int) -> _Names:
        if reference not in self._known:
            self._known[reference] = _Names()  # what a circle adds to itself
            node = self._document.target(reference)
            is_known = isinstance(node, dict)
            self._known[reference] = self.all_of(node, steps) if is_known else _Names(is_said=True)
        return self._known[reference]

    def shared(self, node: dict[str, Any]) -> frozenset[str]:
        """Returns the names that several parts describe with schemas that may hold objects."""
        counts = self._counts(node)
        self._work.spend(len(counts) // 16)
        if counts[_REST] and sum(counts.values()) - counts[_ITEMS] > 1:
            return frozenset(counts)
        return frozenset(name for name, count in counts.items() if count > 1)

    def _counts(self, node: Any, steps: int = 0) -> Counter[str]:
        counts: Counter[str] = Counter()
        self._work.spend()
        if not isinstance(node, dict) or steps > _MAX_STEPS:
            return counts
        for key in (*NAMED[:2], "prefixItems", *SINGLE):
            value = node.get(key)
            named = value.items() if key in NAMED and isinstance(value, dict) else [("", value)]
            self._work.spend(len(named) // 8)
            for name, item in named:
                if isinstance(item, list) or (
                    isinstance(item, dict) and any(each in item for each in _HOLDS)
                ):
                    counts[_name(key, name)] = 1
        for key in IN_PLACE:
            members = node.get(key)
            each = (
                [self._counts(item, steps + 1) for item in members]
                if isinstance(members, list)
                else []
            )
            if key in CHOICES:
                each = [self._most(each)]
            for more in each:
                self._work.spend(len(more) // 8)
                counts.update(more)
        reference = node.get("$ref")
        if isinstance(reference, str):
            if reference not in self._counted:
                self._counted[reference] = Counter()  # what a circle adds to itself
                referred = self._document.target(reference)
                self._counted[reference] = self._counts(referred, steps + 1)
            self._work.spend(len(self._counted[reference]) // 8)
            counts.update(self._counted[reference])
        return counts

    def _most(self, counts: list[Counter[str]]) -> Counter[str]:
        total: Counter[str] = Counter()
        for each in counts:
            self._work.spend((len(total) + len(each)) // 8)
            total |= each
        return total


def _own(node: dict[str, Any]) -> _Names:
    """Returns what the part's own keywords name."""
    properties, patterns = node.get("properties"), node.get("patternProperties")
    required = node.get("required")
    required = required if isinstance(required, list) else []
    return _Names(
        dict.fromkeys(properties) if isinstance(properties, dict) else {},
        dict.fromkeys(patterns) if isinstance(patterns, dict) else {},
        dict.fromkeys(name for name in required if isinstance(name, str)),
        isinstance(properties, dict) or isinstance(patterns, dict),
        "additionalProperties" in node,
    )


def _name(key: str, name: str = "") -> str:
    """Returns the name in `shared` of a schema under this keyword. Definitions are never shared."""
    if key == "properties":
        return name
    if key in ("$defs", "definitions"):
        return ""
    return _REST if key in ("patternProperties", "additionalProperties") else _ITEMS


def _may_be_object(node: dict[str, Any]) -> bool:
    kind = node.get("type", "object")
    return "object" in kind if isinstance(kind, list) else kind == "object"
