"""Checked reading of a checkpoint's JSON files; every error names the file and the key.

This module does not know what the keys mean.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve.errors import ModelLoadError, reason
from serve.regular_file import open_regular

MAX_JSON_BYTES = 64 << 20


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Returns the object in a JSON file. ModelLoadError for anything else."""
    try:
        values = json.loads(read_bytes(path, max_bytes).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not {type(values).__name__}")
    return values


def read_bytes(path: Path, max_bytes: int) -> bytes:
    """Returns the content of a regular file. ModelLoadError for a larger one and for anything else
    in its place."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            # a read reserves as much memory as it asks for
            data = file.read(min(size, max_bytes) + 1)
            if len(data) > max_bytes:
                raise ModelLoadError(f"{path} is {size} bytes; at most {max_bytes} are read")
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {reason(error)}") from error
    return data


class ConfigReader:
    """Typed, range-checked access to one JSON object. A null value counts as absent."""

    def __init__(self, values: dict[str, Any], source: str) -> None:
        self.values = values
        self.source = source

    def fail(self, key: str, complaint: str) -> ModelLoadError:
        return ModelLoadError(f"{self.source}: {key} {complaint}")

    def aliased(self, aliases: Mapping[str, str]) -> ConfigReader:
        """Returns a reader that knows keys of the file by the names that aliases give them; its
        errors have the file's."""
        renamed = {name: self.values[key] for key, name in aliases.items() if self.has(key)}
        keys = {n: k for k, n in aliases.items() if n in renamed or not self.has(n)}
        return _AliasedReader(self.values | renamed, self.source, keys)

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def integer(
        self, key: str, default: int | None = None, *, low: int = 1, high: int = 1 << 31
    ) -> int:
        value = self._get(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"must be an integer, not {value!r}")
        if not low <= value <= high:
            raise self.fail(key, f"is {value}; it must be between {low} and {high}")
        return value

    def number(
        self, key: str, default: float | None = None, *, low: float = 0.0, high: float = 1e12
    ) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.fail(key, f"must be a number, not {value!r}")
        # a whole number may be too large for a float, and NaN is in no range
        if not low <= value <= high:
            raise self.fail(key, f"is {str(value)[:40]}; it must be between {low:g} and {high:g}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.fail(key, f"must be true or false, not {value!r}")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.fail(key, f"must be a string, not {value!r}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """Returns an integer or a list of integers as a tuple, empty if the key is absent."""
        value = self.values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise self.fail(key, f"must hold token ids, not {token!r}")
        return tuple(dict.fromkeys(ids))

    def _get(self, key: str, default: object) -> Any:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(key, "is missing")
        return value


class _AliasedReader(ConfigReader):
    """A reader that knows some keys by other names; keys: the file's, by those names."""

    def __init__(self, values: dict[str, Any], source: str, keys: Mapping[str, str]) -> None:
        super().__init__(values, source)
        self._keys = keys

    def fail(self, key: str, complaint: str) -> ModelLoadError:
        return super().fail(self._keys.get(key, key), complaint)
