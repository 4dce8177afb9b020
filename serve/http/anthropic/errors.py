"""Errors in Anthropic's shape and with Anthropic's statuses."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from serve.http.edge.errors import JSON_TYPE, ApiError, common_headers

OVERLOADED_STATUS = 529
# At this code, clients that try server-side conversations go on without them.
THREADS_UNSUPPORTED = "thread_unsupported_request"
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    OVERLOADED_STATUS: "overloaded_error",
}


def error_status(error: ApiError) -> int:
    """Returns 529 for a full queue, as Anthropic's API does; other errors keep their status."""
    return OVERLOADED_STATUS if error.code in ("overloaded", "queue_full") else error.status


def error_object(error: ApiError, request_id: str) -> dict[str, Any]:
    status = error_status(error)
    kind = _KINDS.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    message, param = error.message, error.param or ""
    if (param.rpartition(".")[0] or param) not in message:  # Anthropic's shape has no field for it
        message = f"{param}: {message}"
    message = message.encode("utf-8", "replace").decode()
    body: dict[str, Any] = {"type": kind, "message": message}
    if error.code == THREADS_UNSUPPORTED:
        body["details"] = {"error_code": error.code}
    return {"type": "error", "error": body, "request_id": request_id}


def anthropic_error(error: ApiError, request_id: str) -> web.Response:
    """Returns an error response of Anthropic's routes; it is their error_shape."""
    response = web.Response(
        status=error_status(error),
        body=orjson.dumps(error_object(error, request_id)),
        content_type=JSON_TYPE,
        headers={**common_headers(request_id), **error.headers, "request-id": request_id},
    )
    if error.closes:
        response.force_close()
    return response
