"""The notation of values on the command line, in the environment and in TOML files.

Nothing here knows a setting.
"""

from __future__ import annotations

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from serve.errors import ConfigError, reason
from serve.regular_file import open_regular

MAX_BYTES = 1 << 20
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The values of a file. path: as the user wrote it, for messages."""

    path: str
    values: dict[str, Any]


def parse_size(text: str | int) -> int:
    """Parses "2GiB", "512M" or a number of bytes; K, M, G and T are powers of 1024."""
    match = _SIZE.fullmatch(str(text).strip())
    if match is None:
        raise typer.BadParameter(f"{str(text)[:40]!r} is not a size such as 512M or 2GiB")
    return int(float(match[1]) * 1024 ** _POWERS[match[2].upper()])


def split_list(text: str) -> tuple[str, ...]:
    """Splits a comma-separated list: "a, b" -> ("a", "b")."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def read_config_file(path: str) -> ConfigFile:
    """Reads a TOML file; ConfigError names the file and the line that is wrong."""
    try:
        with open_regular(path) as opened:
            data = opened.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_BYTES >> 20} MiB")
        return ConfigFile(path, tomllib.loads(data.decode("utf-8")))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {reason(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error


def toml_value(value: Any) -> str:
    """Writes a string, number, boolean or list of these as TOML, with control characters
    escaped."""
    if isinstance(value, str | Path):
        return "".join(map(_escaped, json.dumps(str(value), ensure_ascii=False)))
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml_value, value))}]"
    return repr(value)


def _escaped(char: str) -> str:
    """Escapes the characters that JSON leaves as they are; its own escapes are valid TOML."""
    if char.isprintable():
        return char
    if "\ud800" <= char <= "\udfff":  # from a file name that is not UTF-8
        raise ConfigError("a value that is not valid text cannot be written to a settings file")
    return f"\\U{ord(char):08x}"
