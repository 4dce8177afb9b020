"""The messages between a replica that starts and one that has the packed weights in memory.

    the one that starts          the one that has the weights
    DESCRIBE               ->
                           <-    DESCRIPTION: sizes and digests, JSON
    GET area, place        ->
                           <-    PARTs of these bytes in their order

An area is the index of the packed weights, the table of the checkpoint's tensors, or the data, by
offsets in the file that they would be. Index and table have digests in the description; the index
has the checksum of every chunk of the data. Every message begins with a header, whose length keeps
the bytes behind it at multiples of 64.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

from serve.models.packed_cache.layout import shown
from transport.base import TransportError

PROTOCOL = "1"
HEADER_BYTES = 64
MAX_GET_BYTES = 32 << 20
"""The most bytes of one GET: a chunk of the data."""
MAX_DESCRIPTION_BYTES = 1 << 16
MAX_TABLE_BYTES = 256 << 20
_HEADER = struct.Struct("<BBxxIQQ")


class Kind(IntEnum):
    DESCRIBE = 1
    DESCRIPTION = 2
    GET = 3
    PART = 4


class Area(IntEnum):
    INDEX = 0
    TABLE = 1
    DATA = 2


class Header(NamedTuple):
    """number: of the request. start, num_bytes: of the area."""

    kind: Kind
    area: Area
    number: int
    start: int
    num_bytes: int


class WeightProtocolError(TransportError):
    """A message that no peer of ours sends, or bytes with another checksum than is due."""


def pack_header(header: Header) -> bytes:
    kind, area, number, start, num_bytes = header
    packed = _HEADER.pack(kind, area, number & 0xFFFFFFFF, start, num_bytes)
    return packed.ljust(HEADER_BYTES, b"\0")


def read_header(message: memoryview) -> Header:
    """WeightProtocolError if it is cut off or of no known kind."""
    if len(message) < HEADER_BYTES:
        raise WeightProtocolError(f"a message of {len(message)} bytes")
    kind, area, number, start, num_bytes = _HEADER.unpack_from(message)
    try:
        return Header(Kind(kind), Area(area), number, start, num_bytes)
    except ValueError as error:
        raise WeightProtocolError(f"a message of kind {kind}, area {area}") from error


def digest_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=32).hexdigest()


def difference(ours: Mapping[str, str], theirs: Mapping[str, object]) -> str | None:
    """Returns in what a peer's weights differ from those that are needed, with both values, or
    None."""
    for name, value in ours.items():
        other = theirs.get(name)
        if other != value:
            return f"{name.replace('_', ' ')} {shown(other)} there, {shown(value)} here"
    return None
