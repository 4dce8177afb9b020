"""The messages between an engine that pulls pages and one that has them.

    the one that pulls            the one that has pages
    ASK names              ->
                           <-     HAVE, a byte for each name: it can be loaded, is being computed,
                                  or neither
    GET names              ->
                           <-     PAGE for each name in their order: checksum and bytes, or nothing
    NEWS, at most n        ->
                           <-     NEW, names of pages of running sequences since the last NEWS

Every message begins with a header: its kind, the number of the request and a count. An answer has
the number of its request. A page's checksum is keyed by the shared secret and the page's name. So a
page that was altered, mixed up with another one or cut off is noticed. What it cannot show is that
the K/V is that of the tokens: who has the key can sign any bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum

from memory.prefix.index import KEY_BYTES
from transport.base import TransportError

PROTOCOL = "2"
MAX_NAMES = 8192
"""The most names of one message."""
MAX_NEWS = 1024
"""The most names of one NEW."""
ID_CHARS = 64
"""The most characters of an engine's id that are noted."""
CHECKSUM_BYTES = 16
_HEADER = struct.Struct("<BxxxII")
HEADER_BYTES = _HEADER.size
PAGE_HEADER_BYTES = HEADER_BYTES + CHECKSUM_BYTES
_NEW_PAGE = struct.Struct(f"<I{KEY_BYTES}s")
NAMES_WINDOW_BYTES = 1 << 20
"""A window for messages of names; a message takes a quarter of it at most."""
_SHOWN_CHARS = 80


class Kind(IntEnum):
    ASK = 1
    HAVE = 2
    GET = 3
    PAGE = 4
    NEWS = 5
    NEW = 6


class Flag(IntEnum):
    """What HAVE says of a page."""

    ABSENT = 0
    THERE = 1
    COMING = 2


class PeerProtocolError(TransportError):
    """A message that no peer of ours sends, or a page with another content than its checksum."""


def header(kind: Kind, number: int, count: int) -> bytes:
    return _HEADER.pack(kind, number & 0xFFFFFFFF, count)


def read_header(message: memoryview) -> tuple[int, int, int]:
    """Returns the kind, the request's number and the count. PeerProtocolError if it is cut off."""
    if len(message) < HEADER_BYTES:
        raise PeerProtocolError(f"a message of {len(message)} bytes")
    kind, number, count = _HEADER.unpack_from(message)
    return kind, number, count


def pack_names(kind: Kind, number: int, names: Sequence[bytes]) -> bytes:
    assert len(names) <= MAX_NAMES, f"{len(names)} names"
    return header(kind, number, len(names)) + b"".join(names)


def read_names(message: memoryview) -> tuple[Kind, int, list[bytes]]:
    """Returns the kind, number and names of a request. PeerProtocolError for anything else."""
    kind, number, count = read_header(message)
    if kind not in (Kind.ASK, Kind.GET):
        raise PeerProtocolError(f"a message of kind {kind}")
    if not 0 < count <= MAX_NAMES:
        raise PeerProtocolError(f"{count} names in a message")
    if len(message) != HEADER_BYTES + count * KEY_BYTES:
        raise PeerProtocolError(f"{count} names in {len(message)} bytes")
    body = bytes(message[HEADER_BYTES:])
    names = [body[at : at + KEY_BYTES] for at in range(0, len(body), KEY_BYTES)]
    return Kind(kind), number, names


def read_news_request(message: memoryview) -> tuple[int, int]:
    """Returns the number of a NEWS and the most names that it asks for. PeerProtocolError if it is
    none."""
    kind, number, most = read_header(message)
    if kind != Kind.NEWS or len(message) != HEADER_BYTES or not 0 < most <= MAX_NEWS:
        raise PeerProtocolError(f"a question for {most} new names in {len(message)} bytes")
    return number, most


def pack_news(number: int, pages: Sequence[tuple[int, bytes]]) -> bytes:
    """pages: the number of a sequence, and a name."""
    body = b"".join([_NEW_PAGE.pack(*page) for page in pages])
    return header(Kind.NEW, number, len(pages)) + body


def read_news(message: memoryview, number: int, most: int) -> list[tuple[int, bytes]]:
    """Returns what pack_news was given. PeerProtocolError for anything else, or for more names than
    were asked for."""
    kind, found, count = read_header(message)
    if (kind, found) != (Kind.NEW, number & 0xFFFFFFFF) or count > most:
        raise PeerProtocolError(f"{count} new names in a message of kind {kind}")
    if len(message) != HEADER_BYTES + count * _NEW_PAGE.size:
        raise PeerProtocolError(f"{count} new names in {len(message)} bytes")
    return list(_NEW_PAGE.iter_unpack(bytes(message[HEADER_BYTES:])))


def read_answer(message: memoryview, kind: Kind, number: int, count: int) -> None:
    """Raises PeerProtocolError unless the message is of this kind, to this request and with this
    count."""
    found = read_header(message)
    if found != (kind, number & 0xFFFFFFFF, count):
        raise PeerProtocolError(f"{found} where {(int(kind), number, count)} was due")


class PageChecksums:
    """Checksums of pages under the secret that the peers of a model share."""

    def __init__(self, secret: bytes) -> None:
        self._secret = hashlib.blake2b(b"page checksums", key=secret, digest_size=32).digest()

    def of(self, name: bytes, page: memoryview) -> bytes:
        """Returns the checksum of a page under this name. It does not hold the interpreter lock."""
        digest = hashlib.sha256(page).digest()  # faster than BLAKE2b where processors have it
        return hashlib.blake2b(digest, key=self._secret + name, digest_size=CHECKSUM_BYTES).digest()

    def is_right(self, name: bytes, page: memoryview, checksum: bytes) -> bool:
        return hmac.compare_digest(self.of(name, page), checksum)


def difference(ours: Mapping[str, str], theirs: Mapping[str, object]) -> str | None:
    """Returns in what the identity of a peer differs from ours, with both values, or None."""
    for name, value in ours.items():
        other = theirs.get(name)
        if other != value:
            return f"{name.replace('_', ' ')} {_shown(other)} there, {_shown(value)} here"
    return None


def _shown(value: object) -> str:
    text = "unknown" if value is None else str(value)
    return "".join([c if c.isprintable() else "?" for c in text[:_SHOWN_CHARS]])
