"""Who is let in: what is due at the next commit counts, in mappings and pages."""

from __future__ import annotations

import pytest

from memory.prefix.index import PrefixHasher
from tests.support.engine.fakes import check_mapping, make_kv


def side_by_side(kv, num_tokens: int) -> list[bytes]:
    """Two sequences grow beside each other, so that no two pages of one are neighbours; the keys
    of the first."""
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
    """Opened with a hit that ends with a page, or None."""
    hit = kv.match(keys, num_tokens)
    assert hit.num_tokens == num_tokens
    return kv.open(num_tokens + 1, hit) if kv.can_fit(num_tokens + 1, hit=hit) else None


def test_mappings_of_all_that_are_admitted_in_one_step_count():
    kv, memory = make_kv(num_pages=400, num_ranges=20, max_model_len=400)
    keys = side_by_side(kv, 200)
    kv.space.max_mappings = 220
    items = []
    while (item := admit(kv, keys, 200)) is not None:
        items.append(item)
    assert len(items) == 3, "50 mappings each, and those that were there"
    kv.commit()
    while (item := admit(kv, keys, 200)) is not None:
        items.append(item)
        kv.commit()
    assert len(items) == 4 and kv.space.num_mappings == 200
    kv.close(items.pop())
    assert admit(kv, keys, 200) is not None, "those of a closed one can be had"
    kv.commit()
    check_mapping(kv, memory)
    kv.check_integrity()


def test_stale_mappings_go_before_others_come(monkeypatch):
    kv, memory = make_kv(num_pages=400, num_ranges=20, max_model_len=400)
    smooth = [kv.open(204) for _ in range(2)]
    for item in smooth:
        assert kv.grow(item, 204)
    kv.commit()
    keys = side_by_side(kv, 400)
    for item in smooth:
        kv.close(item)
    assert kv.space.num_mappings == 202
    kv.space.max_mappings = 260
    counts = []
    show = kv.space.map

    def counting(*args):
        show(*args)
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
    """Until the copy is made its source is needed too: seven pages for a prompt of six."""
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
