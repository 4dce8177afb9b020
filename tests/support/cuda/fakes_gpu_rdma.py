"""A GPU and an mlx5 device that share memory. What is undefined on real ones is an
AssertionError here. Streams run when the test says so, and stop at a wait that is not fulfilled."""

from __future__ import annotations

import ctypes
import enum
import mmap
import os
import struct
from collections.abc import Callable
from types import SimpleNamespace

PAGE = mmap.PAGESIZE
DEVICE = 7
DEVICE_BASE = 1 << 40
_MAPPED = 1 << 44  # offset from a host address to the device's


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_NOT_PERMITTED = 800


class CUdevice_attribute(enum.IntEnum):
    CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES = 98
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING = 118
    CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS = 122
    CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED = 124


class CUpointer_attribute(enum.IntEnum):
    CU_POINTER_ATTRIBUTE_SYNC_MEMOPS = 6


class CUmemRangeHandleType(enum.IntEnum):
    CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD = 1


class CUstreamWaitValue_flags(enum.IntFlag):
    CU_STREAM_WAIT_VALUE_GEQ = 0
    CU_STREAM_WAIT_VALUE_FLUSH = 1 << 30


class CUstreamWriteValue_flags(enum.IntFlag):
    CU_STREAM_WRITE_VALUE_DEFAULT = 0


class Pages:
    """Zeroed host memory that begins at a page boundary."""

    def __init__(self, num_bytes: int = PAGE) -> None:
        self.map = mmap.mmap(-1, num_bytes)
        self.num_bytes = num_bytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))


class FakeDriver:
    CUresult = CUresult
    CUdevice_attribute = CUdevice_attribute
    CUpointer_attribute = CUpointer_attribute
    CUmemRangeHandleType = CUmemRangeHandleType
    CUstreamWaitValue_flags = CUstreamWaitValue_flags
    CUstreamWriteValue_flags = CUstreamWriteValue_flags
    CU_MEMHOSTREGISTER_DEVICEMAP = 2
    CU_MEMHOSTREGISTER_IOMEMORY = 4

    def __init__(self, device_bytes: int = 16 * PAGE) -> None:
        self.lacks: set[str] = set()
        self.device = bytearray(device_bytes)
        self.registered: dict[int, int] = {}  # page: flags
        self.nic: FakeNic | None = None
        self.is_peer_mapping_allowed = True
        self.queue: list[Callable[[], bool]] = []
        self.num_flushes = 0
        self.writes_ordering = 0
        self.num_synchronized = 0
        self._synchronous: set[int] = set()
        self.fds: list[int] = []

    # ---- methods for tests

    def run(self) -> None:
        """Runs the stream as far as it gets."""
        while self.queue and self.queue[0]():
            self.queue.pop(0)

    def enqueue(self, work: Callable[[], None]) -> None:
        """Queues a kernel."""
        self.queue.append(lambda: work() is None)

    def owns(self, address: int, num_bytes: int) -> bool:
        """Returns whether it is device memory."""
        return DEVICE_BASE <= address <= DEVICE_BASE + len(self.device) - num_bytes

    def load(self, address: int, num_bytes: int) -> bytes:
        """Reads device memory, or mapped memory of the host."""
        host = address - _MAPPED
        if host - host % PAGE in self.registered:
            return ctypes.string_at(host, num_bytes)
        return self.read(address, num_bytes)

    def read(self, address: int, num_bytes: int) -> bytes:
        at = address - DEVICE_BASE
        assert at >= 0 and at + num_bytes <= len(self.device)
        return bytes(self.device[at : at + num_bytes])

    def write(self, address: int, data: bytes) -> None:
        at = address - DEVICE_BASE
        assert at >= 0 and at + len(data) <= len(self.device)
        self.device[at : at + len(data)] = data

    # ---- the driver's calls

    def cuDeviceGetAttribute(self, attribute: CUdevice_attribute, device: int):
        assert device == DEVICE
        name = attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_")
        if name == "GPU_DIRECT_RDMA_WRITES_ORDERING":
            return CUresult.CUDA_SUCCESS, self.writes_ordering
        return CUresult.CUDA_SUCCESS, int(name not in self.lacks)

    def cuPointerSetAttribute(self, value: int, attribute: CUpointer_attribute, address: int):
        assert value == 1 and attribute is CUpointer_attribute.CU_POINTER_ATTRIBUTE_SYNC_MEMOPS
        self._synchronous.add(address)
        return (CUresult.CUDA_SUCCESS,)

    def cuMemGetHandleForAddressRange(self, address: int, size: int, kind, flags: int):
        assert "DMA_BUF_SUPPORTED" not in self.lacks and flags == 0
        assert kind is CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        assert address % PAGE == 0 and size % PAGE == 0 and address in self._synchronous
        if not self.owns(address, size):
            return CUresult.CUDA_ERROR_INVALID_VALUE, 0
        self.fds.append(os.memfd_create("dma-buf"))
        return CUresult.CUDA_SUCCESS, self.fds[-1]

    def cuMemHostRegister(self, address: int, size: int, flags: int):
        assert address % PAGE == 0 and size == PAGE and address not in self.registered
        is_register = self.nic is not None and address == self.nic.register.address
        assert bool(flags & self.CU_MEMHOSTREGISTER_IOMEMORY) == is_register
        assert flags & self.CU_MEMHOSTREGISTER_DEVICEMAP
        if is_register and not self.is_peer_mapping_allowed:
            return (CUresult.CUDA_ERROR_NOT_PERMITTED,)
        self.registered[address] = flags
        return (CUresult.CUDA_SUCCESS,)

    def cuMemHostUnregister(self, address: int):
        del self.registered[address]
        return (CUresult.CUDA_SUCCESS,)

    def cuMemHostGetDevicePointer(self, address: int, flags: int):
        assert address in self.registered and flags == 0
        return CUresult.CUDA_SUCCESS, address + _MAPPED

    def cuStreamSynchronize(self, stream):
        self.num_synchronized += 1
        return (CUresult.CUDA_SUCCESS,)

    def cuStreamWaitValue64(self, stream, address: int, value: int, flags: int):
        assert "CAN_USE_64_BIT_STREAM_MEM_OPS" not in self.lacks
        return self._wait(address, value, flags, 8)

    def cuStreamWaitValue32(self, stream, address: int, value: int, flags: int):
        return self._wait(address, value, flags, 4)

    def _wait(self, address: int, value: int, flags: int, num_bytes: int):
        assert address % num_bytes == 0 and 0 <= value < 1 << (8 * num_bytes)
        flush = flags & CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_FLUSH
        assert not flush or "CAN_FLUSH_REMOTE_WRITES" not in self.lacks
        assert flags in (0, flush)

        def is_over() -> bool:
            seen = int.from_bytes(self.load(address, num_bytes), "little")
            span = 1 << (8 * num_bytes)
            if (seen - value) % span >= span // 2:
                return False
            self.num_flushes += bool(flush)
            return True

        self.queue.append(is_over)
        return (CUresult.CUDA_SUCCESS,)

    def cuStreamWriteValue32(self, stream, address: int, value: int, flags: int):
        return self._write(address, value, flags, 4)

    def cuStreamWriteValue64(self, stream, address: int, value: int, flags: int):
        assert "CAN_USE_64_BIT_STREAM_MEM_OPS" not in self.lacks
        return self._write(address, value, flags, 8)

    def _write(self, address: int, value: int, flags: int, num_bytes: int):
        assert flags == 0 and address % num_bytes == 0
        data = value.to_bytes(num_bytes, "little")

        def write() -> bool:
            host = address - _MAPPED
            assert host - host % PAGE in self.registered
            ctypes.memmove(host, data, num_bytes)
            if self.nic is not None:
                self.nic.on_register_write(host)
            return True

        self.queue.append(write)
        return (CUresult.CUDA_SUCCESS,)


class FakeNic:
    """The sending half of an mlx5 queue pair, which reads its queue when its register is
    written."""

    NUMBER = 0x4321
    PAIR = 0xC0FFEE  # the queue pair's address
    BUFFER_BYTES = 0x100
    AT = 0x800  # the register's offset in its page

    def __init__(self, num_blocks: int) -> None:
        self.blocks = Pages(-(-num_blocks * 64 // PAGE) * PAGE)
        self.num_blocks = num_blocks
        self.records = Pages()
        self.register = Pages()
        self.peer: dict[int, bytearray] = {}  # by key; addresses begin at 0
        self.read_local: dict[int, Callable[[int, int], bytes]] = {}
        self.num_done = 0
        self.num_completions = 0
        self._next_register = self.AT

    def direct(self, objects, kind) -> int:
        """Stands in for mlx5dv_init_obj."""
        assert kind.value == 1
        pair, out = objects._obj[0], objects._obj[1]
        if pair != self.PAIR:
            return 22
        head = struct.pack(
            "=QQIIQIIQI",
            self.records.address + 64,
            self.blocks.address,
            self.num_blocks,
            64,
            0,
            0,
            0,
            self.register.address + self.AT,
            self.BUFFER_BYTES,
        )
        ctypes.memmove(out, head, len(head))
        return 0

    def on_register_write(self, host: int) -> None:
        if host - host % PAGE != self.register.address:
            return
        assert host == self.register.address + self._next_register
        self._next_register ^= self.BUFFER_BYTES
        rung = ctypes.string_at(host, 8)
        record = ctypes.string_at(self.records.address + 64 + 4, 4)
        filled = int.from_bytes(record, "big")
        assert filled < 1 << 16
        count = (filled - self.num_done) % (1 << 16)
        assert 0 < count <= self.num_blocks
        for _ in range(count):
            first = self._execute()
        assert rung == first, "the register shows another request than the queue's last"

    def _execute(self) -> bytes:
        at = self.blocks.address + self.num_done % self.num_blocks * 64
        block = ctypes.string_at(at, 64)
        operation, pair, signature, stream, control, _ = struct.unpack(">IIBHBI", block[:16])
        assert operation == (self.num_done & 0xFFFF) << 8 | 0x08
        assert pair >> 8 == self.NUMBER and (pair & 0xFF) == 3
        assert signature == stream == 0 and control in (0, 8)
        address, key, reserved = struct.unpack(">QII", block[16:32])
        assert reserved == 0
        length = int.from_bytes(block[32:36], "big")
        if length & 1 << 31:
            length &= ~(1 << 31)
            assert length <= 12
            data = block[36 : 36 + length]
        else:
            assert length > 0
            local_key, source = struct.unpack(">IQ", block[36:48])
            data = self.read_local[local_key](source, length)
        assert address + length <= len(self.peer[key])
        self.peer[key][address : address + length] = data
        self.num_done += 1
        self.num_completions += control == 8
        return block[:8]


def context(vendor: int = 0x02C9) -> SimpleNamespace:
    return SimpleNamespace(query_device=lambda: SimpleNamespace(vendor_id=vendor))
