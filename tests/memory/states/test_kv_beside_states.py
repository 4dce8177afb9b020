"""K/V in partitions and records of states in another memory: a sequence needs both."""

from __future__ import annotations

import pytest

from memory.kv_beside_states import KVBesideStates
from memory.pages.layer_groups import LayerGroup
from memory.prefix.index import PrefixHasher
from tests.support.engine.fakes import make_kv

INTERVAL = 16
RECORD = LayerGroup(256 // INTERVAL, INTERVAL, window=2, read_block=INTERVAL, is_state=True)
FULL = LayerGroup(64)  # 4 tokens a page


def make(num_pages: int = 100, num_records: int = 40, num_partitions: int = 2) -> KVBesideStates:
    sizes = {"max_model_len": 200, "max_rows": 8, "num_ranges": 6}
    partitions = []
    for number in range(num_partitions):
        first = number * 6 * partitions[0].range_tokens if partitions else 0
        partitions.append(make_kv(num_pages, groups=(FULL,), first_start=first, **sizes)[0])
    records, _ = make_kv(num_records, groups=(RECORD,), **sizes)
    return KVBesideStates(partitions, records)


def keys_of(kv, tokens) -> list[bytes]:
    keys: list[bytes] = []
    PrefixHasher(kv.page_end, b"secret").extend(keys, list(tokens))
    return keys


def compute(kv, tokens, hit=None, rows=8):
    """Computes a sequence; returns its range, which is open."""
    tokens = list(tokens)
    keys, item = keys_of(kv, tokens), kv.open(len(tokens), hit)
    for position in range(hit.num_tokens if hit else 0, len(tokens), rows):
        end = min(len(tokens), position + rows)
        assert kv.grow(item, end, position)
        kv.commit([item])
        kv.insert_prefix(item, keys, end)
        kv.check_integrity()
    return item


def num_records_cached(kv) -> int:
    return len(kv.records.prefixes.index.pages)


# ---- prefixes


def test_a_hit_needs_both():
    kv = make()
    kv.close(compute(kv, range(70)))
    keys = keys_of(kv, range(70))
    assert kv.num_cached_tokens(keys) == 64, "K/V of 68 tokens, and four records"
    hit = kv.match(keys, 69)
    assert (hit.num_tokens, hit.partition) == (64, 0)
    assert kv.match(keys, 63).num_tokens == 48
    item = kv.open(70, hit)
    assert item.num_offered == 16 + 4, "the next key is that of the 17th page of K/V"
    assert kv.page_end(item.num_offered) == 68
    kv.close(item)
    index = kv.records.prefixes.index
    last = kv._split(keys)[1][3]
    kv.records.prefixes.drop(index.evict_tree(index.page_of(last)))
    assert kv.num_cached_tokens(keys) == 48
    pages = kv.partitions[0].prefixes
    pages.drop(pages.index.evict_tree(pages.index.page_of(kv._split(keys)[0][5])))
    assert kv.num_cached_tokens(keys) == 16, "of the K/V 20 tokens are left"
    kv.check_integrity()


def test_records_are_dropped_with_the_kv_before_them():
    kv = make()
    kv.close(compute(kv, range(70)))
    assert num_records_cached(kv) == 4
    pages = kv.partitions[0].prefixes
    pages.drop(pages.index.evict_tree(pages.index.page_of(kv._split(keys_of(kv, range(70)))[0][9])))
    assert num_records_cached(kv) == 2, "those of 16 and of 32 tokens"
    kv.check_integrity()
    kv.partitions[0].reset(0)
    assert (num_records_cached(kv), kv.records.num_in_use) == (0, 0)
    kv.check_integrity()


def test_a_record_stays_with_kv_in_another_partition():
    kv = make()
    first = compute(kv, range(40))
    kv.avoided = frozenset({0})
    second = compute(kv, range(40))
    assert [kv.partition_of(item) for item in (first, second)] == [0, 1]
    kv.close(first)
    kv.close(second)
    assert num_records_cached(kv) == 2, "both have the same"
    kv.partitions[0].reset(0)
    assert num_records_cached(kv) == 2
    assert kv.match(keys_of(kv, range(40)), 39).partition == 1
    kv.partitions[1].reset(0)
    assert num_records_cached(kv) == 0


def test_a_record_without_kv_is_not_kept():
    kv = make()
    item = compute(kv, range(15))
    pages = kv.partitions[0].prefixes
    keys = keys_of(kv, range(17))
    pages.insert = lambda *args, **more: None  # as if the parent were gone
    assert kv.grow(item, 17, 15)
    kv.commit()
    kv.insert_prefix(item, keys, 17)
    assert num_records_cached(kv) == 0
    kv.check_integrity()


# ---- memory


def test_sequences_are_admitted_by_both():
    kv = make(num_pages=20, num_records=7)
    items = []
    while kv.can_fit(5):
        items.append(kv.open(5))
        assert kv.grow(items[-1], 5)
    assert len(items) == 3, "two records for each"
    for item in items:
        kv.commit([item])
        assert kv.grow(item, 17, 5), "an interval begins in all of them"
    for item in items:
        kv.close(item)
    kv.check_integrity()
    assert not kv.can_fit(81), "21 pages in one partition"
    assert kv.can_fit(80) and kv.fits_alone(80) and not kv.fits_alone(81)
    assert not make(num_records=1).fits_alone(17)
    assert make(num_records=1).fits_alone(16)


def test_a_sequence_that_lacks_a_record_takes_that_of_any_other():
    kv = make(num_records=2)
    one = kv.open(5)
    assert kv.grow(one, 5)
    kv.avoided = frozenset({kv.partition_of(one)})
    other = kv.open(0)
    assert kv.grow(other, 16)
    assert kv.partition_of(one) != kv.partition_of(other)
    assert not kv.shares_memory(one, other)
    kv.commit()
    assert not kv.grow(other, 17, 16)
    assert kv.shares_memory(one, other), "it lacks a record, and not K/V"
    kv.close(one)
    assert kv.grow(other, 17, 16)
    assert not kv.shares_memory(one, other)
    kv.close(other)
    kv.check_integrity()


@pytest.mark.parametrize("num_records", [2, 40])
def test_ranges_are_closed_for_what_is_short(num_records):
    """A sequence of 40 tokens needs 10 pages in one partition and two records."""
    kv = make(num_pages=14, num_records=num_records)
    items = [kv.open(5)]
    kv.grow(items[0], 20 if num_records > 2 else 5)
    kv.avoided = frozenset({kv.partition_of(items[0])})
    items.append(kv.open(5))
    kv.grow(items[1], 5)
    chosen = kv.ranges_to_close(40, items)
    assert chosen == (items if num_records == 2 else [items[1]])
    assert kv.ranges_to_close(60, items) is None
    for item in items:
        kv.close(item)
    assert kv.ranges_to_close(40, []) == []
