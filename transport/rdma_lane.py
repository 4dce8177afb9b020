"""Lanes over RDMA: each has a queue pair of its own beside that of the endpoint.

The stream's end registers device memory, and the stream rings the doorbell of its queue pair. The
host's end writes with ordinary posts and polls its memory. Both devices have to promise that memory
fills in the order of the writes, because nothing else tells that a message is whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from transport._windows import Memory
from transport.base import Endpoint, RefusedError, TransportError
from transport.gpu import (
    DeviceRegion,
    Gpu,
    GpuUnavailableError,
    HostWord,
    StreamReceiver,
    StreamSender,
    send_queue_of,
)
from transport.lane import DeviceMemory, StreamEnd, StreamLane
from transport.queue_pair import QueuePair, QueuePairAddress
from transport.verbs import Port, RdmaUnavailableError, open_port, verbs_errors

logger = logging.getLogger(__name__)

_HOST_POSTS = 64  # in flight
_ORDER = "does not promise that memory fills in order"


class _DevicePair(QueuePair):
    """A queue pair whose window and outgoing memory are on a GPU."""

    def __init__(self, gpu: Gpu, port: Port, window: DeviceMemory, num_messages: int) -> None:
        self._gpu = gpu
        super().__init__(port, window, 2 * num_messages)

    def _register(self, address: int, num_bytes: int, access: int) -> Any:
        for_peer = bool(access & self._e.IBV_ACCESS_REMOTE_WRITE)
        region = DeviceRegion(self._gpu, self.domain, address, num_bytes, for_peer=for_peer)
        if region.address_of(address) != address:
            region.close()
            raise GpuUnavailableError("this release of pyverbs lacks MREx")
        return region.registration

    @property
    def source_key(self) -> int:
        """The key for sends of outgoing memory."""
        return int(self._outgoing.lkey)

    def num_reports(self) -> int:
        """Returns the number of new completions of sends. Raises TransportError for a failed
        one."""
        count, found = self._sent.poll(16)
        for completion in found:
            self._check(completion)
        return int(count)

    def close(self) -> None:
        """Raises TransportError, after which the memory may still be registered."""
        with verbs_errors("closing a lane"):
            super().close()


class RdmaLaneOpener:
    """Opens lanes of a stream beside endpoints of rdma://."""

    def __init__(
        self,
        gpu: Gpu,
        stream: Any,
        release_stream: Any,
        enter: Callable[[], None],
        free: Callable[[], None],
    ) -> None:
        """enter and free: see LaneOpener; they may raise OSError."""
        self.gpu, self.stream, self.release_stream = gpu, stream, release_stream
        self._enter, self._free = enter, free

    def enter(self) -> None:
        with _device_errors():
            self._enter()

    def close(self) -> None:
        with _device_errors():
            self._free()

    def offer(
        self, endpoint: Endpoint, window: DeviceMemory, source: DeviceMemory, num_messages: int
    ) -> RdmaOffer:
        port = getattr(endpoint, "port", None)
        if not isinstance(port, Port):
            raise GpuUnavailableError("the node is not connected by rdma://")
        self.gpu.require("CAN_USE_64_BIT_STREAM_MEM_OPS")
        return RdmaOffer(self, again(port), window, source, num_messages)


def again(port: Port) -> Port:
    """Opens a port a second time."""
    return open_port(port.device, port.number, port.gid_index)


class RdmaOffer:
    """A StreamOffer."""

    def __init__(
        self,
        opener: RdmaLaneOpener,
        port: Port,
        window: DeviceMemory,
        source: DeviceMemory,
        num_messages: int,
    ) -> None:
        self._opener, self._window, self._source = opener, window, source
        with contextlib.ExitStack() as undo:
            undo.callback(port.context.close)
            self._receiver = StreamReceiver(opener.gpu, is_device_memory=True)
            self._pair = _DevicePair(opener.gpu, port, window, num_messages)
            undo.pop_all()
        self.terms: Mapping[str, object] = self._pair.address.to_wire()

    def connect(self, theirs: object) -> StreamLane:
        peer = QueuePairAddress.from_wire(theirs)
        opener, pair, gpu = self._opener, self._pair, self._opener.gpu
        pair.connect(peer, self._source)
        with contextlib.ExitStack() as undo, verbs_errors("opening a lane"):
            if not pair.is_ordered():
                raise GpuUnavailableError(f"the RDMA device {_ORDER}")
            sender = StreamSender(gpu, send_queue_of(pair.context, pair.pair))
            undo.callback(sender.close)
            progress = HostWord(gpu)
            undo.pop_all()
        end = StreamEnd(
            sender=sender,
            receiver=self._receiver,
            progress=progress,
            source=self._source.address,
            source_key=pair.source_key,
            window=self._window.address,
            peer_key=peer.window_key,
            peer_address=peer.window_address,
            num_reports=pair.num_reports,
            free=pair.close,
        )
        return StreamLane(gpu, opener.stream, opener.release_stream, end)

    def close(self) -> None:
        self._pair.close()


class RdmaHostLane:
    """A HostLane."""

    def __init__(self, port: Port, theirs: object, window_bytes: int, outgoing_bytes: int) -> None:
        """port: of the endpoint. theirs: the peer's terms. Raises RdmaUnavailableError and
        TransportError."""
        peer = QueuePairAddress.from_wire(theirs)
        self._own, self._mirror = Memory.anonymous(window_bytes), Memory.anonymous(outgoing_bytes)
        for memory in (self._own, self._mirror):
            memory.keep_from_forks()
        port = again(port)
        with contextlib.ExitStack() as undo:
            undo.callback(port.context.close)
            self._pair = QueuePair(port, (self._own.address, self._own.num_bytes), _HOST_POSTS)
            undo.pop_all()
            undo.callback(self._pair.close)
            self._pair.connect(peer, (self._mirror.address, self._mirror.num_bytes))
            if not self._pair.is_ordered():
                raise RdmaUnavailableError(f"the node's RDMA device {_ORDER}")
            undo.pop_all()
        self.terms: Mapping[str, object] = self._pair.address.to_wire()
        self.window, self.outgoing = _view(self._own), _view(self._mirror)
        self._numbers = self.window.cast("Q")

    def number(self, at: int) -> int:
        return self._numbers[at // 8]

    def write(self, at: int, num_bytes: int, number_at: int, number: int) -> None:
        struct.pack_into("<Q", self.outgoing, number_at, number)
        self._pair.write([(at, num_bytes), (number_at, 8)], None)

    def close(self) -> None:
        try:
            with verbs_errors("closing a lane"):
                self._pair.close()
        except TransportError as error:  # registered pages outlive their mapping
            logger.warning("%s", error)


@contextlib.contextmanager
def _device_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TransportError(str(error)) from error


def _view(memory: Memory) -> memoryview:
    pages = (ctypes.c_char * memory.num_bytes).from_address(memory.address)
    return memoryview(pages).cast("B")


def accept(endpoint: Endpoint, theirs: object, window_bytes: int, outgoing_bytes: int) -> Any:
    """Returns the HostLane of a peer's offer. Raises RefusedError if the endpoint has no lanes,
    and TransportError."""
    port = getattr(endpoint, "port", None)
    if not isinstance(port, Port):
        raise RefusedError("the engine is not connected by rdma://")
    try:
        return RdmaHostLane(port, theirs, window_bytes, outgoing_bytes)
    except (OSError, MemoryError) as error:
        raise TransportError(
            f"{window_bytes + outgoing_bytes} bytes for a lane: {error}"
        ) from error
