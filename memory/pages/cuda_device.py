"""One CUDA device's primary context, and driver calls that raise exceptions.

The driver is a module whose calls return (error, value...), like `cuda.bindings.driver`; tests pass
another one.
"""

from __future__ import annotations

import errno
import importlib
from typing import Any


class CudaUnavailableError(RuntimeError):
    """The package, the driver or the device is missing, or the device lacks a capability."""


class CudaError(OSError):
    """A driver call failed. errno is ENOMEM if memory ran out, EBADF after close, else EIO."""


class CudaDevice:
    """A CUDA device's primary context, and the driver calls on it.

    Any thread may use it; each thread calls `enter` first.
    """

    def __init__(self, driver: Any, index: int, *, for_rdma: bool = False) -> None:
        """driver: None is `cuda.bindings.driver`. Raises CudaUnavailableError."""
        self._driver = driver = _import_driver() if driver is None else driver
        self._success = driver.CUresult.CUDA_SUCCESS
        self._context: Any = None
        try:
            self._open(index, for_rdma)
        except (CudaError, RuntimeError) as error:  # the bindings' own error: no libcuda
            self.close()
            reason = error.strerror if isinstance(error, CudaError) else error
            raise CudaUnavailableError(f"CUDA device {index}: {reason}") from error

    def _open(self, index: int, for_rdma: bool) -> None:
        self.call("cuInit", 0)
        self._handle = self.call("cuDeviceGet", index)
        self._require("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED")
        if for_rdma:
            self._require("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED")
        self._context = self.call("cuDevicePrimaryCtxRetain", self._handle)
        self.enter()
        self._kind = self._allocation_kind(index, for_rdma)
        self._access = self._driver.CUmemAccessDesc()
        self._access.location = self._kind.location
        self._access.flags = self._driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        smallest = self._driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = int(self.call("cuMemGetAllocationGranularity", self._kind, smallest))

    def _require(self, what: str) -> None:
        attribute = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{what}")
        if not self.call("cuDeviceGetAttribute", attribute, self._handle):
            raise CudaUnavailableError(f"the device lacks {what}")

    def _allocation_kind(self, index: int, for_rdma: bool) -> Any:
        driver = self._driver
        kind = driver.CUmemAllocationProp()
        kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        kind.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        kind.location.id = index
        kind.requestedHandleTypes = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE
        kind.win32HandleMetaData = 0
        kind.allocFlags.gpuDirectRDMACapable = int(for_rdma)
        return kind

    def call(self, name: str, *arguments: Any) -> Any:
        """Calls the driver and returns the call's value, if it has one. Raises CudaError with the
        name of the call and the driver's error."""
        error, *values = getattr(self._driver, name)(*arguments)
        if error != self._success:
            raise self._failed(name, error)
        return values[0] if values else None

    def _failed(self, name: str, error: Any) -> CudaError:
        is_full = error == self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
        return CudaError(errno.ENOMEM if is_full else errno.EIO, f"{name}: {error.name}")

    def is_over(self, event: Any) -> bool:
        """Returns whether the work before the event has ended, without waiting. Raises
        CudaError."""
        (error,) = self._driver.cuEventQuery(event)
        if error not in (self._success, self._driver.CUresult.CUDA_ERROR_NOT_READY):
            raise self._failed("cuEventQuery", error)
        return bool(error == self._success)

    def enter(self) -> None:
        """Makes the context current on this thread. It is cheap if it is already."""
        if self._context is None:
            raise CudaError(errno.EBADF, "the device memory is closed")
        if int(self.call("cuCtxGetCurrent")) != int(self._context):
            self.call("cuCtxSetCurrent", self._context)

    def synchronize(self) -> None:
        self.call("cuCtxSynchronize")

    def create(self, size_bytes: int) -> Any:
        return self.call("cuMemCreate", size_bytes, self._kind, 0)

    def allow(self, address: int, size_bytes: int) -> None:
        self.call("cuMemSetAccess", address, size_bytes, [self._access], 1)

    def close(self) -> None:
        if self._context is not None:
            self._context = None
            self.call("cuDevicePrimaryCtxRelease", self._handle)


def _import_driver() -> Any:
    try:
        return importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise CudaUnavailableError(
            f"cuda-bindings cannot be imported ({error}): pip install 'mergestep[cuda]'"
        ) from error
