"""Takes what nobody else may read out of what is written: keys, passwords in URLs; and what a
terminal would obey."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from typing import Any

HIDDEN = "***"
MIN_SECRET_CHARS = 4  # shorter ones are in any text
_SECRET_NAME = re.compile(
    r"(api[-_]?key|(^|[-_])key|token|secret|password|passwd|authorization)$", re.I
)
_IN_URL = re.compile(r"([a-z][a-z0-9+.-]*://)[^\s/@'\"]+@", re.I)
_IN_QUERY = re.compile(
    r"([?&](?:[\w-]*(?:key|token|secret|password|sig|signature))=)[^&\s'\"#]+", re.I
)
_BEARER = re.compile(r"((?:bearer|basic)\s+)[\w.~+/=-]{6,}", re.I)
_KEY = re.compile(r"\b(?:sk|hf|gsk|xai|nvapi)[-_][\w-]{8,}")
# an option's value as a shell quotes it
_OPTION = re.compile(
    r"(--?(?:[\w-]*(?:api[-_]?key|[-_]key|token|secret|password|authorization)|header|H)(?:=|\s+))"
    r"(?:'[^']*'|\"[^\"]*\"|[^\s'\"])+",
    re.I,
)
_SECRET_OPTION = re.compile(r"-H|--(?i:header|[\w-]*(?:key|token|secret|password|authorization))")


def command_line(words: Sequence[str]) -> str:
    """The words as a shell takes them, without the values of options that are secret."""
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
    """Of text: URLs lose their credentials, and options and headers with a secret their value.
    Of dicts and lists: all that is in them, and whole values whose name says that they are
    secret. Other values as they are."""
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
    """Takes these very texts out of others, wherever they stand."""
    known = {secret for secret in secrets if len(secret) >= MIN_SECRET_CHARS}
    if not known:
        return str
    found = re.compile("|".join(map(re.escape, sorted(known, key=len, reverse=True))))
    return lambda text: found.sub(HIDDEN, text)


def printable(text: str) -> str:
    """Without what could command a terminal; any white space is a space."""
    return "".join(
        char if char.isprintable() else " " for char in text if char.isprintable() or char.isspace()
    )


def _is_secret(name: Any) -> bool:
    return isinstance(name, str) and bool(_SECRET_NAME.search(name))
