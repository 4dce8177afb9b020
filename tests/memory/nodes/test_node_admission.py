"""Admission counts the mappings and pages that are due at the next commit."""

from __future__ import annotations

import pytest

from memory.prefix.index import PrefixHasher
from tests.support.engine.fakes import check_mapping, make_kv


def side_by_side(kv, num_tokens: int) -> list[bytes]:
    """Two sequences grow in turn, so that no two pages of either are neighbours. Returns the
    page keys of the first."""
    items = [kv.open(num_tokens) for _ in range(2)]
    for length in range(4, num_tokens + 1, 4):
        for item in items:
            assert kv.grow(item, length)
    kv.commit()
    keys: list[bytes] = []
    PrefixHasher(kv.page_end, b"secret").extend(keys, list(range(num_tokens)))
    kv.insert_prefix(items[0], keys, num_tokens)
    for item in items:
        kv.close(item)
    return keys


def admit(kv, keys: list[bytes], num_tokens: int):
    """Opens a sequence with a prefix hit that ends at a page boundary, or returns None."""
    hit = kv.match(keys, num_tokens)
    assert hit.num_tokens == num_tokens
    return kv.open(num_tokens + 1, hit) if kv.can_fit(num_tokens + 1, hit=hit) else None


def test_mappings_of_all_sequences_admitted_in_one_step_count():
    kv, memory = make_kv(num_pages=400, num_ranges=20, max_model_len=400)
    keys = side_by_side(kv, 200)
    kv.space.max_mappings = 220
    items = []
    while (item := admit(kv, keys, 200)) is not None:
        items.append(item)
    assert len(items) == 3, "each needs 50 mappings beside the existing ones"
    kv.commit()
    while (item := admit(kv, keys, 200)) is not None:
        items.append(item)
        kv.commit()
    assert len(items) == 4 and kv.space.num_mappings == 200
    kv.close(items.pop())
    assert admit(kv, keys, 200) is not None, "mappings of a closed sequence are free"
    kv.commit()
    check_mapping(kv, memory)
    kv.check_integrity()


def test_stale_mappings_are_removed_before_new_ones_are_made(monkeypatch):
    kv, memory = make_kv(num_pages=400, num_ranges=20, max_model_len=400)
    contiguous = [kv.open(204) for _ in range(2)]
    for item in contiguous:
        assert kv.grow(item, 204)
    kv.commit()
    keys = side_by_side(kv, 400)
    for item in contiguous:
        kv.close(item)
    assert kv.space.num_mappings == 202
    kv.space.max_mappings = 260
    counts = []
    map_pages = kv.space.map

    def counting(*args):
        map_pages(*args)
        counts.append(kv.space.num_mappings)

    monkeypatch.setattr(kv.space, "map", counting)
    for _ in range(3):
        assert admit(kv, keys[:50], 200) is not None
    kv.commit()
    assert len(counts) == 3 and max(counts) <= 260
    check_mapping(kv, memory)
    kv.check_integrity()


@pytest.mark.parametrize("num_pages", [6, 7])
def test_a_promised_prompt_whose_last_page_is_copied_can_grow(num_pages):
    """The source of the copy is needed until it is made, so a prompt of six pages needs seven."""
    kv, memory = make_kv(num_pages=num_pages, num_ranges=4, max_model_len=24)
    keys: list[bytes] = []
    PrefixHasher(kv.page_end, b"secret").extend(keys, list(range(16)))
    item = kv.open(16)
    assert kv.grow(item, 16)
    kv.commit()
    kv.insert_prefix(item, keys, 16)
    kv.close(item)
    hit = kv.match(keys, 15)
    assert [len(hit.parts[0].shared), len(hit.parts[0].copied)] == [3, 1]
    assert kv.can_fit(24, hit=hit) == (num_pages == 7)
    if num_pages == 7:
        item = kv.open(24, hit)
        assert kv.grow(item, 24), "before the copy is made"
        kv.commit()
        check_mapping(kv, memory)
    kv.check_integrity()
