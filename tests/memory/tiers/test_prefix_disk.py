"""The prefix cache works over a real disk tier that is smaller than what is written to it."""

from __future__ import annotations

import time

import pytest

from memory.kv_manager import KVManager
from memory.pages.linux_vmm import LinuxMemory
from memory.prefix.index import PrefixHasher
from memory.tiers.disk_tier import DiskTier

PAGE = 4096
TOKENS = 4  # tokens per page


class Rig:
    def __init__(self, folder, disk_pages):
        self.memory = LinuxMemory(PAGE, 32)
        self.kv = KVManager(
            self.memory,
            num_pages=32,
            num_ranges=2,
            max_model_len=128,
            token_bytes=PAGE // TOKENS,
            in_background=False,
        )
        self.memory.reserve(self.kv.total_bytes)
        self.store = DiskTier(folder, PAGE, disk_pages * PAGE, b"test")
        self.kv.prefixes.use_store(self.store, self.memory.page_address, self.memory.keep_pages)
        self.hasher = PrefixHasher(self.kv.page_end, b"test")

    def keys(self, tokens):
        keys = []
        self.hasher.extend(keys, tokens)
        return keys

    def compute(self, tokens):
        """Computes a sequence and writes its pages to the disk as far as that has room."""
        item = self.kv.open(len(tokens))
        assert self.kv.grow(item, len(tokens))
        self.kv.commit()
        self.kv.insert_prefix(item, self.keys(tokens), len(tokens))
        self.kv.close(item)
        for _ in range(1000):
            if not self.kv.prefixes.write_unwritten():
                return
            time.sleep(0.001)
        raise AssertionError("it writes for ever")

    def evict_from_memory(self):
        while self.kv.num_cached:
            self.kv.prefixes.evict()

    def fetch(self, tokens):
        """Returns the number of pages that are loaded."""
        keys = self.keys(tokens)
        self.kv.fetch(keys)
        while self.kv.prefixes.is_fetching:
            self.kv.prefixes.wait(1.0)
            self.kv.prefixes.poll()
        return self.kv.num_cached_tokens(keys) // TOKENS

    def close(self):
        self.kv.close_all()
        self.memory.close()


@pytest.fixture
def rig(tmp_path):
    made = Rig(tmp_path / "disk", disk_pages=10)
    yield made
    made.close()


def test_the_beginning_of_a_prompt_larger_than_the_disk_is_kept(rig):
    tokens = list(range(17 * TOKENS))
    rig.compute(tokens)
    stored = rig.store.stats().stores
    assert stored == 10, "only pages that fit are written"
    rig.evict_from_memory()
    assert rig.fetch(tokens) == 10


def test_the_disk_evicts_the_end_of_the_oldest_prompt_first(rig):
    first, second = ([base + i for i in range(6 * TOKENS)] for base in (0, 1000))
    rig.compute(first)
    rig.compute(second)
    rig.evict_from_memory()
    assert rig.fetch(second) == 6
    rig.evict_from_memory()
    assert rig.fetch(first) == 4


def test_loaded_pages_are_evicted_from_their_end(rig):
    first, second, third = ([base + i for i in range(4 * TOKENS)] for base in (0, 1000, 2000))
    rig.compute(first)
    rig.compute(second)
    rig.evict_from_memory()
    assert rig.fetch(first) == 4, "the first prompt is used after the second"
    rig.compute(third)
    rig.evict_from_memory()
    assert rig.fetch(first) == 4
    rig.evict_from_memory()
    assert rig.fetch(second) == 2
