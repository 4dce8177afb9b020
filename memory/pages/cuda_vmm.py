"""Virtual ranges and physical pages on a CUDA device: `VirtualMemory` on the driver's calls.

A physical page is one allocation handle of cuMemCreate. cuMemMap maps one page, and a run of pages
gets its access rights in one cuMemSetAccess. Like `LinuxMemory` it decides nothing. Behind the end
of the reservation every page has a slot of its own, to access it whatever range maps it
(`page_address`). Only `torch_view` needs torch.

+--------------------------------------------------------------------------------------+
| Invariants: a page has at most one handle, and has one while it is mapped anywhere.  |
| `_mapped` is what the driver has mapped, one cuMemMap for each entry.                |
+--------------------------------------------------------------------------------------+
"""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from memory.pages.cuda_device import CudaDevice, CudaError

if TYPE_CHECKING:
    from torch import Tensor


_NEIGHBOURS = 32  # on either side that `page_address` maps along with a page


class CudaMemory:
    """Pages of device memory in a reservation of device addresses.

    One thread at a time calls `map`, `unmap`, `release` and `close`; any thread calls `prepare`.
    The calling thread's current CUDA context becomes the device's primary one, which torch uses
    too.
    """

    # Another thread could replace a page that a kernel reads (kvcached issue 465 saw faults). The
    # computing thread maps unmapped slots while a step runs, as vAttention does, and waits
    # (`settle`) before it replaces a mapping.
    maps_during_kernels = False

    def __init__(
        self,
        page_bytes: int,
        num_pages: int,
        *,
        device: int = 0,
        driver: Any = None,
        synchronize: Callable[[], None] | None = None,
        settle: Callable[[int, int], None] | None = None,
        compute_stream: int = 0,
        for_rdma: bool = False,
    ) -> None:
        """synchronize: waits for all kernels that may access the reservation (cuCtxSynchronize).
        settle(first, end): waits for the kernels that may access these bytes; by default for all.
        compute_stream: the stream of the kernels; 0 is the legacy stream, torch's default.
        for_rdma: network cards may read and write the pages.

        Raises CudaUnavailableError if the device cannot be used, and ValueError if it does not
        support the page size.
        """
        self.page_bytes = page_bytes
        self.device = device
        self._device = CudaDevice(driver, device, for_rdma=for_rdma)
        if page_bytes <= 0 or page_bytes % self._device.granularity:
            self._device.close()
            raise ValueError(
                f"kv_page_bytes: {page_bytes} is not a multiple of {self._device.granularity} "
                f"(2 MiB on most), the unit in which CUDA device {device} maps memory"
            )
        self._synchronize = synchronize or self._device.synchronize
        self._settle = settle or (lambda first, end: self._synchronize())
        self._compute_stream = compute_stream
        self._address = 0
        self._num_slots = 0
        self._mapped: dict[int, int] = {}  # page by slot
        self._unusable: set[int] = set()  # slots in _mapped that a failure left without access
        self._uses = [0] * num_pages  # how often each page is in _mapped
        self._changed = threading.Condition()  # guards the three below
        self._handles: dict[int, Any] = {}
        self._creating: set[int] = set()
        self._is_closed = self._is_kept = False

    @property
    def size_bytes(self) -> int:
        return self._num_slots * self.page_bytes

    def reserve(self, size_bytes: int) -> int:
        assert not self._address, "one reservation per object"
        self._device.enter()
        num_slots = -(-size_bytes // self.page_bytes)
        size = (num_slots + len(self._uses)) * self.page_bytes
        self._address = int(self._device.call("cuMemAddressReserve", size, 0, 0, 0))
        self._num_slots = num_slots
        return self._address

    def prepare(self, first_page: int, num_pages: int) -> None:
        self._device.enter()
        for page in range(first_page, first_page + num_pages):
            self._create(page)

    def _create(self, page: int) -> Any:
        """Returns the page's handle, creating it if needed. The lock is not held meanwhile, so that
        `map` never waits for other pages."""
        assert 0 <= page < len(self._uses), f"{page=}"
        with self._changed:
            while page in self._creating:
                self._changed.wait()
            if self._is_closed:
                raise CudaError(errno.EBADF, "the device memory is closed")
            if page in self._handles:
                return self._handles[page]
            self._creating.add(page)
        handle = None
        try:
            handle = self._device.create(self.page_bytes)
        finally:
            with self._changed:
                self._creating.discard(page)
                if handle is not None:
                    self._handles[page] = handle
                self._changed.notify_all()
        return handle

    def map(self, offset: int, first_page: int, num_pages: int) -> None:
        self._map(self._slot(offset, num_pages), first_page, num_pages)

    def _map(self, slot: int, first_page: int, num_pages: int) -> None:
        self._device.enter()
        pages = range(first_page, first_page + num_pages)
        handles = [self._create(page) for page in pages]
        self._clear(slot, num_pages)  # the driver, unlike mmap, replaces nothing
        done: list[int] = []
        try:
            for i, (page, handle) in enumerate(zip(pages, handles, strict=True)):
                address = self._slot_address(slot + i)
                self._device.call("cuMemMap", address, self.page_bytes, 0, handle, 0)
                self._mapped[slot + i] = page
                self._uses[page] += 1
                done.append(slot + i)
            self._device.allow(self._slot_address(slot), num_pages * self.page_bytes)
        except BaseException:
            # If this fails too, the pages stay in _mapped, and the next `map` there tries again.
            with contextlib.suppress(CudaError):
                self._unmap_slots(done)
            self._unusable.update(slot for slot in done if slot in self._mapped)
            raise

    def unmap(self, offset: int, num_pages: int) -> None:
        slot = self._slot(offset, num_pages)
        self._device.enter()
        self._clear(slot, num_pages)

    def page_address(self, page: int) -> int:
        """Returns an address at which the page can be accessed until its release, whatever range
        maps it. Raises CudaError.

        The first call maps it, together with neighbours that have memory, in one cuMemSetAccess.
        Unlike `prepare` it must not run beside kernels.
        """
        assert self._address, "reserve first"
        slot = self._num_slots + page
        if slot not in self._mapped or slot in self._unusable:
            self._device.enter()
            self._create(page)
            first, end = self._unmapped_around(page)
            self._map(self._num_slots + first, first, end - first)
        return self._slot_address(slot)

    def keep_pages(self) -> None:
        """Keeps the pages mapped at their page_address even after `release` and `close`, because a
        copy that cannot be waited for may still be in progress."""
        self._is_kept = True

    def _unmapped_around(self, page: int) -> tuple[int, int]:
        """Returns (first, end) of the run of pages around this one that have memory but are not
        mapped at their own slots."""

        def needs_mapping(page: int) -> bool:
            return page in self._handles and self._num_slots + page not in self._mapped

        first, end = page, page + 1
        with self._changed:
            while page - first < _NEIGHBOURS and needs_mapping(first - 1):
                first -= 1
            while end - page <= _NEIGHBOURS and needs_mapping(end):
                end += 1
        return first, end

    def copy_page(self, source: int, target: int) -> None:
        addresses = (self.page_address(target), self.page_address(source))
        self._device.enter()
        # The stream orders the copy after the kernel that wrote the source and before the next one.
        call = self._device.call
        call("cuMemcpyDtoDAsync", *addresses, self.page_bytes, self._compute_stream)

    def is_mapped(self, offset: int) -> bool:
        return offset // self.page_bytes in self._mapped

    def _slot(self, offset: int, num_pages: int) -> int:
        slot, rest = divmod(offset, self.page_bytes)
        assert not rest and 0 <= slot <= self._num_slots - num_pages, f"{offset=} {num_pages=}"
        return slot

    def _slot_address(self, slot: int) -> int:
        return self._address + slot * self.page_bytes

    def _clear(self, slot: int, num_pages: int) -> None:
        """Unmaps the slots that are mapped, once no queued kernel can access them."""
        self._clear_all([s for s in range(slot, slot + num_pages) if s in self._mapped])

    def _clear_all(self, slots: list[int]) -> None:
        """Unmaps mapped slots, given in ascending order, once no queued kernel can access them."""
        if not slots:
            return
        if slots[-1] < self._num_slots:
            self._settle(slots[0] * self.page_bytes, (slots[-1] + 1) * self.page_bytes)
        else:  # the pages' own slots, which copies use
            self._synchronize()
        self._unmap_slots(slots)

    def _unmap_slots(self, slots: list[int]) -> None:
        """Unmaps mapped slots, given in ascending order, with one driver call per run."""
        start = 0
        for end in range(1, len(slots) + 1):
            if end < len(slots) and slots[end] == slots[end - 1] + 1:
                continue
            size = (end - start) * self.page_bytes
            self._device.call("cuMemUnmap", self._slot_address(slots[start]), size)
            for slot in slots[start:end]:
                self._uses[self._mapped.pop(slot)] -= 1
                self._unusable.discard(slot)
            start = end

    def release(self, first_page: int, num_pages: int) -> None:
        """Frees the pages' memory. What they hold when they are mapped again is undefined.

        Pages that a range maps stay as they are; after the others were released, CudaError (EBUSY)
        is raised for them.
        """
        if self._is_kept:
            return
        self._device.enter()
        own = {page: self._num_slots + page for page in range(first_page, first_page + num_pages)}
        busy = [page for page, slot in own.items() if self._uses[page] > (slot in self._mapped)]
        for page in busy:
            del own[page]
        self._clear_all([slot for slot in own.values() if slot in self._mapped])
        self._release(list(own))
        if busy:
            raise CudaError(errno.EBUSY, f"pages {busy} are mapped and were not released")

    def _release(self, pages: list[int]) -> None:
        for page in pages:
            handle = self._handles.get(page)
            if handle is not None:
                self._device.call("cuMemRelease", handle)
                with self._changed:
                    del self._handles[page]

    def close(self) -> None:
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            while self._creating:
                self._changed.wait()
        slots = sorted(self._mapped)
        with contextlib.ExitStack() as last_to_first:  # all steps run even if one fails
            if self._is_kept:
                slots = [slot for slot in slots if slot < self._num_slots]
            else:
                last_to_first.callback(self._device.close)
                last_to_first.callback(self._free_addresses)
            last_to_first.callback(lambda: self._release(list(self._handles)))
            last_to_first.callback(lambda: self._unmap_slots(slots))
            last_to_first.callback(self._synchronize)
            self._device.enter()

    def _free_addresses(self) -> None:
        if self._address:
            size = (self._num_slots + len(self._uses)) * self.page_bytes
            self._device.call("cuMemAddressFree", self._address, size)
            self._address = self._num_slots = 0

    def view(self) -> DeviceBytes:
        """Returns the reservation for libraries that read __cuda_array_interface__."""
        return DeviceBytes(self, self._address, self.size_bytes)


class DeviceBytes:
    """Device addresses as an array of bytes. It keeps the memory object alive, not its mappings."""

    def __init__(self, memory: CudaMemory, address: int, size_bytes: int) -> None:
        self.memory = memory
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


def torch_view(memory: CudaMemory) -> Tensor:
    """Returns the whole reservation as uint8 [size_bytes], without a copy.

    Only mapped bytes may be accessed, so the whole tensor must not be printed, cloned or filled.
    """
    import torch

    # torch asks the driver about the first address, so a page must be mapped there.
    is_unmapped = not memory.is_mapped(0)
    if is_unmapped:
        memory.map(0, 0, 1)
    try:
        return torch.as_tensor(memory.view(), device=f"cuda:{memory.device}")
    finally:
        if is_unmapped:
            memory.unmap(0, 1)
