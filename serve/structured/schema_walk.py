"""Which keywords of a JSON schema hold schemas, what a reference in it points to, and how much work
all of this may be.

A schema is prepared in the server's process. Its references make a graph of it, which can have far
more paths than values, so that whatever follows them counts its steps.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from serve.structured.refusal import invalid

# 0.2 to 0.8 s. A schema of 130 models with references, 80 KB, takes 27,000 steps.
MAX_WORK = 300_000

NAMED = ("properties", "patternProperties", "$defs", "definitions")  # a schema by name
CHOICES = ("anyOf", "oneOf")
IN_PLACE = ("allOf", *CHOICES)  # lists of schemas for the same value
LISTED = (*IN_PLACE, "prefixItems")
SINGLE = ("additionalProperties", "items", "additionalItems")
DATA = ("const", "enum", "default", "examples")  # values, which are no schemas


class Work:
    """The steps that are left to prepare one structured output."""

    def __init__(self, left: int = MAX_WORK) -> None:
        self.left = left

    def spend(self, steps: int = 1) -> None:
        """Raises RequestError with code "invalid_schema" if no steps are left."""
        self.left -= steps
        if self.left < 0:
            raise invalid(
                "is too complicated: its $ref, allOf, anyOf and oneOf combine in too many ways"
            )


class Document:
    """A schema with its references, each of which is looked up once. work: None sets a limit for
    this schema alone."""

    def __init__(self, root: dict[str, Any], work: Work | None = None) -> None:
        self.root = root
        self.work = work or Work()
        self._found: dict[str, tuple[Any, bool]] = {}

    def target(self, reference: str) -> Any:
        """Returns what a reference such as #/$defs/name points to, or None if there is nothing,
        which the compiler reports, or if it is an anchor."""
        return self._find(reference)[0]

    def is_place(self, reference: str) -> bool:
        """Returns whether the reference leads through keywords to the schema of a value, and not to
        a member of allOf, anyOf or oneOf."""
        return self._find(reference)[1]

    def _find(self, reference: str) -> tuple[Any, bool]:
        found = self._found.get(reference)
        if found is None:
            parts = _parts(reference)
            found = _target(self.root, reference, parts), _is_place(self.root, parts)
            self._found[reference] = found
        return found


def _parts(reference: str) -> list[str]:
    parts = unquote(reference).removeprefix("#").split("/")[1:]
    return [part.replace("~1", "/").replace("~0", "~") for part in parts]


def _target(root: Any, reference: str, parts: list[str]) -> Any:
    if reference != "#" and not reference.startswith("#/"):
        return None
    node = root
    for part in parts:
        if isinstance(node, list) and part.isdecimal() and len(part) < 6:
            node = node[int(part)] if int(part) < len(node) else None
        else:
            node = node.get(part) if isinstance(node, dict) else None
    return node


def _is_place(root: Any, parts: list[str]) -> bool:
    keys = iter(parts)
    node = root
    for key in keys:
        node = node.get(key) if isinstance(node, dict) else None
        if key in NAMED and isinstance(node, dict):
            node = node.get(next(keys, ""))
        elif isinstance(node, list) and key not in IN_PLACE:
            index = next(keys, "")
            is_index = index.isdecimal() and len(index) < 6 and int(index) < len(node)
            node = node[int(index)] if is_index else None
        elif key not in SINGLE:
            return False
    return isinstance(node, dict)
