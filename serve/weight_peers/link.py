"""A connection to a replica that has the packed weights. One thread uses it."""

from __future__ import annotations

import contextlib
import ctypes
import json
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from serve.models.packed_cache.layout import DATA_START, shown
from serve.weight_peers.wire import (
    HEADER_BYTES,
    MAX_DESCRIPTION_BYTES,
    MAX_GET_BYTES,
    MAX_TABLE_BYTES,
    Area,
    Header,
    Kind,
    WeightProtocolError,
    digest_of,
    pack_header,
    read_header,
)
from transport import connect, take_shared
from transport.base import Endpoint, Frame, TransportError, TransportTimeoutError
from transport.messages import post_bytes, view_of

CONNECT_S = 2.0
LATE_S = 5.0
"""A peer that sends nothing for so long while bytes are due is left."""
LEAST_RATE = 512 << 10
"""Bytes a second below which a peer is left, however steadily they come."""
DESCRIBE_S = 120.0
"""A peer that was not asked before reads all its weights first."""
WINDOW_BYTES = 8 << 20
"""What waits to be taken stays in the processor's cache."""
_SLICE_S = 0.25
_MAX_DATA_BYTES = 1 << 46


class Description(NamedTuple):
    """What a peer has. index_place, table_place: size and digest."""

    data_end: int
    is_complete: bool
    checkpoint: str
    index_place: tuple[int, str]
    table_place: tuple[int, str]


class WeightLink:
    """Connects when it is asked to. Methods but `close` raise TransportError."""

    def __init__(self, url: str, key: bytes) -> None:
        self.url = url
        self._key = key
        self._endpoint: Endpoint | None = None
        self._number = 0

    @property
    def info(self) -> Mapping[str, object]:
        """How the peer describes its weights."""
        assert self._endpoint is not None
        return self._endpoint.peer.info

    def connect(self) -> None:
        self.close()
        try:
            self._endpoint = connect(
                self.url, key=self._key, window_bytes=WINDOW_BYTES, timeout_s=CONNECT_S
            )
        except (OSError, ValueError, ImportError) as error:  # also a bad address
            raise TransportError(str(error) or type(error).__name__) from error

    def take_shared(self) -> int | None:
        """Returns the descriptor of the peer's weights, which the caller closes, if the peer shares
        them."""
        return None if self._endpoint is None else take_shared(self._endpoint)

    def close(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()

    def describe(self, poll: Callable[[], object]) -> Description:
        """poll: is called while the peer prepares its answer, and may raise."""
        number = self._ask(Kind.DESCRIBE, Area.INDEX, 0, 0)
        frame = self._next(DESCRIBE_S, poll)
        try:
            view = view_of(frame)
            head, body = read_header(view), bytes(view[HEADER_BYTES:][:MAX_DESCRIPTION_BYTES])
        finally:
            self._release(frame)
        if head.kind is not Kind.DESCRIPTION or head.number != number:
            raise WeightProtocolError(f"a message of kind {head.kind.name} where none was due")
        return _read_description(body)

    def fetch(
        self, area: Area, place: tuple[int, str], poll: Callable[[], object] = object
    ) -> bytes:
        """Returns a whole index or table, whose digest is right. poll: as that of `receive`."""
        num_bytes, digest = place
        content = ctypes.create_string_buffer(num_bytes)
        for start in range(0, num_bytes, MAX_GET_BYTES):
            length = min(MAX_GET_BYTES, num_bytes - start)
            number = self.ask(area, start, length)
            address = ctypes.addressof(content) + start
            self.receive(Header(Kind.PART, area, number, start, length), address, poll)
        found = content.raw[:num_bytes]
        if digest_of(found) != digest:
            raise WeightProtocolError(f"the {area.name.lower()} has another digest")
        return found

    def ask(self, area: Area, start: int, num_bytes: int) -> int:
        """Returns the number of the request, whose bytes `receive` takes."""
        return self._ask(Kind.GET, area, start, num_bytes)

    def receive(self, due: Header, address: int, poll: Callable[[], object] = object) -> None:
        """Copies the bytes of the oldest request that is not answered to an address. poll: is
        called meanwhile, and may raise."""
        at, end = due.start, due.start + due.num_bytes
        allowed_s = LATE_S + due.num_bytes / LEAST_RATE
        end_s = time.monotonic() + allowed_s
        while at < end:
            if time.monotonic() > end_s:
                came = f"{at - due.start} of {due.num_bytes} bytes"
                raise TransportTimeoutError(f"only {came} came in {allowed_s:.0f} s")
            frame = self._next(LATE_S, poll)
            try:
                head, length = read_header(view_of(frame)), frame.num_bytes - HEADER_BYTES
                if head != Header(Kind.PART, due.area, due.number, at, length):
                    raise WeightProtocolError(f"{head} where bytes from {at} on were due")
                if not 0 < length <= end - at:
                    raise WeightProtocolError(f"{length} bytes where {end - at} were due")
                ctypes.memmove(address + at - due.start, frame.address + HEADER_BYTES, length)
            finally:
                self._release(frame)
            at += length
            poll()

    def _ask(self, kind: Kind, area: Area, start: int, num_bytes: int) -> int:
        if self._endpoint is None:
            raise TransportError("not connected")
        self._number = (self._number + 1) & 0xFFFFFFFF
        message = pack_header(Header(kind, area, self._number, start, num_bytes))
        post_bytes(self._endpoint, message, LATE_S)
        return self._number

    def _next(self, timeout_s: float, poll: Callable[[], object] = object) -> Frame:
        if self._endpoint is None:
            raise TransportError("not connected")
        for _ in range(max(1, round(timeout_s / _SLICE_S))):
            frame = self._endpoint.poll(_SLICE_S)
            if frame is not None:
                return frame
            poll()
        raise TransportTimeoutError(f"nothing came for {timeout_s:.0f} s")

    def _release(self, frame: Frame) -> None:
        if self._endpoint is not None:
            with contextlib.suppress(TransportError):
                self._endpoint.release(frame)


def _read_description(body: bytes) -> Description:
    try:
        values = json.loads(body)
        index, table = (_place(values[name]) for name in ("index", "table"))
        data_end, is_complete = values["data_end"], values["is_complete"]
        checkpoint = values["checkpoint"]
        if type(data_end) is not int or not DATA_START <= data_end <= _MAX_DATA_BYTES:
            raise ValueError("the end of the data")
        if type(is_complete) is not bool or not isinstance(checkpoint, str):
            raise ValueError("what it is of")
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise WeightProtocolError(f"a description that is wrong: {shown(error)}") from error
    return Description(data_end, is_complete, checkpoint, index, table)


def _place(value: object) -> tuple[int, str]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("a place")
    num_bytes, digest = value
    if type(num_bytes) is not int or not 0 <= num_bytes <= MAX_TABLE_BYTES:
        raise ValueError("a size")
    if not isinstance(digest, str):
        raise ValueError("a digest")
    return num_bytes, digest
