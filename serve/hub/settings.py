"""Where the hub and the cache are, by the environment variables of Hugging Face's tools."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from serve.errors import ConfigError

DEFAULT_ENDPOINT = "https://huggingface.co"
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_TRUE = {"1", "ON", "YES", "TRUE"}
_MAX_TIMEOUT_S = 3600
_HOST = re.compile(r"[A-Za-z0-9._-]{1,253}|\[[0-9A-Fa-f:.]{2,45}\]")


@dataclass(frozen=True, slots=True)
class HubSettings:
    """endpoint: the hub's URL without a slash at its end. cache: the folder of all models.
    token: the user's access token, None to ask as a stranger. is_offline: only the cache is used.
    timeout_s: how long a connection may be silent."""

    endpoint: str
    cache: Path
    token: str | None = field(default=None, repr=False)
    is_offline: bool = False
    timeout_s: float = 10.0

    @property
    def host(self) -> str:
        """The hub's name in messages."""
        return self.endpoint.partition("://")[2]


def read_settings(environment: Mapping[str, str] = os.environ) -> HubSettings:
    """Returns the settings. ConfigError names the variable that cannot be used."""
    endpoint = (environment.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
    if not is_web_address(endpoint):
        raise ConfigError(
            "HF_ENDPOINT must be the address of a hub, http://HOST or https://HOST, without a user"
        )
    return HubSettings(
        endpoint,
        cache_folder(environment),
        _token(),
        _is_offline(environment),
        _timeout(environment),
    )


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the cache directory, found as Hugging Face's tools find it."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if folder := environment.get(name):
            return _path(folder)
    if home := environment.get("HF_HOME"):
        return _path(home) / "hub"
    return _path(environment.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def is_web_address(text: str) -> bool:
    """Returns whether the text is an http or https URL with a plain host and no user."""
    if not text.isascii() or not text.isprintable() or len(text) > 8192:
        return False
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    if parts.scheme not in ("http", "https") or "@" in parts.netloc or port == 0:
        return False
    host = parts.netloc if port is None else parts.netloc.rpartition(":")[0]
    return _HOST.fullmatch(host) is not None


def _path(text: str) -> Path:
    return Path(os.path.expandvars(text)).expanduser()


def _is_offline(environment: Mapping[str, str]) -> bool:
    given = environment.get("HF_HUB_OFFLINE") or environment.get("TRANSFORMERS_OFFLINE") or ""
    return given.upper() in _TRUE


def _timeout(environment: Mapping[str, str]) -> float:
    text = environment.get("HF_HUB_DOWNLOAD_TIMEOUT") or "10"
    if not text.isdecimal() or not 1 <= int(text) <= _MAX_TIMEOUT_S:
        raise ConfigError(
            f"HF_HUB_DOWNLOAD_TIMEOUT must be a number of seconds from 1 to {_MAX_TIMEOUT_S}"
        )
    return float(text)


def _token() -> str | None:
    """Returns the token of HF_TOKEN, or of `hf auth login`."""
    from huggingface_hub import constants, get_token

    token: str | None = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    if token and not (token.isascii() and token.isprintable() and " " not in token):
        raise ConfigError("HF_TOKEN holds characters that no token has")
    return token or None
