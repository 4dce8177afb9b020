"""Removes secrets (keys, passwords in URLs) and terminal control characters from texts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any

HIDDEN = "***"
MIN_SECRET_CHARS = 4  # a shorter secret occurs in any text
_SECRET_NAME = re.compile(
    r"(api[-_]?key|(^|[-_])key|token|secret|password|passwd|authorization)$", re.I
)
_IN_URL = re.compile(r"([a-z][a-z0-9+.-]*://)[^\s/@'\"]+@", re.I)
_IN_QUERY = re.compile(
    r"([?&](?:[\w-]*(?:key|token|secret|password|sig|signature))=)[^&\s'\"#]+", re.I
)
_BEARER = re.compile(r"((?:bearer|basic)\s+)[\w.~+/=-]{6,}", re.I)
_KEY = re.compile(r"\b(?:sk|hf|gsk|xai|nvapi)[-_][\w-]{8,}")
# An option's value, as a shell quotes it.
_OPTION = re.compile(
    r"(--?(?:[\w-]*(?:api[-_]?key|[-_]key|token|secret|password|authorization)|header|H)(?:=|\s+))"
    r"(?:'[^']*'|\"[^\"]*\"|[^\s'\"])+",
    re.I,
)
_SECRET_OPTION = re.compile(r"-H|--(?i:header|[\w-]*(?:key|token|secret|password|authorization))")


def command_line(words: Sequence[str]) -> str:
    """Returns the words as a shell takes them, without the values of secret options."""
    shown: list[str] = []
    is_value = False
    for word in words:
        name, equals, _ = word.partition("=")
        is_secret = not is_value and _SECRET_OPTION.fullmatch(name) is not None
        if is_value or (is_secret and equals):
            shown.append(HIDDEN if is_value else f"{name}={HIDDEN}")
        elif word.startswith("-H") and word != "-H":
            shown.append(f"-H{HIDDEN}")
        else:
            shown.append(shlex.quote(redact(word)))
        is_value = is_secret and not equals
    return " ".join(shown)


def redact(value: Any) -> Any:
    """Returns the value without secrets. In a text, URLs lose their credentials, and secret options
    and headers their values. In dicts and lists every item is redacted, and a value whose key names
    a secret is hidden whole. Other values stay as they are."""
    if isinstance(value, str):
        text = _IN_URL.sub(r"\1", value)
        for pattern in (_IN_QUERY, _BEARER, _OPTION):
            text = pattern.sub(rf"\1{HIDDEN}", text)
        return _KEY.sub(HIDDEN, text)
    if isinstance(value, dict):
        return {
            redact(name): HIDDEN if item and _is_secret(name) else redact(item)
            for name, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(item) for item in value]
    return value


def hider(secrets: Iterable[str]) -> Callable[[str], str]:
    """Returns a function that hides these secrets wherever they occur in a text."""
    hidden = {secret for secret in secrets if len(secret) >= MIN_SECRET_CHARS}
    if not hidden:
        return str
    pattern = re.compile("|".join(map(re.escape, sorted(hidden, key=len, reverse=True))))
    return lambda text: pattern.sub(HIDDEN, text)


def printable(text: str) -> str:
    """Returns the text without control characters; any white space becomes a space."""
    return "".join(
        char if char.isprintable() else " " for char in text if char.isprintable() or char.isspace()
    )


def _is_secret(name: Any) -> bool:
    return isinstance(name, str) and bool(_SECRET_NAME.search(name))
