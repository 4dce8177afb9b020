"""How a server knows a call of its operator's hop: by a secret that both have.

Anyone may send a continuation, or say that another server computes a prompt, so all tokens of such
a call count towards a quota. The hop sends a continuation only of an answer whose beginning another
server has counted; and what it says of a call whose prompt another server computes, and counts, is
another value of the header, since that call itself is to be counted.
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


def prompt_token(token: str) -> str:
    """Returns what the header has where another server counts the prompt of the call."""
    return hmac.new(token.encode(), b"prompt", hashlib.sha256).hexdigest()


def is_of_hop(request: web.BaseRequest, token: str) -> bool:
    """Whether a call goes on with an answer for the operator's hop."""
    return _has(request, token)


def is_prompt_counted(request: web.BaseRequest, token: str) -> bool:
    """Whether the operator's hop has another server compute the prompt of a call."""
    is_given = token and HOP_HEADER in request.headers
    return bool(is_given) and _has(request, prompt_token(token))


def _has(request: web.BaseRequest, token: str) -> bool:
    given = request.headers.get(HOP_HEADER)
    if not token or given is None:
        return False
    # aiohttp decodes bytes that are no UTF-8 as surrogates
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), token.encode())
