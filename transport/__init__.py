"""Bytes between machines: windows and sequence numbers (transport/base.py has the contract)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast
from urllib.parse import urlsplit

from transport.base import DEFAULT_WINDOW_BYTES, Endpoint, Listener

# Each has connect(url, ...) and listen(url, ...) with the arguments of those below.
TRANSPORTS = {
    "inproc": "transport.inproc:InprocTransport",
    "shm": "transport.shm:ShmTransport",
    "tcp": "transport.tcp:TcpTransport",
    "rdma": "transport.rdma:RdmaTransport",
}


def connect(
    url: str,
    *,
    key: bytes,
    info: Mapping[str, object] | None = None,
    window_bytes: int = DEFAULT_WINDOW_BYTES,
    timeout_s: float = 5.0,
) -> Endpoint:
    """A connection to who listens at url. key: the secret both ends know, 16 bytes or more.

    info: what the peer is told about us, JSON. window_bytes: of our window; the peer's is its
    own affair. TransportError; ValueError for a url or setting that no peer could accept.
    """
    made = _transport(url).connect(
        url, key=key, info=info or {}, window_bytes=window_bytes, timeout_s=timeout_s
    )
    return cast(Endpoint, made)


def listen(
    url: str,
    *,
    key: bytes,
    info: Mapping[str, object] | None = None,
    window_bytes: int = DEFAULT_WINDOW_BYTES,
    max_peers: int = 64,
) -> Listener:
    """Where peers may arrive. window_bytes: of our window for each of them. TransportError."""
    made = _transport(url).listen(
        url, key=key, info=info or {}, window_bytes=window_bytes, max_peers=max_peers
    )
    return cast(Listener, made)


def check_scheme(url: str) -> str:
    """The transport's name. ValueError if there is none like it."""
    if "://" not in url:
        raise ValueError(f"{url}: an address begins with its transport, as in tcp://{url}")
    scheme = urlsplit(url).scheme
    if scheme not in TRANSPORTS:
        raise ValueError(f"{url}: no transport {scheme!r}; there are {', '.join(TRANSPORTS)}")
    return scheme


def _transport(url: str) -> Any:
    scheme = check_scheme(url)
    module, _, name = TRANSPORTS[scheme].partition(":")
    return getattr(import_module(module), name)
