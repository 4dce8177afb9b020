"""How a server knows a call of its operator's hop: by a secret that both have.

Anyone may send a continuation, so what it has computed counts towards a quota. The hop sends one
only of an answer whose beginning another server has counted.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from aiohttp import web

from serve.errors import ConfigError, reason
from serve.regular_file import open_regular

HOP_HEADER = "x-mergestep-hop"
_MAX_BYTES = 1 << 16
_LEAST_BYTES = 16


def load_hop_token(path: str | None) -> str:
    """Returns what the header has, by the secret in a file; "" without one. Raises ConfigError."""
    if path is None:
        return ""
    try:
        with open_regular(Path(path)) as file:
            secret = file.read(_MAX_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"hop_key_file {path}: {reason(error)}") from error
    if not _LEAST_BYTES <= len(secret) <= _MAX_BYTES:
        raise ConfigError(f"hop_key_file {path} must have {_LEAST_BYTES} to {_MAX_BYTES} bytes")
    return hmac.new(secret, b"mergestep hop", hashlib.sha256).hexdigest()


def is_of_hop(request: web.BaseRequest, token: str) -> bool:
    """Whether a call goes on with an answer for the operator's hop."""
    given = request.headers.get(HOP_HEADER)
    return bool(token) and given is not None and hmac.compare_digest(given.encode(), token.encode())
