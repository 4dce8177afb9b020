"""The disk tier on a disk that fails, is full or hangs returns misses, counts faults and closes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time

import pytest

from memory.tiers.disk_directory import DiskDirectoryInUse
from tests.support.memory.disk_pages import PAGE, found, open_store, put
from tests.support.memory.faulty_storage import Pages, faulty


@pytest.fixture
def pages():
    return Pages(PAGE, 64)


def test_requests_are_bounded(tmp_path, pages):
    opener, opened = faulty(lambda kind, n: "hold" if kind == "write" else None)
    store = open_store(tmp_path, max_requests=2, open_file=opener)
    futures = [store.store(b"%d" % i, pages.fill(i, b"%d" % i)) for i in range(3)]
    assert futures[2].done() and not futures[2].result() and store.stats().requests == 2
    assert not store.load(b"0", pages.at(9)).result()
    opened[0].release()
    assert futures[0].result() and futures[1].result()
    store.close()


def test_a_load_does_not_wait_for_a_write_that_was_discarded(tmp_path, pages):
    """The page may have a new owner before the checksum is taken, which would then fit by
    chance."""
    opener, opened = faulty(lambda kind, n: "hold" if (kind, n) == ("write", 0) else None)
    store = open_store(tmp_path, open_file=opener)
    stored = store.store(b"K", pages.fill(0, b"right"))
    load = store.load(b"K", pages.at(1))
    assert store.discard(b"K") and not load.done()
    pages.fill(0, b"somebody else's")
    opened[0].release()
    assert not stored.result() and not load.result()
    assert store.flush() and store.stats().requests == 0
    store._slots.check_integrity()
    assert put(store, pages, *[b"%d" % i for i in range(8)]) == [True] * 8, "its slot is free"
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
    assert store.stats().entries == 2 and not store.contains(b"a")  # d is in a's former slot
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
    """A file size limit stands in for a full disk where no file system can be made; EFBIG is
    handled as EIO."""
    code = (
        "import resource, signal, sys, tempfile\n"
        "from tests.support.memory.faulty_storage import Pages\n"
        "from tests.support.memory.disk_pages import *\n"
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
    store.close()  # close writes a new index
    store = open_store(tmp_path, persistent=True)
    assert all(found(store, pages, key) for key in (b"a", b"b", b"c"))
    store.close()


def test_a_batch_starts_as_a_whole_or_not_at_all(tmp_path, pages):
    """Otherwise the first page would wait for a transfer that never starts, and `close` for that
    page."""
    store = open_store(tmp_path)
    for batch in ([(b"a", pages.at(0)), (b"", pages.at(1))], [(b"a", pages.at(0)), (b"b", 17)]):
        with pytest.raises(AssertionError):
            store.store_many(batch)
        with pytest.raises(AssertionError):
            store.load_many(batch)
    assert store.stats().requests == 0 and put(store, pages, b"a") == [True]
    assert store.close(1.0)


@pytest.mark.timing
def test_a_hung_disk_does_not_delay_the_close(tmp_path, pages, caplog):
    """`close` reports that the disk may still use the memory, and the folder stays locked
    meanwhile."""
    is_hung = threading.Event()
    opener, opened = faulty(lambda kind, n: "hold" if is_hung.is_set() else None)
    store = open_store(tmp_path, open_file=opener, persistent=True)
    assert put(store, pages, b"a", b"b") == [True] * 2
    is_hung.set()
    write, load = store.store(b"c", pages.fill(2, b"c")), store.load(b"a", pages.at(9))
    began_s = time.monotonic()
    assert not store.close(0.5)
    assert time.monotonic() - began_s < 1.0
    assert not write.done() and not load.done() and "2 transfers left" in caplog.text
    assert not store.close(0.5), "it stays unclosed"
    with pytest.raises(DiskDirectoryInUse):
        open_store(tmp_path)
    opened[0].release()
    assert not write.result(5) and not load.result(5), "the file is closed"
    os.close(store._claim)
    store = open_store(tmp_path, persistent=True)
    assert found(store, pages, b"a") and found(store, pages, b"b") and not found(store, pages, b"c")
    assert store.close()


def test_damaged_pages_are_logged_once_a_minute(tmp_path, pages, caplog):
    now = [0.0]
    opener, _ = faulty(lambda kind, n: ("torn" if n % 2 else None) if kind == "write" else None)
    store = open_store(tmp_path, open_file=opener, clock=lambda: now[0])
    keys = [b"%d" % i for i in range(8)]
    put(store, pages, *keys)
    assert [found(store, pages, key) for key in keys[:4]] == [True, False] * 2
    assert caplog.text.count("could not be read back") == 1
    now[0] += 61
    assert [found(store, pages, key) for key in keys[4:]] == [True, False] * 2
    assert caplog.text.count("could not be read back") == 2
    assert "2 pages could not" in caplog.text, "one page from before and this one"
    assert store.stats().corrupt == 4
    store.close()
