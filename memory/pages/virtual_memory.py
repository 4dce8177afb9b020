"""The protocol of virtual ranges and physical pages: reserve, map, unmap.

linux_vmm.py and cuda_vmm.py implement it. They neither count pages nor choose them.
"""

from __future__ import annotations

from typing import Protocol


class VirtualMemory(Protocol):
    """One reservation and a pool of physical pages. Sizes in bytes, page numbers in the pool."""

    page_bytes: int
    maps_during_kernels: bool
    """Whether `map` may run while kernels read and write other places of the reservation."""

    def reserve(self, size_bytes: int) -> int:
        """Reserves addresses and returns the first one. Nothing is mapped there. Once per
        object."""

    def prepare(self, first_page: int, num_pages: int) -> None:
        """Allocates the pages' physical memory, so that `map` need not. Pages that have memory keep
        their content. Optional. Any thread may call it until `close`. Raises OSError if there is no
        memory."""

    def map(self, offset: int, first_page: int, num_pages: int) -> None:
        """Maps consecutive pages at the byte `offset` of the reservation, readable and writable, in
        place of what was mapped there. Raises OSError."""

    def copy_page(self, source: int, target: int) -> None:
        """Copies a page's content to another one. Both have memory, and nothing else writes
        them."""

    def unmap(self, offset: int, num_pages: int) -> None:
        """Unmaps the addresses, which stay reserved."""

    def release(self, first_page: int, num_pages: int) -> None:
        """Returns the memory of unmapped pages to the system. Their content is lost."""

    def close(self) -> None:
        """Frees everything. Views of the reservation must not be used any more."""
