"""A store of pages in front of `tests.support.engine.fakes.FakeMemory` that follows its plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future

from memory.prefix.store_stats import StoreStats
from tests.support.engine.fakes import FakeMemory

# "store", "load" or "contains" and a key -> None (it works, at once), "fail", "raise" or "hold"
# (until `release`).
Plan = Callable[[str, bytes], str | None]


class Clock:
    """A clock that a test sets, in seconds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FakeStore:
    """Addresses are page numbers. Memory is read and written when a transfer ends, as a disk may
    do, so that a page that changes or is taken away meanwhile shows."""

    def __init__(self, memory: FakeMemory, plan: Plan = lambda kind, key: None) -> None:
        self.plan = plan
        self.memory = memory
        self.pages: dict[bytes, dict[int, int]] = {}
        self.room = 1024
        self.largest_batch = 0
        self.close_s: float | None = None  # the time limit that `close` got
        self._held: list[tuple[str, bytes, int, Future[bool], object]] = []

    def store_many(self, pages: Sequence[tuple[bytes, int]]) -> list[Future[bool]]:
        return self._start("store", pages)

    def load_many(self, pages: Sequence[tuple[bytes, int]]) -> list[Future[bool]]:
        return self._start("load", pages)

    def _start(self, kind: str, pages: Sequence[tuple[bytes, int]]) -> list[Future[bool]]:
        assert len(pages) <= self.room, "the rest would be refused"
        self.largest_batch = max(self.largest_batch, len(pages))
        fates = [self.plan(kind, key) for key, _ in pages]
        if "raise" in fates:
            raise RuntimeError("the store is broken")
        futures = []
        for (key, page), fate in zip(pages, fates, strict=True):
            future: Future[bool] = Future()
            before = dict(self.memory.content.get(page, {}))
            if kind == "load":
                self.memory.content[page] = {-1: -1}  # garbage until the load ends
            transfer = (kind, key, page, future, before)
            if fate == "hold":
                self._held.append(transfer)
            else:
                self._end(*transfer, works=fate != "fail")
            futures.append(future)
        return futures

    def _end(self, kind, key, page, future, before, works=True):
        content = self.memory.content.get(page, {})
        if kind == "load":
            works = works and key in self.pages
            self.memory.content[page] = dict(self.pages[key]) if works else {-2: -2}
        elif works and key is not None:
            assert content == before, "a page changed while it was written"
            self.pages[key] = before
        future.set_result(works)

    def release(self, count: int = 1 << 30) -> None:
        ended, self._held = self._held[:count], self._held[count:]
        for transfer in ended:
            self._end(*transfer)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def use(self, keys: Sequence[bytes]) -> int:
        return self.room

    def contains(self, key: bytes) -> bool:
        if self.plan("contains", key) == "raise":
            raise RuntimeError("the store is broken")
        return key in self.pages

    def discard(self, key: bytes) -> bool:
        self._held = [
            (kind, None if kind == "store" and k == key else k, *rest)
            for kind, k, *rest in self._held
        ]
        return self.pages.pop(key, None) is not None

    def stats(self) -> StoreStats:
        return StoreStats(entries=len(self.pages))

    def close(self, timeout_s: float) -> bool:
        self.close_s = timeout_s
        if self.plan("close", b"") == "raise":
            raise RuntimeError("the store is broken")
        return not self._held
