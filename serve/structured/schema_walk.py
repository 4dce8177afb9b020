"""Which keywords of a JSON schema hold schemas, and what a reference in it points to."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

NAMED = ("properties", "patternProperties", "$defs", "definitions")  # a schema by name
CHOICES = ("anyOf", "oneOf")
IN_PLACE = ("allOf", *CHOICES)  # lists of schemas for the same value
LISTED = (*IN_PLACE, "prefixItems")
SINGLE = ("additionalProperties", "items", "additionalItems")
DATA = ("const", "enum", "default", "examples")  # values, which are no schemas


def _parts(reference: str) -> list[str]:
    parts = unquote(reference).removeprefix("#").split("/")[1:]
    return [part.replace("~1", "/").replace("~0", "~") for part in parts]


def target(root: Any, reference: str) -> Any:
    """Returns what a reference such as #/$defs/name points to, or None if there is nothing, which
    the compiler reports, or if it is an anchor."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    node = root
    for part in _parts(reference):
        if isinstance(node, list) and part.isdecimal() and len(part) < 6:
            node = node[int(part)] if int(part) < len(node) else None
        else:
            node = node.get(part) if isinstance(node, dict) else None
    return node


def is_place(root: Any, reference: str) -> bool:
    """Returns whether the reference leads through keywords to the schema of a value, and not to a
    member of allOf, anyOf or oneOf."""
    keys = iter(_parts(reference))
    node = root
    for key in keys:
        node = node.get(key) if isinstance(node, dict) else None
        if key in NAMED and isinstance(node, dict):
            node = node.get(next(keys, ""))
        elif isinstance(node, list) and key not in IN_PLACE:
            index = next(keys, "")
            node = node[int(index)] if index.isdecimal() and len(index) < 6 else None
        elif key not in SINGLE:
            return False
    return isinstance(node, dict)
