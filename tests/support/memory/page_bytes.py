"""A store of the bytes of real pages whose transfers are late and fail when a test says so."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from memory.prefix.store_stats import StoreStats


@dataclass
class _Transfer:
    key: bytes
    address: int
    works: bool
    before: bytes | None
    """The page as it was when it was given to be stored; None: it is loaded."""
    is_dropped: bool = False
    future: Future[bool] = field(default_factory=Future)


class PageBytesStore:
    """Keeps so many pages, the newest. mode: "at once", "held" (until `release`) or "failing" (a
    load leaves garbage). A page must not change while it is written."""

    def __init__(self, page_bytes: int, num_pages: int) -> None:
        self.mode = "at once"
        self.pages: dict[bytes, bytes] = {}
        self.room = 1000
        self._page_bytes, self._num_pages = page_bytes, num_pages
        self._held: list[_Transfer] = []

    def store_many(self, pages: Sequence[tuple[bytes, int]]) -> list[Future[bool]]:
        return [self._begin(key, address, is_store=True) for key, address in pages]

    def load_many(self, pages: Sequence[tuple[bytes, int]]) -> list[Future[bool]]:
        return [self._begin(key, address, is_store=False) for key, address in pages]

    def _begin(self, key: bytes, address: int, *, is_store: bool) -> Future[bool]:
        before = ctypes.string_at(address, self._page_bytes) if is_store else None
        transfer = _Transfer(key, address, self.mode != "failing", before)
        if self.mode == "held":
            self._held.append(transfer)
        else:
            self._end(transfer)
        return transfer.future

    def _end(self, transfer: _Transfer) -> None:
        if transfer.before is None:
            page = self.pages.get(transfer.key) if transfer.works else None
            ctypes.memmove(transfer.address, page or b"\xee" * self._page_bytes, self._page_bytes)
            transfer.future.set_result(page is not None)
            return
        if not transfer.is_dropped:
            page = ctypes.string_at(transfer.address, self._page_bytes)
            assert page == transfer.before, "a page changed while it was written"
            if transfer.works:
                self.pages[transfer.key] = page
            while len(self.pages) > self._num_pages:
                del self.pages[next(iter(self.pages))]
        transfer.future.set_result(transfer.works and not transfer.is_dropped)

    def release(self, count: int = 1 << 30) -> None:
        """Ends the first `count` held transfers."""
        due, self._held = self._held[:count], self._held[count:]
        for transfer in due:
            self._end(transfer)

    def use(self, keys: Sequence[bytes]) -> int:
        return self.room

    def contains(self, key: bytes) -> bool:
        return key in self.pages

    def discard(self, key: bytes) -> bool:
        for transfer in self._held:
            transfer.is_dropped |= transfer.key == key and transfer.before is not None
        return self.pages.pop(key, None) is not None

    def stats(self) -> StoreStats:
        return StoreStats(entries=len(self.pages))

    def close(self, timeout_s: float) -> bool:
        return not self._held
