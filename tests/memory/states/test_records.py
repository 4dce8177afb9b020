"""Which records of states prefixes need, and which of them survive when memory is short."""

from __future__ import annotations

import random

import pytest

from memory.pages.layer_groups import LayerGroup
from memory.prefix.finder import is_kept
from memory.prefix.index import PrefixHasher
from tests.support.engine.fakes import make_kv
from tests.support.memory.page_store import FakeStore

FULL = LayerGroup(64)
INTERVAL = 16


def record_of(pages: int) -> LayerGroup:
    """Returns the group of records that take so many pages of 256 bytes."""
    return LayerGroup(
        pages * 256 // INTERVAL, INTERVAL, window=2, read_block=INTERVAL, is_state=True
    )


SMALL, LARGE = record_of(1), record_of(3)
BOTH = pytest.mark.parametrize("state", [SMALL, LARGE])


def make(*groups: LayerGroup, num_pages: int = 400, num_ranges: int = 4):
    """Returns the accounting with pages of 256 bytes: 4 tokens of FULL."""
    settings = {"max_model_len": 600, "max_rows": 8, "num_ranges": num_ranges}
    return make_kv(num_pages, groups=groups, **settings)[0]


def keys_of(kv, tokens) -> list[bytes]:
    keys: list[bytes] = []
    PrefixHasher(kv.page_end, b"secret").extend(keys, list(tokens))
    return keys


def compute(kv, tokens, rows: int = 8, close: bool = True, hit=None):
    """Computes a sequence in steps of so many rows; returns its range and its page keys."""
    tokens = list(tokens)
    keys, item = keys_of(kv, tokens), kv.open(len(tokens), hit)
    for position in range(hit.num_tokens if hit else 0, len(tokens), rows):
        end = min(len(tokens), position + rows)
        assert kv.grow(item, end, position)
        kv.commit()
        kv.insert_prefix(item, keys, end)
        kv.check_integrity()
    if close:
        kv.close(item)
    return item, keys


def records(kv, keys) -> list[list[bytes]]:
    """Returns the page keys of each record, in their order."""
    group = kv.layout.groups[-1]
    own, each = list(group.keys_of(keys)), group.slots_for(1)
    return [own[i : i + each] for i in range(0, len(own), each)]


def cached_records(kv, keys) -> list[int]:
    """Returns the numbers of the records, counted from one, all of whose pages are cached."""
    index = kv.prefixes.index
    found = enumerate(records(kv, keys), 1)
    return [number for number, record in found if all(index.has_key(key) for key in record)]


# ---- what a hit needs


@BOTH
def test_a_hit_ends_at_a_record(state):
    kv = make(FULL, state)
    _, keys = compute(kv, range(100))
    found = [kv._finder.num_tokens(keys, most, lambda key: True) for most in range(101)]
    assert found == [most // INTERVAL * INTERVAL for most in range(101)]
    hit = kv.match(keys, 99)
    group = kv.layout.groups[1]
    assert hit.num_tokens == 96
    assert hit.parts[1].first == group.slots_for(96) - group.slots_for(1), "one record"
    assert len(hit.parts[1].shared) == group.slots_for(1) and not hit.parts[1].copied
    assert len(hit.parts[0].shared) == 96 // 4 and not hit.parts[0].copied


@BOTH
@pytest.mark.parametrize("others", [(), (LayerGroup(32, window=24, read_block=8),)])
def test_a_hit_is_the_longest_whose_pages_are_all_there(state, others):
    rng, kv = random.Random(1), make(FULL, *others, state)
    keys = keys_of(kv, range(200))
    full = list(kv.layout.groups[0].keys_of(keys))
    own, found = records(kv, keys), []
    # a window keeps what the rows from a hit on can reach
    window = list(kv.layout.groups[1].keys_of(keys)) if others else []

    def is_there(num_tokens: int, cached: set[bytes]) -> bool:
        needed = [*full[: num_tokens // 4], *own[num_tokens // INTERVAL - 1]]
        if others:
            first = kv.layout.groups[1].first_slot(num_tokens)
            needed += window[first : -(-num_tokens // 8)]
        return cached.issuperset(needed)

    for _ in range(300):
        cached = {key for key in keys if rng.random() < (0.98 if key in full else 0.6)}
        most = rng.randint(0, 200)
        lengths = [n for n in range(INTERVAL, most + 1, INTERVAL) if is_there(n, cached)]
        found.append(kv._finder.num_tokens(keys, most, cached.__contains__))
        assert found[-1] == max(lengths, default=0)
    assert len(set(found)) > 6 and 0 < found.count(0) < 250


@BOTH
def test_kv_beyond_a_record_does_not_count(state):
    kv = make(FULL, state)
    _, keys = compute(kv, range(63))
    assert kv.num_cached_tokens(keys) == 48, "the last 12 tokens have K/V, but no state"
    kv.prefixes.demote(records(kv, keys)[2])
    assert cached_records(kv, keys) == [1, 2, 3]
    for page in [kv.prefixes.index.page_of(key) for key in records(kv, keys)[2]]:
        kv.prefixes.drop(kv.prefixes.index.evict_tree(page))
    assert kv.num_cached_tokens(keys) == 32
    kv.check_integrity()


@BOTH
def test_a_record_is_dropped_with_the_kv_before_it(state):
    kv = make(FULL, state)
    _, keys = compute(kv, range(96))
    index, full = kv.prefixes.index, kv.layout.groups[0].keys_of(keys)
    kv.prefixes.drop(index.evict_tree(index.page_of(full[7])))  # of tokens 28 to 31
    assert cached_records(kv, keys) == [1]
    assert [index.has_key(key) for key in full] == [True] * 7 + [False] * 17
    assert kv.num_cached_tokens(keys) == 16
    kv.check_integrity()


@BOTH
def test_a_record_without_kv_is_not_inserted(state):
    kv = make(FULL, state)
    item, keys = compute(kv, range(32), close=False)
    index, full = kv.prefixes.index, kv.layout.groups[0].keys_of(keys)
    record = records(kv, keys)[1][0]
    page = index.page_of(record)
    kv.prefixes.drop(index.evict_tree(index.page_of(full[4])))
    assert not index.has_key(record)
    kv.prefixes.insert(record, full[7], page)
    assert not index.has_key(record), "its parent is gone"
    kv.close(item)
    kv.check_integrity()


@BOTH
def test_two_sequences_share_a_record_and_write_their_own(state):
    kv = make(FULL, state)
    _, keys = compute(kv, range(40))
    hits = [kv.match(keys, 39) for _ in range(2)]
    assert [hit.num_tokens for hit in hits] == [32, 32]
    pair = [
        compute(kv, [*range(40), *range(tail, tail + 20)], close=False, hit=hit)[0]
        for tail, hit in zip((100, 200), hits, strict=True)
    ]
    held = [set(item.parts[1].held) for item in pair]
    assert not held[0] & held[1]
    for item in pair:
        kv.close(item)
    kv.check_integrity()
    assert kv.num_in_use == 0


@BOTH
def test_a_sequence_holds_two_records_at_most_and_mostly_one(state):
    kv = make(FULL, state)
    each = kv.layout.groups[1].slots_for(1)
    item, num_over = kv.open(600), 0
    for position in range(600):
        assert kv.grow(item, position + 1, position)
        kv.commit()
        assert len(item.parts[1].held) <= 2 * each
        over = len(item.pages) - kv.layout.pages_at(position + 1)
        assert over in (0, each)
        num_over += over > 0
    assert num_over == 600 // INTERVAL * 4, "until the first page of K/V in an interval is full"
    kv.close(item)
    kv.check_integrity()


# ---- what survives


def test_the_newest_record_and_powers_of_two_are_kept():
    group = make(FULL, LARGE).layout.groups[1]
    kept = [number for number in range(1, 20) if is_kept(group, 3 * number - 1, 3 * 19)]
    assert kept == [1, 2, 4, 8, 16, 19]
    assert [is_kept(group, slot, 3 * 7) for slot in range(3 * 4, 3 * 7)] == [False] * 6 + [True] * 3


@BOTH
@pytest.mark.parametrize("rows", [1, 8, 200])
def test_other_records_are_minor_however_the_sequence_was_computed(state, rows):
    kv = make(FULL, state)
    _, keys = compute(kv, range(200), rows)
    index = kv.prefixes.index
    minor = [[index.is_minor(key) for key in record] for record in records(kv, keys)]
    assert all(len(set(each)) == 1 for each in minor), "pages of a record are worth the same"
    assert [not each[0] for each in minor] == [n in (1, 2, 4, 8, 12) for n in range(1, 13)]
    assert not any(index.is_minor(key) for key in kv.layout.groups[0].keys_of(keys))


@BOTH
def test_minor_records_are_evicted_first_then_the_oldest_end_of_a_chain(state):
    kv = make(FULL, state, num_pages=200)
    each = kv.layout.groups[1].slots_for(1)
    _, keys = compute(kv, range(200))
    evicted = kv.prefixes.stats
    while evicted.num_evicted < 7 * each:
        assert kv.num_cached_tokens(keys) == 192
        assert kv.match(keys, 199).num_tokens == 192
        kv.prefixes.evict()
    assert cached_records(kv, keys) == [1, 2, 4, 8, 12]
    assert len(kv.prefixes.index.match(kv.layout.groups[0].keys_of(keys))) == 50, "all K/V"
    # the K/V behind the last record goes next, as a chain is evicted from its end
    kv.prefixes.evict()
    kv.prefixes.evict()
    assert kv.match(keys, 199).num_tokens == 192
    kv.check_integrity()


@BOTH
def test_a_record_that_was_hit_survives_those_that_were_not(state):
    kv = make(FULL, state, num_pages=200)
    each = kv.layout.groups[1].slots_for(1)
    _, keys = compute(kv, range(112))
    hit = kv.match(keys, 90)
    assert hit.num_tokens == 80
    _, longer = compute(kv, [*range(90), *range(500, 540)], hit=hit)
    for _ in range(4 * each):  # the third and sixth of both
        kv.prefixes.evict()
    assert cached_records(kv, keys) == [1, 2, 4, 5, 7]
    assert cached_records(kv, longer) == [1, 2, 4, 5, 8]
    assert kv.match(longer, 90).num_tokens == 80
    kv.check_integrity()


@BOTH
def test_the_newest_record_of_a_sequence_is_worth_less_once_there_is_a_newer_one(state):
    kv = make(FULL, state)
    index, keys, item = kv.prefixes.index, keys_of(kv, range(120)), kv.open(120)
    kept = []
    for end in range(INTERVAL, 113, INTERVAL):
        assert kv.grow(item, end, end - INTERVAL)
        kv.commit()
        kv.insert_prefix(item, keys, end)
        found = enumerate(records(kv, keys)[: end // INTERVAL], 1)
        kept.append([number for number, record in found if not index.is_minor(record[0])])
    assert kept[:4] == [[1], [1, 2], [1, 2, 3], [1, 2, 4]]
    assert kept[4:] == [[1, 2, 4, 5], [1, 2, 4, 6], [1, 2, 4, 7]]
    kv.close(item)


@BOTH
def test_a_newest_record_that_was_hit_is_not_demoted(state):
    kv = make(FULL, state)
    item, keys = compute(kv, range(48), close=False)
    assert kv.match(keys, 48).num_tokens == 48
    longer = keys_of(kv, range(64))
    assert kv.grow(item, 64, 48)
    kv.commit()
    kv.insert_prefix(item, longer, 64)
    assert not any(kv.prefixes.index.is_minor(key) for key in records(kv, longer)[2])
    kv.close(item)


@BOTH
def test_the_record_at_the_end_of_a_turn_outlives_later_ones_that_are_not(state):
    """A closed sequence's newest record counts as used when it is closed, not when it was
    written."""
    kv = make(FULL, state)
    item, keys = compute(kv, range(96), close=False)
    compute(kv, range(1000, 1096))
    kv.close(item)
    nodes, record = kv.prefixes.index._nodes, records(kv, keys)[5]
    used = [nodes[key].used for key in record]
    assert min(used) > max(node.used for key, node in nodes.items() if key not in record)
    assert used == sorted(used, reverse=True), "its last page is evicted first"


def written(kv, store, keys) -> list[int]:
    """Writes what is to be written; returns the numbers of the records that the store has."""
    while kv.prefixes.write_unwritten():
        pass
    found = enumerate(records(kv, keys), 1)
    return [number for number, record in found if any(key in store.pages for key in record)]


def with_store(*groups: LayerGroup):
    kv = make(*groups)
    store = FakeStore(kv._memory)
    kv.prefixes.use_store(store, lambda page: page, lambda: None)
    return kv, store


@BOTH
@pytest.mark.parametrize("rows", [8, 100])
def test_minor_records_are_not_written_to_a_store(state, rows):
    kv, store = with_store(FULL, state)
    _, keys = compute(kv, range(100), rows)
    assert written(kv, store, keys) == [1, 2, 4, 6]
    assert all(key in store.pages for key in kv.layout.groups[0].keys_of(keys))
    assert kv.match(keys, 85).num_tokens == 80
    assert written(kv, store, keys) == [1, 2, 4, 5, 6], "one that was hit is"
    kv.check_integrity()


@BOTH
def test_a_prefix_comes_back_from_a_store_with_its_last_record_alone(state):
    kv, store = with_store(FULL, state)
    _, keys = compute(kv, range(100))
    assert written(kv, store, keys)
    while kv.prefixes.num_evictable:
        kv.prefixes.evict()
    assert kv.num_cached_tokens(keys) == 0
    while kv.fetch(keys):
        kv.prefixes.poll()
    assert kv.match(keys, 99).num_tokens == 96
    assert cached_records(kv, keys) == [6]
    each = kv.layout.groups[1].slots_for(1)
    assert kv.prefixes.stats.num_loaded == 96 // 4 + each
    kv.check_integrity()
