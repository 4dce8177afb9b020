"""Lanes without a GPU and without RDMA: a stream that is the calling thread, device memory that is
this process's, and a fake mlx5 device for each lane (fakes_gpu_rdma.py). The node's end is a thread
that polls memory and writes to the stream's."""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from itertools import count
from types import SimpleNamespace

import torch

from memory.nodes.engine_lanes import EngineLanes
from tests.support.cuda.fakes_gpu_rdma import (
    DEVICE,
    PAGE,
    CUresult,
    FakeDriver,
    FakeNic,
    Pages,
    context,
)
from transport.base import PeerLostError
from transport.gpu import (
    Gpu,
    GpuUnavailableError,
    HostWord,
    StreamReceiver,
    StreamSender,
    send_queue_of,
)
from transport.lane import StreamEnd, StreamLane

STREAM, RELEASE_STREAM = object(), object()
_PATIENCE_S = 30.0


class _Inline:
    """The queue of a stream that is the calling thread: an append ends when the work has."""

    def append(self, work) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not work():
            assert time.monotonic() < deadline, "a stream waits for ever"
            time.sleep(2e-5)


class HostDriver(FakeDriver):
    """Device addresses are those of tensors of `allocate`."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = _Inline()
        self.blocks: dict[int, torch.Tensor] = {}
        self.nics: list[FakeNic] = []
        self.nic = self
        self.num_waits = self.num_releases = 0

    def allocate(self, num_bytes: int) -> torch.Tensor:
        memory = torch.zeros(num_bytes + PAGE, dtype=torch.uint8)
        first = -memory.data_ptr() % PAGE
        self.blocks[memory.data_ptr() + first] = memory[first : first + num_bytes]
        return memory[first : first + num_bytes]

    def owns(self, address: int, num_bytes: int) -> bool:
        return any(a <= address <= a + len(x) - num_bytes for a, x in self.blocks.items())

    def read(self, address: int, num_bytes: int) -> bytes:
        assert self.owns(address, num_bytes)
        return ctypes.string_at(address, num_bytes)

    def write(self, address: int, data: bytes) -> None:
        assert self.owns(address, len(data))
        ctypes.memmove(address, data, len(data))

    def on_register_write(self, host: int) -> None:
        for nic in self.nics:
            nic.on_register_write(host)

    def cuMemHostRegister(self, address: int, size: int, flags: int):
        assert address % PAGE == 0 and size == PAGE and address not in self.registered
        is_register = any(address == nic.register.address for nic in self.nics)
        assert flags == 2 | (4 if is_register else 0)
        self.registered[address] = flags
        return (CUresult.CUDA_SUCCESS,)

    def cuStreamWaitValue64(self, stream, address: int, value: int, flags: int):
        assert stream is STREAM
        self.num_waits += 1
        return super().cuStreamWaitValue64(stream, address, value, flags)

    def cuStreamWriteValue64(self, stream, address: int, value: int, flags: int):
        if not self.owns(address, 8):
            assert stream is STREAM
            return super().cuStreamWriteValue64(stream, address, value, flags)
        assert stream is RELEASE_STREAM, "the stream that waits cannot release itself"
        self.num_releases += 1
        self.write(address, struct.pack("<Q", value))
        return (CUresult.CUDA_SUCCESS,)


class FakeHostLane:
    """A HostLane."""

    def __init__(self, offer, window_bytes: int, outgoing_bytes: int) -> None:
        self._offer = offer
        self._pages = Pages(window_bytes), Pages(outgoing_bytes)
        self.window, self.outgoing = (memoryview(x.map) for x in self._pages)
        self.terms = {"number": offer.number}
        self.is_closed = False
        self.num_written = 0

    def number(self, at: int) -> int:
        assert not self.is_closed and at % 8 == 0
        return struct.unpack_from("<Q", self.window, at)[0]

    def write(self, at: int, num_bytes: int, number_at: int, number: int) -> None:
        offer = self._offer
        if self._offer.is_closed:
            raise PeerLostError("the queue pair is in error")
        offer.hub.on_write(self, number)
        for first, data in (
            (at, bytes(self.outgoing[at : at + num_bytes])),
            (number_at, struct.pack("<Q", number)),
        ):
            offer.hub.driver.write(offer.window.address + first, data)
        self.num_written += 1

    def close(self) -> None:
        self.is_closed = True


class FakeOffer:
    """A StreamOffer."""

    def __init__(self, hub: LaneHub, number: int, window, source, num_messages: int) -> None:
        self.hub, self.number, self.window, self.source = hub, number, window, source
        self.terms = {"number": number}
        self.num_messages = num_messages
        self.is_closed = False
        self.host: FakeHostLane | None = None

    def connect(self, theirs) -> StreamLane:
        assert theirs == self.terms and self.host is not None
        driver, gpu = self.hub.driver, self.hub.gpu
        nic = FakeNic(num_blocks=4 * self.num_messages)
        nic.peer[0xBEEF] = self.host.window
        nic.read_local[0xA2] = driver.read
        driver.nics.append(nic)
        pair = SimpleNamespace(qp=0xC0FFEE, qp_num=FakeNic.NUMBER)
        library = SimpleNamespace(mlx5dv_init_obj=nic.direct)
        seen = [0]

        def num_reports() -> int:
            before, seen[0] = seen[0], nic.num_completions
            return seen[0] - before

        end = StreamEnd(
            sender=StreamSender(gpu, send_queue_of(context(), pair, library)),
            receiver=StreamReceiver(gpu, is_device_memory=True),
            progress=HostWord(gpu),
            source=self.source.address,
            source_key=0xA2,
            window=self.window.address,
            peer_key=0xBEEF,
            peer_address=0,
            num_reports=num_reports,
            free=self.close,
        )
        self.hub.num_open += 1
        return StreamLane(gpu, STREAM, RELEASE_STREAM, end)

    def close(self) -> None:
        assert not self.is_closed
        self.is_closed = True
        self.hub.num_open -= self.host is not None
        for block in (self.window, self.source):
            del self.hub.driver.blocks[block.address]


class LaneHub:
    """Where both ends' lanes meet: a LaneOpener, and the node's `accept`."""

    def __init__(self, refuses: str = "") -> None:
        self.driver = HostDriver()
        self.gpu = Gpu(self.driver, DEVICE)
        self.refuses = refuses
        self.num_open = 0
        self.is_closed = False
        self.offers: dict[int, FakeOffer] = {}
        self.entered: list[threading.Thread] = []
        self.on_write = lambda lane, number: None
        """Called in a node's thread before it writes a result."""
        self._numbers = count(1)

    def lanes(self, max_rows: int) -> EngineLanes:
        return EngineLanes(self, self.driver.allocate, max_rows)

    def enter(self) -> None:
        self.entered.append(threading.current_thread())

    def close(self) -> None:
        self.is_closed = True

    def offer(self, endpoint, window, source, num_messages: int) -> FakeOffer:
        if self.refuses:
            raise GpuUnavailableError(self.refuses)
        number = next(self._numbers)
        self.offers[number] = FakeOffer(self, number, window, source, num_messages)
        return self.offers[number]

    def accept(self, endpoint, theirs, window_bytes: int, outgoing_bytes: int) -> FakeHostLane:
        offer = self.offers[theirs["number"]]
        offer.host = FakeHostLane(offer, window_bytes, outgoing_bytes)
        return offer.host
