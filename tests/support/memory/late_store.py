"""A store of pages whose transfers end, and fail, when a test says so."""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from memory.prefix.store_stats import StoreStats


def content(key: bytes, size: int) -> bytes:
    """Returns a key's page content; every key has its own bytes."""
    block = hashlib.blake2b(key).digest()
    return (block * (size // len(block) + 1))[:size]


class LateStore:
    """Pages in a dictionary. mode: "at once", "held" (until `release`), "refused" (nothing is
    done) or "failing" (the transfer is made, reads garbage or writes nothing, and returns
    False)."""

    def __init__(self, page_bytes: int) -> None:
        self.mode = "at once"
        self.pages: dict[bytes, bytes] = {}
        self.num_loads = 0
        self.num_dropped = 0
        self.num_closed = 0
        self._page_bytes = page_bytes
        self._lock = threading.Lock()
        self._held: list[Callable[[], None]] = []

    @property
    def num_held(self) -> int:
        return len(self._held)

    def release(self, count: int = 1 << 30) -> None:
        """Ends the first `count` held transfers."""
        with self._lock:
            due, self._held = self._held[:count], self._held[count:]
        for transfer in due:
            transfer()

    def use(self, keys: Sequence[bytes]) -> int:
        return 1 << 30

    def store_many(self, pages: Sequence[tuple[bytes, int]]) -> list[Future[bool]]:
        return [self._begin(self._store, key, address) for key, address in pages]

    def load_many(self, pages: Sequence[tuple[bytes, int]]) -> list[Future[bool]]:
        self.num_loads += len(pages)
        return [self._begin(self._load, key, address) for key, address in pages]

    def _begin(
        self, transfer: Callable[[bytes, int, bool], bool], key: bytes, address: int
    ) -> Future[bool]:
        future: Future[bool] = Future()
        mode = self.mode

        def end() -> None:
            future.set_result(transfer(key, address, mode == "failing"))

        if mode == "refused":
            future.set_result(False)
        elif mode == "held":
            with self._lock:
                self._held.append(end)
        else:
            end()
        return future

    def _store(self, key: bytes, address: int, is_failing: bool) -> bool:
        page = ctypes.string_at(address, self._page_bytes)
        assert page == content(key, self._page_bytes), "the slot was used again"
        if not is_failing:
            self.pages[key] = page
        return not is_failing

    def _load(self, key: bytes, address: int, is_failing: bool) -> bool:
        page = self.pages.get(key)
        if page is None or is_failing:
            ctypes.memset(address, 0xEE, self._page_bytes)
            self.num_dropped += self.pages.pop(key, None) is not None
            return False
        ctypes.memmove(address, page, self._page_bytes)
        return True

    def contains(self, key: bytes) -> bool:
        return key in self.pages

    def discard(self, key: bytes) -> bool:
        return self.pages.pop(key, None) is not None

    @property
    def room(self) -> int:
        return 1000

    def stats(self) -> StoreStats:
        return StoreStats(entries=len(self.pages))

    def close(self, timeout_s: float) -> bool:
        self.num_closed += 1
        return not self._held
