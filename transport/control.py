"""The control connection, which authenticates both ends before anything else is exchanged.

    client                                   server
    magic, nonce                  ->
                                  <-         magic, nonce
    HMAC(key, client, nonces)     ->                        a wrong one closes the connection
                                  <-         HMAC(key, server, nonces)
    hello, as a sealed message    <->        hello, or the reason of a refusal

Both ends prove that they know the key without sending it, over fresh nonces. JSON objects follow,
each with an HMAC under a key of this session over its direction and number, so that none can be
replayed, reordered or reflected. They are not encrypted; what tcp sends afterwards can be
(encryption.py).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from transport.base import PeerLostError, RefusedError, TransportError, TransportTimeoutError

MAGIC = b"mergstp1"  # the handshake's own version, which is meant never to change
DATA_MAGIC = b"mergdat1"
PROTOCOL_VERSION = 1
"""The version of everything after the handshake. Both ends must have the same."""
HANDSHAKE_S = 1.0
"""The time for a peer to prove that it knows the key, and again for its set-up."""
MAX_MESSAGE_BYTES = 4096
MIN_KEY_BYTES = 16
TOKEN_BYTES = 32
_NONCE_BYTES = 32
_MAC_BYTES = 32


def check_key(key: bytes) -> None:
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"key: {len(key)} bytes, at least {MIN_KEY_BYTES} are needed")


def receive_exactly(sock: socket.socket, num_bytes: int, deadline: float) -> bytes:
    """Receives exactly so many bytes. Raises PeerLostError at the end of the stream and
    TransportTimeoutError at the deadline."""
    parts = bytearray()
    while len(parts) < num_bytes:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TransportTimeoutError("the set-up of the connection took too long")
        sock.settimeout(left)
        try:
            part = sock.recv(num_bytes - len(parts))
        except TimeoutError:
            continue
        except OSError as error:
            raise PeerLostError(f"the peer closed the connection: {error}") from error
        if not part:
            raise PeerLostError("the peer closed the connection")
        parts += part
    return bytes(parts)


def send_all(sock: socket.socket, data: bytes, deadline: float) -> None:
    sock.settimeout(max(deadline - time.monotonic(), 1e-3))
    try:
        sock.sendall(data)
    except TimeoutError:
        raise TransportTimeoutError("the set-up of the connection took too long") from None
    except OSError as error:
        raise PeerLostError(f"the peer closed the connection: {error}") from error


class Session:
    """An authenticated control connection during set-up: messages both ways until the deadline,
    then `detach`. One thread uses it."""

    def __init__(
        self, sock: socket.socket, key: bytes, deadline: float, *, is_client: bool
    ) -> None:
        self.sock = sock
        self.deadline = deadline
        self._key = key
        self._ours, self._theirs = (b"client", b"server") if is_client else (b"server", b"client")
        self._num_sent = self._num_received = 0
        self._transcript = hashlib.sha256()  # of all messages, which both ends see in one order

    def _mac(self, role: bytes, number: int, body: bytes) -> bytes:
        return _mac(self._key, role + number.to_bytes(8, "big") + body)

    def send(self, message: Mapping[str, object]) -> None:
        body = encode(message)
        self._num_sent += 1
        mac = self._mac(self._ours, self._num_sent, body)
        self._transcript.update(mac)
        send_all(self.sock, len(body).to_bytes(2, "big") + body + mac, self.deadline)

    def receive(self) -> dict[str, Any]:
        """Receives a message. Raises TransportError, also for a forged one or one that is no JSON
        object."""
        length = int.from_bytes(receive_exactly(self.sock, 2, self.deadline), "big")
        if not 0 < length <= MAX_MESSAGE_BYTES:
            raise RefusedError(f"a control message of {length} bytes")
        body = receive_exactly(self.sock, length, self.deadline)
        mac = receive_exactly(self.sock, _MAC_BYTES, self.deadline)
        self._num_received += 1
        if not hmac.compare_digest(mac, self._mac(self._theirs, self._num_received, body)):
            raise RefusedError("a control message that the peer did not send")
        self._transcript.update(mac)
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RefusedError("a control message that is no JSON") from error
        if not isinstance(message, dict):
            raise RefusedError("a control message that is no object")
        return message

    def secret(self, shared: bytes, label: bytes) -> bytes:
        """Returns 32 bytes that only ends with this key, this session's messages and `shared` know:
        HKDF-SHA256 with the session's key as salt."""
        extracted = _mac(self._key, shared)
        return _mac(extracted, label + self._transcript.digest() + b"\x01")

    def detach(self) -> int:
        """Returns the socket's descriptor, not blocking; the caller owns it from now on."""
        self.sock.setblocking(False)
        return self.sock.detach()


def encode(message: Mapping[str, object]) -> bytes:
    """Returns the object as bytes; raises ValueError if they do not fit into one message."""
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > MAX_MESSAGE_BYTES:
        raise ValueError(f"{len(body)} bytes of JSON for the peer, at most {MAX_MESSAGE_BYTES} fit")
    return body


def _mac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, hashlib.sha256)


def _proof(key: bytes, role: bytes, client_nonce: bytes, server_nonce: bytes) -> bytes:
    return _mac(key, MAGIC + role + client_nonce + server_nonce)


def authenticate_to(sock: socket.socket, key: bytes, deadline: float) -> Session:
    """Runs the client's half. Raises RefusedError if either end does not know the key."""
    nonce = os.urandom(_NONCE_BYTES)
    try:
        send_all(sock, MAGIC + nonce, deadline)
        answer = receive_exactly(sock, len(MAGIC) + _NONCE_BYTES, deadline)
    except PeerLostError as error:
        raise RefusedError(
            "the peer ended the handshake at once: full, or no peer of ours"
        ) from error
    theirs = answer[len(MAGIC) :]
    if answer[: len(MAGIC)] != MAGIC or theirs == nonce:
        raise RefusedError("what answers does not speak our protocol")
    try:
        send_all(sock, _proof(key, b"client", nonce, theirs), deadline)
        proof = receive_exactly(sock, _MAC_BYTES, deadline)
    except PeerLostError as error:
        raise RefusedError("the peer ended the handshake: it has another key") from error
    if not hmac.compare_digest(proof, _proof(key, b"server", nonce, theirs)):
        raise RefusedError("the peer does not know our key")
    return Session(sock, _proof(key, b"session", nonce, theirs), deadline, is_client=True)


def authenticate_from(sock: socket.socket, key: bytes, deadline: float) -> Session:
    """Runs the server's half, after the magic has been read."""
    theirs = receive_exactly(sock, _NONCE_BYTES, deadline)
    nonce = os.urandom(_NONCE_BYTES)
    send_all(sock, MAGIC + nonce, deadline)
    proof = receive_exactly(sock, _MAC_BYTES, deadline)
    if not hmac.compare_digest(proof, _proof(key, b"client", theirs, nonce)):
        raise RefusedError("the peer does not know our key")
    send_all(sock, _proof(key, b"server", theirs, nonce), deadline)
    return Session(sock, _proof(key, b"session", theirs, nonce), deadline, is_client=False)


def hello(
    transport: str, info: Mapping[str, object], window_bytes: int, **more: object
) -> dict[str, object]:
    """Returns the first message of either end; raises ValueError if info is too large."""
    said = {
        "version": PROTOCOL_VERSION,
        "transport": transport,
        "window_bytes": window_bytes,
        "info": dict(info),
        **more,
    }
    more_at_most = {"token": "0" * (2 * TOKEN_BYTES), "encryption": "0" * 64}
    encode(said | more_at_most)
    return said


def why_not(theirs: Mapping[str, Any], transport: str) -> str | None:
    """Returns what is wrong with a hello, as a text for both ends, or None."""
    version, other = theirs.get("version"), theirs.get("transport")
    if version != PROTOCOL_VERSION:
        return f"protocol versions {_shown(version)} and {PROTOCOL_VERSION} do not go together"
    if other != transport:
        return f"transports {_shown(other)} and {transport!r} do not go together"
    window_bytes = theirs.get("window_bytes")
    if type(window_bytes) is not int or not is_window_size(window_bytes):
        return "a window of a size that cannot be"
    if not isinstance(theirs.get("info"), dict):
        return "no info"
    return None


def printable(text: object, most: int) -> str:
    """Returns a peer's text in a form that is safe to log: one line of bounded length."""
    return "".join([c if c.isprintable() else "?" for c in str(text)[:most]])


def _shown(value: object) -> str:
    return repr(value)[:40]


def is_window_size(window_bytes: int) -> bool:
    return 4096 <= window_bytes <= 1 << 32 and window_bytes % 4096 == 0


def check_window(window_bytes: int) -> None:
    if not is_window_size(window_bytes):
        raise ValueError(f"window_bytes={window_bytes}: a multiple of 4096 up to 4 GiB is needed")


def exchange_hellos(session: Session, ours: Mapping[str, object]) -> dict[str, Any]:
    """Runs the client's half and returns the server's hello. Raises RefusedError with the reason of
    either end."""
    session.send(ours)
    theirs = session.receive()
    if "refused" in theirs:
        raise RefusedError(f"the peer refuses: {printable(theirs['refused'], 200)}")
    if reason := why_not(theirs, str(ours["transport"])):
        raise RefusedError(reason)
    return theirs


def connection_error(address: str, error: OSError) -> TransportError:
    if isinstance(error, TimeoutError):
        return TransportTimeoutError(f"{address}: no answer in time")
    return TransportError(f"{address}: {error.strerror or error}")
