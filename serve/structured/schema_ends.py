"""How short the texts of a JSON schema can be: no finite text matches one that requires itself."""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Callable
from typing import Any

from serve.structured.schema_walk import CHOICES, IN_PLACE, LISTED, NAMED, Document, Work

_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# A string with a format or a pattern (a guess), and the quotes, colon and comma of a property.
_FORMATTED, _AROUND_NAME = 12, 4
_LITERAL_END = re.compile(r"(?:^|[^\\\w@ -])([\w@ -]{1,32})\$?$", re.ASCII)
Measure = Callable[[str], int]


def has_finite_text(schema: dict[str, Any], work: Work | None = None) -> bool:
    """Returns False only if no finite text matches; other constraints are not considered."""
    return _Ends(schema, len, work).shortest() < math.inf


def shortest_sizes(
    schema: dict[str, Any], measure: Measure, work: Work | None = None
) -> tuple[float, int]:
    """Returns the size of the schema's shortest text, about and at most, and the largest of such
    sizes of the values below the schema's own, such as the items of an array, with their names.
    measure: returns the size of a name or a constant; other characters count as one each."""
    ends = _Ends(schema, measure, work)
    return ends.shortest(), ends.longest_part


def pattern_ends(schema: Any) -> dict[str, None]:
    """Returns the literal texts at the ends of patterns in the schema, each once: a text that
    matches one may have to end so."""
    ends: dict[str, None] = {}
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            patterns = node.get("patternProperties")
            texts = [node.get("pattern"), *(patterns if isinstance(patterns, dict) else ())]
            for text in texts:
                found = _LITERAL_END.search(text) if isinstance(text, str) else None
                if found is not None:
                    ends[found.group(1)] = None
            left += node.values()
        elif isinstance(node, list):
            left += node
    return ends


def required_names(schema: Any) -> dict[str, None]:
    """Returns the names of required properties in the schema, each once."""
    names: dict[str, None] = {}
    left = [schema]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            required = node.get("required")
            if isinstance(required, list):
                names |= dict.fromkeys(name for name in required if isinstance(name, str))
            left += node.values()
        elif isinstance(node, list):
            left += node
    return names


class _Ends:
    """Computes the least fixed point of sizes: a schema that refers to itself has a size if it has
    one without that. A size is infinite where no text is finite."""

    def __init__(self, root: dict[str, Any], measure: Measure, work: Work | None) -> None:
        self._document = Document(root, work)
        self._measure = measure
        # All by the identity of a schema; those without a finite size have none in _sizes.
        self._sizes: dict[int, float] = {}
        self._parts: dict[int, list[dict[str, Any]]] = {}
        self._users: dict[int, list[dict[str, Any]]] = {}
        self.longest_part = 0

    def shortest(self) -> float:
        schemas = self._reached()
        left = deque(schemas)
        while left:
            node = left.popleft()
            if id(node) not in self._sizes and self._set_size(node):
                left += self._users[id(node)]
        for node in schemas:  # in a circle a size may be less by now
            self._set_size(node)
            self._see_parts(node)
        return self._size(self._document.root)

    def _reached(self) -> list[dict[str, Any]]:
        """Returns the schemas whose sizes count, each once and, but for circles, after its parts:
        those on which its own size depends, or its longest part."""
        found: list[dict[str, Any]] = []
        left: list[tuple[dict[str, Any], bool]] = [(self._document.root, False)]
        while left:
            node, is_done = left.pop()
            if is_done:
                found.append(node)
            elif id(node) not in self._parts:
                parts = self._parts[id(node)] = self._parts_of(node)
                self._users.setdefault(id(node), [])
                left.append((node, True))
                for part in parts:
                    self._users.setdefault(id(part), []).append(node)
                    left.append((part, False))
        return found

    def _parts_of(self, node: dict[str, Any]) -> list[dict[str, Any]]:
        parts = [self._referred(node)]
        if _constants(node) is None:
            for key in (*LISTED, *NAMED[:2]):
                value = node.get(key)
                value = list(value.values()) if isinstance(value, dict) else value
                parts += value if isinstance(value, list) else []
            parts += node.get("additionalProperties"), node.get("items")
        return [part for part in parts if isinstance(part, dict)]

    def _referred(self, node: dict[str, Any]) -> Any:
        reference = node.get("$ref")
        return self._document.target(reference) if isinstance(reference, str) else None

    def _size(self, node: Any) -> float:
        return self._sizes.get(id(node), math.inf) if isinstance(node, dict) else 1.0

    def _set_size(self, node: dict[str, Any]) -> bool:
        """Returns whether the size is finite."""
        self._document.work.spend(1 + len(self._parts[id(node)]))
        size = self._size(self._referred(node)) if isinstance(node.get("$ref"), str) else 0.0
        constants = _constants(node)
        if constants is not None:
            size += min(map(self._measure, constants), default=0)
        else:
            for key in IN_PLACE:
                branches = node.get(key)
                if isinstance(branches, list):
                    sizes = map(self._size, branches)
                    size += min(sizes, default=0.0) if key in CHOICES else sum(sizes)
            kinds = node.get("type", "any")
            each = kinds if isinstance(kinds, list) else [kinds]
            size += min((self._kind_size(node, str(kind)) for kind in each), default=1.0)
        if size < math.inf:
            self._sizes[id(node)] = size
        return size < math.inf

    def _kind_size(self, node: dict[str, Any], kind: str) -> float:
        match kind:
            case "object":
                members, required = node.get("properties"), node.get("required")
                known = members if isinstance(members, dict) else {}
                names = {str(name) for name in required} if isinstance(required, list) else set()
                sizes = (self._name_size(name) + self._size(known.get(name)) for name in names)
                return 2 + sum(sizes)
            case "array":
                items = node.get("prefixItems")
                first = items if isinstance(items, list) else []
                count = _count(node, "minItems")
                more = max(0, count - len(first))
                rest = more * (self._size(node.get("items")) + 2) if more else 0.0
                return 2 + sum(map(self._size, first[:count])) + rest
            case "string":
                is_formatted = "pattern" in node or "format" in node
                return 2 + _count(node, "minLength") + _FORMATTED * is_formatted
            case "number" | "integer":
                return max((len(str(node[key])) for key in _BOUNDS if key in node), default=1)
            case "boolean" | "null":
                return self._measure("false" if kind == "boolean" else "null")
        return 1.0

    def _name_size(self, name: str) -> int:
        return self._measure(name) + _AROUND_NAME

    def _see_parts(self, node: dict[str, Any]) -> None:
        """Counts the schema's constants and parts, but for those of allOf, which are no values of
        their own. A member that need not be there counts with its name: a comma may bring it."""
        joined = node.get("allOf")
        skipped = {id(part) for part in joined} if isinstance(joined, list) else set()
        parts = [self._size(part) for part in self._parts[id(node)] if id(part) not in skipped]
        constants = _constants(node)
        if constants is not None:
            parts += map(self._measure, constants)
        else:
            parts.append(_AROUND_NAME)
            members, patterns = node.get("properties"), node.get("patternProperties")
            known = members if isinstance(members, dict) else {}
            parts += (self._name_size(name) + self._size(item) for name, item in known.items())
            if isinstance(patterns, dict):
                around = _FORMATTED + _AROUND_NAME
                parts += (around + self._size(item) for item in patterns.values())
            others = node.get("additionalProperties")
            if others is not False and (others is not None or not (known or patterns)):
                parts.append(1 + _AROUND_NAME + self._size(others))
        finite = (int(size) for size in parts if size < math.inf)
        self.longest_part = max(self.longest_part, *finite, 0)


def _constants(node: dict[str, Any]) -> list[str] | None:
    """Returns the values that the schema lists, as JSON."""
    values = [node["const"]] if "const" in node else node.get("enum")
    return [json.dumps(value) for value in values] if isinstance(values, list) else None


def _count(node: dict[str, Any], key: str) -> int:
    value = node.get(key)
    return int(value) if isinstance(value, int | float) and value > 0 else 0
