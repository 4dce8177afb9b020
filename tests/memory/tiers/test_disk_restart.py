"""The disk tier after a restart or a kill finds only intact pages of its own, even in damaged
files."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
import time

import pytest

from memory.tiers.disk_directory import DiskDirectoryError, DiskDirectoryInUse
from memory.tiers.disk_index import RECORD_BYTES
from tests.support.memory.disk_pages import HEADER, PAGE, found, open_store, put
from tests.support.memory.faulty_storage import Pages


@pytest.fixture
def pages():
    return Pages(PAGE, 64)


def test_no_pages_are_left_without_persistence(tmp_path, pages):
    store = open_store(tmp_path / "kv")
    put(store, pages, b"a")
    assert os.listdir(tmp_path / "kv") == ["lock"]  # the pages' file has no name
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
    put(store, pages, b"d", b"e", b"f")  # b was used earlier
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
@pytest.mark.row("X9")
def test_unusable_files_are_replaced(tmp_path, pages, how, caplog):
    store = open_store(tmp_path, persistent=True)
    put(store, pages, b"a", b"b")
    store.close()
    damage(tmp_path, how)
    store = open_store(tmp_path, persistent=True)
    assert not store.contains(b"a") and put(store, pages, b"a") == [True]
    assert found(store, pages, b"a")
    store.close()
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len([line for line in warnings if "anew" in line or "not ours" in line]) == 1, warnings
    store = open_store(tmp_path, persistent=True)
    assert found(store, pages, b"a")
    store.close()
    assert len(list(tmp_path.glob("pages-*.kv"))) == 1


@pytest.mark.parametrize("other", [{"identity": b"another"}, {"page": 2 * PAGE}])
@pytest.mark.row("X9")
def test_another_model_finds_nothing(tmp_path, pages, other, caplog):
    store = open_store(tmp_path, persistent=True)
    put(store, pages, b"a")
    store.close()
    store = open_store(tmp_path, persistent=True, **other)
    assert not store.contains(b"a") and "beginning anew" in caplog.text
    store.close()


@pytest.mark.row("X9")
def test_damaged_records_and_pages(tmp_path, pages, caplog):
    """A record and a page have a flipped bit, the last record is torn, and a page is cut off."""
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


def test_an_exit_without_a_close(tmp_path, pages):
    """Transfers in flight end, the index is written, and nothing is logged."""
    code = (
        "import sys\n"
        "from tests.support.memory.faulty_storage import Pages\n"
        "from tests.support.memory.disk_pages import *\n"
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
    with pytest.raises(DiskDirectoryInUse, match="in use"):
        open_store(tmp_path)
    assert found(store, pages, b"a")
    store.close()
    open_store(tmp_path).close()


def test_a_directory_open_to_others(tmp_path):
    tmp_path.chmod(0o755)
    open_store(tmp_path).close()  # a directory that holds only the tier's files is made private
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700
    tmp_path.chmod(0o755)
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(DiskDirectoryError, match="chmod 700"):
        open_store(tmp_path)


KILLED = """
import sys, itertools
from tests.support.memory.faulty_storage import Pages
from tests.support.memory.disk_pages import *
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


@pytest.mark.process
@pytest.mark.parametrize(("io", "kills"), [("auto", (24, 20_000, 24)), ("threads", (24, 20_000))])
def test_killed_at_any_moment(tmp_path, pages, io, kills):
    """Only complete and correct pages are found after every kill. All pages of the last flush
    are found where nothing had to be evicted; with few slots, the kill meets pages that are
    being replaced."""
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
