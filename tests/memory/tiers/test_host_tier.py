"""The host tier over host pages: in any order of operations, over a store that is late or fails."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, wait

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memory.tiers.host_arena import HostArena
from memory.tiers.host_tier import HostTier
from memory.tiers.page_copy import MemoryCopier
from tests.support.memory.host_pages import (
    PAGE,
    FailingCopier,
    Pages,
    fetch,
    fill,
    name,
    pages,
    results,
)
from tests.support.memory.late_store import LateStore, content
from tests.support.profile import examples

__all__ = ["pages"]


def test_pages_come_back_from_host_memory(pages):
    copier = FailingCopier()
    tier = HostTier(PAGE, 8 * PAGE, copier)
    assert results(fill(pages, tier, [1, 2, 3])) == [True] * 3
    pages[1] = bytes(PAGE)
    assert fetch(pages, tier, 1) == content(name(1), PAGE)
    assert fetch(pages, tier, 4) is None
    assert tier.contains(name(1)) and not tier.contains(name(4))
    stats = tier.host_stats()
    assert (stats.hits, stats.misses, stats.stores) == (1, 1, 3)
    assert (stats.bytes_in, stats.bytes_out) == (3 * PAGE, PAGE)
    assert (stats.entries, stats.bytes_used, stats.requests) == (3, 3 * PAGE, 0)
    assert not tier.flush(), "host memory alone is not safe"
    tier.close()
    tier.close()
    assert copier.is_closed
    assert results(fill(pages, tier, [5])) == [False]
    assert fetch(pages, tier, 1) is None
    assert tier.host_stats().refused == 2


def test_the_page_used_longest_ago_goes_first(pages):
    tier = HostTier(PAGE, 4 * PAGE, MemoryCopier())
    results(fill(pages, tier, [0, 1, 2, 3]))
    assert fetch(pages, tier, 0)
    for number in (4, 5):
        results(fill(pages, tier, [number]))
    assert [number for number in range(6) if tier.contains(name(number))] == [0, 3, 4, 5]
    assert tier.host_stats().lost == 2
    tier.close()


def test_more_than_host_memory_goes_below_and_comes_back(pages):
    below = LateStore(PAGE)
    tier = HostTier(PAGE, 4 * PAGE, MemoryCopier(), below)
    for number in range(24):
        assert results(fill(pages, tier, [number])) == [True]
        pages[number] = bytes(PAGE)
    for _ in range(2):
        for number in range(24):
            assert fetch(pages, tier, number) == content(name(number), PAGE)
    stats = tier.host_stats()
    assert (stats.misses, stats.lost) == (0, 0)
    assert stats.hits + stats.hits_below == 48
    assert stats.hits_below >= 40
    assert stats.pushed_down == len(below.pages) <= 24, "each is written once"
    assert stats.bytes_used <= 4 * PAGE
    assert tier.flush()
    assert len(below.pages) == 24
    tier.close()
    assert below.num_closed == 1


def test_stores_wait_for_a_slow_store_below(pages):
    """Nothing is lost: what must give way is below first, and later pages wait for that."""
    below = LateStore(PAGE)
    below.mode = "held"
    tier = HostTier(PAGE, 4 * PAGE, MemoryCopier(), below)
    futures = fill(pages, tier, list(range(12)))
    assert results(futures[:4]) == [True] * 4
    while below.num_held < 4:
        time.sleep(0.001)
    assert not any(future.done() for future in futures[4:])
    assert fetch(pages, tier, 2) == content(name(2), PAGE), "also while it is being written"
    while not all(future.done() for future in futures):
        below.release(1)
    assert results(futures) == [True] * 12
    below.mode = "at once"
    below.release()
    assert tier.flush()
    assert sorted(below.pages) == sorted(name(number) for number in range(12))
    tier.close()


@pytest.mark.parametrize("mode", ["refused", "failing"])
def test_a_store_below_that_takes_nothing(pages, mode):
    """The newest pages stay, the others are lost and counted; a flush tries again."""
    below = LateStore(PAGE)
    below.mode = mode
    tier = HostTier(PAGE, 4 * PAGE, MemoryCopier(), below)
    for number in range(12):
        assert results(fill(pages, tier, [number])) == [True]
    assert [number for number in range(12) if fetch(pages, tier, number)] == [8, 9, 10, 11]
    assert (tier.host_stats().lost, tier.host_stats().pushed_down) == (8, 0)
    assert not tier.flush()
    below.mode = "at once"
    assert tier.flush()
    assert sorted(below.pages) == sorted(name(number) for number in range(8, 12))
    tier.close()


def test_a_failed_read_below_is_a_miss_and_leaves_no_page(pages):
    below = LateStore(PAGE)
    tier = HostTier(PAGE, 2 * PAGE, MemoryCopier(), below)
    for number in range(6):
        results(fill(pages, tier, [number]))
    below.mode = "failing"
    assert fetch(pages, tier, 0) is None
    below.mode = "at once"
    assert fetch(pages, tier, 0) is None
    assert results(fill(pages, tier, [0])) == [True]
    assert fetch(pages, tier, 0) == content(name(0), PAGE)
    tier.close()


def test_one_read_below_serves_all_who_ask(pages):
    """A store of the same key waits for it too, and takes its own page where the read fails."""
    below = LateStore(PAGE)
    tier = HostTier(PAGE, 2 * PAGE, MemoryCopier(), below)
    for number in range(6):
        results(fill(pages, tier, [number]))
    for mode in ("held", "failing"):
        assert tier.flush()
        below.mode, below.num_loads = "held", 0
        loads = [tier.load_many([(name(0), pages.address(page))])[0] for page in (20, 21)]
        while not below.num_loads:
            time.sleep(0.001)
        again = fill(pages, tier, [0])
        loads += tier.load_many([(name(0), pages.address(22))])
        if mode == "failing":
            below.pages.pop(name(0))
        assert below.num_loads == 1
        below.mode = "at once"
        below.release()
        assert results(again) == [True]
        assert results(loads) == [mode == "held"] * 3
        for page in (20, 21, 22) if mode == "held" else ():
            assert pages[page] == content(name(0), PAGE)
        assert fetch(pages, tier, 0) == content(name(0), PAGE)
        for number in range(1, 6):
            results(fill(pages, tier, [number]))
    tier.close()


def test_failed_copies_are_misses(pages):
    copier = FailingCopier()
    tier = HostTier(PAGE, 8 * PAGE, copier)
    copier.fail_next = True
    assert results(fill(pages, tier, [1])) == [False]
    assert fetch(pages, tier, 1) is None
    assert results(fill(pages, tier, [1])) == [True]
    copier.fail_next = True
    assert fetch(pages, tier, 1) is None
    assert fetch(pages, tier, 1) == content(name(1), PAGE), "the host's page is as it was"
    copier.is_unordered = True
    assert results(fill(pages, tier, [2])) == [False]
    assert fetch(pages, tier, 1) is None
    assert (tier.host_stats().copy_errors, tier.host_stats().refused) == (2, 2)
    tier.close()


def test_a_copy_that_nobody_knows_of_ends_everything_else(pages, caplog):
    """No slot is used again, and no memory given back that may still be written, the page's
    included: whoever has it must not be told that it is free."""
    copier, below = FailingCopier(), LateStore(PAGE)
    tier = HostTier(PAGE, 4 * PAGE, copier, below)
    results(fill(pages, tier, [1, 2]))
    copier.is_lost = True
    (load,) = tier.load_many([(name(1), pages.address(31))])
    tier._worker._thread.join(10)
    assert not tier.contains(name(1))
    assert results(fill(pages, tier, [3])) == [False]
    assert fetch(pages, tier, 2) is None
    assert not tier.flush()
    assert not tier.close() and not load.done()
    assert "out of order (" in caplog.text and "they may still be written" in caplog.text
    assert not copier.is_closed
    assert below.num_closed == 1


def test_what_is_discarded_may_change(pages):
    """While it waits, while it is copied, when it is there: nobody finds it any more."""
    copier, below = FailingCopier(), LateStore(PAGE)
    tier = HostTier(PAGE, 4 * PAGE, copier, below)
    results(fill(pages, tier, [0]))
    assert tier.flush()
    assert tier.discard(name(0)) and not tier.discard(b"unknown")
    assert fetch(pages, tier, 0) is None
    copier.may_go_on.clear()
    copier.is_asked.clear()
    futures = fill(pages, tier, [1])
    assert copier.is_asked.wait(10)
    futures += fill(pages, tier, [2, 1])
    for number in (1, 2):
        assert tier.discard(name(number))
        pages[number] = b"\xaa" * PAGE
    copier.may_go_on.set()
    assert results(futures) == [False] * 3
    assert fetch(pages, tier, 1) is fetch(pages, tier, 2) is None
    assert results(fill(pages, tier, [1])) == [True]
    assert fetch(pages, tier, 1) == content(name(1), PAGE)
    assert tier.flush()
    tier._worker.arena.check_integrity()
    assert (tier.room, tier.stats().entries) == (1024, 1)
    tier.close()


def test_the_caller_never_waits_for_a_copy(pages):
    copier = FailingCopier()
    tier = HostTier(PAGE, 8 * PAGE, copier, max_requests=4)
    copier.may_go_on.clear()
    futures = fill(pages, tier, [0, 1, 2, 3])
    assert not wait(futures, timeout=0.05).done
    assert results(fill(pages, tier, [4])) == [False], "too many"
    assert not tier.contains(name(5))
    copier.may_go_on.set()
    assert results(futures) == [True] * 4
    tier.close()


def test_flush_sees_what_was_asked_before(pages):
    copier, below = FailingCopier(), LateStore(PAGE)
    tier = HostTier(PAGE, 4 * PAGE, copier, below)
    results(fill(pages, tier, [0]))
    assert tier.flush()
    copier.may_go_on.clear()
    copier.is_asked.clear()
    load = tier.load_many([(name(0), pages.address(20))])
    assert copier.is_asked.wait(10)
    fill(pages, tier, [1])
    answers: list[bool] = []
    flushing = threading.Thread(target=lambda: answers.append(tier.flush()))
    flushing.start()
    while not tier._worker._flushes:
        time.sleep(0.001)
    copier.may_go_on.set()
    flushing.join(10)
    assert answers == results(load) == [True]
    assert sorted(below.pages) == [name(0), name(1)]
    tier.close()


def test_flush_gives_up_in_time(pages):
    below = LateStore(PAGE)
    below.mode = "held"
    tier = HostTier(PAGE, 4 * PAGE, MemoryCopier(), below)
    results(fill(pages, tier, [0]))
    assert not tier.flush(0.05)
    below.release()
    assert tier.flush()
    tier.close()


def test_the_arena_gives_no_slot_twice():
    lost: list[bytes] = []
    arena: HostArena[int] = HostArena(2, lost.append)
    first, second = arena.add(b"1"), arena.add(b"2")
    assert first and second and arena.add(b"3") is None
    first.is_there = True
    arena.release(first)
    assert arena.add(b"3") is None, "it is young"
    aged = arena.age()
    assert aged is first and arena.age() is None
    arena.use(first, is_wanted=True)
    arena.release(first)
    arena.release(first)
    assert arena.add(b"3") is None, "it was wanted meanwhile"
    aged = arena.age()
    assert aged is first
    arena.release(first)
    third = arena.add(b"3")
    assert third and third.slot == first.slot and lost == [b"1"]
    arena.drop(second)
    assert arena.add(b"4") is None, "what was dropped still has a user"
    arena.release(second)
    arena.check_integrity()
    assert arena.num_used == 1


class HostTierMachine(RuleBasedStateMachine):
    """Whatever is loaded has the bytes of its key, and nothing disappears without being counted."""

    @initialize(num_slots=st.integers(1, 6), has_below=st.booleans())
    def begin(self, num_slots: int, has_below: bool) -> None:
        self.pages = Pages(16)
        self.copier = FailingCopier()
        self.below = LateStore(PAGE) if has_below else None
        self.tier = HostTier(PAGE, num_slots * PAGE, self.copier, self.below)
        self.num_slots = num_slots
        self.free = set(range(16))
        self.under_way: list[tuple[Future[bool], int, bytes, bool]] = []
        self.stored: set[bytes] = set()
        self.num_discarded = 0

    @rule(numbers=st.lists(st.integers(0, 11), min_size=1, max_size=5), is_store=st.booleans())
    def ask(self, numbers: list[int], is_store: bool) -> None:
        numbers = numbers[: len(self.free)]
        taken = [(name(number), self.free.pop()) for number in numbers]
        for key, page in taken:
            self.pages[page] = content(key, PAGE) if is_store else bytes(PAGE)
        places = [(key, self.pages.address(page)) for key, page in taken]
        futures = (self.tier.store_many if is_store else self.tier.load_many)(places)
        for future, (key, page) in zip(futures, taken, strict=True):
            self.under_way.append((future, page, key, is_store))

    @invariant()
    def collect(self) -> None:
        still = []
        for future, page, key, is_store in getattr(self, "under_way", []):
            if not future.done():
                still.append((future, page, key, is_store))
                continue
            if is_store and future.result():
                self.stored.add(key)
            elif future.result():
                assert self.pages[page] == content(key, PAGE)
            self.pages[page] = b"\xaa" * PAGE  # whoever still reads it is found out
            self.free.add(page)
        self.under_way = still

    @precondition(lambda self: self.below)
    @rule(mode=st.sampled_from(["at once", "held", "held", "refused", "failing"]))
    def change_below(self, mode: str) -> None:
        self.below.mode = mode

    @precondition(lambda self: self.below)
    @rule(count=st.integers(1, 4))
    def release(self, count: int) -> None:
        self.below.release(count)

    @rule(number=st.integers(0, 11))
    def discard(self, number: int) -> None:
        """Pages that are being stored change."""
        key = name(number)
        self.tier.discard(key)
        self.num_discarded += 1
        for _, page, other, is_store in self.under_way:
            if is_store and other == key:
                self.pages[page] = b"\xbb" * PAGE

    @rule()
    def fail_a_copy(self) -> None:
        self.copier.fail_next = True

    @rule(timeout_s=st.sampled_from([0.0, 0.01]))
    def flush(self, timeout_s: float) -> None:
        if self.tier.flush(timeout_s):
            entries = list(self.tier._worker.arena.entries.items())
            there = {key for key, entry in entries if entry.is_there}
            assert there <= set(self.below.pages if self.below else ())

    def settle(self) -> None:
        until = time.monotonic() + 20
        while not all(future.done() for future, *_ in self.under_way):
            if self.below:
                self.below.release()
            time.sleep(0.0002)
            assert time.monotonic() < until, "a future does not end"
        self.collect()

    @rule()
    def everything_is_counted(self) -> None:
        self.settle()
        assert len(self.free) == 16
        num_missing = sum(not self.tier.contains(key) for key in self.stored)
        num_dropped = self.below.num_dropped if self.below else 0
        stats = self.tier.host_stats()
        assert num_missing <= stats.lost + num_dropped + self.num_discarded
        assert stats.entries <= self.num_slots and stats.requests == 0

    def teardown(self) -> None:
        if not hasattr(self, "tier"):
            return
        self.settle()
        if self.below:
            self.below.mode = "at once"
            self.below.release()
            assert self.tier.flush(10)
        self.tier._worker.arena.check_integrity()
        assert self.tier.close()
        assert self.copier.is_closed
        assert self.below is None or self.below.num_closed == 1
        assert not self.tier._worker._thread.is_alive()
        self.pages.memory.close()


TestHostTierMachine = HostTierMachine.TestCase
TestHostTierMachine.settings = examples(100, steps=40)
