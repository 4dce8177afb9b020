"""Random operations on a K/V manager whose page store fails, raises, is slow and hangs."""

from __future__ import annotations

import random

import pytest

from memory.pages.layer_groups import LayerGroup
from tests.support.memory.kv_model import KVModel
from tests.support.memory.page_store import Clock, FakeStore


class StoreModel(KVModel):
    """Sequences whose pages are written to and loaded from a store that fails, raises, is slow
    or hangs."""

    def __init__(self, rng: random.Random, **settings) -> None:
        super().__init__(**settings)
        self.store = FakeStore(self.memory, lambda kind, key: self.fate(kind))
        self.clock = Clock()
        self.rng = rng
        self.fates: list[str | None] = [None]
        self.kv.prefixes.use_store(self.store, lambda page: page, lambda: None, self.clock)

    def fate(self, kind: str) -> str | None:
        return None if kind == "close" else self.rng.choice(self.fates)

    def fetch(self, tokens: list[int], salt: str) -> None:
        keys: list[bytes] = []
        self.hasher.extend(keys, tokens, salt)
        self.kv.fetch(keys)
        self.kv.prefixes.poll()

    def run_random_operation(self) -> None:
        operation = self.rng.random()
        if operation < 0.25:
            prompt = [(i * i * self.rng.randint(1, 3)) % 3 for i in range(self.rng.randint(4, 40))]
            salt = self.rng.choice("ab")
            self.fetch(prompt, salt)
            self.open(prompt, salt)
        elif operation < 0.7 and self.running:
            self.advance(self.rng.choice(self.running), self.rng.choice([1, 2, 8, 40]))
        elif operation < 0.85 and self.running:
            self.close(self.rng.choice(self.running))
        elif operation < 0.9:
            self.store.release(self.rng.randint(1, 5))
        elif operation < 0.95:
            self.kv.prefixes.write_unwritten()
        else:
            self.clock.now_s += self.rng.choice([0.1, 1.0, 12.0])
        self.kv.prefixes.poll()


WINDOW = LayerGroup(32, window=6, read_block=2)
BLOCK = LayerGroup(64, window=8, read_block=4, by_block=True)
STATE = LayerGroup(64, 8, window=2, read_block=8, is_state=True)
LAYOUTS = [
    {"num_pages": 16},
    {"num_pages": 16, "tile_tokens": 4, "page_bytes": 64 * 6},
    {"num_pages": 30, "max_rows": 8, "groups": (LayerGroup(64), WINDOW)},
    {"num_pages": 16, "max_rows": 8, "groups": (WINDOW,)},
    {"num_pages": 40, "max_rows": 8, "groups": (LayerGroup(64), BLOCK)},
    {"num_pages": 30, "max_rows": 8, "groups": (LayerGroup(64), STATE)},
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_10_000_random_operations(layout):
    rng = random.Random(11)
    model = StoreModel(rng, **layout)
    for number in range(10_000):
        if number % 50 == 0:
            usual = [None] * 6
            model.fates = [*usual, *rng.choice([["hold"] * 3, ["fail"], ["raise"], [], ["hold"]])]
        model.run_random_operation()
        if number % 10 == 0:
            model.check()
    stats = model.kv.prefixes.stats
    assert stats.num_loaded > 300 and stats.num_stored > 300
    assert stats.num_lost > 10 and stats.num_failed > 10
    model.fates = [None]
    while model.kv.prefixes.is_transferring:
        model.store.release()
        model.kv.prefixes.poll()
    model.finish()
    assert model.kv.allocator.num_free == layout["num_pages"]
