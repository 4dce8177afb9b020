"""How short the texts of a JSON schema can be: no finite text matches one that requires itself."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from serve.structured.schema_walk import CHOICES, target

# More references than depend on each other in practice; beyond it a text is taken to end.
_MAX_ROUNDS = 32
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
# A string with a format or a pattern (a guess), and the quotes, colon and comma of a property.
_FORMATTED, _AROUND_NAME = 12, 4
_LITERAL_END = re.compile(r"(?:^|[^\\\w@ -])([\w@ -]{1,32})\$?$", re.ASCII)
Measure = Callable[[str], int]


def has_finite_text(schema: dict[str, Any]) -> bool:
    """Returns False only if no finite text matches; other constraints are not considered."""
    return _Ends(schema, len).shortest() < math.inf


def shortest_sizes(schema: dict[str, Any], measure: Measure) -> tuple[float, int]:
    """Returns the size of the schema's shortest text, about and at most, and the largest of such
    sizes of the values below the schema's own, such as the items of an array, with their names.
    measure: returns the size of a name or a constant; other characters count as one each."""
    ends = _Ends(schema, measure)
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
    """Computes a least fixed point: a reference ends if its target ends without it. A size is
    infinite where no text is finite."""

    def __init__(self, root: dict[str, Any], measure: Measure) -> None:
        self._root = root
        self._measure = measure
        self._sizes: dict[str, float] = {}  # of references
        self._open: set[str] = set()
        self.longest_part = 0

    def shortest(self) -> float:
        for _ in range(_MAX_ROUNDS):
            num_ended = self._num_ended()
            self._open, visited = set(), set[str]()
            size = self._size(self._root)
            while self._open - visited:
                reference = min(self._open - visited)
                visited.add(reference)
                self._sizes[reference] = self._part(target(self._root, reference))
            if self._num_ended() == num_ended:
                return size
        return 0.0

    def _num_ended(self) -> int:
        return sum(size < math.inf for size in self._sizes.values())

    def _part(self, node: Any) -> float:
        size = self._size(node)
        if size < math.inf:
            self.longest_part = max(self.longest_part, int(size))
        return size

    def _size(self, node: Any) -> float:
        if not isinstance(node, dict):
            return 1.0
        size = 0.0
        reference = node.get("$ref")
        if isinstance(reference, str):
            self._open.add(reference)
            size = self._sizes.get(reference, math.inf)
        values = [node["const"]] if "const" in node else node.get("enum")
        if isinstance(values, list):
            lengths = [self._measure(json.dumps(value)) for value in values]
            self.longest_part = max(self.longest_part, *lengths, 0)
            return size + min(lengths, default=0)
        for key in CHOICES:
            branches = node.get(key)
            if isinstance(branches, list):
                size += min(map(self._part, branches), default=0.0)
        branches = node.get("allOf")
        if isinstance(branches, list):
            size += sum(map(self._size, branches))
        return size + self._type_size(node)

    def _type_size(self, node: dict[str, Any]) -> float:
        kind = node.get("type", "any")
        kinds = [str(each) for each in kind] if isinstance(kind, list) else [str(kind)]
        digits = max((len(str(node[key])) for key in _BOUNDS if key in node), default=1)
        is_formatted = "pattern" in node or "format" in node
        sizes: dict[str, float] = {
            "object": self._object_size(node),
            "array": self._array_size(node),
            "string": 2 + _count(node, "minLength") + _FORMATTED * is_formatted,
            "number": digits,
            "integer": digits,
            "boolean": self._measure("false"),
            "null": self._measure("null"),
        }
        return min((sizes.get(each, 1.0) for each in kinds), default=1.0)

    def _object_size(self, node: dict[str, Any]) -> float:
        members, required = node.get("properties"), node.get("required")
        known = members if isinstance(members, dict) else {}
        sizes = {name: self._part(item) for name, item in known.items()}
        self._see_members(node, sizes)
        names = {str(name) for name in required} if isinstance(required, list) else set()
        return 2 + sum(self._measure(name) + _AROUND_NAME + sizes.get(name, 1.0) for name in names)

    def _see_members(self, node: dict[str, Any], sizes: dict[str, float]) -> None:
        """Counts a member that need not be there among the parts, with its name: a comma may bring
        it. sizes: those of the named properties' values."""
        members = [self._measure(name) + size for name, size in sizes.items()]
        patterns, others = node.get("patternProperties"), node.get("additionalProperties")
        if isinstance(patterns, dict):
            members += [_FORMATTED + self._part(item) for item in patterns.values()]
        if others is not False and (others is not None or not (sizes or patterns)):
            members.append(1 + self._part(others))
        longest = max((size for size in members if size < math.inf), default=0.0)
        self.longest_part = max(self.longest_part, int(longest) + _AROUND_NAME)

    def _array_size(self, node: dict[str, Any]) -> float:
        items = node.get("prefixItems")
        first = [self._part(item) for item in (items if isinstance(items, list) else [])]
        count, rest = _count(node, "minItems"), self._part(node.get("items"))
        more = max(0, count - len(first))
        return 2 + sum(first[:count]) + (more * (rest + 2) if more else 0.0)


def _count(node: dict[str, Any], key: str) -> int:
    value = node.get(key)
    return int(value) if isinstance(value, int | float) and value > 0 else 0
