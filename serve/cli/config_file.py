"""Configuration files: TOML in, TOML out. Knows no setting."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve.errors import ConfigError, reason

MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """path: as it was given, for messages."""

    path: str
    values: dict[str, Any]


def read_config_file(path: str) -> ConfigFile:
    """ConfigError names the file, and the line of what is no TOML."""
    try:
        with Path(path).open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_BYTES >> 20} MiB")
        return ConfigFile(path, tomllib.loads(data.decode("utf-8")))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {reason(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from error


def toml_value(value: Any) -> str:
    """A string, number, boolean or list of these as TOML writes it. What a terminal would obey is
    escaped."""
    if isinstance(value, str | Path):
        return "".join(map(_escaped, json.dumps(str(value), ensure_ascii=False)))
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml_value, value))}]"
    return repr(value)


def _escaped(char: str) -> str:
    """JSON's escapes are TOML's; it leaves more characters as they are."""
    if char.isprintable():
        return char
    if "\ud800" <= char <= "\udfff":  # of a name that is no UTF-8
        raise ConfigError("a value that is no text cannot be written to a file of settings")
    return f"\\U{ord(char):08x}"
