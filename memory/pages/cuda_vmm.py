"""Virtual ranges and physical pages on a CUDA device: `VirtualMemory` on the driver's calls.

A physical page is one allocation handle of cuMemCreate; mapping one is cuMemMap, and a run of
pages gets its access rights in one cuMemSetAccess. Like `LinuxMemory` it decides nothing.
Behind the reservation's end every page has a place of its own, for what is done to it wherever it
is mapped (`page_address`). Nothing here needs torch, except `torch_view` when it is called.

+--------------------------------------------------------------------------------------+
| invariants: a page has at most one handle, and one while it is mapped anywhere;        |
| `_shown` is what the driver has mapped, one cuMemMap for each entry.                   |
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


_NEIGHBOURS = 32  # on either side that `page_address` shows along with a page


class CudaMemory:
    """Pages of device memory in a reservation of device addresses.

    `map`, `unmap`, `release` and `close` are for one thread at a time; `prepare` for any.
    A thread's current CUDA context becomes the device's primary one, which torch uses too.
    """

    # A thread of its own could replace what a kernel looks at (kvcached issue 465 saw faults). The
    # computing thread maps new places while a step runs, as vAttention does, and waits (`settle`)
    # where something is there already.
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
        """synchronize: waits for every kernel that may touch the reservation (cuCtxSynchronize).
        settle(first, end): only for those that may touch these bytes of it; by default for all.
        compute_stream: where the kernels run; 0 is the legacy stream, torch's default.

        for_rdma: network cards may read and write the pages. CudaUnavailableError if the device
        cannot be used, ValueError for a page size it does not have.
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
        self._shown: dict[int, int] = {}  # page number by place in the reservation
        self._unusable: set[int] = set()  # in _shown, but a failure left them without access
        self._uses = [0] * num_pages  # how often each page is in _shown
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
        """The page's handle. The lock is not held meanwhile: `map` never waits for other pages."""
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
                place = self._place(slot + i)
                self._device.call("cuMemMap", place, self.page_bytes, 0, handle, 0)
                self._shown[slot + i] = page
                self._uses[page] += 1
                done.append(slot + i)
            self._device.allow(self._place(slot), num_pages * self.page_bytes)
        except BaseException:
            # If this fails too the pages stay in _shown, and the next `map` there tries again.
            with contextlib.suppress(CudaError):
                self._hide(done)
            self._unusable.update(slot for slot in done if slot in self._shown)
            raise

    def unmap(self, offset: int, num_pages: int) -> None:
        slot = self._slot(offset, num_pages)
        self._device.enter()
        self._clear(slot, num_pages)

    def page_address(self, page: int) -> int:
        """Where a page can be read and written, whatever range it is in, until its release.

        Mapped when it is first asked for, which is not beside kernels as `prepare` is, and with
        present neighbours: one cuMemSetAccess for all. CudaError if it cannot be.
        """
        assert self._address, "reserve first"
        place = self._num_slots + page
        if place not in self._shown or place in self._unusable:
            self._device.enter()
            self._create(page)
            first, end = self._hidden_around(page)
            self._map(self._num_slots + first, first, end - first)
        return self._place(place)

    def keep_pages(self) -> None:
        """From now on pages stay where page_address says, also when released or closed: a copy
        may still be under way, and nobody can wait for it."""
        self._is_kept = True

    def _hidden_around(self, page: int) -> tuple[int, int]:
        """First and end of a run of present pages around this one without a place of their own."""

        def is_hidden(page: int) -> bool:
            return page in self._handles and self._num_slots + page not in self._shown

        first, end = page, page + 1
        with self._changed:
            while page - first < _NEIGHBOURS and is_hidden(first - 1):
                first -= 1
            while end - page <= _NEIGHBOURS and is_hidden(end):
                end += 1
        return first, end

    def copy_page(self, source: int, target: int) -> None:
        places = (self.page_address(target), self.page_address(source))
        self._device.enter()
        # After the kernel that wrote the source and before the next one, so aliases are coherent.
        call = self._device.call
        call("cuMemcpyDtoDAsync", *places, self.page_bytes, self._compute_stream)

    def is_mapped(self, offset: int) -> bool:
        return offset // self.page_bytes in self._shown

    def _slot(self, offset: int, num_pages: int) -> int:
        slot, rest = divmod(offset, self.page_bytes)
        assert not rest and 0 <= slot <= self._num_slots - num_pages, f"{offset=} {num_pages=}"
        return slot

    def _place(self, slot: int) -> int:
        return self._address + slot * self.page_bytes

    def _clear(self, slot: int, num_pages: int) -> None:
        """Unmap what is there, holes or not, once no queued kernel can touch it."""
        self._clear_all([s for s in range(slot, slot + num_pages) if s in self._shown])

    def _clear_all(self, slots: list[int]) -> None:
        """slots: ascending."""
        if not slots:
            return
        if slots[-1] < self._num_slots:
            self._settle(slots[0] * self.page_bytes, (slots[-1] + 1) * self.page_bytes)
        else:  # pages' own places, where copies are made
            self._synchronize()
        self._hide(slots)

    def _hide(self, slots: list[int]) -> None:
        """slots: mapped ones, ascending. One call per run: it takes adjacent mappings, no holes."""
        start = 0
        for end in range(1, len(slots) + 1):
            if end < len(slots) and slots[end] == slots[end - 1] + 1:
                continue
            size = (end - start) * self.page_bytes
            self._device.call("cuMemUnmap", self._place(slots[start]), size)
            for slot in slots[start:end]:
                self._uses[self._shown.pop(slot)] -= 1
                self._unusable.discard(slot)
            start = end

    def release(self, first_page: int, num_pages: int) -> None:
        """Their content is lost, and what the pages hold when they are mapped again is undefined.

        CudaError (EBUSY) after the others if some are in a range: those stay as they are.
        """
        if self._is_kept:
            return
        self._device.enter()
        own = {page: self._num_slots + page for page in range(first_page, first_page + num_pages)}
        busy = [page for page, place in own.items() if self._uses[page] > (place in self._shown)]
        for page in busy:
            del own[page]
        self._clear_all([place for place in own.values() if place in self._shown])
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
        places = sorted(self._shown)
        with contextlib.ExitStack() as last_to_first:  # all of them, whichever fails
            if self._is_kept:
                places = [place for place in places if place < self._num_slots]
            else:
                last_to_first.callback(self._device.close)
                last_to_first.callback(self._free_addresses)
            last_to_first.callback(lambda: self._release(list(self._handles)))
            last_to_first.callback(lambda: self._hide(places))
            last_to_first.callback(self._synchronize)
            self._device.enter()

    def _free_addresses(self) -> None:
        if self._address:
            size = (self._num_slots + len(self._uses)) * self.page_bytes
            self._device.call("cuMemAddressFree", self._address, size)
            self._address = self._num_slots = 0

    def view(self) -> DeviceBytes:
        """The reservation for libraries that read __cuda_array_interface__."""
        return DeviceBytes(self, self._address, self.size_bytes)


class DeviceBytes:
    """Device addresses as an array of bytes. Keeps the memory object, not its mappings."""

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
    """uint8 [size_bytes]: the whole reservation without a copy; other dtypes by `.view`.

    Only what is mapped may be touched; so never print, clone or fill the whole tensor.
    """
    import torch

    # torch asks the driver whose memory the first address is: something must be mapped there.
    is_hole = not memory.is_mapped(0)
    if is_hole:
        memory.map(0, 0, 1)
    try:
        return torch.as_tensor(memory.view(), device=f"cuda:{memory.device}")
    finally:
        if is_hole:
            memory.unmap(0, 1)
