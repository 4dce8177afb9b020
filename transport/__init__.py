"""Bytes between machines, through memory windows and sequence numbers.

It owns connections, their authentication and their liveness. It does not know what the bytes mean
and does not import torch. Begin with base.py, which is the contract of every transport.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast
from urllib.parse import urlsplit

from transport.base import DEFAULT_WINDOW_BYTES, Endpoint, HasDescriptor, Listener

# Each class has connect(url, ...) and listen(url, ...) with the arguments of the functions below.
TRANSPORTS = {
    "inproc": "transport.inproc:InprocTransport",
    "shm": "transport.shm:ShmTransport",
    "tcp": "transport.tcp:TcpTransport",
    "rdma": "transport.rdma:RdmaTransport",
}

ENCRYPTION_MODES = ("auto", "on", "off")


def connect(
    url: str,
    *,
    key: bytes,
    info: Mapping[str, object] | None = None,
    window_bytes: int = DEFAULT_WINDOW_BYTES,
    timeout_s: float = 5.0,
    encryption: str = "auto",
) -> Endpoint:
    """Connects to the listener at url.

    key is the secret that both ends know, of 16 bytes or more. info (JSON) describes this end to
    the peer. window_bytes is the size of this end's window; the peer chooses its own. encryption is
    of tcp: "on", "off", or "auto", which is on unless the peer is on the loopback interface. Both
    ends need the same. Raises TransportError, and ValueError for a url or setting that no peer
    could accept.
    """
    made = _transport(url).connect(
        url,
        key=key,
        info=info or {},
        window_bytes=window_bytes,
        timeout_s=timeout_s,
        **_encryption(url, encryption),
    )
    return cast(Endpoint, made)


def listen(
    url: str,
    *,
    key: bytes,
    info: Mapping[str, object] | None = None,
    window_bytes: int = DEFAULT_WINDOW_BYTES,
    max_peers: int = 64,
    encryption: str = "auto",
    shared: HasDescriptor | None = None,
) -> Listener:
    """Listens for peers at url. window_bytes is the size of our window for each of them; encryption
    is as for `connect`. shared is memory whose descriptor each peer gets (`take_shared`), over shm
    only. Raises TransportError, and ValueError as `connect` does."""
    more: dict[str, Any] = {}
    if shared is not None:
        if check_scheme(url) != "shm":
            raise ValueError(f"{url}: memory is shared over shm only")
        more["shared"] = shared
    made = _transport(url).listen(
        url,
        key=key,
        info=info or {},
        window_bytes=window_bytes,
        max_peers=max_peers,
        **_encryption(url, encryption),
        **more,
    )
    return cast(Listener, made)


def take_shared(endpoint: Endpoint) -> int | None:
    """Returns the descriptor that the peer shares, which the caller closes; None if there is none,
    or it was taken."""
    fds: list[int] = getattr(endpoint, "shared_fds", [])
    return fds.pop() if fds else None


def check_scheme(url: str) -> str:
    """Returns the name of the url's transport; raises ValueError for an unknown one."""
    if "://" not in url:
        raise ValueError(f"{url}: an address begins with its transport, as in tcp://{url}")
    scheme = urlsplit(url).scheme
    if scheme not in TRANSPORTS:
        raise ValueError(f"{url}: no transport {scheme!r}; there are {', '.join(TRANSPORTS)}")
    return scheme


def _encryption(url: str, mode: str) -> dict[str, Any]:
    """Returns the setting as the url's transport takes it; raises ValueError if it cannot."""
    scheme = check_scheme(url)
    if mode not in ENCRYPTION_MODES:
        raise ValueError(f"encryption {mode!r}: it is one of {', '.join(ENCRYPTION_MODES)}")
    if mode == "on" and scheme == "rdma":
        raise ValueError(f"{url}: encryption is on, and rdma has none; tcp has")
    return {"encryption": mode} if scheme == "tcp" else {}


def _transport(url: str) -> Any:
    scheme = check_scheme(url)
    module, _, name = TRANSPORTS[scheme].partition(":")
    return getattr(import_module(module), name)
