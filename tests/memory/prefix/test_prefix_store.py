"""The prefix cache writes pages to its store and loads them, whatever the store does."""

from __future__ import annotations

import ctypes
import threading
import time

import pytest

from memory.pages.linux_vmm import LinuxMemory
from memory.prefix.index import PrefixHasher
from tests.support.engine.fakes import make_kv
from tests.support.memory.page_store import Clock, FakeStore

TOKENS = list(range(100, 140))  # ten pages


def chain(keys: list[bytes]) -> list[tuple[bytes, bytes | None]]:
    """Returns each key with its parent."""
    return list(zip(keys, [None, *keys[:-1]], strict=True))


class Rig:
    """A KV manager with a store, and sequences that are computed and closed at once."""

    def __init__(self, num_pages: int = 32, plan=lambda kind, key: None) -> None:
        self.kv, self.memory = make_kv(num_pages=num_pages, max_model_len=64)
        self.store = FakeStore(self.memory, plan)
        self.clock = Clock()
        self.num_kept = 0
        self.prefixes = self.kv.prefixes
        self.use_store()
        self.hasher = PrefixHasher(self.kv.page_end, b"secret")

    def use_store(self) -> None:
        self.prefixes.use_store(self.store, lambda page: page, self.keep, self.clock)

    def keep(self) -> None:
        self.num_kept += 1

    def keys(self, tokens: list[int]) -> list[bytes]:
        keys: list[bytes] = []
        self.hasher.extend(keys, tokens)
        return keys

    def compute(self, tokens: list[int] = TOKENS) -> list[bytes]:
        """Computes and closes a sequence, so that only the prefix cache has its pages. Returns
        its page keys."""
        keys = self.keys(tokens)
        item = self.kv.open(len(tokens))
        assert self.kv.grow(item, len(tokens))
        self.kv.commit()
        for page, key in zip(item.pages, keys, strict=True):
            self.memory.content[page] = {0: hash(key)}
        self.kv.insert_prefix(item, keys, len(tokens))
        self.kv.close(item)
        return keys

    def evict_all(self) -> None:
        while self.prefixes.num_evictable:
            self.prefixes.evict()

    def fetch(self, keys: list[bytes], num_spare: int = 1000) -> int:
        """Fetches a chain and returns how many of its pages are in memory."""
        self.prefixes.fetch(chain(keys), num_spare)
        for _ in range(100):
            self.store.release()
            self.prefixes.poll()
        self.kv.check_integrity()
        pages = self.prefixes.index.match(keys)
        for page, key in zip(pages, keys, strict=False):
            assert self.memory.content[page] == {0: hash(key)}
        return len(pages)


def test_pages_that_could_not_be_written_are_written_later():
    broken = [True]
    rig = Rig(plan=lambda kind, key: "fail" if kind == "store" and broken[0] else None)
    rig.compute()
    calls = []
    for _ in range(1000):  # steps of a busy second
        rig.clock.now_s += 0.001
        before = rig.prefixes.stats.num_failed
        rig.prefixes.write_unwritten()
        calls.append(rig.prefixes.stats.num_failed > before)
        rig.kv.check_integrity()
    assert sum(calls) <= 4, "a disk that fails is not asked at every step"
    broken[0] = False
    rig.clock.now_s += 5
    for _ in range(4):
        is_writing = rig.prefixes.write_unwritten()
    assert not is_writing
    assert rig.prefixes.stats.num_stored == 10 and len(rig.store.pages) == 10
    assert rig.prefixes.stats.num_failed >= 3


def test_one_bad_page_does_not_stop_the_others():
    bad = Rig().keys(TOKENS)[0]
    rig = Rig(plan=lambda kind, key: "fail" if (kind, key) == ("store", bad) else None)
    rig.compute()
    for _ in range(10):
        rig.clock.now_s += 100
        rig.prefixes.write_unwritten()
    assert len(rig.store.pages) == 9 and bad not in rig.store.pages


def test_idle_steps_stop_writing_to_a_dead_disk():
    rig = Rig(plan=lambda kind, key: "fail" if kind == "store" else None)
    rig.compute()
    for attempt in range(10_000):  # noqa: B007
        rig.clock.now_s += 0.05
        if not rig.prefixes.write_unwritten():
            break
    assert rig.clock.now_s < 120 and rig.prefixes.stats.num_failed < 200
    assert attempt > 100, "the first error does not stop it"


def test_a_page_evicted_meanwhile_is_not_written_again():
    rig = Rig(plan=lambda kind, key: "hold" if kind == "store" else None)
    keys = rig.compute()
    rig.prefixes.write_unwritten()  # the first four pages, which are an eighth of 32
    assert rig.store.num_held == 4
    tree = rig.prefixes.index.evict_tree(rig.prefixes.index.match(keys)[0])
    rig.prefixes.drop(tree)
    rig.store.plan = lambda kind, key: "fail"
    rig.store._held = [(*t[:3], t[3], None) for t in rig.store._held]
    for *_, future, _ in rig.store._held:
        future.set_result(False)
    rig.prefixes.poll()
    rig.kv.check_integrity()
    assert rig.kv.num_in_use == 0 and rig.kv.allocator.num_free == 32


@pytest.mark.parametrize("kind", ["store", "contains"])
def test_a_store_that_raises_when_writing(kind):
    broken = [True]
    rig = Rig(plan=lambda k, key: "raise" if k == kind and broken[0] else None)
    rig.compute()
    rig.prefixes.write_unwritten()
    rig.kv.check_integrity()
    assert rig.prefixes.stats.num_failed > 0 and rig.kv.num_in_use == 0
    broken[0] = False
    for _ in range(5):
        rig.clock.now_s += 10
        rig.prefixes.write_unwritten()
    assert rig.prefixes.stats.num_stored == 10
    rig.prefixes.close()
    assert rig.kv.allocator.num_free == 32 and not rig.num_kept


@pytest.mark.parametrize("kind", ["load", "contains"])
def test_a_store_that_raises_when_reading(kind):
    rig = Rig()
    keys = rig.compute()
    rig.prefixes.close()
    rig.use_store()
    head = rig.compute(TOKENS[:8])
    rig.store.plan = lambda k, key: "raise" if k == kind else None
    assert rig.fetch(keys) == 2 and keys[:2] == head
    assert rig.prefixes.stats.num_lost > 0 and not rig.prefixes.is_fetching
    rig.store.plan = lambda k, key: None
    assert rig.fetch(keys) == 10


def test_futures_that_raise_count_as_failures():
    rig = Rig(plan=lambda kind, key: "hold")
    rig.compute()
    rig.prefixes.write_unwritten()
    *_, future, _ = rig.store._held.pop()
    future.set_exception(OSError("no"))
    rig.store._held[0][3].cancel()
    rig.store._held.pop(0)
    rig.store.release()
    rig.prefixes.poll()
    assert rig.prefixes.stats.num_failed == 2
    rig.kv.check_integrity()


def test_batches_fit_the_room_of_the_store():
    rig = Rig()
    keys = rig.compute()
    rig.prefixes.close()
    rig.use_store()
    rig.store.room = rig.store.largest_batch = 3
    assert rig.fetch(keys) == 10
    stats = rig.prefixes.stats
    assert (stats.num_loaded, stats.num_lost, rig.store.largest_batch) == (10, 0, 3)


def test_a_fetch_leaves_pages_for_sequences():
    rig = Rig()
    keys = rig.compute()
    rig.prefixes.close()
    rig.use_store()
    rig.store.plan = lambda kind, key: "hold"
    rig.prefixes.fetch(chain(keys), 1000)
    assert rig.store.num_held == 8, "a quarter of the pages at once, in case the disk hangs"
    assert rig.fetch(keys) == 10
    rig.evict_all()
    assert rig.fetch(keys, num_spare=5) == 5, "no more pages than the spare ones"


def test_pages_computed_during_a_fetch_are_kept():
    rig = Rig()
    keys = rig.compute()
    rig.prefixes.close()
    rig.use_store()
    rig.store.plan = lambda kind, key: "hold"
    rig.prefixes.fetch(chain(keys), 1000)
    assert rig.compute(TOKENS[:32]) == keys[:8]
    rig.store.plan = lambda kind, key: None
    *_, future, _ = rig.store._held.pop()
    future.set_result(False)
    rig.store.release()
    rig.prefixes.poll()
    rig.prefixes.poll()
    rig.kv.check_integrity()
    assert len(rig.prefixes.index.match(keys)) == 10, "the rest is loaded too"
    assert (rig.prefixes.stats.num_loaded, rig.prefixes.stats.num_lost) == (2, 0)


def test_the_parent_of_a_fetch_is_evicted_last():
    """A loaded page is of use only while its parent is in the prefix cache."""
    rig = Rig()
    keys = rig.compute()
    rig.prefixes.close()
    rig.use_store()
    rig.compute(TOKENS[:8])
    rig.compute([7] * 8)
    rig.store.plan = lambda kind, key: "hold" if kind == "load" else None
    rig.prefixes.fetch(chain(keys), 4)
    rig.prefixes.evict()
    rig.prefixes.evict()
    rig.store.release()
    rig.prefixes.poll()
    assert rig.prefixes.stats.num_loaded == 4 and rig.prefixes.stats.num_lost == 0


def test_a_hung_write_is_abandoned_and_the_others_complete():
    rig = Rig(plan=lambda kind, key: "hold")
    rig.compute()
    rig.prefixes.write_unwritten()
    assert rig.kv.num_in_use == 4
    *_, future, _ = rig.store._held.pop()
    future.set_result(True)  # the last write ends before the first
    began_s = time.monotonic()
    rig.prefixes.poll()
    rig.prefixes.wait(0.1)
    assert time.monotonic() - began_s > 0.09, "waiting does not become a busy loop"
    assert rig.kv.num_in_use == 3
    rig.clock.now_s += 11
    rig.store.plan = lambda kind, key: "fail"
    rig.prefixes.poll()
    assert rig.kv.num_in_use == 0
    for page in range(32):  # another sequence's content
        rig.memory.content[page] = {5: 5}
    rig.store.release()
    assert not rig.store.pages, "a late write is not indexed"
    rig.kv.check_integrity()


@pytest.mark.timing
def test_a_hung_disk_does_not_delay_the_close(caplog):
    """The futures never end, in real time."""
    rig = Rig(plan=lambda kind, key: "hold" if kind in ("store", "load") else None)
    rig.prefixes.use_store(rig.store, lambda page: page, rig.keep)
    rig.compute()
    began_s = time.monotonic()
    rig.kv.close_all(timeout_s=0.5)
    took_s = time.monotonic() - began_s
    assert 0.3 < took_s < 1.0 and rig.store.close_s > 0.1
    assert "10 pages were not written" in caplog.text
    assert rig.num_kept == 1, "the disk may still write there"
    assert rig.kv.num_in_use == 4, "these pages are never used again"
    rig.kv.check_integrity()


@pytest.mark.timing
def test_closing_waits_for_a_slow_disk_up_to_the_time_limit(caplog):
    rig = Rig(plan=lambda kind, key: "hold")
    rig.prefixes.use_store(rig.store, lambda page: page, rig.keep)
    rig.compute()
    is_over = threading.Event()

    def slowly():
        while not is_over.wait(0.1):
            rig.store.release(1)

    disk = threading.Thread(target=slowly)
    disk.start()
    began_s = time.monotonic()
    rig.prefixes.close(timeout_s=0.8)
    is_over.set()
    disk.join()
    assert time.monotonic() - began_s < 1.2
    assert 3 <= len(rig.store.pages) <= 7 and "pages were not written" in caplog.text


@pytest.mark.timing
@pytest.mark.parametrize("fate", ["fail", "raise"])
def test_a_broken_store_can_be_closed(fate):
    rig = Rig(plan=lambda kind, key: fate if kind != "contains" else None)
    rig.compute()
    began_s = time.monotonic()
    rig.kv.close_all()
    assert time.monotonic() - began_s < 1.0
    assert rig.kv.num_in_use == 0 and rig.kv.num_mapped == 0
    assert rig.num_kept == (fate == "raise"), "a store that raises may still write"
    assert rig.prefixes.store_stats().entries == 0


def test_pages_of_a_hung_disk_stay_mapped():
    memory = LinuxMemory(4096, 4)
    memory.reserve(1 << 20)
    memory.map(0, 0, 4)
    address = memory.page_address(2)
    ctypes.memset(address, 7, 4096)
    memory.keep_pages()
    memory.close()
    # The disk may still write; without the mapping this would be a SIGSEGV.
    ctypes.memset(address + 1, 9, 4095)
    assert ctypes.string_at(address, 3) == b"\x07\x09\x09"
