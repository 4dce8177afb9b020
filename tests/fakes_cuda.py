"""A CUDA driver without a device: the calls of `cuda.bindings.driver` that we use, strictly.

What the real one leaves undefined (a released handle, a second release) is an AssertionError
here. Device memory is a bytearray for each handle, full of garbage at first, so that two
addresses of one handle show the same bytes. Kernels run as late as they may: when somebody
synchronises.
"""

from __future__ import annotations

import collections
import ctypes
import enum
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_UNKNOWN = 999


class CUdevice_attribute(enum.IntEnum):
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102
    CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED = 110


class CUmemAllocationType(enum.IntEnum):
    CU_MEM_ALLOCATION_TYPE_INVALID = 0
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(enum.IntEnum):
    CU_MEM_LOCATION_TYPE_INVALID = 0
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAllocationHandleType(enum.IntEnum):
    CU_MEM_HANDLE_TYPE_NONE = 0


class CUmemAllocationGranularity_flags(enum.IntEnum):
    CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0


class CUmemAccess_flags(enum.IntEnum):
    CU_MEM_ACCESS_FLAGS_PROT_NONE = 0
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


def _location() -> SimpleNamespace:
    return SimpleNamespace(type=CUmemLocationType.CU_MEM_LOCATION_TYPE_INVALID, id=-1)


def CUmemAllocationProp() -> SimpleNamespace:
    return SimpleNamespace(
        type=CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_INVALID,
        location=_location(),
        requestedHandleTypes=None,
        win32HandleMetaData=0xDEAD,  # whoever forgets to clear it is refused
        allocFlags=SimpleNamespace(gpuDirectRDMACapable=0),
    )


def CUmemAccessDesc() -> SimpleNamespace:
    flags = CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_NONE
    return SimpleNamespace(location=_location(), flags=flags)


class Refused(Exception):
    def __init__(self, error: CUresult) -> None:
        super().__init__(error.name)
        self.error = error


class IllegalAddress(AssertionError):
    """The device touched an address that is not mapped, or that has no access rights yet."""


def _require(condition: bool, error: CUresult = CUresult.CUDA_ERROR_INVALID_VALUE) -> None:
    if not condition:
        raise Refused(error)


def _call(*, values: int = 0, context: bool = True) -> Callable[[Any], Any]:
    """A driver call. values: how many it returns; context: it needs a current context."""

    def wrap(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: FakeDriver, *arguments: Any) -> tuple[Any, ...]:
            with self.lock:
                try:
                    self.enter(method.__name__, context)
                    result = method(self, *arguments)
                except Refused as refused:
                    return (refused.error, *[None] * values)
            returned = [result] if values == 1 else result or []
            return (CUresult.CUDA_SUCCESS, *returned)

        return call

    return wrap


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


class FakeDriver:
    """One device (number 0). Every call locks, so that it can be used from any thread."""

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
        self._dead: CUresult | None = None
        self._queued: list[Callable[[], None]] = []

    # What tests set and look at.

    def fail(self, call: str, error: CUresult, after: int = 0) -> None:
        """One call of that name fails: the one after the next `after` ones."""
        assert error != CUresult.CUDA_SUCCESS
        self._due[call] = [*[None] * after, error]

    def fail_no_more(self) -> None:
        self._due.clear()

    @property
    def num_live(self) -> tuple[int, int, int, int]:
        """Handles, mappings, reservations, references to the context."""
        return len(self.handles), len(self.mappings), len(self.reservations), self.num_retained

    def read(self, address: int, size: int) -> bytes:
        with self.lock:
            return b"".join(bytes(part) for part in self._parts(address, size))

    def write(self, address: int, data: bytes) -> None:
        with self.lock:
            for part in self._parts(address, len(data)):
                part[:], data = data[: len(part)], data[len(part) :]

    def launch(self, address: int, data: bytes) -> None:
        """A kernel that writes; an illegal address is noticed later and kills the context."""
        with self.lock:
            self._queued.append(lambda: self.write(address, data))

    def enter(self, call: str, needs_context: bool) -> None:
        self.calls[call] += 1
        due = self._due.get(call)
        error = due.pop(0) if due else None
        if error is not None:
            raise Refused(error)
        _require(self._is_initialized or call == "cuInit", CUresult.CUDA_ERROR_NOT_INITIALIZED)
        if needs_context:
            current = getattr(self._thread, "context", 0)
            is_valid = current == self._context and self.num_retained > 0
            _require(is_valid, CUresult.CUDA_ERROR_INVALID_CONTEXT)
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
        """They must fill the addresses, and each must lie in them as a whole."""
        found, end = [], address + size
        while address < end:
            _require(address in self.mappings)
            found.append(self.mappings[address])
            address += found[-1].size
        _require(address == end and bool(found))
        return found

    # The driver.

    @_call(context=False)
    def cuInit(self, flags: int) -> None:
        _require(flags == 0)
        self._is_initialized = True

    @_call(values=1, context=False)
    def cuDeviceGet(self, ordinal: int) -> int:
        _require(ordinal == 0, CUresult.CUDA_ERROR_INVALID_DEVICE)
        return ordinal

    @_call(values=1, context=False)
    def cuDeviceGetName(self, length: int, device: int) -> bytes:
        return b"fake device\0".ljust(length, b"\0")

    @_call(values=1, context=False)
    def cuDriverGetVersion(self) -> int:
        return 13000

    @_call(values=1, context=False)
    def cuDeviceGetAttribute(self, attribute: CUdevice_attribute, device: int) -> int:
        return int(attribute not in self.lacks)

    @_call(values=1, context=False)
    def cuDevicePrimaryCtxRetain(self, device: int) -> int:
        self.num_retained += 1
        return self._context

    @_call(context=False)
    def cuDevicePrimaryCtxRelease(self, device: int) -> None:
        _require(self.num_retained > 0, CUresult.CUDA_ERROR_INVALID_CONTEXT)
        self.num_retained -= 1

    @_call(values=1, context=False)
    def cuCtxGetCurrent(self) -> int:
        return getattr(self._thread, "context", 0)

    @_call(context=False)
    def cuCtxSetCurrent(self, context: int) -> None:
        is_valid = context == self._context and self.num_retained > 0
        _require(is_valid, CUresult.CUDA_ERROR_INVALID_CONTEXT)
        self._thread.context = context

    @_call()
    def cuCtxSynchronize(self) -> None:
        self._run_queued()

    def _run_queued(self) -> None:
        queued, self._queued = self._queued, []
        try:
            for kernel in queued:
                kernel()
        except IllegalAddress:
            self._dead = CUresult.CUDA_ERROR_ILLEGAL_ADDRESS
            raise Refused(self._dead) from None

    @_call(values=2)
    def cuMemGetInfo(self) -> tuple[int, int]:
        return self.memory_bytes - self.used_bytes, self.memory_bytes

    @_call(values=1)
    def cuMemGetAllocationGranularity(self, prop: SimpleNamespace, option: int) -> int:
        self._check(prop)
        _require(option == CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM)
        return self.granularity

    def _check(self, prop: SimpleNamespace) -> None:
        _require(prop.type == CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED)
        self._check_location(prop.location)
        _require(prop.requestedHandleTypes == CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE)
        _require(prop.win32HandleMetaData == 0)

    @staticmethod
    def _check_location(location: SimpleNamespace) -> None:
        _require(location.type == CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE)
        _require(location.id == 0, CUresult.CUDA_ERROR_INVALID_DEVICE)

    def _check_aligned(self, *values: int) -> None:
        _require(all(value % self.granularity == 0 for value in values))

    @_call(values=1)
    def cuMemAddressReserve(self, size: int, alignment: int, address: int, flags: int) -> int:
        _require(size > 0 and flags == 0)
        self._check_aligned(size, alignment)
        address = self._next_address
        self._next_address += size + self.granularity  # a hole, so that overruns are caught
        self.reservations[address] = size
        return address

    @_call()
    def cuMemAddressFree(self, address: int, size: int) -> None:
        _require(self.reservations.get(address) == size)
        _require(not any(address <= m < address + size for m in self.mappings))
        del self.reservations[address]

    @_call(values=1)
    def cuMemCreate(self, size: int, prop: SimpleNamespace, flags: int) -> int:
        self._check(prop)
        self._check_aligned(size)
        _require(size > 0 and flags == 0)
        is_room = self.used_bytes + size <= self.memory_bytes
        _require(is_room, CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        self.used_bytes += size
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        is_for_rdma = bool(prop.allocFlags.gpuDirectRDMACapable)
        self.handles[handle] = Allocation(bytearray(b"\xcd") * size, is_for_rdma)
        return handle

    @_call()
    def cuMemRelease(self, handle: int) -> None:
        assert handle in self.handles, f"handle {handle} is not live: undefined behaviour"
        allocation = self.handles.pop(handle)
        allocation.has_handle = False
        self._free_unused(allocation)

    def _free_unused(self, allocation: Allocation) -> None:
        if not allocation.has_handle and not allocation.num_mappings:
            self.used_bytes -= len(allocation.data)

    @_call()
    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> None:
        assert handle in self.handles, f"handle {handle} is not live: undefined behaviour"
        allocation = self.handles[handle]
        self._check_aligned(address, size, offset)
        _require(size > 0 and flags == 0 and offset + size <= len(allocation.data))
        inside = any(a <= address and address + size <= a + n for a, n in self.reservations.items())
        _require(inside)
        for m in self.mappings.values():
            _require(address + size <= m.address or m.address + m.size <= address)
        self.mappings[address] = Mapping(address, size, allocation, offset)
        allocation.num_mappings += 1

    @_call()
    def cuMemSetAccess(
        self, address: int, size: int, descs: list[SimpleNamespace], count: int
    ) -> None:
        _require(len(descs) == count == 1)
        self._check_location(descs[0].location)
        for mapping in self._mappings_in(address, size):
            allowed = CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            mapping.is_accessible = descs[0].flags == allowed

    @_call()
    def cuMemUnmap(self, address: int, size: int) -> None:
        for mapping in self._mappings_in(address, size):
            del self.mappings[mapping.address]
            mapping.allocation.num_mappings -= 1
            self._free_unused(mapping.allocation)

    @_call()
    def cuMemsetD8(self, address: int, value: int, size: int) -> None:
        self.launch(address, bytes([value]) * size)

    @_call()
    def cuMemcpyDtoH(self, host: int, address: int, size: int) -> None:
        self._run_queued()
        try:
            ctypes.memmove(host, self.read(address, size), size)
        except IllegalAddress:
            raise Refused(CUresult.CUDA_ERROR_INVALID_VALUE) from None

    @_call()
    def cuMemcpyDtoD(self, target: int, source: int, size: int) -> None:
        """Queued, as on a device: it happens when somebody synchronizes."""
        self._queued.append(lambda: self.write(target, self.read(source, size)))
