"""The prefix cache's way to its store and back, whatever the store does."""

from __future__ import annotations

import ctypes
import random
import threading
import time

import pytest

from memory.pages.layer_groups import LayerGroup
from memory.pages.linux_vmm import LinuxMemory
from memory.prefix.index import PrefixHasher
from tests.support.engine.fakes import make_kv
from tests.support.memory.kv_model import KVModel
from tests.support.memory.page_store import FakeStore

TOKENS = list(range(100, 140))  # ten pages


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def chain(keys: list[bytes]) -> list[tuple[bytes, bytes | None]]:
    """Each with its parent."""
    return list(zip(keys, [None, *keys[:-1]], strict=True))


class Rig:
    """A KV manager with a store, and sequences that compute and end at once."""

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
        """The sequence's pages are known to the cache, and nobody else's any more."""
        keys = self.keys(tokens)
        item = self.kv.open(len(tokens))
        assert self.kv.grow(item, len(tokens))
        self.kv.commit()
        for page, key in zip(item.pages, keys, strict=True):
            self.memory.content[page] = {0: hash(key)}
        self.kv.insert_prefix(item, keys, len(tokens))
        self.kv.close(item)
        return keys

    def forget(self) -> None:
        while self.prefixes.num_evictable:
            self.prefixes.evict()

    def fetch(self, keys: list[bytes], num_spare: int = 1000) -> int:
        """Pages of the chain that are in memory then."""
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


def test_one_bad_page_does_not_keep_the_others():
    bad = Rig().keys(TOKENS)[0]
    rig = Rig(plan=lambda kind, key: "fail" if (kind, key) == ("store", bad) else None)
    rig.compute()
    for _ in range(10):
        rig.clock.now_s += 100
        rig.prefixes.write_unwritten()
    assert len(rig.store.pages) == 9 and bad not in rig.store.pages


def test_idle_moments_leave_a_dead_disk_alone():
    rig = Rig(plan=lambda kind, key: "fail" if kind == "store" else None)
    rig.compute()
    for asked in range(10_000):  # noqa: B007
        rig.clock.now_s += 0.05
        if not rig.prefixes.write_unwritten():
            break
    assert rig.clock.now_s < 120 and rig.prefixes.stats.num_failed < 200
    assert asked > 100, "but not at the first error"


def test_a_page_forgotten_meanwhile_is_not_written_again():
    rig = Rig(plan=lambda kind, key: "hold" if kind == "store" else None)
    keys = rig.compute()
    rig.prefixes.write_unwritten()  # the first four: an eighth of 32 pages
    assert rig.store.num_held == 4
    tree = rig.prefixes.index.evict_tree(rig.prefixes.index.match(keys)[0])
    rig.prefixes._drop(tree)
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


def test_futures_may_raise_too():
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


def test_a_batch_is_as_large_as_the_store_takes():
    rig = Rig()
    keys = rig.compute()
    rig.prefixes.close()
    rig.use_store()
    rig.store.room = rig.store.largest_batch = 3
    assert rig.fetch(keys) == 10
    stats = rig.prefixes.stats
    assert (stats.num_loaded, stats.num_lost, rig.store.largest_batch) == (10, 0, 3)


def test_a_fetch_leaves_room_for_others():
    rig = Rig()
    keys = rig.compute()
    rig.prefixes.close()
    rig.use_store()
    rig.store.plan = lambda kind, key: "hold"
    rig.prefixes.fetch(chain(keys), 1000)
    assert rig.store.num_held == 8, "a quarter of the pages at once, should the disk hang"
    assert rig.fetch(keys) == 10
    rig.forget()
    assert rig.fetch(keys, num_spare=5) == 5, "and no more than there are to spare"


def test_what_was_computed_meanwhile_is_not_lost():
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
    assert len(rig.prefixes.index.match(keys)) == 10, "the rest has followed"
    assert (rig.prefixes.stats.num_loaded, rig.prefixes.stats.num_lost) == (2, 0)


def test_what_a_fetch_continues_is_forgotten_last():
    """Else what comes back could not be used: nobody would know what it continues."""
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


def test_a_hung_write_is_given_up_and_the_rest_goes_on():
    rig = Rig(plan=lambda kind, key: "hold")
    rig.compute()
    rig.prefixes.write_unwritten()
    assert rig.kv.num_in_use == 4
    *_, future, _ = rig.store._held.pop()
    future.set_result(True)  # not the first one
    began_s = time.monotonic()
    rig.prefixes.poll()
    rig.prefixes.wait(0.1)
    assert time.monotonic() - began_s > 0.09, "waiting does not become a busy loop"
    assert rig.kv.num_in_use == 3
    rig.clock.now_s += 11
    rig.store.plan = lambda kind, key: "fail"
    rig.prefixes.poll()
    assert rig.kv.num_in_use == 0
    for page in range(32):  # somebody else's now
        rig.memory.content[page] = {5: 5}
    rig.store.release()
    assert not rig.store.pages, "what such a write writes is found by nobody"
    rig.kv.check_integrity()


@pytest.mark.timing
def test_a_hung_disk_does_not_hold_up_the_end(caplog):
    """Real time: the futures never end."""
    rig = Rig(plan=lambda kind, key: "hold" if kind in ("store", "load") else None)
    rig.prefixes.use_store(rig.store, lambda page: page, rig.keep)
    rig.compute()
    began_s = time.monotonic()
    rig.kv.close_all(timeout_s=0.5)
    took_s = time.monotonic() - began_s
    assert 0.3 < took_s < 1.0 and rig.store.close_s > 0.1
    assert "10 pages were not written" in caplog.text
    assert rig.num_kept == 1, "the disk may still write there"
    assert rig.kv.num_in_use == 4, "nobody gets these pages any more"
    rig.kv.check_integrity()


@pytest.mark.timing
def test_a_slow_disk_gets_its_time_and_no_more(caplog):
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
    assert rig.num_kept == (fate == "raise"), "who knows what it is still doing"
    assert rig.prefixes.store_stats().entries == 0


def test_pages_of_a_hung_disk_stay_mapped():
    memory = LinuxMemory(4096, 4)
    memory.reserve(1 << 20)
    memory.map(0, 0, 4)
    address = memory.page_address(2)
    ctypes.memset(address, 7, 4096)
    memory.keep_pages()
    memory.close()
    ctypes.memset(address + 1, 9, 4095)  # what the disk might do; else this is a SIGSEGV
    assert ctypes.string_at(address, 3) == b"\x07\x09\x09"


class StoreModel(KVModel):
    """Sequences whose pages come and go by a store that fails, raises, is slow and hangs."""

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

    def turn(self) -> None:
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
LAYOUTS = [
    {"num_pages": 16},
    {"num_pages": 16, "tile_tokens": 4, "page_bytes": 64 * 6},
    {"num_pages": 30, "max_rows": 8, "groups": (LayerGroup(64), WINDOW)},
    {"num_pages": 16, "max_rows": 8, "groups": (WINDOW,)},
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_10_000_random_operations(layout):
    rng = random.Random(11)
    model = StoreModel(rng, **layout)
    for number in range(10_000):
        if number % 50 == 0:
            usual = [None] * 6
            model.fates = [*usual, *rng.choice([["hold"] * 3, ["fail"], ["raise"], [], ["hold"]])]
        model.turn()
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
