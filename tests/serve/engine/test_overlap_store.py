"""Overlapped steps with a store of pages behind them: copies to and from it happen at any time
after the steps launched before them, pages are copied in the order of the device's work, and
every sequence gets the tokens of a run without overlap."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from memory.prefix.store_stats import StoreStats
from serve.config import QUEUE_POLICIES
from serve.request import FinishReason
from tests.serve.engine.test_overlap_walk import Walk
from tests.support.cuda.late_device import Job
from tests.support.engine.fakes import FakeMemory

LOST = {0: (-9, -9)}  # what a page holds after a load that found nothing


class LateStore:
    """A PageStore whose copies wait for the step that was launched last before their request."""

    room = 8

    def __init__(self, walk: StoreWalk) -> None:
        self._walk = walk
        self._pages: dict[bytes, dict[int, object]] = {}
        self._asked: list[tuple[bool, bytes, int, Future[bool], Job | None]] = []
        self.num_stored = self.num_loaded = 0

    def _ask(self, is_load: bool, pages) -> list[Future[bool]]:
        futures: list[Future[bool]] = []
        for key, page in pages:
            futures.append(Future())
            last = self._walk.device._last
            self._asked.append((is_load, key, page, futures[-1], last))
        return futures

    def store_many(self, pages) -> list[Future[bool]]:
        return self._ask(False, pages)

    def load_many(self, pages) -> list[Future[bool]]:
        return self._ask(True, pages)

    def use(self, keys) -> int:
        return self.room

    def contains(self, key: bytes) -> bool:
        return key in self._pages

    def discard(self, key: bytes) -> bool:
        return self._pages.pop(key, None) is not None

    def stats(self) -> StoreStats:
        return StoreStats()

    def close(self, timeout_s: float) -> bool:
        self.go_on(to_the_end=True)
        return True

    def go_on(self, *, to_the_end: bool = False) -> None:
        """Runs some of the requested copies."""
        for item in list(self._asked):
            last = item[-1]
            if last is not None and not last.done.is_set():
                if not to_the_end:
                    continue
                self._walk.device.synchronize()
            if to_the_end or self._walk.rng.random() < 0.3:
                self._asked.remove(item)
                self._copy(*item[:4])

    def _copy(self, is_load: bool, key: bytes, page: int, future: Future[bool]) -> None:
        content = self._walk.memory.content
        if not is_load:
            self.num_stored += 1
            self._pages[key] = dict(content.get(page, {}))
            future.set_result(True)
            return
        found = self._pages.get(key)
        self.num_loaded += found is not None
        content[page] = dict(LOST if found is None else found)
        future.set_result(found is not None)


class StoreWalk(Walk):
    """Steps of random work, with the store's copies between them."""

    def __init__(self, seed: int, order: str, fails: str | None) -> None:
        super().__init__(seed, order, fails)
        self.store = LateStore(self)
        if self.scheduler.prefixes.is_on:
            self.kv.prefixes.use_store(
                self.store, lambda page: page, lambda: None, clock=lambda: self.device.now_s
            )
        self.memory.copy_page = self._copy_in_order  # as CudaMemory does, in the kernels' stream

    def _copy_in_order(self, source: int, target: int) -> None:
        def work() -> list[int]:
            FakeMemory.copy_page(self.memory, source, target)
            return []

        job = Job(-1, work)
        self.device._queue.append(job)
        self.device._last = job

    def step(self) -> None:
        self.store.go_on()
        super().step()
        self.store.go_on()

    def end(self) -> None:
        self.device.synchronize()
        while self.kv.prefixes.is_transferring:
            self.store.go_on(to_the_end=True)
            self.kv.prefixes.poll()
        self.check_end()


@pytest.mark.parametrize("fails", [None, "launch", "wait"])
def test_pages_that_come_and_go_are_right(fails):
    num_stored = num_loaded = 0
    for seed in range(6):
        walk = StoreWalk(seed, QUEUE_POLICIES[seed % len(QUEUE_POLICIES)], fails).walk(30)
        walk.end()
        failed = {s for s, reason in walk.ended.items() if reason is FinishReason.ERROR}
        assert failed <= set(walk.bad)
        num_stored += walk.store.num_stored
        num_loaded += walk.store.num_loaded
    assert num_stored > 50 and num_loaded > 5
