"""Finds ends in text that arrives in pieces."""

from __future__ import annotations

import re

_OUTSIDE = re.compile(r'["{}\[\]<]')
_INSIDE = re.compile(r'["\\]')


def overlap(text: str, marker: str) -> int:
    """Returns the length of the longest suffix of text that is a proper prefix of marker."""
    at = text.find(marker[0], max(0, len(text) - len(marker) + 1))
    while at >= 0:
        if marker.startswith(text[at:]):
            return len(text) - at
        at = text.find(marker[0], at + 1)
    return 0


class JsonEnd:
    """Finds the end of a JSON object or list by its brackets and strings.

    depth: the number of brackets that are open already.
    """

    __slots__ = ("_depth", "_is_escaped", "_is_string")

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._is_string = False
        self._is_escaped = False

    @property
    def is_complete(self) -> bool:
        """Whether the last bracket was found."""
        return self._depth <= 0

    def scan(self, text: str, start: int) -> int:
        """Returns the index after the last bracket, or -1 if it is not in text[start:].

        The next call continues with the text that follows. A < outside a string, which is not
        JSON, is an end too.
        """
        at = start
        while at < len(text):
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            match = (_INSIDE if self._is_string else _OUTSIDE).search(text, at)
            if match is None:
                return -1
            char, at = match[0], match.end()
            if self._is_string:
                self._is_escaped = char == "\\"
                self._is_string = self._is_escaped
            elif char == '"':
                self._is_string = True
            elif char == "<":
                return at - 1
            else:
                self._depth += 1 if char in "{[" else -1
                if self._depth <= 0:
                    return at
        return -1
