"""Checks whether a finite text can match a JSON schema: none does if it requires itself."""

from __future__ import annotations

from typing import Any

# More references than depend on each other in practice; beyond it the result is True.
_MAX_ROUNDS = 32
_BOTTOMLESS = frozenset({"object", "array"})


def has_finite_text(schema: dict[str, Any]) -> bool:
    """Returns False only if no finite text matches; other constraints are not considered."""
    return _Ends(schema).is_found()


class _Ends:
    """Computes a least fixed point: a reference ends if its target ends without it."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._ended: set[str] = set()
        self._open: set[str] = set()

    def is_found(self) -> bool:
        for _ in range(_MAX_ROUNDS):
            self._open = set()
            if self._ends(self._root):
                return True
            visited: set[str] = set()
            before = len(self._ended)
            while self._open - visited:
                reference = min(self._open - visited)
                visited.add(reference)
                if self._ends(self._target(reference)):
                    self._ended.add(reference)
            if len(self._ended) == before:
                return False
        return True

    def _ends(self, node: Any) -> bool:
        if not isinstance(node, dict):
            return True
        reference = node.get("$ref")
        if isinstance(reference, str) and reference not in self._ended:
            self._open.add(reference)
            return False
        if "enum" in node or "const" in node:
            return True
        for key in ("anyOf", "oneOf"):
            branches = node.get(key)
            if isinstance(branches, list) and not any(self._ends(b) for b in branches):
                return False
        branches = node.get("allOf")
        if isinstance(branches, list) and not all(self._ends(b) for b in branches):
            return False
        return self._type_ends(node)

    def _type_ends(self, node: dict[str, Any]) -> bool:
        kind = node.get("type")
        kinds = {str(each) for each in kind} if isinstance(kind, list) else {str(kind)}
        if not kinds or not kinds <= _BOTTOMLESS:
            return True
        results = []
        if "object" in kinds:
            members, required = node.get("properties"), node.get("required")
            names = required if isinstance(required, list) else []
            known = members if isinstance(members, dict) else {}
            results.append(all(self._ends(known.get(str(name))) for name in names))
        if "array" in kinds:
            count, items = node.get("minItems"), node.get("prefixItems")
            count = int(count) if isinstance(count, (int, float)) and count > 0 else 0
            first = items[:count] if isinstance(items, list) else []
            rest = [node.get("items")] if count > len(first) else []
            results.append(all(self._ends(item) for item in (*first, *rest)))
        return any(results)

    def _target(self, reference: str) -> Any:
        """Returns the target, or None if there is none, which the compiler reports."""
        node: Any = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, list) and part.isdecimal() and len(part) < 6:
                node = node[int(part)] if int(part) < len(node) else None
            else:
                node = node.get(part) if isinstance(node, dict) else None
        return node
