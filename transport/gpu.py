"""Device memory that a peer writes over RDMA, and CUDA streams that wait for its writes.

None of it has run on hardware (docs/rdma.md). A stream can neither compute nor check a checksum,
and its waits must be enqueued before the messages are known. So this is no Endpoint: both sides
agree beforehand where each message lies and which number is written behind it (transport/lane.py),
and the control connection and its endpoint stay beside it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

from transport.base import TransportError
from transport.verbs import RdmaUnavailableError, constants, pyverbs

_MELLANOX = 0x02C9
_BLOCK_BYTES = 64  # of a block of the send queue, which here has one request
_RDMA_WRITE = 0x08  # the opcode of mlx5's requests
_REPORT = 0x08  # ask for a completion
_INLINE = 1 << 31
_INIT_QUEUE_PAIR = 1  # mlx5dv_init_obj
_OWNER = 100  # CUGPUDirectRDMAWritesOrdering: the GPU's own work sees peers' writes in order
RELEASED = 1 << 30
"""A released wait sees a number that is later by so much."""


class GpuUnavailableError(RdmaUnavailableError):
    """This GPU, driver, device or library lacks a feature; the host can do the work instead."""


class Gpu:
    """Calls `cuda.bindings.driver`, whose functions return (error, value...). The device's context
    must be current on every thread that uses this."""

    def __init__(self, driver: Any, device: Any) -> None:
        self.driver = driver
        self._device = device

    def call(self, name: str, *arguments: Any) -> Any:
        error, *values = getattr(self.driver, name)(*arguments)
        if error != self.driver.CUresult.CUDA_SUCCESS:
            raise TransportError(f"{name}: {error.name}")
        return values[0] if values else None

    def attribute(self, what: str) -> int:
        """Returns an attribute of the device, 0 if the bindings do not know it."""
        found = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{what}", None)
        return 0 if found is None else int(self.call("cuDeviceGetAttribute", found, self._device))

    def can(self, what: str) -> bool:
        return bool(self.attribute(what))

    def require(self, what: str) -> None:
        if not self.can(what):
            raise GpuUnavailableError(f"the GPU lacks {what}")


def dma_buf_of(gpu: Gpu, address: int, num_bytes: int) -> int:
    """Returns a file descriptor by which other devices reach device memory; the caller closes it.

    Raises ValueError unless the range consists of whole host pages, GpuUnavailableError and
    TransportError.
    """
    if address % mmap.PAGESIZE or num_bytes % mmap.PAGESIZE or num_bytes <= 0:
        raise ValueError(f"{num_bytes} bytes at {address:#x} are not whole pages")
    gpu.require("DMA_BUF_SUPPORTED")
    driver = gpu.driver
    # Otherwise a synchronous copy may return before the device's reads see its result.
    sync = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
    gpu.call("cuPointerSetAttribute", 1, sync, address)
    kind = driver.CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
    return int(gpu.call("cuMemGetHandleForAddressRange", address, num_bytes, kind, 0))


class DeviceRegion:
    """Device memory that a queue pair's device reads, until it is closed.

    A writer addresses it by `address_of` and `key`.
    """

    def __init__(
        self, gpu: Gpu, domain: Any, address: int, num_bytes: int, *, for_peer: bool = True
    ) -> None:
        """domain: the queue pair's protection domain. for_peer: the peer may write it. The range
        must stay mapped until `close`. Raises what `dma_buf_of` does.
        """
        fd = dma_buf_of(gpu, address, num_bytes)
        api, e = pyverbs("mr"), constants()
        access = e.IBV_ACCESS_LOCAL_WRITE | (e.IBV_ACCESS_REMOTE_WRITE if for_peer else 0)
        try:
            if hasattr(api, "MREx"):
                self._region = api.MREx(domain, num_bytes, access, fd=fd, iova=address)
                self._first = address
            else:  # addresses of a DmaBufMR begin at 0
                self._region = api.DmaBufMR(domain, num_bytes, access, dmabuf=fd, offset=0)
                self._first = 0
        except pyverbs("pyverbs_error").PyverbsError as error:
            raise GpuUnavailableError(f"device memory was not registered: {error}") from error
        finally:
            os.close(fd)  # the registration has its own reference
        self._address, self._num_bytes = address, num_bytes

    @property
    def key(self) -> int:
        """The key for the peer's writes."""
        return int(self._region.rkey)

    @property
    def local_key(self) -> int:
        """The key for sends of this end."""
        return int(self._region.lkey)

    def address_of(self, address: int) -> int:
        """Returns the address by which work requests name this device address."""
        if not self._address <= address < self._address + self._num_bytes:
            raise ValueError(f"{address:#x} is not in the region")
        return address - self._address + self._first

    @property
    def registration(self) -> Any:
        """The registered memory of pyverbs."""
        return self._region

    def close(self) -> None:
        self._region.close()


class StreamReceiver:
    """Makes streams wait for the numbers that a peer writes after its messages."""

    def __init__(self, gpu: Gpu, *, is_device_memory: bool) -> None:
        """is_device_memory: the messages, not only the numbers, are in device memory. Raises
        GpuUnavailableError."""
        self._gpu = gpu
        flags = gpu.driver.CUstreamWaitValue_flags
        self._flags = int(flags.CU_STREAM_WAIT_VALUE_GEQ)
        if is_device_memory:
            # A visible number may not imply that the writes before it are visible.
            if gpu.can("CAN_FLUSH_REMOTE_WRITES"):
                self._flags |= int(flags.CU_STREAM_WAIT_VALUE_FLUSH)
            elif gpu.attribute("GPU_DIRECT_RDMA_WRITES_ORDERING") < _OWNER:
                raise GpuUnavailableError(
                    "the GPU lacks CAN_FLUSH_REMOTE_WRITES and does not order peers' writes"
                )
        self._is_64_bit = gpu.can("CAN_USE_64_BIT_STREAM_MEM_OPS")

    def wait(self, stream: Any, address: int, number: int) -> None:
        """Makes later work of the stream wait until the word at this device address is at least
        `number`. If the peer is lost, only a write to the word from this end ends the wait."""
        if self._is_64_bit:
            self._gpu.call("cuStreamWaitValue64", stream, address, number, self._flags)
        else:  # the low half suffices, because the comparison is cyclic
            low = number & 0xFFFFFFFF
            self._gpu.call("cuStreamWaitValue32", stream, address, low, self._flags)

    def release(self, stream: Any, address: int, number: int) -> None:
        """Ends the waits of other streams for this number, or for one before it, at this device
        address, as if the peer had written a later one. stream: one that waits for nothing."""
        late = number + RELEASED  # the waits' low halves end, too
        flags = self._gpu.driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
        if self._is_64_bit:
            self._gpu.call("cuStreamWriteValue64", stream, address, late, int(flags))
        else:
            low = late & 0xFFFFFFFF
            self._gpu.call("cuStreamWriteValue32", stream, address, low, int(flags))


class HostWord:
    """A number in this machine's memory that a stream writes when it gets there, or waits for."""

    def __init__(self, gpu: Gpu) -> None:
        """Raises TransportError if the driver does not map the memory, and GpuUnavailableError."""
        gpu.require("CAN_USE_64_BIT_STREAM_MEM_OPS")
        self._gpu = gpu
        self._memory = mmap.mmap(-1, mmap.PAGESIZE)
        self._word = ctypes.c_uint64.from_buffer(self._memory)
        self._address = ctypes.addressof(self._word)
        flags = gpu.driver.CU_MEMHOSTREGISTER_DEVICEMAP
        gpu.call("cuMemHostRegister", self._address, mmap.PAGESIZE, flags)
        try:
            self.device_address = int(gpu.call("cuMemHostGetDevicePointer", self._address, 0))
        except TransportError:
            self.close()
            raise

    def write(self, stream: Any, number: int) -> None:
        """Makes the stream write the number after all of its earlier work."""
        flags = self._gpu.driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
        self._gpu.call("cuStreamWriteValue64", stream, self.device_address, number, int(flags))

    @property
    def value(self) -> int:
        """The number that was written last. Any thread may read it; the host sets it for a stream
        that waits at `device_address`."""
        return int(self._word.value)

    @value.setter
    def value(self, number: int) -> None:
        self._word.value = number

    def close(self) -> None:
        """Unmaps the memory. No stream writes it any more."""
        self._gpu.call("cuMemHostUnregister", self._address)


@dataclass(frozen=True, slots=True)
class SendQueue:
    """The send queue of an mlx5 queue pair, by addresses in this process."""

    queue_pair: int
    blocks: int
    num_blocks: int
    record: int
    """The address of the number of filled blocks: 4 bytes, big-endian, of which 2 count."""
    register: int
    """The device's doorbell: 8 bytes written here make it read the queue. A second doorbell
    follows at `other_register` bytes; the two are used in turn."""
    other_register: int


class _DirectQueuePair(ctypes.Structure):
    """struct mlx5dv_qp"""

    _fields_ = (
        ("record", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("num_blocks", ctypes.c_uint32),
        ("block_bytes", ctypes.c_uint32),
        ("receive_blocks", ctypes.c_void_p),
        ("num_receive_blocks", ctypes.c_uint32),
        ("receive_block_bytes", ctypes.c_uint32),
        ("register", ctypes.c_void_p),
        ("register_bytes", ctypes.c_uint32),
        ("mask", ctypes.c_uint64),
        ("more", ctypes.c_uint64 * 4),
    )


def send_queue_of(context: Any, pair: Any, library: Any = None) -> SendQueue:
    """Returns the send queue of a pyverbs queue pair that is connected and has sent nothing. After
    this only a StreamSender may send on it. library: libmlx5. Raises GpuUnavailableError.
    """
    if context.query_device().vendor_id != _MELLANOX:
        raise GpuUnavailableError("the RDMA device is not one of mlx5")
    address = getattr(pair, "qp", None)
    if address is None:
        raise GpuUnavailableError("this release of pyverbs does not expose a queue pair's address")
    if library is None:
        try:
            library = ctypes.CDLL("libmlx5.so.1")
        except OSError as error:
            raise GpuUnavailableError(f"mlx5's direct verbs: {error}") from error
    found = _DirectQueuePair()
    # struct mlx5dv_obj: pairs of (in, out) for seven kinds of objects, queue pairs first
    objects = (ctypes.c_void_p * 14)(address, ctypes.addressof(found))
    if library.mlx5dv_init_obj(ctypes.byref(objects), ctypes.c_uint64(_INIT_QUEUE_PAIR)) != 0:
        raise GpuUnavailableError("mlx5dv_init_obj refused the queue pair")
    if found.block_bytes != _BLOCK_BYTES or not found.blocks or not found.register:
        raise GpuUnavailableError("the queue pair's send queue is not of the usual kind")
    return SendQueue(
        queue_pair=pair.qp_num,
        blocks=found.blocks,
        num_blocks=found.num_blocks,
        record=found.record + 4,  # after the receive queue's
        register=found.register,
        other_register=found.register_bytes,
    )


class Source(NamedTuple):
    local_key: int
    address: int
    num_bytes: int


class Target(NamedTuple):
    key: int
    address: int
    number_address: int
    """The address to which the number is written after the payload, under the same key."""


class StreamSender:
    """Sends from a stream. The host writes a message's requests into the send queue beforehand, and
    the stream rings the device's doorbell when it reaches that point. Use it with one stream at a
    time, and open one sender per device, since several would share pages."""

    def __init__(self, gpu: Gpu, queue: SendQueue) -> None:
        """Raises GpuUnavailableError if the driver does not map the device's register. NVIDIA's
        driver must be loaded with PeerMappingOverride=1."""
        self._gpu, self._queue = gpu, queue
        self._num_filled = self._num_done = 0
        gpu.require("CAN_USE_64_BIT_STREAM_MEM_OPS")
        driver = gpu.driver
        self._mapped: list[int] = []
        try:
            self._record = self._map(queue.record, driver.CU_MEMHOSTREGISTER_DEVICEMAP)
            flags = driver.CU_MEMHOSTREGISTER_DEVICEMAP | driver.CU_MEMHOSTREGISTER_IOMEMORY
            self._register = self._map(queue.register, flags)
        except TransportError as error:
            self.close()
            raise GpuUnavailableError(f"the device's doorbell: {error}") from error

    def _map(self, address: int, flags: int) -> int:
        """Maps the page of a host address and returns its address for the device."""
        page = address - address % mmap.PAGESIZE
        self._gpu.call("cuMemHostRegister", page, mmap.PAGESIZE, flags)
        self._mapped.append(page)
        return int(self._gpu.call("cuMemHostGetDevicePointer", page, 0)) + address - page

    def send(
        self, stream: Any, source: Source, target: Target, number: int, *, reports: bool = False
    ) -> None:
        """Makes the stream write the payload to the peer and then the number. reports: the write
        has a completion, which the caller takes and reports by `done`.

        Raises ValueError for an empty payload and TransportError if the send queue is full.
        """
        if not 0 < source.num_bytes < 1 << 31:  # 0 would be 2 GiB
            raise ValueError(f"a payload of {source.num_bytes} bytes")
        if self._num_filled + 2 - self._num_done > self._queue.num_blocks:
            raise TransportError("the send queue is full")
        length, inline = source.num_bytes, struct.pack("<Q", number)
        self._place(
            target.key,
            target.address,
            struct.pack(">IIQ", length, source.local_key, source.address),
            reports=False,
        )
        first = self._place(
            target.key,
            target.number_address,
            struct.pack(">I", len(inline) | _INLINE) + inline,
            reports=reports,
        )
        record = (self._num_filled & 0xFFFF).to_bytes(4, "big")
        # By default a write of a stream comes after all earlier work of the stream.
        self._write(stream, 32, self._record, record)
        self._write(stream, 64, self._register, first)
        self._register ^= self._queue.other_register

    def _place(self, key: int, address: int, tail: bytes, *, reports: bool) -> bytes:
        """Fills the next block with a write; returns its first 8 bytes."""
        queue, index = self._queue, self._num_filled
        segments = (16 + 16 + len(tail) + 15) // 16
        control = struct.pack(
            ">IIBHBI",
            (index & 0xFFFF) << 8 | _RDMA_WRITE,
            queue.queue_pair << 8 | segments,
            0,
            0,
            _REPORT if reports else 0,
            0,
        )
        block = (control + struct.pack(">QII", address, key, 0) + tail).ljust(_BLOCK_BYTES, b"\0")
        at = queue.blocks + index % queue.num_blocks * _BLOCK_BYTES
        ctypes.memmove(at, block, _BLOCK_BYTES)
        self._num_filled += 1
        return block[:8]

    def _write(self, stream: Any, bits: int, address: int, data: bytes) -> None:
        flags = self._gpu.driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
        value = int.from_bytes(data, "little")
        self._gpu.call(f"cuStreamWriteValue{bits}", stream, address, value, int(flags))

    def done(self, num_messages: int) -> None:
        """Records that the num_messages oldest messages have reached the peer."""
        self._num_done += 2 * num_messages
        assert self._num_done <= self._num_filled

    def close(self) -> None:
        """Unmaps the pages. The stream must have finished its sends."""
        while self._mapped:
            self._gpu.call("cuMemHostUnregister", self._mapped.pop())
