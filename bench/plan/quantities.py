"""Numbers of tokens and times as users write them: 10M, 128K, 30ms, 0.03."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

from serve.errors import ConfigError

_TOKENS = re.compile(r"([0-9]+(?:\.[0-9]+)?)([kKmM]?)")
_TIME = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ms|s|)")
_POWERS = {"": 1, "k": 1_000, "m": 1_000_000}
_UNITS = {"ms": 1e-3, "s": 1.0}
# options that have another name than the setting of the server
_OPTIONS = {"host_weight_bytes": "host-memory"}
_SETTING = re.compile(
    r"\b(kv_(cache_bytes|offload_bytes|offload_dir|policy|dtype)|max_(num_seqs|model_len)"
    r"|(weight_memory|host_weight)_bytes)\b"
)


@contextmanager
def naming_options() -> Iterator[None]:
    """Makes ConfigErrors of the server's functions name the options of the plan."""
    try:
        yield
    except ConfigError as error:
        text = _SETTING.sub(lambda m: _OPTIONS.get(m[0], m[0].replace("_", "-")), str(error))
        raise ConfigError(text) from error


def parse_tokens(name: str, text: str) -> int:
    """Returns a number of tokens: "131072", "128K" (128,000) or "10M" (10,000,000). name is the
    option's, for the ConfigError."""
    matched = _TOKENS.fullmatch(text.strip())
    tokens = float(matched[1]) * _POWERS[matched[2].lower()] if matched else 0.0
    if tokens < 1 or tokens != int(tokens):
        raise ConfigError(f"{name} must be a number of tokens such as 128K or 10M, not {text!r}")
    return int(tokens)


def parse_token_list(name: str, text: str | None) -> list[int] | None:
    """Parses "512,128K"; None stays None."""
    if text is None:
        return None
    return [parse_tokens(name, part) for part in text.split(",")]


def parse_seconds(name: str, text: str | None, unit: str = "s") -> float | None:
    """Returns seconds: "30ms", "0.03s", or a number in `unit`; None stays None. name is the
    option's, for the ConfigError."""
    if text is None:
        return None
    matched = _TIME.fullmatch(text.strip())
    seconds = float(matched[1]) * _UNITS[matched[2] or unit] if matched else 0.0
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{name} must be a time such as 30ms or 0.5s above 0, not {text!r}")
    return seconds
