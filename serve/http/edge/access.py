"""Checks of a request's headers before its path: Host, API key and X-Request-Timeout."""

from __future__ import annotations

import re

from aiohttp import hdrs, web

from serve.http.edge.errors import ApiError
from serve.http.edge.keys import ApiKey, KeyRing
from serve.http.edge.settings import HttpSettings

API_KEY_HEADER = "x-api-key"
TIMEOUT_HEADER = "X-Request-Timeout"
ANY = "*"
_LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
_SECONDS = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,3})?")


class HostCheck:
    """Refuses requests whose Host header names another host. This stops DNS rebinding, where the
    name of a foreign web page resolves to this machine."""

    def __init__(self, settings: HttpSettings) -> None:
        names = settings.allowed_hosts
        if not names and settings.is_loopback:
            names = (*_LOOPBACK_NAMES, settings.host)
        self._names = None if not names or ANY in names else {_host_name(name) for name in names}

    def __call__(self, request: web.BaseRequest) -> None:
        """Raises ApiError 400. A request without Host passes: HTTP/1.0 needs none, and no browser
        speaks it."""
        host = request.headers.get(hdrs.HOST)
        if self._names is None or host is None or _host_name(host) in self._names:
            return
        raise ApiError(
            400,
            "the Host header names a host that is not served here; see --allowed-hosts",
            code="invalid_request",
            closes=True,
        )


def _host_name(host: str) -> str:
    """Returns the host in lower case without a port; an IPv6 address keeps its brackets."""
    host = host.strip().lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    if host.count(":") > 1:
        return f"[{host}]"
    return host.partition(":")[0].rstrip(".")


def authenticate(request: web.BaseRequest, keys: KeyRing) -> ApiKey:
    """Returns the request's key, from `Authorization: Bearer KEY` or `x-api-key: KEY`. Raises
    ApiError 401 without a valid one."""
    key = keys.find(_presented(request))
    if key is None:
        raise ApiError(
            401,
            "a valid API key is needed, as `Authorization: Bearer KEY` or `x-api-key: KEY`",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return key


def _presented(request: web.BaseRequest) -> bytes:
    authorization = request.headers.get(hdrs.AUTHORIZATION)
    if authorization is None:
        text = request.headers.get(API_KEY_HEADER, "")
    else:
        scheme, _, text = authorization.partition(" ")
        if scheme.lower() != "bearer":
            text = ""
    return text.strip(" ").encode("utf-8", "surrogateescape")


def request_timeout_s(request: web.BaseRequest, max_s: float) -> float:
    """Returns how many seconds the client waits at most: the header X-Request-Timeout, bounded by
    max_s. Raises ApiError 400, which names the header."""
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return max_s
    seconds = float(text) if _SECONDS.fullmatch(text) else 0.0
    if not seconds or len(request.headers.getall(TIMEOUT_HEADER)) > 1:
        raise ApiError(
            400,
            f"{TIMEOUT_HEADER} must be a positive number of seconds, such as 30 or 0.5",
            param=TIMEOUT_HEADER,
            code="invalid_value",
        )
    return min(seconds, max_s)
