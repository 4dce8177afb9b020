"""The host tier stores, loads, evicts and passes pages to a store below."""

from __future__ import annotations

import threading
import time
from concurrent.futures import wait

import pytest

from memory.tiers.host_arena import HostArena
from memory.tiers.host_tier import HostTier
from memory.tiers.page_copy import MemoryCopier
from tests.support.memory.host_pages import (
    PAGE,
    FailingCopier,
    fetch,
    fill,
    name,
    pages,
    results,
)
from tests.support.memory.late_store import LateStore, content

__all__ = ["pages"]


def test_pages_are_loaded_from_host_memory(pages):
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
    assert not tier.flush(), "host memory alone is not persistent"
    tier.close()
    tier.close()
    assert copier.is_closed
    assert results(fill(pages, tier, [5])) == [False]
    assert fetch(pages, tier, 1) is None
    assert tier.host_stats().refused == 2


def test_the_least_recently_used_page_is_evicted_first(pages):
    tier = HostTier(PAGE, 4 * PAGE, MemoryCopier())
    results(fill(pages, tier, [0, 1, 2, 3]))
    assert fetch(pages, tier, 0)
    for number in (4, 5):
        results(fill(pages, tier, [number]))
    assert [number for number in range(6) if tier.contains(name(number))] == [0, 3, 4, 5]
    assert tier.host_stats().lost == 2
    tier.close()


def test_pages_beyond_host_memory_are_written_below_and_loaded(pages):
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
    assert stats.pushed_down == len(below.pages) <= 24, "each page is written once"
    assert stats.bytes_used <= 4 * PAGE
    assert tier.flush()
    assert len(below.pages) == 24
    tier.close()
    assert below.num_closed == 1


def test_stores_wait_for_a_slow_store_below(pages):
    """Nothing is lost: evicted pages are below first, and later stores wait for that."""
    below = LateStore(PAGE)
    below.mode = "held"
    tier = HostTier(PAGE, 4 * PAGE, MemoryCopier(), below)
    futures = fill(pages, tier, list(range(12)))
    assert results(futures[:4]) == [True] * 4
    while below.num_held < 4:
        time.sleep(0.001)
    assert not any(future.done() for future in futures[4:])
    assert fetch(pages, tier, 2) == content(name(2), PAGE), (
        "a page can be loaded while it is written"
    )
    while not all(future.done() for future in futures):
        below.release(1)
    assert results(futures) == [True] * 12
    below.mode = "at once"
    below.release()
    assert tier.flush()
    assert sorted(below.pages) == sorted(name(number) for number in range(12))
    tier.close()


@pytest.mark.parametrize("mode", ["refused", "failing"])
def test_a_store_below_that_refuses_or_fails(pages, mode):
    """The newest pages stay, and the others are lost and counted. A flush tries again."""
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


def test_one_read_below_serves_all_loads_of_a_key(pages):
    """A store of the same key waits for the read and takes its own page when the read fails."""
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
    assert fetch(pages, tier, 1) == content(name(1), PAGE), "the page in host memory is intact"
    copier.is_unordered = True
    assert results(fill(pages, tier, [2])) == [False]
    assert fetch(pages, tier, 1) is None
    assert (tier.host_stats().copy_errors, tier.host_stats().refused) == (2, 2)
    tier.close()


def test_a_copy_of_unknown_state_stops_the_tier(pages, caplog):
    """After a copy of unknown state no slot is used again and no memory is freed, as either may
    still be written. The load's future stays open, so that its page is not used again either."""
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


def test_discarded_pages_are_not_found(pages):
    """A discarded page is not found, whether its store waits, is being copied or is complete."""
    copier, below = FailingCopier(), LateStore(PAGE)
    tier = HostTier(PAGE, 4 * PAGE, copier, below)
    results(fill(pages, tier, [0]))
    assert tier.flush()
    assert tier.discard(name(0)) and not tier.discard(b"unknown")
    assert fetch(pages, tier, 0) is None
    copier.may_continue.clear()
    copier.has_started.clear()
    futures = fill(pages, tier, [1])
    assert copier.has_started.wait(10)
    futures += fill(pages, tier, [2, 1])
    for number in (1, 2):
        assert tier.discard(name(number))
        pages[number] = b"\xaa" * PAGE
    copier.may_continue.set()
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
    copier.may_continue.clear()
    futures = fill(pages, tier, [0, 1, 2, 3])
    assert not wait(futures, timeout=0.05).done
    assert results(fill(pages, tier, [4])) == [False], "too many"
    assert not tier.contains(name(5))
    copier.may_continue.set()
    assert results(futures) == [True] * 4
    tier.close()


def test_flush_includes_earlier_requests(pages):
    copier, below = FailingCopier(), LateStore(PAGE)
    tier = HostTier(PAGE, 4 * PAGE, copier, below)
    results(fill(pages, tier, [0]))
    assert tier.flush()
    copier.may_continue.clear()
    copier.has_started.clear()
    load = tier.load_many([(name(0), pages.address(20))])
    assert copier.has_started.wait(10)
    fill(pages, tier, [1])
    answers: list[bool] = []
    flushing = threading.Thread(target=lambda: answers.append(tier.flush()))
    flushing.start()
    while not tier._worker._flushes:
        time.sleep(0.001)
    copier.may_continue.set()
    flushing.join(10)
    assert answers == results(load) == [True]
    assert sorted(below.pages) == [name(0), name(1)]
    tier.close()


def test_flush_ends_at_its_time_limit(pages):
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
    assert arena.add(b"3") is None, "it is not old enough"
    aged = arena.age()
    assert aged is first and arena.age() is None
    arena.use(first, is_wanted=True)
    arena.release(first)
    arena.release(first)
    assert arena.add(b"3") is None, "it was used meanwhile"
    aged = arena.age()
    assert aged is first
    arena.release(first)
    third = arena.add(b"3")
    assert third and third.slot == first.slot and lost == [b"1"]
    arena.drop(second)
    assert arena.add(b"4") is None, "the dropped slot is still in use"
    arena.release(second)
    arena.check_integrity()
    assert arena.num_used == 1
