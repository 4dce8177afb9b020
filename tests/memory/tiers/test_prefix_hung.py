"""While a disk hangs, no sequence computes with another one's pages or waits for long."""

from __future__ import annotations

import ctypes
import time

import pytest

from memory.kv_manager import KVManager
from memory.pages.linux_vmm import LinuxMemory
from memory.prefix.index import PrefixHasher
from tests.support.engine.fakes import make_kv
from tests.support.memory.disk_pages import open_store
from tests.support.memory.faulty_storage import faulty
from tests.support.memory.page_store import FakeStore

pytestmark = pytest.mark.timing

PAGE_BYTES = 4096


def fill(kv, memory, pages, value):
    """Fills page i with value + i."""
    for number, page in enumerate(pages):
        ctypes.memset(memory.page_address(page), value + number, PAGE_BYTES)


def compute(kv, memory, keys, hit=None):
    """A sequence fills the pages of these keys, page i with 10 + i, and leaves them to the prefix
    cache. The pages of the hit come first and are filled already."""
    num_tokens = 4 * len(keys)
    num_hit = hit.num_tokens // 4 if hit else 0
    item = kv.open(num_tokens, hit)
    assert kv.grow(item, num_tokens)
    kv.commit()
    fill(kv, memory, item.pages[num_hit:], 10 + num_hit)
    kv.insert_prefix(item, keys, num_tokens)
    kv.close(item)


def new_owners(kv, memory):
    """Opens sequences that take 26 of the 32 pages, and fills them with another value."""
    owners = [kv.open(64), kv.open(40)]
    for owner, num_tokens in zip(owners, (64, 40), strict=True):
        assert kv.grow(owner, num_tokens)
        fill(kv, memory, owner.pages, 99)
    kv.commit()
    return owners


def test_an_abandoned_write_is_never_loaded(tmp_path):
    """Pages A and B are on the disk and the write of C hangs. A load of C waits behind it, and
    the page that is being written gets a new owner."""
    is_hung = [False]
    opener, opened = faulty(lambda kind, n: "hold" if kind == "write" and is_hung[0] else None)
    now = [0.0]
    memory = LinuxMemory(PAGE_BYTES, 32)
    kv = KVManager(
        memory,
        num_pages=32,
        num_ranges=4,
        max_model_len=64,
        token_bytes=1024,
        in_background=False,
    )
    memory.reserve(kv.total_bytes)
    store = open_store(tmp_path, slots=100, page=PAGE_BYTES, open_file=opener)
    kv.prefixes.use_store(store, memory.page_address, memory.keep_pages, lambda: now[0])
    keys: list[bytes] = []
    PrefixHasher(kv.page_end, b"secret").extend(keys, list(range(12)))

    compute(kv, memory, keys[:2])
    while kv.prefixes.write_unwritten():
        kv.prefixes.wait(0.1)
    is_hung[0] = True
    compute(kv, memory, keys, kv.match(keys[:2], 8))
    assert kv.prefixes.write_unwritten()
    while kv.prefixes.num_evictable:
        kv.prefixes.evict()
    assert not kv.prefixes.index.has_key(keys[2]), "it is evicted with its parent"
    assert kv.fetch(keys), "the store reports C as in flight"
    now[0] += 11
    kv.prefixes.poll()
    owners = new_owners(kv, memory)
    is_hung[0] = False
    opened[0].release()
    for owner in owners:
        kv.close(owner)
    until = time.monotonic() + 10
    while kv.prefixes.is_transferring and time.monotonic() < until:
        kv.prefixes.wait(0.1)
        kv.prefixes.poll()
    assert [kv.prefixes.index.has_key(key) for key in keys] == [True, True, False]
    for number, key in enumerate(keys[:2]):
        address = memory.page_address(kv.prefixes.index.page_of(key))
        assert ctypes.string_at(address, PAGE_BYTES) == bytes([10 + number]) * PAGE_BYTES
    kv.check_integrity()
    kv.close_all()
    memory.close()


class Hung:
    """A pool with a context of 16 pages and a disk that hangs from now on. The pool is full of
    unwritten pages while older ones are being loaded."""

    def __init__(self, num_pages: int) -> None:
        self.kv, memory = make_kv(num_pages=num_pages, num_ranges=num_pages, max_model_len=64)
        self.now_s = 0.0
        self.store = FakeStore(memory)
        self.kv.prefixes.use_store(self.store, lambda page: page, lambda: None, lambda: self.now_s)
        self.hasher = PrefixHasher(self.kv.page_end, b"secret")
        old = self.compute(0, 15)
        while self.kv.prefixes.write_unwritten():
            pass
        while self.kv.prefixes.num_evictable:
            self.kv.prefixes.evict()
        self.store.plan = lambda kind, key: "hold" if kind != "contains" else None
        self.compute(1, 15)
        self.compute(2, num_pages - 15)
        assert self.kv.fetch(old)
        self.kv.prefixes.poll()
        self.num_loads = len(self.kv.prefixes._loads)
        self.num_writes = len(self.kv.prefixes._writes)

    def compute(self, token: int, num_pages: int) -> list[bytes]:
        keys: list[bytes] = []
        self.hasher.extend(keys, [token] * 4 * num_pages)
        item = self.kv.open(4 * num_pages)
        assert self.kv.grow(item, 4 * num_pages)
        self.kv.commit()
        self.kv.insert_prefix(item, keys, 4 * num_pages)
        self.kv.close(item)
        return keys


def test_the_longest_request_fits_beside_a_hung_disk():
    """It fits from one and a quarter contexts on, as a load keeps its pages and a write for 10 s
    only."""
    hung = Hung(20)
    assert (hung.num_loads, hung.num_writes) == (4, 2)
    assert not hung.kv.can_fit(64), "the writes may still end"
    hung.now_s += 11
    hung.kv.prefixes.poll()
    assert hung.kv.prefixes.is_fetching and hung.kv.can_fit(64)
    item = hung.kv.open(64)
    assert hung.kv.grow(item, 64)
    hung.kv.commit()
    hung.kv.check_integrity()


def test_a_pool_of_one_context_loads_fewer_pages_at_once():
    hung = Hung(16)
    assert hung.num_loads == 2
    hung.now_s += 11
    hung.kv.prefixes.poll()
    assert hung.kv.can_fit(64 - 2 * 4)
