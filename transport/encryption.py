"""What encrypts the data of a tcp connection: whether it is done, and the keys.

Both ends say in their hellos whether they encrypt, and then send an X25519 key of this connection
alone. The key that both ends share authenticates the hellos, so no process in between can change
what they say. The secrets of both directions follow from all three: the shared key, the exchange,
and the messages themselves. So a shared key that is stolen later does not open recorded traffic.
csrc/records.h has what is done with them.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from typing import Any

from transport._windows import x25519_public, x25519_shared
from transport.base import PeerLostError, RefusedError
from transport.control import Session

_FIELD = (
    "encryption"  # of a hello: the public key in hexadecimal; an end that does not encrypt has none
)
_KEY_BYTES = 32


def check_is_possible() -> None:
    """Raises TransportError where the library that encrypts is missing."""
    x25519_public(bytes(_KEY_BYTES))


def is_on(mode: str, sock: socket.socket) -> bool:
    """Whether a connection is encrypted. With `auto` it is, unless both ends are on this machine's
    loopback interface."""
    if mode != "auto":
        return mode == "on"
    try:
        return not is_loopback(sock.getpeername()[0])
    except OSError as error:
        raise PeerLostError(f"the peer closed the connection: {error}") from error


def is_loopback(host: str) -> bool:
    """Whether an address, not a name, is of the loopback interface."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


class KeyExchange:
    """One end's part of an exchange for one connection."""

    def __init__(self) -> None:
        self._private = os.urandom(_KEY_BYTES)

    def hello(self) -> dict[str, object]:
        """Returns what this end's hello has beside the rest."""
        return {_FIELD: x25519_public(self._private).hex()}

    def secrets(
        self, session: Session, theirs: Mapping[str, Any], *, is_client: bool
    ) -> tuple[bytes, bytes]:
        """Returns the secrets of sending and of receiving, once both hellos are exchanged. Raises
        RefusedError for a public key that is none."""
        try:
            shared = x25519_shared(self._private, bytes.fromhex(theirs[_FIELD]))
        except (KeyError, TypeError, ValueError) as error:
            raise RefusedError("the peer's encryption: its public key is none") from error
        client = session.secret(shared, b"mergestep data of the client")
        server = session.secret(shared, b"mergestep data of the server")
        return (client, server) if is_client else (server, client)


def disagreement(theirs: Mapping[str, Any], is_on_here: bool, *, is_client: bool) -> str | None:
    """Returns why the ends do not fit together, or None."""
    is_on_there = _FIELD in theirs
    if is_on_here == is_on_there:
        return None
    listener_is_on = is_on_there if is_client else is_on_here
    on, off = ("the listener", "the connecting end")[:: 1 if listener_is_on else -1]
    return f"encryption is on at {on} and off at {off}: both need the same setting"
