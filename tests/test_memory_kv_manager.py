"""The KV manager's promises, by table and by a random walk (hypothesis)."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.fakes import check_mapping, make_kv


def test_grow_maps_only_at_commit():
    kv, memory = make_kv()
    item = kv.open(9)
    assert kv.grow(item, 9)
    assert not memory.mapped
    assert item.capacity == 12
    kv.commit()
    assert len(memory.mapped) == 3
    check_mapping(kv, memory)


def test_consecutive_pages_are_one_call():
    kv, memory = make_kv()
    item = kv.open(40)
    kv.grow(item, 40)
    kv.commit()
    assert memory.num_calls == 1


def test_closed_ranges_keep_their_pages_until_needed():
    kv, memory = make_kv(num_pages=10, num_ranges=2)
    first = kv.open(40)
    assert kv.grow(first, 40)
    kv.commit()
    calls = memory.num_calls
    kv.close(first)
    assert (kv.num_in_use, kv.num_mapped, kv.num_available) == (0, 10, 10)
    again = kv.open(8)
    assert again is first, "best fit takes the range that has pages"
    assert kv.grow(again, 8)
    kv.commit()
    assert memory.num_calls == calls, "nothing had to be mapped"
    assert (kv.num_in_use, kv.num_available) == (2, 8)


def test_spare_pages_of_an_open_range_can_be_had():
    """A small sequence in a range full of pages does not lock them away."""
    kv, memory = make_kv(num_pages=10, num_ranges=2)
    first = kv.open(40)
    kv.grow(first, 40)
    kv.commit()
    kv.close(first)
    small = kv.open(4)
    assert kv.grow(small, 4)
    assert kv.can_fit(36)
    other = kv.open(36)
    assert other is not small
    assert kv.grow(other, 36)
    kv.commit()
    check_mapping(kv, memory)
    assert (len(small.pages), len(other.pages)) == (1, 9)
    assert not kv.grow(small, 5)
    kv.check_integrity()


def test_shrunk_and_grown_between_commits_shows_no_stale_page():
    kv, memory = make_kv(num_pages=6, num_ranges=2)
    first = kv.open(24)
    kv.grow(first, 24)
    kv.commit()
    kv.close(first)
    again = kv.open(4)
    other = kv.open(16)
    assert again is first
    assert kv.grow(again, 4)
    assert kv.grow(other, 16)  # takes spare pages from the end of `again`
    kv.close(other)
    assert kv.grow(again, 20)  # and `again` takes them back in another order
    kv.commit()
    check_mapping(kv, memory)
    kv.check_integrity()


def test_promised_pages_are_not_given_to_the_next():
    kv, _ = make_kv(num_pages=10)
    first = kv.open(32)  # 8 pages promised, none mapped yet
    assert kv.num_in_use == 0
    assert not kv.can_fit(12)
    assert kv.can_fit(8)
    assert kv.grow(first, 16)
    assert not kv.can_fit(12)
    kv.close(first)
    assert kv.can_fit(40)
    kv.check_integrity()


def test_grow_says_no_and_changes_nothing():
    kv, _ = make_kv(num_pages=4)
    first, second = kv.open(8), kv.open(8)
    assert kv.grow(first, 12)
    assert not kv.grow(second, 12)
    assert second.pages == []
    kv.check_integrity()


def test_a_failed_map_is_tried_again():
    kv, memory = make_kv()
    item = kv.open(4)
    kv.grow(item, 4)
    memory.fail_next = "map"
    with pytest.raises(OSError, match="no memory"):
        kv.commit()
    kv.commit()
    check_mapping(kv, memory)


def test_one_range_that_cannot_be_mapped_stops_no_other():
    kv, memory = make_kv(num_ranges=4)
    items = [kv.open(8) for _ in range(4)]
    for item in items:
        kv.grow(item, 8)
    memory.fail_next = "map"
    with pytest.raises(OSError, match="no memory"):
        kv.commit(items[:1])
    kv.commit(items[1:])
    assert [item.mapped for item in items] == [0, 2, 2, 2]
    kv.check_integrity()
    for item in items:
        kv.close(item)
    again = [kv.open(8) for _ in range(4)]
    for item in again:
        assert kv.grow(item, 8)
    kv.commit(again)
    check_mapping(kv, memory)


def test_trim_unmaps_everything_idle():
    kv, memory = make_kv()
    keep, drop = kv.open(8), kv.open(8)
    kv.grow(keep, 8)
    kv.grow(drop, 8)
    kv.commit()
    kv.close(drop)
    kv.trim()
    assert kv.num_mapped == 2
    check_mapping(kv, memory)


def test_token_addresses_are_range_start_plus_position():
    kv, _ = make_kv(tokens_per_page=3)  # 64-byte tokens do not divide most sizes
    assert kv.range_bytes % kv.page_bytes == 0
    assert kv.range_bytes == kv.range_tokens * kv.token_bytes
    assert kv.start_of(2) == 2 * kv.range_tokens


class KVMachine(RuleBasedStateMachine):
    """Open, grow, close, commit and trim in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.kv, self.memory = make_kv(num_pages=20, num_ranges=5, max_model_len=40)
        self.open: dict[int, int] = {}

    @rule(num_tokens=st.integers(1, 40))
    def open_range(self, num_tokens: int) -> None:
        if self.kv.can_fit(num_tokens):
            item = self.kv.open(num_tokens)
            assert item.index not in self.open
            self.open[item.index] = 0

    @precondition(lambda self: self.open)
    @rule(data=st.data(), num_tokens=st.integers(1, 40))
    def grow(self, data: st.DataObject, num_tokens: int) -> None:
        index = data.draw(st.sampled_from(sorted(self.open)))
        before = self.kv.num_available
        item = self.kv.ranges[index]
        missing = self.kv.pages_for(num_tokens) - item.granted
        grown = self.kv.grow(item, num_tokens)
        assert grown == (missing <= before)
        if grown:
            assert item.capacity >= num_tokens
            self.open[index] = max(self.open[index], num_tokens)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from(sorted(self.open)))
        self.kv.close(self.kv.ranges[index])
        del self.open[index]

    @rule()
    def commit(self) -> None:
        self.kv.commit()
        check_mapping(self.kv, self.memory)

    @rule(fail=st.sampled_from(["map", "unmap"]))
    def commit_with_a_failure(self, fail: str) -> None:
        """Whatever fails stays due: the next commit puts everything right."""
        self.memory.fail_next = fail
        with contextlib.suppress(OSError):
            self.kv.commit()
        self.memory.fail_next = None

    @rule()
    def trim(self) -> None:
        self.kv.trim()
        check_mapping(self.kv, self.memory)
        assert self.kv.num_mapped == self.kv.num_in_use

    @invariant()
    def consistent(self) -> None:
        self.kv.check_integrity()
        for index, num_tokens in self.open.items():
            assert self.kv.ranges[index].capacity >= num_tokens

    def teardown(self) -> None:
        for index in self.open:
            self.kv.close(self.kv.ranges[index])
        self.kv.trim()
        assert self.kv.num_mapped == 0
        assert not self.memory.mapped


TestKVMachine = KVMachine.TestCase
TestKVMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
