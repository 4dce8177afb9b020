"""Reads the API key that commands send to a server, from a file or the environment.

It is never an argument, since other users of the machine see those.
"""

from __future__ import annotations

import os
from pathlib import Path

from serve.errors import ConfigError, reason
from serve.regular_file import open_regular

API_KEY_ENV = "MERGESTEP_API_KEY"
MAX_KEY_BYTES = 1 << 16


def read_client_key(file: Path | None) -> str | None:
    """Returns the text of the file, else of MERGESTEP_API_KEY; ConfigError never shows it."""
    if file is None:
        return os.environ.get(API_KEY_ENV) or None
    try:
        with open_regular(file) as opened:
            key = opened.read(MAX_KEY_BYTES).decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as exc:
        what = reason(exc) if isinstance(exc, OSError) else "it is not ASCII text"
        raise ConfigError(f"api_key_file {file} cannot be read: {what}") from exc
    if not key:
        raise ConfigError(f"api_key_file {file} is empty")
    return key
