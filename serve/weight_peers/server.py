"""Serves packed weights from memory to replicas that start, in threads of their own.

A peer has proved that it knows the shared key, but what it sends is not trusted: a message that is
none of ours ends the connection. The bytes go from where the model uses them into the peer's
window: this end takes no memory for them but, once, a chunk for checksums that are not known yet.
The threads give way to those that compute, and all peers together get at most a set rate.
"""

from __future__ import annotations

import ctypes
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ops.cpu.native_stored import Buffer
from serve.models.packed_cache.in_memory import PackedBytes
from serve.models.packed_cache.layout import DATA_START
from serve.weight_peers.urgency import give_way
from serve.weight_peers.wire import (
    HEADER_BYTES,
    MAX_GET_BYTES,
    Area,
    Header,
    Kind,
    WeightProtocolError,
    digest_of,
    pack_header,
    read_header,
)
from transport.base import Endpoint, Listener, Segment, TransportError
from transport.messages import view_of

logger = logging.getLogger(__name__)

MAX_PEERS = 8
WINDOW_BYTES = 64 << 10
"""For requests, which are small."""
POST_S = 5.0  # a peer that takes nothing for so long is left
IDLE_S = 60.0
"""A peer that asks for nothing for so long is left, and its place is free for others."""
_WAIT_S = 0.1
_PART_BYTES = 1 << 20
_BURST_S = 0.05  # the rate holds over such times


@dataclass(frozen=True, slots=True)
class OfferedWeights:
    """What a replica gives to others. checkpoint: the fingerprint of its files. table: of its
    checkpoint's tensors, empty if only the files themselves will do."""

    packed: PackedBytes
    checkpoint: str
    table: bytes


@dataclass(slots=True)
class WeightServerStats:
    """peers: that are connected. served_bytes: to all peers since the start. refused: connections
    without the key, and those that sent what no peer does or took nothing."""

    peers: int = 0
    served_bytes: int = 0
    refused: int = 0


class Rate:
    """A bound on the bytes a second of all threads together."""

    def __init__(self, bytes_per_s: int | None) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = 0.0  # when the next bytes may go

    def wait(self, num_bytes: int, is_over: Callable[[], bool]) -> None:
        """Waits until these bytes may be sent, or until is_over says that the connection or the
        server ends."""
        if self._bytes_per_s is None:
            return
        with self._lock:
            begin_s = max(self._free_s, time.monotonic() - _BURST_S)
            self._free_s = begin_s + num_bytes / self._bytes_per_s
        while (left := begin_s - time.monotonic()) > 0 and not is_over():
            time.sleep(min(left, _WAIT_S))


class _Closing(Exception):
    """The server is being closed."""


class WeightServer:
    """Serves until `close`, which returns when nothing refers to the weights any more."""

    def __init__(self, listener: Listener, offered: OfferedWeights, rate: int | None) -> None:
        """The server closes the listener. rate: bytes a second; None: as fast as the link is."""
        self.url = listener.url
        self._listener = listener
        self._offered = offered
        self._rate = Rate(rate)
        self._stats = WeightServerStats()
        self._areas_lock = threading.Lock()  # held while all weights are read
        self._areas: dict[Area, bytes] | None = None
        self._lock = threading.Lock()  # guards the following
        self._threads: set[threading.Thread] = set()
        self._is_closing = False
        self._acceptor = threading.Thread(
            target=self._accept, name="mergestep-serve-weights", daemon=True
        )
        self._acceptor.start()

    def snapshot(self) -> WeightServerStats:
        refused = self._stats.refused + self._listener.num_refused
        return replace(self._stats, peers=len(self._threads), refused=refused)

    def close(self) -> None:
        self._is_closing = True
        self._listener.close()
        self._acceptor.join()
        with self._lock:
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _accept(self) -> None:
        while not self._is_closing:
            endpoint = self._listener.accept(_WAIT_S)
            if endpoint is None:
                continue
            thread = threading.Thread(
                target=self._serve, args=(endpoint,), name="mergestep-serve-weights", daemon=True
            )
            with self._lock:
                self._threads.add(thread)
            thread.start()

    def _serve(self, endpoint: Endpoint) -> None:
        give_way()
        began_s, before = time.monotonic(), self._stats.served_bytes
        try:
            self._answer_all(endpoint)
        except _Closing:
            pass
        except (TransportError, OSError) as error:
            if not endpoint.is_lost or isinstance(error, WeightProtocolError):
                self._stats.refused += 1
                logger.warning("weights_listen: %s is left: %s", endpoint.peer.address, error)
        except Exception:
            logger.exception("weights_listen: serving %s failed", endpoint.peer.address)
        finally:
            endpoint.close()
            with self._lock:
                self._threads.discard(threading.current_thread())
        seconds, served = time.monotonic() - began_s, self._stats.served_bytes - before
        address = endpoint.peer.address
        packed = self._offered.packed
        is_shared = packed.shared is not None and self.url.startswith("shm:")
        if is_shared and served < packed.data_end // 2:  # the index is served in any case
            logger.info("weights: the memory is shared with %s", address)
            return
        logger.info("weights: %.1f MB served to %s in %.2f s", served / 1e6, address, seconds)

    def _answer_all(self, endpoint: Endpoint) -> None:
        left_s = time.monotonic() + IDLE_S
        while not self._is_closing:
            frame = endpoint.poll(_WAIT_S)
            if frame is None:
                if time.monotonic() > left_s:
                    logger.info("weights: %s asks for nothing and is left", endpoint.peer.address)
                    return
                continue
            try:
                request = read_header(view_of(frame))
                is_whole = frame.num_bytes == HEADER_BYTES
            finally:
                endpoint.release(frame)
            if not is_whole or request.kind not in (Kind.DESCRIBE, Kind.GET):
                raise WeightProtocolError(f"a message of kind {request.kind.name}")
            if request.kind is Kind.DESCRIBE:
                self._describe(endpoint, request)
            else:
                self._give(endpoint, request)
            left_s = time.monotonic() + IDLE_S

    def _describe(self, endpoint: Endpoint, request: Header) -> None:
        offered, areas = self._offered, self._prepared()
        description = {
            "data_end": offered.packed.data_end,
            "is_complete": offered.packed.is_complete,
            "checkpoint": offered.checkpoint,
            "index": [len(areas[Area.INDEX]), digest_of(areas[Area.INDEX])],
            "table": [len(areas[Area.TABLE]), digest_of(areas[Area.TABLE])],
        }
        body = json.dumps(description).encode()
        head = Header(Kind.DESCRIPTION, Area.INDEX, request.number, 0, len(body))
        _post(endpoint, head, [_buffer_of(body)])

    def _prepared(self) -> dict[Area, bytes]:
        """Returns index and table. The first call may read all weights, for their checksums."""
        with self._areas_lock:
            if self._areas is None:
                index = self._offered.packed.index(self._raise_if_closing).to_bytes()
                self._areas = {Area.INDEX: index, Area.TABLE: self._offered.table}
            return self._areas

    def _raise_if_closing(self) -> None:
        if self._is_closing:
            raise _Closing

    def _give(self, endpoint: Endpoint, request: Header) -> None:
        area, start, end = request.area, request.start, request.start + request.num_bytes
        content = None if area is Area.DATA else self._prepared()[area]
        first, last = 0, self._offered.packed.data_end
        if content is None:
            first = DATA_START
        else:
            last = len(content)
        if not (first <= start < end <= last and request.num_bytes <= MAX_GET_BYTES):
            raise WeightProtocolError(f"{request.num_bytes} bytes from {start} on of {area.name}")
        most = min(_PART_BYTES, endpoint.max_message_bytes - HEADER_BYTES)
        for at in range(start, end, most):
            num_bytes = min(most, end - at)
            self._rate.wait(num_bytes, lambda: self._is_closing or endpoint.is_lost)
            self._raise_if_closing()
            if content is None:
                buffers = self._offered.packed.buffers(at, num_bytes)
            else:
                whole = _buffer_of(content)
                buffers = [Buffer(whole.address + at, num_bytes)]
            _post(endpoint, Header(Kind.PART, area, request.number, at, num_bytes), buffers)
            self._stats.served_bytes += num_bytes


def _post(endpoint: Endpoint, head: Header, buffers: list[Buffer]) -> None:
    """Sends a header and the bytes behind it."""
    packed = pack_header(head)
    segments = [
        Segment(address, 1, num_bytes, num_bytes)
        for address, num_bytes in (_buffer_of(packed), *buffers)
    ]
    endpoint.post(segments, POST_S)


def _buffer_of(content: bytes) -> Buffer:
    """Returns where bytes are, which the caller keeps."""
    address = ctypes.cast(ctypes.c_char_p(content), ctypes.c_void_p).value
    assert address is not None
    return Buffer(address, len(content))
