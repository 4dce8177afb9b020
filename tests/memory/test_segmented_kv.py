"""The accounting of sequences that grow over several holders."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from memory.kv_manager import KVManager
from memory.nodes.edit_log import EditLog
from memory.pages.layer_groups import LayerGroup
from memory.prefix.index import PrefixHasher
from memory.segmented_kv import SegmentedKV
from tests.support.engine.fakes import make_kv

LENGTH, LONGEST = 8, 44
FULL = LayerGroup(16, max_tokens=LENGTH)
GROUPS = {"full": (FULL,), "windowed": (FULL, LayerGroup(16, window=6, read_block=2))}


def make(num_holders=2, groups="full", own_pages=24, holder_pages=12, num_ranges=5):
    """Pages have 4 tokens."""
    own, _ = make_kv(
        num_pages=own_pages,
        num_ranges=num_ranges,
        max_model_len=LENGTH if groups == "full" else LONGEST,
        groups=GROUPS[groups],
        page_bytes=64,
        max_rows=8,
    )
    holders = [
        make_kv(
            num_pages=holder_pages,
            num_ranges=num_ranges * 3,
            max_model_len=LENGTH,
            groups=(LayerGroup(16),),
            page_bytes=64,
        )[0]
        for _ in range(num_holders)
    ]
    return SegmentedKV(own, holders, LENGTH, LONGEST)


def check(kv, lengths):
    """lengths: the tokens of each open range."""
    kv.check_integrity()
    for target, length in lengths:
        assert target.capacity >= length
        for segment in range(1, -(-length // LENGTH)):
            holder, index = kv.locate(target.start, segment)
            assert holder == (segment - 1) % len(kv.partitions)
            held = kv.partitions[holder].ranges[index]
            assert held.is_open
            assert held.capacity >= min(LENGTH, length - segment * LENGTH)
        assert len(target.parts[0].pages) <= LENGTH // 4, "this machine holds one segment"


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("num_holders", [1, 2, 3])
def test_any_order_of_growth_keeps_the_books(num_holders, groups):
    kv, pick = make(num_holders, groups), random.Random(num_holders)
    running, num_short = [], 0
    for _ in range(400):
        if running and pick.random() < 0.2:
            target, _ = running.pop(pick.randrange(len(running)))
            kv.close(target)
        elif len(running) < 5 and pick.random() < 0.4:
            length = pick.randint(1, LONGEST)
            if kv.can_fit(length):
                target = kv.open(length)
                if pick.random() < 0.8:  # its pages were promised
                    for end in [*range(8, length, 8), length]:
                        assert kv.grow(target, end, end - 8)
                        kv.commit()
                    running.append((target, length))
                else:
                    kv.close(target)
        elif running:
            number = pick.randrange(len(running))
            target, length = running[number]
            longer = min(LONGEST, length + pick.randint(1, 8))
            if kv.grow(target, longer, length):
                running[number] = (target, longer)
            else:
                num_short += 1
                helpers = [it for it, _ in running if kv.shares_memory(it, target)]
                assert any(it is target for it in helpers)
        kv.commit([target for target, _ in running])
        check(kv, running)
    assert num_short > 0
    for target, _ in running:
        kv.close(target)
    kv.check_integrity()
    assert all(memory.num_in_use == 0 for memory in kv.partitions)
    assert kv.num_in_use == 0
    kv.close_all()


def test_a_sequence_that_fits_alone_grows_token_by_token():
    kv = make(holder_pages=4)
    assert kv.fits_alone(LENGTH * 5)
    assert not kv.fits_alone(LENGTH * 5 + 1)
    target = kv.open(1)
    for length in range(1, LENGTH * 5 + 1):
        assert kv.grow(target, length, length - 1)
        kv.commit()
        check(kv, [(target, length)])
    assert not kv.grow(target, LENGTH * 5 + 1, LENGTH * 5)
    kv.close(target)


def test_only_those_who_hold_the_scarce_pages_are_preempted():
    kv = make(num_holders=2, holder_pages=3)
    short, other, long = kv.open(4), kv.open(20), kv.open(4)
    for target, length in ((short, 4), (other, 20), (long, 8)):
        assert kv.grow(target, length)
    assert kv.shares_memory(short, long)
    assert not kv.grow(long, 16), "holder 1 has one page left, and two are needed"
    assert not kv.shares_memory(short, long)
    assert kv.shares_memory(other, long)
    assert kv.shares_memory(long, long)
    kv.close(other)
    assert kv.grow(long, 16)
    assert kv.shares_memory(short, long)


def test_room_for_an_urgent_sequence_counts_what_its_victims_hold():
    kv = make(num_holders=1, holder_pages=4)
    held, short = kv.open(20), kv.open(4)
    assert kv.grow(held, 20)
    assert kv.grow(short, 4)
    assert not kv.can_fit(20)
    assert kv.ranges_to_close(20, [short]) is None
    assert kv.ranges_to_close(20, [short, held]) == [short, held]


def test_prefixes_end_with_the_first_segment():
    kv = make()
    hasher, tokens = PrefixHasher(kv.page_end, b"secret"), list(range(20))
    keys: list[bytes] = []
    hasher.extend(keys, tokens, None)
    target = kv.open(20)
    assert kv.grow(target, 20)
    kv.commit()
    kv.insert_prefix(target, keys, 20)
    kv.close(target)
    assert kv.num_cached_tokens(keys) == LENGTH
    hit = kv.match(keys, 19)
    assert hit is not None
    assert hit.num_tokens == LENGTH
    again = kv.open(20, hit)
    assert kv.grow(again, 20, LENGTH)
    check(kv, [(again, 20)])
    kv.close(again)


def test_a_lost_holder_is_named_by_the_ranges_it_held():
    kv = make(num_holders=2)
    one, two, three = kv.open(LENGTH), kv.open(2 * LENGTH), kv.open(3 * LENGTH)
    assert [kv.has_part_on(it, {1}) for it in (one, two, three)] == [False, False, True]
    for target in (two, three):
        kv.close(target)
    kv.partitions[0].reset(0)
    assert kv.fits_alone(4 * LENGTH), "three segments, as many as holder 1 has of the longest"
    assert not kv.fits_alone(4 * LENGTH + 1)
    assert not kv.can_fit(4 * LENGTH + 1)
    target = kv.open(3 * LENGTH)
    assert {kv.locate(target.start, segment)[0] for segment in (1, 2)} == {1}
    assert kv.grow(target, 4 * LENGTH)
    assert not kv.grow(target, 4 * LENGTH + 1)
    assert not kv.shares_memory(one, target), "no preemption brings the holder back"
    kv.close(target)
    kv.partitions[1].reset(0)
    assert kv.fits_alone(LENGTH)
    assert not kv.can_fit(LENGTH + 1)


def ten_million(num_holders=3, page_tokens=128):
    length = 1 << 20
    slots = length // page_tokens
    own = KVManager(
        EditLog(page_tokens * 128, 2, [slots]),
        num_pages=slots,
        num_ranges=2,
        max_model_len=length,
        groups=(LayerGroup(128, 16, max_tokens=length),),
        in_background=False,
    )
    holders = [
        KVManager(
            EditLog(page_tokens * 128, 8, [slots]),
            num_pages=30_000,
            num_ranges=8,
            max_model_len=length,
            groups=(LayerGroup(128, 16),),
            in_background=False,
        )
        for _ in range(num_holders)
    ]
    return SegmentedKV(own, holders, length, 10_000_000)


def test_ten_million_tokens_take_little_memory_for_their_books():
    tracemalloc.start()
    kv = ten_million()
    assert kv.fits_alone(10_000_000)
    target = kv.open(10_000_000)
    for length in range(1_000_000, 10_000_001, 1_000_000):
        assert kv.grow(target, length, length)
        kv.commit()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 << 20
    assert sum(memory.num_in_use for memory in kv.partitions) == -(-(10_000_000 - (1 << 20)) // 128)
    assert target.capacity >= 10_000_000
    kv.close(target)
    kv.check_integrity()


def test_a_step_of_ten_million_tokens_edits_only_the_pages_it_adds():
    kv = ten_million()
    target = kv.open(10_000_000)
    assert kv.grow(target, 9_999_000, 0)
    kv.commit()
    for memory in kv.partitions:
        memory._memory.take()
    assert kv.grow(target, 9_999_512, 9_999_000)
    kv.commit()
    edits = [edit for memory in kv.partitions for edit in memory._memory.take()]
    assert 1 <= len(edits) <= 2
    assert sum(edit.num_pages for edit in edits) <= 5
    kv.close(target)
