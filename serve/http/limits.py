"""Everything that a stranger can send has a bound, and this is where it is.

The numbers are used by the settings' defaults and by the parsers; the table of
docs/operations.md is made of LIMITS (`python -m serve.http.limits`).
"""

from __future__ import annotations

from typing import NamedTuple

KIB, MIB = 1 << 10, 1 << 20

# the head of a request
LINE_BYTES = 8190  # the request line, or one header with its name
HEADERS = 64
HEAD_BYTES = 32 * KIB
HEAD_S = 10.0
FIRST_REQUEST_S = 15.0
PIPELINED = 32

# its body
BODY_BYTES = 8 * MIB
BODIES_BYTES = 256 * MIB
BODY_S = 30.0
BODY_MIN_RATE = KIB
BODY_GRACE_S = 5.0
JSON_DEPTH = 64
JSON_VALUES = 1_000_000
INTEGER_CHARS = 20
ALLOWED_IDS = 1 << 20  # of all prompts

# connections and answers
CONNECTIONS = 20_000
CONNECTIONS_PER_ADDRESS = 1024
BACKLOG = 4096
TLS_HANDSHAKE_S = 10.0
KEEPALIVE_S = 75.0
CALLS = 8192
SEND_BUFFER_BYTES = 128 * KIB
WRITE_S = 30.0
REQUEST_S = 21_600.0
CLIENT_REQUEST_ID_CHARS = 64
LOGPROBS = 1 << 21  # numbers in one answer; each is some hundred bytes until it is sent


class Limit(NamedTuple):
    """One bound: of what, how much, what happens beyond it, and the setting that changes it."""

    what: str
    bound: str
    beyond: str
    setting: str = ""


def seconds(value: float) -> str:
    return f"{value:g} s"


def size(value: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if value % unit == 0:
            return f"{value // unit} {name}"
    return f"{value} bytes"


def count(value: int) -> str:
    return f"{value:,}"
