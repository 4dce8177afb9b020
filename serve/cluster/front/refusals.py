"""What servers refuse, and whether another one may not."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from serve.http.anthropic.errors import error_object
from serve.http.edge.errors import ERROR_CODE_HEADER, SERVER_ERROR, ApiError
from serve.http.edge.sse import named_event

# Codes of errors with which a replica says that it cannot answer now, and another one can.
ELSEWHERE = frozenset(
    {"draining", "handed_over", "model_not_ready", "continuation_differs"}
    | {"engine_failed", "engine_stuck", "memory_nodes_lost", "rank_lost"}
    | {"weights_lost", "kv_lost"}
)
_REFUSALS = frozenset({503, 409})
# Responses are stored where they were made.
_STORED_ELSEWHERE = frozenset({"previous_response_not_found", "response_not_found"})


def last_error(path: str) -> bytes:
    """Returns the event that tells the client, in the shape of its API, that its answer ends."""
    message = "no server is left to go on with this answer"
    error = ApiError(503, message, kind=SERVER_ERROR, code="no_replica")
    if path.startswith("/v1/messages"):
        return named_event("error", error_object(error, ""))
    if path.startswith("/v1/responses"):
        fields = {"message": message, "param": None, "code": error.code}
        return named_event("error", {"type": "error", **fields})
    return b"data: " + error.body() + b"\n\n"


def goes_elsewhere(answer: web.Response) -> bool:
    code = error_code(answer)
    if answer.status in (429, 529):
        return code == "overloaded"
    if answer.status in _REFUSALS:
        return code in ELSEWHERE
    return answer.status in (400, 404) and code in _STORED_ELSEWHERE


def error_code(answer: web.Response) -> str | None:
    """Returns the code of an error: that of the header, since not all APIs' bodies have it."""
    code = answer.headers.get(ERROR_CODE_HEADER)
    if code is not None:
        return code
    try:
        value: Any = orjson.loads(body_bytes(answer.body))
    except ValueError:
        return None
    error = value.get("error") if isinstance(value, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return code if isinstance(code, str) else None


def body_bytes(body: object) -> bytes:
    return body if isinstance(body, bytes) else b""
