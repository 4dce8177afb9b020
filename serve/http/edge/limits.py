"""Limits on requests before their fields are parsed, and on time.

Limits of fields stand beside the fields; docs/operations.md lists all of them.
"""

from __future__ import annotations

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
WORK_BYTES = 1024 * MIB
BODY_S = 30.0
BODY_MIN_RATE = KIB
BODY_GRACE_S = 5.0
JSON_DEPTH = 64
JSON_VALUES = 1_000_000
JSON_CONTAINERS = 131_072
INTEGER_CHARS = 20
ALLOWED_IDS = 1 << 20  # prompts times allowed_token_ids

# connections and answers
CONNECTIONS = 20_000
CONNECTIONS_PER_ADDRESS = 1024
BACKLOG = 4096
TLS_HANDSHAKE_S = 10.0
KEEPALIVE_S = 75.0
CALLS = 8192
SEND_BUFFER_BYTES = 128 * KIB
PARSE_INLINE_BYTES = 16 * KIB
WRITE_S = 30.0
REQUEST_S = 21_600.0
CLIENT_REQUEST_ID_CHARS = 64
LOGPROBS = 1 << 21  # numbers in one answer; each takes some hundred bytes until it is sent
