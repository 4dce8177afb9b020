"""Overlapped steps with a page store give every sequence the tokens of a run without overlap.
Copies to and from the store happen at any time after the steps that were launched before them."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from memory.prefix.store_stats import StoreStats
from serve.config import QUEUE_POLICIES
from serve.request import FinishReason
from tests.serve.engine.test_overlap_walk import Walk
from tests.support.cuda.late_device import Job
from tests.support.engine.fakes import FakeMemory

LOST = {0: (-9, -9)}  # the content of a page after a failed load


class LateStore:
    """A PageStore whose copies wait for the last step that was launched before their request."""

    room = 8

    def __init__(self, walk: StoreWalk) -> None:
        self._walk = walk
        self._pages: dict[bytes, dict[int, object]] = {}
        self._requested: list[tuple[bool, bytes, int, Future[bool], Job | None]] = []
        self.num_stored = self.num_loaded = 0

    def _request(self, is_load: bool, pages) -> list[Future[bool]]:
        futures: list[Future[bool]] = []
        for key, page in pages:
            futures.append(Future())
            last = self._walk.device._last
            self._requested.append((is_load, key, page, futures[-1], last))
        return futures

    def store_many(self, pages) -> list[Future[bool]]:
        return self._request(False, pages)

    def load_many(self, pages) -> list[Future[bool]]:
        return self._request(True, pages)

    def use(self, keys) -> int:
        return self.room

    def contains(self, key: bytes) -> bool:
        return key in self._pages

    def discard(self, key: bytes) -> bool:
        return self._pages.pop(key, None) is not None

    def stats(self) -> StoreStats:
        return StoreStats()

    def close(self, timeout_s: float) -> bool:
        self.run_copies(runs_all=True)
        return True

    def run_copies(self, *, runs_all: bool = False) -> None:
        """Runs some of the requested copies."""
        for item in list(self._requested):
            last = item[-1]
            if last is not None and not last.done.is_set():
                if not runs_all:
                    continue
                self._walk.device.synchronize()
            if runs_all or self._walk.rng.random() < 0.3:
                self._requested.remove(item)
                self._copy(*item[:4])

    def _copy(self, is_load: bool, key: bytes, page: int, future: Future[bool]) -> None:
        content = self._walk.memory.content
        if not is_load:
            self.num_stored += 1
            self._pages[key] = dict(content.get(page, {}))
            future.set_result(True)
            return
        stored = self._pages.get(key)
        self.num_loaded += stored is not None
        content[page] = dict(LOST if stored is None else stored)
        future.set_result(stored is not None)


class StoreWalk(Walk):
    """Runs random work with the store's copies between the steps."""

    def __init__(self, seed: int, queue_policy: str, fails: str | None) -> None:
        super().__init__(seed, queue_policy, fails)
        self.store = LateStore(self)
        if self.scheduler.prefixes.is_on:
            self.kv.prefixes.use_store(
                self.store, lambda page: page, lambda: None, clock=lambda: self.device.now_s
            )
        self.memory.copy_page = self._copy_in_order  # CudaMemory copies in the kernels' stream

    def _copy_in_order(self, source: int, target: int) -> None:
        def work() -> list[int]:
            FakeMemory.copy_page(self.memory, source, target)
            return []

        job = Job(-1, work)
        self.device._queue.append(job)
        self.device._last = job

    def step(self) -> None:
        self.store.run_copies()
        super().step()
        self.store.run_copies()

    def end(self) -> None:
        self.device.synchronize()
        while self.kv.prefixes.is_transferring:
            self.store.run_copies(runs_all=True)
            self.kv.prefixes.poll()
        self.check_end()


@pytest.mark.parametrize("fails", [None, "launch", "wait"])
def test_stored_and_loaded_pages_are_correct(fails):
    num_stored = num_loaded = 0
    for seed in range(6):
        walk = StoreWalk(seed, QUEUE_POLICIES[seed % len(QUEUE_POLICIES)], fails).walk(30)
        walk.end()
        failed = {s for s, reason in walk.ended.items() if reason is FinishReason.ERROR}
        assert failed <= set(walk.bad)
        num_stored += walk.store.num_stored
        num_loaded += walk.store.num_loaded
    assert num_stored > 50 and num_loaded > 5
