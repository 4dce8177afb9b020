"""A CUDA driver without a device: the used calls of `cuda.bindings.driver`, strictly.

What is undefined on a real driver (a released handle, a second release) is an AssertionError here.
Device memory is a bytearray for each handle, full of garbage at first, so that two addresses of one
handle show the same bytes. Kernels run as late as possible, when the host synchronises.
"""

from __future__ import annotations

import collections
import ctypes
import threading
from dataclasses import dataclass
from types import SimpleNamespace

from tests.support.cuda.fakes_cuda_streams import Streams
from tests.support.cuda.fakes_cuda_types import (
    CUdevice_attribute,
    CUmemAccess_flags,
    CUmemAllocationGranularity_flags,
    CUmemAllocationHandleType,
    CUmemAllocationType,
    CUmemLocationType,
    CUresult,
    IllegalAddress,
    Refused,
    driver_call,
    require,
)

__all__ = ["CUdevice_attribute", "CUresult", "FakeDriver", "IllegalAddress"]


def _location() -> SimpleNamespace:
    return SimpleNamespace(type=CUmemLocationType.CU_MEM_LOCATION_TYPE_INVALID, id=-1)


def CUmemAllocationProp() -> SimpleNamespace:
    return SimpleNamespace(
        type=CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_INVALID,
        location=_location(),
        requestedHandleTypes=None,
        win32HandleMetaData=0xDEAD,  # a caller that does not clear it is refused
        allocFlags=SimpleNamespace(gpuDirectRDMACapable=0),
    )


def CUmemAccessDesc() -> SimpleNamespace:
    flags = CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE
    return SimpleNamespace(location=_location(), flags=flags)


@dataclass(eq=False)
class Allocation:
    data: bytearray
    is_for_rdma: bool
    has_handle: bool = True
    num_mappings: int = 0


@dataclass(eq=False)
class Mapping:
    address: int
    size: int
    allocation: Allocation
    offset: int
    is_accessible: bool = False


class FakeDriver(Streams):
    """One device (number 0). Every call locks, so that any thread can use it."""

    CUresult = CUresult
    CUdevice_attribute = CUdevice_attribute
    CUmemAllocationType = CUmemAllocationType
    CUmemLocationType = CUmemLocationType
    CUmemAllocationHandleType = CUmemAllocationHandleType
    CUmemAllocationGranularity_flags = CUmemAllocationGranularity_flags
    CUmemAccess_flags = CUmemAccess_flags
    CUmemAllocationProp = staticmethod(CUmemAllocationProp)
    CUmemAccessDesc = staticmethod(CUmemAccessDesc)

    def __init__(self, granularity: int = 2 << 20, memory_bytes: int = 1 << 30) -> None:
        super().__init__()
        self.granularity = granularity
        self.memory_bytes = memory_bytes
        self.lacks: set[CUdevice_attribute] = set()
        self.lock = threading.RLock()
        self.calls: collections.Counter[str] = collections.Counter()
        self.num_retained = 0
        self.handles: dict[int, Allocation] = {}
        self.mappings: dict[int, Mapping] = {}
        self.reservations: dict[int, int] = {}
        self.used_bytes = 0
        self._is_initialized = False
        self._thread = threading.local()
        self._context = 0x1000
        self._next_handle = 1
        self._next_address = 1 << 40
        self._due: dict[str, list[CUresult | None]] = {}

    # Methods for tests.

    def fail(self, call: str, error: CUresult, after: int = 0) -> None:
        """Makes one call of that name fail, after the next `after` ones."""
        assert error != CUresult.CUDA_SUCCESS
        self._due[call] = [*[None] * after, error]

    def fail_no_more(self) -> None:
        self._due.clear()

    @property
    def num_live(self) -> tuple[int, int, int, int]:
        """Returns the numbers of handles, mappings, reservations and references to the context."""
        return len(self.handles), len(self.mappings), len(self.reservations), self.num_retained

    def read(self, address: int, size: int) -> bytes:
        with self.lock:
            return b"".join(bytes(part) for part in self._parts(address, size))

    def write(self, address: int, data: bytes) -> None:
        with self.lock:
            for part in self._parts(address, len(data)):
                part[:], data = data[: len(part)], data[len(part) :]

    def launch(self, address: int, data: bytes) -> None:
        """Queues a kernel that writes; an illegal address is noticed later and kills the
        context."""
        with self.lock:
            self.queue(0, lambda: self.write(address, data))

    def enter(self, call: str, needs_context: bool) -> None:
        self.calls[call] += 1
        due = self._due.get(call)
        error = due.pop(0) if due else None
        if error is not None:
            raise Refused(error)
        require(self._is_initialized or call == "cuInit", CUresult.CUDA_ERROR_NOT_INITIALIZED)
        if needs_context:
            current = getattr(self._thread, "context", 0)
            is_valid = current == self._context and self.num_retained > 0
            require(is_valid, CUresult.CUDA_ERROR_INVALID_CONTEXT)
            if self._dead is not None:
                raise Refused(self._dead)

    def _parts(self, address: int, size: int) -> list[memoryview]:
        parts = []
        while size > 0:
            found = self._mapping_at(address)
            if found is None or not found.is_accessible:
                raise IllegalAddress(hex(address))
            start = address - found.address
            length = min(size, found.size - start)
            start += found.offset
            parts.append(memoryview(found.allocation.data)[start : start + length])
            address, size = address + length, size - length
        return parts

    def _mapping_at(self, address: int) -> Mapping | None:
        for mapping in self.mappings.values():
            if mapping.address <= address < mapping.address + mapping.size:
                return mapping
        return None

    def _mappings_in(self, address: int, size: int) -> list[Mapping]:
        """Returns the mappings that fill the addresses; each must lie in them as a whole."""
        found, end = [], address + size
        while address < end:
            require(address in self.mappings)
            found.append(self.mappings[address])
            address += found[-1].size
        require(address == end and bool(found))
        return found

    # The driver.

    @driver_call(context=False)
    def cuInit(self, flags: int) -> None:
        require(flags == 0)
        self._is_initialized = True

    @driver_call(values=1, context=False)
    def cuDeviceGet(self, ordinal: int) -> int:
        require(ordinal == 0, CUresult.CUDA_ERROR_INVALID_DEVICE)
        return ordinal

    @driver_call(values=1, context=False)
    def cuDeviceGetName(self, length: int, device: int) -> bytes:
        return b"fake device\0".ljust(length, b"\0")

    @driver_call(values=1, context=False)
    def cuDriverGetVersion(self) -> int:
        return 13000

    @driver_call(values=1, context=False)
    def cuDeviceGetAttribute(self, attribute: CUdevice_attribute, device: int) -> int:
        return int(attribute not in self.lacks)

    @driver_call(values=1, context=False)
    def cuDevicePrimaryCtxRetain(self, device: int) -> int:
        self.num_retained += 1
        return self._context

    @driver_call(context=False)
    def cuDevicePrimaryCtxRelease(self, device: int) -> None:
        require(self.num_retained > 0, CUresult.CUDA_ERROR_INVALID_CONTEXT)
        self.num_retained -= 1

    @driver_call(values=1, context=False)
    def cuCtxGetCurrent(self) -> int:
        return getattr(self._thread, "context", 0)

    @driver_call(context=False)
    def cuCtxSetCurrent(self, context: int) -> None:
        is_valid = context == self._context and self.num_retained > 0
        require(is_valid, CUresult.CUDA_ERROR_INVALID_CONTEXT)
        self._thread.context = context

    @driver_call()
    def cuCtxSynchronize(self) -> None:
        self.run_all()

    @driver_call(values=2)
    def cuMemGetInfo(self) -> tuple[int, int]:
        return self.memory_bytes - self.used_bytes, self.memory_bytes

    @driver_call(values=1)
    def cuMemGetAllocationGranularity(self, prop: SimpleNamespace, option: int) -> int:
        self._check(prop)
        require(option == CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM)
        return self.granularity

    def _check(self, prop: SimpleNamespace) -> None:
        require(prop.type == CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED)
        self._check_location(prop.location)
        require(prop.requestedHandleTypes == CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE)
        require(prop.win32HandleMetaData == 0)

    @staticmethod
    def _check_location(location: SimpleNamespace) -> None:
        require(location.type == CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
        require(location.id == 0, CUresult.CUDA_ERROR_INVALID_DEVICE)

    def _check_aligned(self, *values: int) -> None:
        require(all(value % self.granularity == 0 for value in values))

    @driver_call(values=1)
    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> int:
        require(size > 0 and flags == 0)
        self._check_aligned(size, alignment)
        address = self._next_address
        # an unreserved gap, so that overruns are caught
        self._next_address += size + self.granularity
        self.reservations[address] = size
        return address

    @driver_call()
    def cuMemAddressFree(self, address: int, size: int) -> None:
        require(self.reservations.get(address) == size)
        require(not any(address <= m < address + size for m in self.mappings))
        del self.reservations[address]

    @driver_call(values=1)
    def cuMemCreate(self, size: int, prop: SimpleNamespace, flags: int) -> int:
        self._check(prop)
        self._check_aligned(size)
        require(size > 0 and flags == 0)
        is_room = self.used_bytes + size <= self.memory_bytes
        require(is_room, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        self.used_bytes += size
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        is_for_rdma = bool(prop.allocFlags.gpuDirectRDMACapable)
        self.handles[handle] = Allocation(bytearray(b"\xcd") * size, is_for_rdma)
        return handle

    @driver_call()
    def cuMemRelease(self, handle: int) -> None:
        assert handle in self.handles, f"handle {handle} is not live: undefined behaviour"
        allocation = self.handles.pop(handle)
        allocation.has_handle = False
        self._free_unused(allocation)

    def _free_unused(self, allocation: Allocation) -> None:
        if not allocation.has_handle and not allocation.num_mappings:
            self.used_bytes -= len(allocation.data)

    @driver_call()
    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        assert handle in self.handles, f"handle {handle} is not live: undefined behaviour"
        allocation = self.handles[handle]
        self._check_aligned(address, size, offset)
        require(size > 0 and flags == 0 and offset + size <= len(allocation.data))
        inside = any(a <= address and address + size <= a + n for a, n in self.reservations.items())
        require(inside)
        for m in self.mappings.values():
            require(address + size <= m.address or m.address + m.size <= address)
        self.mappings[address] = Mapping(address, size, allocation, offset)
        allocation.num_mappings += 1

    @driver_call()
    def cuMemSetAccess(
        self, address: int, size: int, descs: list[SimpleNamespace], count: int
    ) -> None:
        require(len(descs) == count == 1)
        self._check_location(descs[0].location)
        for mapping in self._mappings_in(address, size):
            allowed = CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            mapping.is_accessible = descs[0].flags == allowed

    @driver_call()
    def cuMemUnmap(self, address: int, size: int) -> None:
        for mapping in self._mappings_in(address, size):
            del self.mappings[mapping.address]
            mapping.allocation.num_mappings -= 1
            self._free_unused(mapping.allocation)

    @driver_call()
    def cuMemsetD8(self, address: int, value: int, size: int) -> None:
        self.launch(address, bytes([value]) * size)

    @driver_call()
    def cuMemcpyDtoH(self, host: int, address: int, size: int) -> None:
        self.run(0)
        try:
            ctypes.memmove(host, self.read(address, size), size)
        except IllegalAddress:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE) from None
