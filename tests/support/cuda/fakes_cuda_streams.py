"""The fake driver's streams, events and page-locked host memory.

Work runs as late as possible: when the host synchronises, or queries an event a second time. So a
copy that the host did not wait for reads and writes what is there much later.
"""

from __future__ import annotations

import collections
import ctypes
import mmap
from collections.abc import Callable
from dataclasses import dataclass

from tests.support.cuda.fakes_cuda_types import (
    CUevent_flags,
    CUresult,
    CUstream_flags,
    IllegalAddress,
    Refused,
    driver_call,
    require,
)

_OFFSET = 256  # offset of host memory from a page's start, as alignment to pages is not promised


@dataclass(eq=False)
class Event:
    """A position in a stream's queue."""

    stream: int = 0
    is_over: bool = True  # not recorded yet


class Streams:
    """Stream 0 always exists; the others do not wait for it."""

    CUstream_flags = CUstream_flags
    CUevent_flags = CUevent_flags

    def __init__(self) -> None:
        self.host: dict[int, mmap.mmap] = {}
        self._queues: dict[int, collections.deque[Callable[[], None]]] = {0: collections.deque()}
        self._events: dict[int, Event] = {}
        self._dead: CUresult | None = None
        self._next_name = 100

    @property
    def num_live_host(self) -> tuple[int, int, int]:
        """Returns the numbers of host allocations, streams and events."""
        return len(self.host), len(self._queues) - 1, len(self._events)

    def read(self, address: int, size: int) -> bytes:
        raise NotImplementedError

    def write(self, address: int, data: bytes) -> None:
        raise NotImplementedError

    def queue(self, stream: int, work: Callable[[], None]) -> None:
        require(stream in self._queues, CUresult.CUDA_ERROR_INVALID_HANDLE)
        self._queues[stream].append(work)

    def run(self, stream: int, until: Event | None = None) -> None:
        require(stream in self._queues, CUresult.CUDA_ERROR_INVALID_HANDLE)
        queue = self._queues[stream]
        try:
            while queue and not (until and until.is_over):
                queue.popleft()()
        except IllegalAddress:
            self._dead = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
            raise Refused(self._dead) from None

    def run_all(self) -> None:
        for stream in list(self._queues):
            self.run(stream)

    def _name(self) -> int:
        self._next_name += 1
        return self._next_name

    def _event(self, event: int) -> Event:
        require(event in self._events, CUresult.CUDA_ERROR_INVALID_HANDLE)
        return self._events[event]

    def _is_host(self, address: int, size: int) -> bool:
        return any(
            start <= address and address + size <= start + len(memory) - _OFFSET
            for start, memory in self.host.items()
        )

    # The driver.

    @driver_call(values=1)
    def cuMemHostAlloc(self, size: int, flags: int) -> int:
        require(size > 0 and flags == 0)
        memory = mmap.mmap(-1, size + _OFFSET)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + _OFFSET
        ctypes.memset(address, 0xCD, size)
        self.host[address] = memory
        return address

    @driver_call()
    def cuMemFreeHost(self, address: int) -> None:
        require(address in self.host)
        self.host.pop(address).close()

    @driver_call(values=1)
    def cuStreamCreate(self, flags: int) -> int:
        assert flags == CUstream_flags.CU_STREAM_NON_BLOCKING, "it would wait for stream 0"
        name = self._name()
        self._queues[name] = collections.deque()
        return name

    @driver_call()
    def cuStreamDestroy(self, stream: int) -> None:
        require(stream in self._queues, CUresult.CUDA_ERROR_INVALID_HANDLE)
        assert stream and not self._queues[stream], "work is queued in it"
        del self._queues[stream]

    @driver_call()
    def cuStreamSynchronize(self, stream: int) -> None:
        self.run(stream)

    @driver_call()
    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> None:
        require(flags == 0)
        recorded = self._event(event)
        self.queue(
            stream, lambda: None if recorded.is_over else self.run(recorded.stream, recorded)
        )

    @driver_call(values=1)
    def cuEventCreate(self, flags: int) -> int:
        require(flags & ~7 == 0)
        name = self._name()
        self._events[name] = Event()
        return name

    @driver_call()
    def cuEventDestroy(self, event: int) -> None:
        self._event(event)
        del self._events[event]

    @driver_call()
    def cuEventRecord(self, event: int, stream: int) -> None:
        self._event(event)
        recorded = self._events[event] = Event(stream, is_over=False)
        self.queue(stream, lambda: setattr(recorded, "is_over", True))

    @driver_call()
    def cuEventQuery(self, event: int) -> None:
        recorded = self._event(event)
        if not recorded.is_over:
            self.run(recorded.stream, recorded)  # the device progresses meanwhile
            raise Refused(CUresult.CUDA_ERROR_NOT_READY)

    @driver_call()
    def cuMemcpyDtoHAsync(self, host: int, address: int, size: int, stream: int) -> None:
        require(self._is_host(host, size))

        def copy() -> None:
            if not self._is_host(host, size):
                raise IllegalAddress(hex(host))
            ctypes.memmove(host, self.read(address, size), size)

        self.queue(stream, copy)

    @driver_call()
    def cuMemcpyHtoDAsync(self, address: int, host: int, size: int, stream: int) -> None:
        require(self._is_host(host, size))

        def copy() -> None:
            if not self._is_host(host, size):
                raise IllegalAddress(hex(host))
            self.write(address, ctypes.string_at(host, size))

        self.queue(stream, copy)

    @driver_call()
    def cuMemcpyDtoDAsync(self, target: int, source: int, size: int, stream: int) -> None:
        self.queue(stream, lambda: self.write(target, self.read(source, size)))
