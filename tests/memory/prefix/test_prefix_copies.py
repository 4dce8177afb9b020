"""Several sequences hold copies of the same page, of which the prefix cache indexes one."""

from __future__ import annotations

import random

import pytest

from memory.prefix.index import PrefixHasher
from tests.support.engine.fakes import make_kv
from tests.support.memory.page_store import FakeStore

TOKENS = list(range(80))  # 20 pages


class Copies:
    def __init__(self, plan=lambda kind, key: None) -> None:
        self.kv, memory = make_kv(num_pages=40, max_model_len=120)
        self.store = FakeStore(memory, plan)
        self.prefixes = self.kv.prefixes
        self.prefixes.use_store(self.store, lambda page: page, lambda: None, lambda: 0.0)
        self.keys: list[bytes] = []
        PrefixHasher(self.kv.page_end, b"secret").extend(self.keys, TOKENS)

    def compute(self, item, num_tokens: int) -> None:
        assert self.kv.grow(item, num_tokens)
        self.kv.commit()
        self.kv.insert_prefix(item, self.keys, num_tokens)
        self.kv.check_integrity()

    def open(self, num_tokens: int):
        item = self.kv.open(80)
        self.compute(item, num_tokens)
        return item

    def num_hit(self) -> int:
        hit = self.kv.match(self.keys, 79)
        return hit.num_tokens if hit else 0

    def evict_all(self) -> None:
        while self.prefixes.num_evictable:
            self.prefixes.evict()
            self.kv.check_integrity()


def test_a_copied_page_replaces_its_source():
    """A prompt is repeated exactly and ends at a page boundary."""
    rig = Copies()
    rig.kv.close(rig.open(16))
    item = rig.kv.open(80, rig.kv.match(rig.keys[:4], 15))
    rig.kv.commit()
    rig.compute(item, 40)
    assert len(rig.prefixes.index) == 10 and rig.kv.num_in_use == 10
    assert rig.prefixes.num_evictable == 0, "every cached page is in use"
    rig.compute(item, 80)
    rig.kv.close(item)
    assert rig.num_hit() == 79


def test_pages_of_a_closed_sequence_are_replaced():
    """Two sequences compute the same beginning at once, and the one with the cached pages ends."""
    rig = Copies()
    first, second = rig.open(16), rig.open(16)
    assert [rig.prefixes.index.page_of(key) for key in rig.keys[:4]] == first.pages
    rig.compute(second, 24)
    rig.kv.close(first)
    assert rig.prefixes.num_evictable == 4
    rig.compute(second, 40)
    assert rig.prefixes.num_evictable == 0
    assert [rig.prefixes.index.page_of(key) for key in rig.keys[:10]] == second.pages
    rig.kv.close(second)
    assert rig.num_hit() == 40


def test_pages_of_a_running_sequence_are_inserted_again_after_eviction():
    rig = Copies()
    first, second = rig.open(16), rig.open(16)
    rig.compute(second, 40)
    rig.kv.close(first)
    rig.evict_all()
    assert len(rig.prefixes.index) == 0 and len(second.pages) == 10
    rig.compute(second, 43)
    assert len(rig.prefixes.index) == 0, "pages are inserted with the next full page"
    rig.compute(second, 80)
    rig.kv.close(second)
    assert rig.num_hit() == 79
    while rig.prefixes.write_unwritten():
        pass
    assert set(rig.store.pages) == set(rig.keys)


@pytest.mark.parametrize("works", [True, False])
def test_a_page_that_is_being_written_is_replaced(works):
    rig = Copies(lambda kind, key: "hold" if kind == "store" else None)
    first, second = rig.open(16), rig.open(16)
    rig.kv.close(first)
    rig.prefixes.write_unwritten()
    assert rig.store.num_held == 4 and rig.kv.num_in_use == 8
    rig.compute(second, 20)
    assert [rig.prefixes.index.page_of(key) for key in rig.keys[:5]] == second.pages
    rig.store.plan = lambda kind, key: None
    if works:
        rig.store.release()
    else:
        for *_, future, _ in rig.store._held:
            future.set_result(False)
    rig.prefixes.poll()
    rig.kv.check_integrity()
    assert rig.kv.num_in_use == 5, "the pages of the writes are free"
    assert len(rig.prefixes._unwritten) == (1 if works else 5)


def test_a_page_without_a_cached_parent_is_not_inserted():
    rig = Copies()
    item = rig.kv.open(4)
    assert rig.kv.grow(item, 4)
    rig.kv.commit()
    rig.prefixes.insert(rig.keys[1], rig.keys[0], item.pages[0])
    rig.kv.check_integrity()
    rig.kv.close(item)
    assert rig.kv.allocator.num_free == 40


def test_copies_under_random_operations():
    """A sequence that ends leaves all its full pages in the prefix cache."""
    rng = random.Random(3)
    rig = Copies()
    running: list[list] = []
    for _ in range(3000):
        operation = rng.random()
        if operation < 0.3 and len(running) < 3:
            hit = rig.kv.match(rig.keys[: rng.randint(0, 10)], rng.randint(0, 40))
            if rig.kv.can_fit(80, hit=hit):
                item = rig.kv.open(80, hit)
                rig.kv.commit()
                running.append([item, hit.num_tokens if hit else 0])
        elif operation < 0.8 and running:
            entry = rng.choice(running)
            num_tokens = min(80, entry[1] + rng.randint(1, 12))
            if rig.kv.grow(entry[0], num_tokens):
                rig.compute(entry[0], num_tokens)
                if num_tokens // 4 > entry[1] // 4:
                    cached = rig.prefixes.index.match(rig.keys[: num_tokens // 4])
                    assert len(cached) == num_tokens // 4
                entry[1] = num_tokens
        elif operation < 0.9 and running:
            rig.kv.close(running.pop(rng.randrange(len(running)))[0])
        elif rig.prefixes.num_evictable:
            rig.prefixes.evict()
        rig.prefixes.poll()
        rig.kv.check_integrity()
    for item, _ in running:
        rig.kv.close(item)
    rig.kv.close_all()
    assert rig.kv.allocator.num_free == 40
