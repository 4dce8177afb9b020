"""The host tier closes within its time limit, whatever is in flight."""

from __future__ import annotations

import threading
import time

import pytest

from memory.tiers.host_tier import HostTier
from memory.tiers.page_copy import MemoryCopier
from tests.support.memory.host_pages import PAGE, FailingCopier, fill, name, pages, results
from tests.support.memory.late_store import LateStore, content

__all__ = ["pages"]


@pytest.mark.timing
def test_closing_is_bounded_in_time(pages, caplog):
    """The store below never answers. Its slots keep their memory, and every caller gets a
    result."""
    copier, below = FailingCopier(), LateStore(PAGE)
    tier = HostTier(PAGE, 2 * PAGE, copier, below)
    for number in range(6):
        results(fill(pages, tier, [number]))
    below.mode = "held"
    loads = tier.load_many([(name(0), pages.address(20)), (name(1), pages.address(21))])
    while not below.num_loads:
        time.sleep(0.001)
    began = time.monotonic()
    assert not tier.close(0.2)
    assert time.monotonic() - began < 2
    assert results(loads) == [False, False]
    assert not copier.is_closed
    assert "they may still be written" in caplog.text
    tier._worker._thread.join(5)
    assert not tier._worker._thread.is_alive()
    pages[20] = pages[21] = bytes(PAGE)
    below.release()  # the late answer changes nothing
    assert pages[20] == pages[21] == bytes(PAGE)


def test_closing_beside_a_copy_that_never_ends(pages):
    copier = FailingCopier()
    tier = HostTier(PAGE, 2 * PAGE, copier)
    copier.may_continue.clear()
    futures = fill(pages, tier, [0, 1])
    assert copier.has_started.wait(10)
    assert not tier.close(0.1)
    assert [future.result(0) for future in futures] == [False, False]
    assert not copier.is_closed
    copier.may_continue.set()
    tier._worker._thread.join(5)
    assert not tier._worker._thread.is_alive()


def test_closing_beside_a_load_that_never_ends(pages):
    """The page of the first load may be written until the copy ends, and the second load does
    not start."""
    copier = FailingCopier()
    tier = HostTier(PAGE, 2 * PAGE, copier)
    results(fill(pages, tier, [0, 1]))
    copier.has_started.clear()
    copier.may_continue.clear()
    (first,) = tier.load_many([(name(0), pages.address(20))])
    assert copier.has_started.wait(10)
    (second,) = tier.load_many([(name(1), pages.address(21))])
    assert not tier.close(0.1)
    assert not first.done() and not second.result(0)
    copier.may_continue.set()
    assert first.result(10) and pages[20] == content(name(0), PAGE)
    assert pages[21] == bytes(PAGE)


def test_closing_begins_nothing_new(pages):
    """Pages that a flush had not reached are not written."""
    below = LateStore(PAGE)
    below.mode = "held"
    tier = HostTier(PAGE, 80 * PAGE, MemoryCopier(), below)
    for number in range(72):
        pages[0] = content(name(number), PAGE)
        assert tier.store_many([(name(number), pages.address(0))])[0].result(10)
    assert not tier.flush(0.05)
    assert below.num_held == 64
    closing = threading.Thread(target=tier._worker.stop, args=(10,))
    closing.start()
    while not tier._worker.is_closing:
        time.sleep(0.001)
    below.mode = "at once"
    below.release(1)
    assert not closing.join(0.05) and len(below.pages) == 1
    below.release()
    closing.join(5)
    assert len(below.pages) == 64
    assert tier.close()


def test_closing_completes_transfers_in_flight_and_refuses_waiting_ones(pages):
    copier, below = FailingCopier(), LateStore(PAGE)
    below.mode = "held"
    tier = HostTier(PAGE, 2 * PAGE, copier, below)
    futures = fill(pages, tier, [0, 1, 2, 3])
    results(futures[:2])
    while below.num_held < 2:
        time.sleep(0.001)
    closing = threading.Thread(target=tier._worker.stop, args=(10,))
    closing.start()
    assert results(futures[2:]) == [False, False]
    assert closing.is_alive()
    below.release()
    closing.join(5)
    assert tier.close()
    assert copier.is_closed and below.num_closed == 1


def test_closing_writes_pages_that_are_not_below_yet(pages):
    below = LateStore(PAGE)
    tier = HostTier(PAGE, 16 * PAGE, MemoryCopier(), below)
    results(fill(pages, tier, list(range(10))))
    assert len(below.pages) < 10
    assert tier.close() and tier.close()
    assert len(below.pages) == 10
    assert below.num_closed == 1
