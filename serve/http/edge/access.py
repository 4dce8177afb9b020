"""Who may come in: the Host header, and the API key. Looked at before the path is."""

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
    """A page of somebody else, whose name leads to this machine, must not be taken for ours: its
    requests carry that name as their Host (DNS rebinding)."""

    def __init__(self, settings: HttpSettings) -> None:
        names = settings.allowed_hosts
        if not names and settings.is_loopback:
            names = (*_LOOPBACK_NAMES, settings.host)
        self._names = None if not names or ANY in names else {_host_name(name) for name in names}

    def __call__(self, request: web.BaseRequest) -> None:
        """ApiError 400. HTTP/1.0 needs no Host, and no browser speaks it."""
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
    """Without a port, in lower case; an IPv6 address keeps its brackets."""
    host = host.strip().lower()
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    if host.count(":") > 1:
        return f"[{host}]"
    return host.partition(":")[0].rstrip(".")


def authenticate(request: web.BaseRequest, keys: KeyRing) -> ApiKey:
    """ApiError 401 unless the request brings a good key, as `Authorization: Bearer KEY` or as
    `x-api-key: KEY`."""
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


def timeout_of(request: web.BaseRequest, most_s: float) -> float:
    """Seconds; most_s without the header. ApiError 400 names the header."""
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return most_s
    seconds = float(text) if _SECONDS.fullmatch(text) else 0.0
    if not seconds or len(request.headers.getall(TIMEOUT_HEADER)) > 1:
        raise ApiError(
            400,
            f"{TIMEOUT_HEADER} must be a positive number of seconds, such as 30 or 0.5",
            param=TIMEOUT_HEADER,
            code="invalid_value",
        )
    return min(seconds, most_s)
