"""Lent pages: own and lent pages never exceed the pool, own sequences come first, and all come
back."""

from __future__ import annotations

import random
import threading

import pytest

from memory.nodes.server.lent_bytes import LentBytes, LentMemory
from memory.pages.layer_groups import LayerGroup
from tests.support.engine.fakes import make_kv

NUM_PAGES, PAGE = 40, 64  # pages of 4 tokens


class Lease:
    """What a borrower has, over a memory that only counts."""

    def __init__(self, lent, num_pages, memory):
        self.memory = LentMemory(memory, num_pages, lent, lambda: False)
        self.pages = set()
        self.num_pages = num_pages
        self.lent = lent

    @property
    def num_bytes(self):
        return len(self.pages) * self.memory.page_bytes

    def map(self, first, count):
        try:
            self.memory.map(0, first, count)
        except OSError:
            return False
        self.pages.update(range(first, first + count))
        return True

    def release(self, first, count):
        self.memory.release(first, count)
        self.pages.difference_update(range(first, first + count))

    def close(self):
        self.memory.close()
        self.pages.clear()


class CountedMemory:
    maps_during_kernels = True

    def __init__(self, page_bytes):
        self.page_bytes = page_bytes

    def map(self, offset, first_page, num_pages):
        pass

    def release(self, first_page, num_pages):
        pass

    def close(self):
        pass


def make(most_pages=30, kept=True):
    kv, _ = make_kv(
        num_pages=NUM_PAGES,
        num_ranges=8,
        max_model_len=64,
        page_bytes=PAGE,
        groups=(LayerGroup(16),),
    )
    lent = LentBytes(kv, most_pages * PAGE, lambda job: job())
    if not kept:
        lent.kept_pages = 0
    return kv, lent


def check(kv, lent, leases):
    kv.check_integrity()
    used = sum(lease.num_bytes for lease in leases)
    assert lent.used == used
    assert used <= len(kv.lent) * PAGE <= lent.most_bytes
    assert kv.num_in_use + kv.num_cached + len(kv.lent) <= kv.num_pages
    assert kv.num_lent == len(kv.lent.pages)


@pytest.mark.parametrize("seed", range(8))
def test_any_order_of_leases_and_own_sequences(seed):
    rng = random.Random(seed)
    kv, lent = make()
    leases = []

    def give_back(count):
        count -= lent.take_back_unused()
        while count > 0 and leases:
            leases.pop().close()
            count -= lent.take_back_unused()

    kv.lent.on_short = give_back
    opened = []
    for _ in range(300):
        what = rng.choice(["own", "own", "end", "lease", "map", "map", "release", "close"])
        if what == "own":
            num_tokens = rng.randrange(1, 65)
            needed = kv.pages_for(num_tokens)
            held = sum(len(it.pages) + it.promised_pages for it in opened)
            fits = kv.can_fit(num_tokens)
            # what is lent never keeps an own sequence waiting
            assert fits == (needed + held <= NUM_PAGES and len(opened) < 8)
            if fits:
                target = kv.open(num_tokens)
                opened.append(target)
                assert kv.grow(target, rng.randrange(1, num_tokens + 1))
                kv.commit()
        elif what == "end" and opened:
            kv.close(opened.pop(rng.randrange(len(opened))))
        elif what == "lease" and len(leases) < 3:
            size = PAGE * rng.choice([1, 3])
            leases.append(Lease(lent, 20, CountedMemory(size)))
        elif leases:
            lease = rng.choice(leases)
            first = rng.randrange(20)
            count = rng.randrange(1, 21 - first)
            if what == "map":
                lease.map(first, count)
            elif what == "release":
                lease.release(first, count)
            elif what == "close":
                leases.remove(lease)
                lease.close()
        check(kv, lent, leases)
    for lease in leases:
        lease.close()
    for target in opened:
        kv.close(target)
    lent.settle()
    check(kv, lent, [])
    assert (lent.used, len(kv.lent), kv.num_in_use) == (0, 0, 0)
    assert kv.num_available == NUM_PAGES


def test_free_pages_are_lent_first_and_then_cached_ones():
    kv, lent = make(kept=False)
    target = kv.open(64)
    assert kv.grow(target, 64)
    kv.commit()
    kv.insert_prefix(target, [bytes([n]) * 16 for n in range(16)], 64)
    kv.close(target)
    assert kv.num_cached == 16
    lease = Lease(lent, NUM_PAGES, CountedMemory(PAGE))
    assert lease.map(0, 20)
    assert kv.num_cached == 16
    assert lease.map(20, 10)
    assert kv.num_cached <= 10
    check(kv, lent, [lease])
    lease.close()


def test_some_pages_are_never_lent_and_promised_ones_neither():
    kv, lent = make(most_pages=NUM_PAGES)
    target = kv.open(64)
    lease = Lease(lent, NUM_PAGES, CountedMemory(PAGE))
    assert not lease.map(0, NUM_PAGES - 16 - lent.kept_pages + 1)
    assert lease.map(0, NUM_PAGES - 16 - lent.kept_pages)
    assert kv.grow(target, 64)
    lease.close()
    kv.close(target)
    check(kv, lent, [])


def test_a_lease_that_ends_does_not_wait_for_the_loop():
    kv, _ = make()
    jobs = []
    lent = LentBytes(kv, 30 * PAGE, jobs.append)
    is_over, results = threading.Event(), []
    thread = threading.Thread(target=lambda: results.append(lent.take(PAGE, is_over.is_set)))
    thread.start()
    is_over.set()
    thread.join(5)
    assert results == [False] and lent.used == 0
    for job in jobs:
        job()
    assert len(kv.lent) == 0


def test_pages_are_asked_back_only_if_they_end_the_shortage():
    kv, _ = make_kv(
        num_pages=16, num_ranges=2, max_model_len=64, page_bytes=PAGE, groups=(LayerGroup(16),)
    )
    kv.lent.lend(6)
    asked = []
    kv.lent.on_short = asked.append
    assert kv.can_fit(40)
    first = kv.open(40)
    assert kv.grow(first, 40)  # all ten pages
    assert not kv.can_fit(28)  # one more than are lent
    assert asked == []
    assert not kv.can_fit(24)
    assert asked == [6]
    kv.close(first)
    kv.lent.take_back(6)
