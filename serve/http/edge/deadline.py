"""How long a client wants to wait at most: the header X-Request-Timeout, in seconds."""

from __future__ import annotations

import re

from aiohttp import web

from serve.http.edge.errors import ApiError

HEADER = "X-Request-Timeout"
_SECONDS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,3})?")


def timeout_of(request: web.BaseRequest, most_s: float) -> float:
    """Seconds; most_s without the header. ApiError 400 names the header."""
    text = request.headers.get(HEADER)
    if text is None:
        return most_s
    seconds = float(text) if _SECONDS.fullmatch(text) else 0.0
    if not seconds or len(request.headers.getall(HEADER)) > 1:
        raise ApiError(
            400,
            f"{HEADER} must be a positive number of seconds, such as 30 or 0.5",
            param=HEADER,
            code="invalid_value",
        )
    return min(seconds, most_s)
