"""The disk tier: what is found is what was stored, whatever happens to disk and process."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from memory.spill import SpillStore
from memory.spill_directory import SpillDirectoryError, SpillDirectoryInUse
from memory.spill_log import RECORD_BYTES
from tests.faulty_storage import Pages, faulty

PAGE = 8192
HEADER = 128


@pytest.fixture
def pages():
    return Pages(PAGE, 64)


def open_store(directory, *, slots=8, identity=b"model", page=PAGE, **options):
    options = {"io": "threads", "growth_bytes": 4 * page, **options}
    return SpillStore(directory, page, slots * page, identity, **options)


def put(store, pages, *keys, **options):
    """Stores pages that repeat their key."""
    return [store.store(key, pages.fill(i, key), **options).result() for i, key in enumerate(keys)]


def found(store, pages, key):
    """Whether it is there; if so it must be right."""
    pages.fill(63, b"garbage")
    if not store.load(key, pages.at(63)).result():
        return False
    assert pages.holds(63, key)
    return True


@pytest.mark.parametrize("io", ["auto", "threads"])
def test_store_load_discard(tmp_path, pages, io):
    store = open_store(tmp_path / "kv", io=io)
    assert put(store, pages, b"a", b"b" * 32) == [True, True]
    assert found(store, pages, b"a") and found(store, pages, b"b" * 32)
    assert not found(store, pages, b"c")
    assert store.contains(b"a") and store.discard(b"a") and not store.discard(b"a")
    assert not store.contains(b"a") and not found(store, pages, b"a")
    stats = store.stats()
    assert (stats.hits, stats.misses, stats.stores, stats.entries) == (2, 2, 2, 1)
    assert (stats.bytes_written, stats.bytes_read, stats.bytes_used) == (2 * PAGE, 2 * PAGE, PAGE)
    store._slots.check_integrity()
    store.close()
    store.close()
    assert not found(store, pages, b"b" * 32) and put(store, pages, b"d") == [False]


def test_batches_and_lengths(tmp_path, pages):
    store = open_store(tmp_path, slots=32)
    keys = [b"key %d" % i for i in range(20)]
    batch = [(key, pages.fill(i, key)) for i, key in enumerate(keys)]
    assert all(future.result() for future in store.store_many(batch, 4096))
    loads = store.load_many([(key, pages.at(40 + i)) for i, key in enumerate(keys)])
    assert all(future.result() for future in loads)
    assert all(pages.content(40 + i)[:4096] == pages.content(i)[:4096] for i in range(20))
    with pytest.raises(AssertionError):
        store.store(b"", pages.at(0))
    with pytest.raises(AssertionError):
        store.store(b"k", pages.at(0), 100)
    store.close()


def test_least_recently_used_goes_first_and_pins_stay(tmp_path, pages):
    store = open_store(tmp_path, slots=4)
    put(store, pages, b"a", b"b", b"c")
    put(store, pages, b"swapped", pinned=True)
    assert found(store, pages, b"a") and store.pin(b"b") and not store.pin(b"nobody")
    put(store, pages, b"d")  # c is the oldest that may go
    assert [store.contains(key) for key in (b"a", b"b", b"c", b"d")] == [True, True, False, True]
    put(store, pages, b"e", b"f")
    assert [store.contains(key) for key in (b"a", b"b", b"swapped")] == [False, True, True]
    assert put(store, pages, b"x", b"y", pinned=True) == [True, True]
    assert put(store, pages, b"z") == [False]  # all are pinned
    assert store.stats().refused == 1 and store.stats().pinned == 4
    store.unpin(b"b")
    assert put(store, pages, b"z") == [True] and not store.contains(b"b")
    assert found(store, pages, b"swapped") and found(store, pages, b"z")
    assert store.stats().evictions == 6
    store._slots.check_integrity()
    store.close()


def test_a_load_waits_for_the_store(tmp_path, pages):
    opener, opened = faulty(lambda kind, n: "hold" if kind == "write" else None)
    store = open_store(tmp_path, open_file=opener)
    stored = store.store(b"a", pages.fill(0, b"a"))
    again = store.store(b"a", pages.at(0))
    loads = [store.load(b"a", pages.at(i)) for i in (1, 2)]
    lost = store.store(b"b", pages.fill(3, b"b"))
    assert store.discard(b"b") and not stored.done() and not loads[0].done()
    opened[0].let_go()
    assert stored.result() and again.result() and all(load.result() for load in loads)
    assert pages.holds(1, b"a") and pages.holds(2, b"a")
    assert not lost.result() and store.flush() and store.stats().requests == 0
    store._slots.check_integrity()
    store.close()


def test_a_slot_that_is_read_is_not_reused(tmp_path, pages):
    opener, opened = faulty(lambda kind, n: "hold" if kind == "read" else None)
    store = open_store(tmp_path, slots=2, open_file=opener)
    put(store, pages, b"a", b"b")
    load = store.load(b"a", pages.at(9))
    store.discard(b"a")
    assert put(store, pages, b"c") == [True]  # evicts b: a's slot is busy
    assert not store.contains(b"b")
    opened[0].let_go()
    assert load.result() and pages.holds(9, b"a")
    assert put(store, pages, b"d") == [True] and store.contains(b"c")
    store._slots.check_integrity()
    store.close()


@pytest.mark.parametrize("io", ["auto", "threads"])
def test_several_threads_at_once(tmp_path, io):
    """Few slots, the same keys: what is found is right, and the books agree in the end."""
    store = open_store(tmp_path, slots=12, io=io, persistent=True)
    failures = []

    def work(seed):
        rng = random.Random(seed)
        pages = Pages(PAGE, 64)
        try:
            for _ in range(250):
                key = b"key %d " % rng.randrange(24)
                kind = rng.randrange(5)
                if kind < 2:
                    store.store(key, pages.fill(0, key), pinned=kind == 0).result()
                    if kind == 0:
                        store.discard(key)
                elif kind < 4:
                    found(store, pages, key)
                else:
                    store.discard(key)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert store.flush() and store.stats().corrupt == 0 and store.stats().hits > 50
    store._slots.check_integrity()
    keys = list(store._slots.entries)
    store.close()
    store = open_store(tmp_path, slots=12, persistent=True)
    assert list(store._slots.entries) and set(store._slots.entries) <= set(keys)
    assert all(found(store, Pages(PAGE, 64), key) for key in list(store._slots.entries))
    store.close()


def test_requests_are_bounded(tmp_path, pages):
    opener, opened = faulty(lambda kind, n: "hold" if kind == "write" else None)
    store = open_store(tmp_path, max_requests=2, open_file=opener)
    futures = [store.store(b"%d" % i, pages.fill(i, b"%d" % i)) for i in range(3)]
    assert futures[2].done() and not futures[2].result() and store.stats().requests == 2
    assert not store.load(b"0", pages.at(9)).result()
    opened[0].let_go()
    assert futures[0].result() and futures[1].result()
    store.close()


@pytest.mark.parametrize("fault", [errno.EIO, errno.EDQUOT, "short"])
def test_failed_writes_are_misses_and_then_a_pause(tmp_path, pages, fault):
    now = [100.0]
    is_broken = [True]
    opener, _ = faulty(lambda kind, n: fault if kind == "write" and is_broken[0] else None)
    store = open_store(tmp_path, open_file=opener, clock=lambda: now[0])
    assert put(store, pages, b"a", b"b", b"c", b"d") == [False] * 4
    stats = store.stats()
    assert (stats.write_errors, stats.refused, stats.is_paused, stats.entries) == (3, 1, True, 0)
    now[0] += 1.1
    assert put(store, pages, b"a", b"b") == [False] * 2  # one trial, then a longer pause
    now[0] += 1.1
    assert store.stats().is_paused and store.stats().write_errors == 4
    is_broken[0] = False
    now[0] += 60
    assert put(store, pages, b"a", b"b") == [True] * 2
    assert found(store, pages, b"a") and not found(store, pages, b"c")
    store._slots.check_integrity()
    store.close()


def test_a_full_disk_still_serves_the_space_it_has(tmp_path, pages):
    now = [0.0]
    opener, _ = faulty(lambda kind, n: errno.ENOSPC if (kind, n) == ("write", 2) else None)
    store = open_store(tmp_path, open_file=opener, clock=lambda: now[0])
    assert put(store, pages, b"a", b"b", b"c", b"d") == [True, True, False, True]
    assert store.stats().entries == 2 and not store.contains(b"a")  # d is where a was
    now[0] += 31
    assert put(store, pages, b"e", b"f") == [True, True] and store.stats().entries == 4
    store._slots.check_integrity()
    store.close()


def test_unreadable_and_torn_pages_are_misses(tmp_path, pages):
    faults = {("read", 0): errno.EIO, ("write", 1): "torn"}
    opener, _ = faulty(lambda kind, n: faults.get((kind, n)))
    store = open_store(tmp_path, open_file=opener)
    assert put(store, pages, b"a", b"b", b"c") == [True] * 3
    assert not found(store, pages, b"a") and not store.contains(b"a")
    assert not found(store, pages, b"b") and not store.contains(b"b")
    assert found(store, pages, b"c")
    assert store.stats().read_errors == 1 and store.stats().corrupt == 1
    store.close()


def test_a_real_full_disk(pages):
    """A file size limit stands in for it where no file system can be made: EFBIG is EIO's kin."""
    code = (
        "import resource, signal, sys, tempfile\n"
        "from tests.test_memory_spill import *\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "with tempfile.TemporaryDirectory() as d:\n"
        "    store = open_store(d, slots=8, persistent=True)\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * PAGE, 4 * PAGE))\n"
        "    got = put(store, Pages(PAGE, 64), *[b'%d' % i for i in range(6)])\n"
        "    pages = Pages(PAGE, 64)\n"
        "    assert [found(store, pages, b'%d' % i) for i in range(6)] == got\n"
        "    print(got); store.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[True, True, True, True, False, False]\n", done.stderr


def test_nothing_is_left_without_persistence(tmp_path, pages):
    store = open_store(tmp_path / "kv")
    put(store, pages, b"a")
    assert os.listdir(tmp_path / "kv") == ["lock"]  # the pages have no name, even now
    store.close()
    store = open_store(tmp_path / "kv")
    assert not store.contains(b"a")
    store.close()


def test_prefixes_survive_a_restart(tmp_path, pages):
    store = open_store(tmp_path / "kv", slots=4, persistent=True)
    put(store, pages, b"a", b"b", b"c")
    put(store, pages, b"swapped", pinned=True)
    assert found(store, pages, b"a") and store.discard(b"c")
    store.close()
    for path in (tmp_path / "kv").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE((tmp_path / "kv").stat().st_mode) == 0o700
    store = open_store(tmp_path / "kv", slots=4, persistent=True)
    assert store.contains(b"a") and store.contains(b"b")
    assert not store.contains(b"c") and not store.contains(b"swapped")
    store._slots.check_integrity()
    put(store, pages, b"d", b"e", b"f")  # b was used before a
    assert found(store, pages, b"a") and not store.contains(b"b")
    store.close()


def test_a_smaller_capacity_drops_what_does_not_fit(tmp_path, pages):
    store = open_store(tmp_path, persistent=True)
    put(store, pages, *[b"%d" % i for i in range(8)])
    store.close()
    store = open_store(tmp_path, slots=3, persistent=True)
    assert [found(store, pages, b"%d" % i) for i in range(8)] == [True] * 3 + [False] * 5
    store._slots.check_integrity()
    store.close()


def damage(directory, how):
    index = directory / "index"
    (pages_file,) = directory.glob("pages-*.kv")
    raw = bytearray(index.read_bytes())
    if how == "magic":
        raw[0] ^= 1
    elif how == "newer version":
        raw[8] = 200
    elif how == "header bit":
        raw[50] ^= 4
    elif how == "empty":
        raw = bytearray()
    elif how == "no whole header":
        raw = raw[:100]
    elif how == "no pages":
        pages_file.unlink()
    elif how == "pages are a link":
        pages_file.rename(directory / "elsewhere")
        pages_file.symlink_to(directory / "elsewhere")
    if how == "a directory":
        index.unlink()
        index.mkdir()
    elif how == "a pipe":
        index.unlink()
        os.mkfifo(index)
    elif how == "a link":
        index.rename(directory / "other")
        index.symlink_to(directory / "other")
    else:
        index.write_bytes(raw)


ANEW = ["magic", "newer version", "header bit", "empty", "no whole header", "no pages"]
ANEW += ["pages are a link", "a directory", "a pipe", "a link"]


@pytest.mark.parametrize("how", ANEW)
def test_files_of_no_use_are_begun_anew(tmp_path, pages, how, caplog):
    store = open_store(tmp_path, persistent=True)
    put(store, pages, b"a", b"b")
    store.close()
    damage(tmp_path, how)
    store = open_store(tmp_path, persistent=True)
    assert not store.contains(b"a") and put(store, pages, b"a") == [True]
    assert found(store, pages, b"a")
    store.close()
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len([line for line in said if "anew" in line or "not ours" in line]) == 1, said
    store = open_store(tmp_path, persistent=True)
    assert found(store, pages, b"a")
    store.close()
    assert len(list(tmp_path.glob("pages-*.kv"))) == 1


@pytest.mark.parametrize("other", [{"identity": b"another"}, {"page": 2 * PAGE}])
def test_another_model_finds_nothing(tmp_path, pages, other, caplog):
    store = open_store(tmp_path, persistent=True)
    put(store, pages, b"a")
    store.close()
    store = open_store(tmp_path, persistent=True, **other)
    assert not store.contains(b"a") and "beginning anew" in caplog.text
    store.close()


def test_damaged_records_and_pages(tmp_path, pages, caplog):
    """A record whose bit flipped, a torn last one, a page whose bit flipped, a page cut off."""
    keys = [b"key %d" % i for i in range(6)]
    store = open_store(tmp_path, persistent=True)
    put(store, pages, *keys)
    store.close()
    with open(tmp_path / "index", "r+b") as file:
        file.seek(HEADER + RECORD_BYTES + 10)
        file.write(b"\xff")
        file.seek(0, os.SEEK_END)
        file.write(b"torn" * 7)
    (pages_file,) = tmp_path.glob("pages-*.kv")
    with open(pages_file, "r+b") as file:
        file.seek(2 * PAGE + 77)
        file.write(b"\xff")
        file.truncate(5 * PAGE + 100)
    store = open_store(tmp_path, persistent=True)
    assert "1 records" in caplog.text
    assert [store.contains(key) for key in keys] == [True, False, True, True, True, False]
    assert [found(store, pages, key) for key in keys] == [True, False, False, True, True, False]
    assert store.stats().corrupt == 1
    assert put(store, pages, *keys) == [True] * 6
    store.close()
    store = open_store(tmp_path, persistent=True)
    assert all(found(store, pages, key) for key in keys)
    store.close()


def test_a_long_log_is_compacted(tmp_path, pages):
    store = open_store(tmp_path, slots=2, persistent=True)
    for i in range(900):
        assert put(store, pages, b"%d" % i) == [True]
    assert store.flush()
    assert (tmp_path / "index").stat().st_size < HEADER + RECORD_BYTES * 1100
    store.close()
    assert (tmp_path / "index").stat().st_size == HEADER + RECORD_BYTES * 2
    store = open_store(tmp_path, slots=2, persistent=True)
    assert found(store, pages, b"898") and found(store, pages, b"899")
    store.close()


def test_an_index_that_cannot_be_written_costs_only_the_restart(tmp_path, pages, monkeypatch):
    store = open_store(tmp_path, persistent=True)
    put(store, pages, b"a")
    assert store.flush()
    real = os.pwrite

    def failing(fd, data, offset):
        real(fd, data[:20], offset)  # a torn record
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "pwrite", failing)
    assert put(store, pages, b"b") == [True] and found(store, pages, b"b")
    assert not store.flush()
    monkeypatch.undo()
    assert put(store, pages, b"c") == [True]
    store.close()  # writes a new one
    store = open_store(tmp_path, persistent=True)
    assert all(found(store, pages, key) for key in (b"a", b"b", b"c"))
    store.close()


def test_leaving_without_a_close(tmp_path, pages):
    """What is under way ends, the index is written, and nothing complains."""
    code = (
        "import sys\n"
        "from tests.test_memory_spill import *\n"
        "store, pages = open_store(sys.argv[1], persistent=True, io='auto'), Pages(PAGE, 64)\n"
        "futures = [store.store(b'%d' % i, pages.fill(i, b'%d' % i)) for i in range(6)]\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    store = open_store(tmp_path, persistent=True)
    assert all(found(store, pages, b"%d" % i) for i in range(6))
    store.close()


def test_one_process_at_a_time(tmp_path, pages):
    store = open_store(tmp_path, persistent=True)
    put(store, pages, b"a")
    with pytest.raises(SpillDirectoryInUse, match="in use"):
        open_store(tmp_path)
    assert found(store, pages, b"a")
    store.close()
    open_store(tmp_path).close()


def test_a_directory_open_to_others(tmp_path):
    tmp_path.chmod(0o755)
    open_store(tmp_path).close()  # only ours inside: it is made private
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
    tmp_path.chmod(0o755)
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(SpillDirectoryError, match="chmod 700"):
        open_store(tmp_path)


KILLED = """
import sys, itertools
from tests.test_memory_spill import *
start = int(sys.argv[3])
store = open_store(sys.argv[1], slots=int(sys.argv[4]), persistent=True, io=sys.argv[2])
pages = Pages(PAGE, 16)
for turn in itertools.count():
    keys = [b"%d-%d-%d" % (start, turn, i) for i in range(16)]
    batch = [(key, pages.fill(i, key)) for i, key in enumerate(keys)]
    done = [future.result() for future in store.store_many(batch)]
    assert all(done)
    if turn % 8 == 0 and store.flush():
        print(turn, flush=True)
"""


@pytest.mark.parametrize(("io", "kills"), [("auto", (24, 20_000, 24)), ("threads", (24, 20_000))])
def test_killed_at_any_moment(tmp_path, pages, io, kills):
    """After every kill only whole and right pages are found. Where nothing had to be evicted,
    all of the last flush are; with few slots, the kill meets pages being replaced."""
    rng = random.Random(1)
    num_found = 0
    for attempt, slots in enumerate(kills):
        command = [sys.executable, "-c", KILLED, str(tmp_path), io, str(attempt), str(slots)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            assert child.stdout is not None and child.stderr is not None
            line = child.stdout.readline()
            assert line, child.stderr.read()
            time.sleep(rng.random() * 0.15)
            child.send_signal(signal.SIGKILL)
            rest = child.stdout.read().split()
        store = open_store(tmp_path, slots=slots, persistent=True)
        store._slots.check_integrity()
        for key in list(store._slots.entries):
            num_found += found(store, pages, key)
        if slots > 24:
            last = int(rest[-1] if rest else line)
            assert all(store.contains(b"%d-%d-%d" % (attempt, last, i)) for i in range(16))
        store.close()
    assert num_found > 20


class SpillMachine(RuleBasedStateMachine):
    """Against a dict: a key may vanish (evicted, failed write), what is found is right."""

    keys = st.integers(0, 11).map(lambda n: b"key-%d" % n)

    @initialize(data=st.data())
    def start(self, data):
        import tempfile

        self.directory = tempfile.TemporaryDirectory()
        self.pages = Pages(PAGE, 64)
        self.model: dict[bytes, bool] = {}  # key -> pinned
        self.swapped: set[bytes] = set()  # those that were stored pinned
        self.fault: int | str | None = None
        self.now = self.trouble_until = 0.0
        self.open()

    def open(self):
        opener, _ = faulty(lambda kind, n: self.fault)
        self.store = open_store(
            self.directory.name,
            slots=5,
            persistent=True,
            open_file=opener,
            clock=lambda: self.now,
        )

    @rule(key=keys, pinned=st.booleans())
    def put(self, key, pinned):
        was_there = self.store.contains(key)
        ok = self.store.store(key, self.pages.fill(0, key), pinned=pinned).result()
        if was_there:
            assert ok
            self.model[key] = self.model[key] or pinned
        elif ok:
            self.model[key] = pinned
            (self.swapped.add if pinned else self.swapped.discard)(key)
        else:
            is_troubled = self.fault or self.now < self.trouble_until
            assert is_troubled or sum(self.model.values()) >= 5
        if pinned and ok:
            for _ in range(self.store._slots.entries[key].pins - 1):
                assert self.store.unpin(key)

    @rule(key=keys)
    def get(self, key):
        self.pages.fill(1, b"garbage")
        if self.store.load(key, self.pages.at(1)).result():
            assert key in self.model and self.pages.holds(1, key)
        elif self.fault or not self.store.contains(key):
            # A pinned page goes only by a fault: of its read, or earlier of its write.
            assert not self.model.pop(key, False) or self.fault or self.torn_before

    @rule(key=keys)
    def discard(self, key):
        self.store.discard(key)
        self.model.pop(key, None)

    @rule(key=keys)
    def unpin(self, key):
        if self.model.get(key) and self.store.contains(key):
            assert self.store.unpin(key)
            self.model[key] = False

    @rule(fault=st.sampled_from([None, None, errno.EIO, errno.ENOSPC, "torn", "short"]))
    def break_or_mend(self, fault):
        self.torn_before = self.torn_before or fault == "torn"
        if self.fault:
            self.trouble_until = self.now + 61
        self.fault = fault

    @rule()
    def wait(self):
        self.now += 100

    @rule()
    def restart(self):
        self.store.close()
        self.model = {key: False for key in self.model if key not in self.swapped}
        self.trouble_until = 0.0
        self.open()

    torn_before = False

    @invariant()
    def books_are_right(self):
        self.store._slots.check_integrity()
        there = set(self.store._slots.entries)
        assert there <= set(self.model)
        for key in set(self.model) - there:  # evicted or failed
            assert not self.model.pop(key) or self.fault or self.torn_before
        assert self.store.stats().bytes_used == len(there) * PAGE

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()
            self.directory.cleanup()


TestSpillMachine = SpillMachine.TestCase
TestSpillMachine.settings = settings(
    max_examples=15, stateful_step_count=30, deadline=None, derandomize=True
)
