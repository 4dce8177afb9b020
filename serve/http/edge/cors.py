"""CORS: pages of other origins may call from a browser only if their origin is listed.

The server uses no cookies, so it sends no headers about credentials.
"""

from __future__ import annotations

from aiohttp import hdrs, web

MAX_AGE_S = 600
EXPOSED = "x-request-id, x-client-request-id, x-mergestep-warning, Retry-After"


class Cors:
    def __init__(self, origins: tuple[str, ...]) -> None:
        self._origins = frozenset(origins)

    def headers(self, request: web.BaseRequest) -> dict[str, str]:
        """Returns the headers of any answer to the request."""
        if not self._origins:
            return {}
        headers = {"Vary": "Origin"}
        origin = request.headers.get(hdrs.ORIGIN)
        if origin in self._origins:
            headers["Access-Control-Allow-Origin"] = origin
            headers["Access-Control-Expose-Headers"] = EXPOSED
        return headers

    def preflight(self, request: web.BaseRequest) -> web.Response | None:
        """Answers a browser's preflight request, which carries no key; None for other requests."""
        origin = request.headers.get(hdrs.ORIGIN)
        asks = hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers
        if request.method != "OPTIONS" or not asks or origin not in self._origins:
            return None
        return web.Response(
            status=204,
            headers={
                "Access-Control-Allow-Methods": "GET, POST, DELETE",
                "Access-Control-Allow-Headers": (
                    "Authorization, Content-Type, x-api-key, X-Request-Id, X-Request-Timeout,"
                    " anthropic-version, anthropic-beta, OpenAI-Organization, OpenAI-Project"
                ),
                "Access-Control-Max-Age": str(MAX_AGE_S),
            },
        )
