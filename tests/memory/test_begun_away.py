"""Sequences that begin on a holder because this machine has no room for them."""

from __future__ import annotations

import random

import pytest

from memory.pages.layer_groups import LayerGroup
from memory.segmented_kv import SegmentedKV
from tests.support.engine.fakes import make_kv

LENGTH, LONGEST = 64, 160


def make(num_holders=2, own_pages=16, holder_pages=24):
    """Pages have 4 tokens."""

    def one(num_pages, num_ranges, **sizes):
        return make_kv(num_pages=num_pages, num_ranges=num_ranges, page_bytes=64, **sizes)[0]

    own = one(own_pages, 8, max_model_len=LENGTH, groups=(LayerGroup(16, max_tokens=LENGTH),))
    holders = [
        one(holder_pages, 24, max_model_len=LENGTH, groups=(LayerGroup(16),))
        for _ in range(num_holders)
    ]
    return SegmentedKV(own, holders, LENGTH, LONGEST, 3, takes_whole=True)


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_opening_growing_and_closing(seed):
    rng = random.Random(seed)
    kv = make(num_holders=1 + seed % 3)
    lengths: dict[int, list] = {}  # by start: the range and its tokens
    num_away = 0
    for _ in range(250):
        what = rng.choice(["open", "open", "grow", "grow", "close"])
        if what == "open":
            num_tokens = rng.randrange(1, LONGEST + 1)
            if kv.can_fit(num_tokens, spare_pages=rng.choice([0, 2])):
                target = kv.open(num_tokens)
                assert kv.grow(target, num_tokens), "what fits can be had"
                lengths[target.start] = [target, num_tokens]
                num_away += target.start in kv.begun_away
        elif lengths:
            start = rng.choice(list(lengths))
            target, length = lengths[start]
            if what == "close":
                kv.close(target)
                del lengths[start]
            else:
                more = min(LONGEST, length + rng.randrange(1, 30))
                if kv.grow(target, more):
                    lengths[start][1] = more
        kv.commit()
        kv.check_integrity()
        for target, length in lengths.values():
            assert target.capacity >= length
            first = 0 if target.start in kv.begun_away else 1
            assert bool(target.pages) == bool(first)
            for segment in range(first, -(-length // LENGTH)):
                holder, index = kv.locate(target.start, segment)
                part = kv.partitions[holder].ranges[index]
                assert part.is_open
                assert part.capacity >= min(LENGTH, length - segment * LENGTH)
    for target, _ in lengths.values():
        kv.close(target)
    assert num_away > 0
    assert (kv.num_in_use, kv.num_borrowed_bytes) == (0, 0)
    assert not kv.begun_away
    assert kv.num_available == kv.num_pages


def test_the_own_memory_is_used_first_and_some_of_it_is_kept_to_grow():
    kv = make(num_holders=1)
    here = kv.open(40)
    assert kv.grow(here, 40)
    assert here.start not in kv.begun_away
    away = kv.open(20)
    assert kv.grow(away, 20)
    assert away.start in kv.begun_away
    assert not away.pages
    assert kv.num_borrowed_bytes == 5 * 64
    assert kv.grow(here, 64)
    kv.close(away)
    kv.commit()
    assert kv.num_borrowed_bytes == 0


def test_only_those_that_share_memory_are_preempted_for_one_that_cannot_grow():
    kv = make(num_holders=1, own_pages=8, holder_pages=6)
    here, away = kv.open(20), kv.open(20)
    assert kv.grow(here, 20) and kv.grow(away, 20)
    assert kv.begun_away == {away.start}
    assert not kv.grow(away, 40)
    assert not kv.shares_memory(here, away)
    assert not kv.grow(here, 40)
    assert not kv.shares_memory(away, here)
    kv.close(here)
    kv.close(away)


def test_a_lost_holder_takes_only_what_it_had():
    kv = make(num_holders=1)
    here, away = kv.open(40), kv.open(40)
    assert kv.grow(here, 40) and kv.grow(away, 40)
    lost = [target for target in (here, away) if kv.has_part_on(target, {0})]
    assert lost == [away]
    kv.close(away)
    kv.partitions[0].reset(0)
    assert not kv.can_fit(40)
    assert kv.num_pages == 16
    kv.close(here)
    assert kv.can_fit(40)
    kv.check_integrity()


def test_no_page_is_mapped_ahead_here_for_a_sequence_on_a_holder():
    kv = make(num_holders=1)
    here, away = kv.open(40), kv.open(40)
    assert kv.grow(here, 40) and kv.grow(away, 40)
    wanted = []
    kv.own.map_ahead = wanted.extend
    kv.map_ahead([(here, 44), (away, 44)])
    assert wanted == [(here, 44)]
    kv.close(here)
    kv.close(away)
