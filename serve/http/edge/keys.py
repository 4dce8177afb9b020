"""API keys, the names of their clients, and their limits.

The server keeps only the SHA-256 digest of a key. Keys of the same name are one client: they share
its limits and its cached K/V, so that a new key can replace an old one. A key file is TOML or JSON
by its suffix (a table `keys`), or has one key per line, `KEY` or `NAME:KEY`, and `#` for comments.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import stat
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from serve.errors import ConfigError, reason
from serve.regular_file import open_regular

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20
MAX_KEYS = 10_000
_KEY = re.compile(r"[A-Za-z0-9._~+/=-]{16,256}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LINE = re.compile(r"\bline (\d{1,7})\b[^\n]*\Z")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of a key; None is no limit. requests_per_minute: calls except GET and HEAD.
    tokens_per_minute: prompt and answer tokens together. max_concurrent: concurrent calls.
    max_tokens: tokens of one answer. min_priority: the lowest priority number of its requests,
    where lower numbers run first."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None
    max_tokens: int | None = None
    min_priority: int | None = None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A client's API key and its limits. digest: SHA-256 of the key. name: the client's name in
    logs and metrics."""

    name: str
    digest: bytes
    limits: KeyLimits = KeyLimits()


_LIMITS = frozenset(field.name for field in fields(KeyLimits))


class KeyRing:
    """The valid keys. Without any, requests need no key."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self._keys = tuple(keys)

    @property
    def num_keys(self) -> int:
        return len(self._keys)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(key.name for key in self._keys)

    def find(self, presented: bytes) -> ApiKey | None:
        """Returns the key. It compares with every key, so that the time reveals nothing."""
        digest = hashlib.sha256(presented).digest()
        found = None
        for key in self._keys:
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found

    def replace(self, keys: Iterable[ApiKey]) -> None:
        self._keys = tuple(keys)


def load_keys(path: str | None, given: Sequence[str] = ()) -> list[ApiKey]:
    """Returns the keys of a file and those given as KEY or NAME:KEY. Raises ConfigError, whose
    message has no key in it."""
    keys = [_from_line(text, f"API key {number}") for number, text in enumerate(given, 1)]
    if path is not None:
        keys += _from_file(Path(path))
    if len(keys) > MAX_KEYS:
        raise ConfigError(f"there are {len(keys)} API keys; at most {MAX_KEYS} are allowed")
    limits: dict[str, KeyLimits] = {}
    digests: set[bytes] = set()
    for key in keys:
        if limits.setdefault(key.name, key.limits) != key.limits:
            raise ConfigError(f"the API keys named {key.name} have different limits")
        if key.digest in digests:
            raise ConfigError(f"an API key appears twice; the second is named {key.name}")
        digests.add(key.digest)
    return keys


def _from_file(path: Path) -> list[ApiKey]:
    try:
        with open_regular(path) as file:
            mode = stat.S_IMODE(path.stat().st_mode)
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"cannot read the API key file {path}: {reason(exc)}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"the API key file {path} is larger than {MAX_FILE_BYTES} bytes")
    if mode & 0o077:
        logger.warning("other users can read the API key file %s (mode %o): chmod 600", path, mode)
    try:
        text = data.decode()
        if path.suffix == ".toml":
            return _from_table(tomllib.loads(text), path)
        if path.suffix == ".json":
            return _from_table(json.loads(text), path)
    except (ValueError, RecursionError) as exc:
        kind = path.suffix[1:] or "text"
        raise ConfigError(f"the API key file {path} is not valid {kind}{_line_of(exc)}") from None
    lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
    keys = [_from_line(s, f"{path}, line {n}") for n, s in lines if s and not s.startswith("#")]
    return _not_empty(keys, path)


def _line_of(error: Exception) -> str:
    """Returns where a parser stopped. Its whole message is not used, since it may quote a key."""
    found = _LINE.search(str(error))
    return f" (line {found[1]})" if found else ""


def _from_line(text: str, where: str) -> ApiKey:
    name, colon, key = text.strip().rpartition(":")
    return _make(name if colon else None, key, where, KeyLimits())


def _from_table(table: Any, path: Path) -> list[ApiKey]:
    entries = table.get("keys") if isinstance(table, dict) and set(table) == {"keys"} else None
    if not isinstance(entries, list):
        raise ConfigError(f"the API key file {path} must have exactly one list, `keys`")
    return _not_empty(
        [_from_entry(entry, f"{path}, key {number}") for number, entry in enumerate(entries, 1)],
        path,
    )


def _not_empty(keys: list[ApiKey], path: Path) -> list[ApiKey]:
    if not keys:
        raise ConfigError(f"the API key file {path} has no keys")
    return keys


def _from_entry(entry: Any, where: str) -> ApiKey:
    if not isinstance(entry, dict):
        raise ConfigError(f"{where} must be a table")
    unknown = set(entry) - _LIMITS - {"name", "key", "sha256"}
    if unknown:
        raise ConfigError(f"{where} has the unknown field {sorted(unknown)[0]!r}")
    limits: dict[str, int] = {}
    for name in _LIMITS & set(entry):
        value = entry[name]
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{where}: {name} must be an integer")
        if value < 1 and name != "min_priority":
            raise ConfigError(f"{where}: {name} must be positive")
        limits[name] = value
    if ("key" in entry) == ("sha256" in entry):
        raise ConfigError(f"{where} must have either key or sha256")
    digest = entry.get("sha256")
    if digest is None:
        return _make(entry.get("name"), entry["key"], where, KeyLimits(**limits))
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ConfigError(f"{where}: sha256 must be 64 hexadecimal digits, in lower case")
    name = _checked_name(entry.get("name"), digest, where)
    return ApiKey(name, bytes.fromhex(digest), KeyLimits(**limits))


def _make(name: Any, key: Any, where: str, limits: KeyLimits) -> ApiKey:
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise ConfigError(
            f"{where}: a key must be 16 to 256 letters, digits or any of . _ ~ + / = -"
        )
    digest = hashlib.sha256(key.encode()).digest()
    return ApiKey(_checked_name(name, digest.hex(), where), digest, limits)


def _checked_name(name: Any, digest: str, where: str) -> str:
    """Returns the name, or for a key without one a digest of its digest, which does not reveal the
    key."""
    if name is None:
        return "key-" + hashlib.sha256(b"name" + bytes.fromhex(digest)).hexdigest()[:8]
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: a name must be 1 to 64 letters, digits or any of . _ -")
    return name
