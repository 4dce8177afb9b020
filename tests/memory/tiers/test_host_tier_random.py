"""Random operations on the host tier, over a store below that is late or fails."""

from __future__ import annotations

import time
from concurrent.futures import Future

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from memory.tiers.host_tier import HostTier
from tests.support.memory.host_pages import PAGE, FailingCopier, Pages, name
from tests.support.memory.late_store import LateStore, content
from tests.support.profile import examples


class HostTierMachine(RuleBasedStateMachine):
    """A loaded page has the bytes of its key, and every lost page is counted."""

    @initialize(num_slots=st.integers(1, 6), has_below=st.booleans())
    def begin(self, num_slots: int, has_below: bool) -> None:
        self.pages = Pages(16)
        self.copier = FailingCopier()
        self.below = LateStore(PAGE) if has_below else None
        self.tier = HostTier(PAGE, num_slots * PAGE, self.copier, self.below)
        self.num_slots = num_slots
        self.free = set(range(16))
        self.in_flight: list[tuple[Future[bool], int, bytes, bool]] = []
        self.stored: set[bytes] = set()
        self.num_discarded = 0

    @rule(numbers=st.lists(st.integers(0, 11), min_size=1, max_size=5), is_store=st.booleans())
    def request_transfers(self, numbers: list[int], is_store: bool) -> None:
        numbers = numbers[: len(self.free)]
        taken = [(name(number), self.free.pop()) for number in numbers]
        for key, page in taken:
            self.pages[page] = content(key, PAGE) if is_store else bytes(PAGE)
        addressed = [(key, self.pages.address(page)) for key, page in taken]
        futures = (self.tier.store_many if is_store else self.tier.load_many)(addressed)
        for future, (key, page) in zip(futures, taken, strict=True):
            self.in_flight.append((future, page, key, is_store))

    @invariant()
    def collect(self) -> None:
        pending = []
        for future, page, key, is_store in getattr(self, "in_flight", []):
            if not future.done():
                pending.append((future, page, key, is_store))
                continue
            if is_store and future.result():
                self.stored.add(key)
            elif future.result():
                assert self.pages[page] == content(key, PAGE)
            self.pages[page] = b"\xaa" * PAGE  # a late reader gets wrong bytes
            self.free.add(page)
        self.in_flight = pending

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
        """Discards a page; the pages of its pending stores change."""
        key = name(number)
        self.tier.discard(key)
        self.num_discarded += 1
        for _, page, other, is_store in self.in_flight:
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
        while not all(future.done() for future, *_ in self.in_flight):
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
