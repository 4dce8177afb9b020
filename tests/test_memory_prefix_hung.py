"""A disk that does not answer: nobody computes with another's pages or waits for long."""

from __future__ import annotations

import ctypes
import time

from memory.kv_manager import KVManager
from memory.prefix_index import PrefixHasher
from memory.vmm import LinuxMemory
from tests.faulty_storage import faulty
from tests.spilling import open_store

PAGE_BYTES = 4096


def fill(kv, memory, pages, value):
    """Page i repeats value + i."""
    for number, page in enumerate(pages):
        ctypes.memset(memory.page_address(page), value + number, PAGE_BYTES)


def test_nothing_comes_back_from_a_write_that_was_given_up(tmp_path):
    """Pages A and B are on the disk, the write of C hangs, C is to be loaded behind it, and the
    page that is written becomes somebody else's."""
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

    item = kv.open(8)
    assert kv.grow(item, 8)
    kv.commit()
    fill(kv, memory, item.pages, 10)
    kv.remember(item, keys[:2], 8)
    kv.close(item)
    while kv.prefixes.write_some():
        kv.prefixes.wait(0.1)
    is_hung[0] = True
    item = kv.open(12, kv.match(keys[:2], 8))
    assert kv.grow(item, 12)
    kv.commit()
    fill(kv, memory, item.pages[2:], 12)
    kv.remember(item, keys, 12)
    kv.close(item)
    assert kv.prefixes.write_some()
    while kv.prefixes.num_evictable:
        kv.prefixes.evict()
    assert not kv.prefixes.index.has_key(keys[2]), "it went with what it continues"
    assert kv.fetch(keys), "C too: the store says that it is on its way"
    now[0] += 11
    kv.prefixes.poll()
    others = [kv.open(64), kv.open(40)]
    for other, num_tokens in zip(others, (64, 40), strict=True):
        assert kv.grow(other, num_tokens)
        fill(kv, memory, other.pages, 99)
    kv.commit()
    is_hung[0] = False
    opened[0].let_go()
    for other in others:
        kv.close(other)
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
