"""A layer group by block keeps the tokens of a sequence's last block, and costs the prefix cache
little."""

from __future__ import annotations

import random

import pytest

from memory.pages.layer_groups import GroupPages, LayerGroup, kept_bytes
from memory.prefix.index import PrefixHasher
from tests.support.engine.fakes import make_kv

FULL = LayerGroup(64)
BLOCK = LayerGroup(128, window=16, read_block=8, by_block=True)
WIDE = LayerGroup(16, window=16, read_block=8, by_block=True)
CROSSING = LayerGroup(48, window=16, read_block=8, by_block=True)


def make(*groups: LayerGroup, num_pages: int = 400):
    """Returns the accounting with pages of 256 bytes: 4 tokens of FULL, 2 of BLOCK, 16 of WIDE."""
    settings = {"max_model_len": 600, "max_rows": 8, "num_ranges": 4}
    return make_kv(num_pages, groups=groups, **settings)[0]


def keys_of(kv, tokens: list[int]) -> list[bytes]:
    keys: list[bytes] = []
    PrefixHasher(kv.page_end, b"secret").extend(keys, tokens)
    return keys


def compute(kv, num_tokens: int, rows: int = 8, close: bool = True):
    """Computes a sequence in steps of so many rows; returns its range and its page keys."""
    keys, item = keys_of(kv, list(range(num_tokens))), kv.open(num_tokens)
    for position in range(0, num_tokens, rows):
        end = min(num_tokens, position + rows)
        assert kv.grow(item, end, position)
        kv.commit()
        kv.insert_prefix(item, keys, end)
        kv.check_integrity()
    if close:
        kv.close(item)
    return item, keys


def test_the_first_slot_that_a_row_reads_is_that_of_its_block():
    pages = GroupPages(BLOCK, 256, 8)
    assert [pages.first_slot(n) for n in (0, 1, 15, 16, 17, 31, 32)] == [0, 0, 0, 8, 8, 8, 16]
    assert pages.max_decode_pages == 16 // 2 + 1
    assert pages.max_pages == (16 - 1 + 8 + 1) // 2 + 1


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("block", [BLOCK, WIDE, CROSSING])
def test_a_sequence_holds_its_last_block_and_what_a_step_adds(block, rows):
    kv = make(FULL, block)
    item = kv.open(600)
    for position in range(0, 600, rows):
        assert kv.grow(item, min(600, position + rows), position)
        kv.commit()
        part = item.parts[1]
        assert part.num_released <= part.group.first_slot(position)
        assert len(part.held) <= part.group.max_pages
        assert len(item.pages) <= kv.pages_for(min(600, position + rows))
        if rows == 1:
            assert len(item.pages) <= kv.layout.pages_at(position + 1)
    kv.close(item)
    assert kv.num_in_use == 0
    kv.check_integrity()


def test_its_bytes_are_not_those_of_a_token():
    assert make(FULL, BLOCK).token_bytes == kept_bytes([FULL, BLOCK]) == 64


@pytest.mark.parametrize("block", [BLOCK, WIDE])
def test_a_hit_at_the_end_of_a_block_needs_no_page_of_the_group(block):
    kv = make(FULL, block)
    _, keys = compute(kv, 96)
    full = set(kv.layout.groups[0].keys_of(keys))
    num_tokens = kv._finder.num_tokens
    assert num_tokens(keys, 95, full.__contains__) == 80
    assert num_tokens(keys, 96, full.__contains__) == 96
    assert num_tokens(keys, 95, lambda key: True) == 95
    hit = kv.match(keys, 80)
    assert (hit.num_tokens, hit.parts[1].shared, hit.parts[1].copied) == (80, [], [])
    item = kv.open(100, hit)
    for position in range(80, 96):
        assert kv.grow(item, position + 1, position)
        kv.commit()
    kv.check_integrity()
    kv.close(item)


@pytest.mark.parametrize("block", [BLOCK, WIDE, CROSSING])
def test_a_hit_is_the_longest_whose_pages_are_all_there(block):
    rng, kv = random.Random(1), make(FULL, block)
    keys, group = keys_of(kv, list(range(100))), kv.layout.groups[1]
    own, shorter = group.keys_of(keys), 0

    def is_there(num_tokens: int, cached: set[bytes]) -> bool:
        first = num_tokens // 16 * 16
        size = group.token_bytes
        # all pages from the one that the block begins in, which is copied as a whole
        slots = range(first * size // 256, -(-num_tokens * size // 256))
        whole = kv.layout.groups[0].keys_of(keys)[: -(-num_tokens // 4)]
        return (
            4 * len(whole) >= num_tokens
            and all(slot < len(own) and own[slot] in cached for slot in slots)
            and cached.issuperset(whole)
        )

    for _ in range(300):
        cached = {key for key in keys if rng.random() < (0.7 if key in own else 0.97)}
        found = kv._finder.num_tokens(keys, 99, cached.__contains__)
        assert found == max(n for n in range(100) if is_there(n, cached))
        shorter += 0 < found < 95
    assert shorter > 40


def test_complete_blocks_are_evicted_before_all_others():
    kv = make(FULL, BLOCK, num_pages=56)
    _, old = compute(kv, 64)  # 16 and 32 pages, of which 24 are of complete blocks
    assert kv.match(old, 63).num_tokens == 63
    item = kv.open(60)
    for position in range(0, 48, 8):
        assert kv.grow(item, position + 8, position)
        kv.commit()
    assert 0 < kv.prefixes.stats.num_evicted <= 24
    assert kv.match(old, 63).num_tokens == 63, "the last block of a closed sequence is not minor"
    assert kv.match(old, 30).num_tokens == 16
    kv.check_integrity()


def test_a_hit_makes_the_pages_of_a_block_as_good_as_others():
    kv = make(FULL, BLOCK)
    _, keys = compute(kv, 64)
    index, own = kv.prefixes.index, kv.layout.groups[1].keys_of(keys)
    assert [index.is_minor(key) for key in own] == [True] * 24 + [False] * 8
    assert kv.match(keys, 23).num_tokens == 23
    assert [index.is_minor(key) for key in own[8:16]] == [False] * 4 + [True] * 4
