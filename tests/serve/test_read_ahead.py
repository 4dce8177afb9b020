"""A file is brought into memory ahead of its reader, and the next start knows which one."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from serve import read_ahead
from serve.read_ahead import ReadAhead, begin, note_start, records_folder


@pytest.fixture
def file(tmp_path: Path) -> Path:
    folder = tmp_path / "model" / ".mergestep"
    folder.mkdir(parents=True, mode=0o700)
    path = folder / "weights.packed"
    path.write_bytes(bytes(range(256)) * 4096 * 3)
    path.chmod(0o600)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of records."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setattr(read_ahead, "_begun", None)
    return tmp_path / "xdg" / "mergestep" / "packed"


def opened(file: Path) -> ReadAhead:
    fd = os.open(file, os.O_RDONLY)
    try:
        return read_ahead.read_ahead(fd)
    finally:
        os.close(fd)


def test_everything_is_in_memory_in_the_end(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "STEP_BYTES", 1 << 20)
    fd = os.open(file, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    monkeypatch.setattr(read_ahead, "NUM_THREADS", 2)
    ahead = ReadAhead(fd)
    ahead.wait(1)
    ahead.wait(1 << 40)
    assert str(file) not in Path("/proc/self/maps").read_text()
    page = bytearray(mmap.PAGESIZE)
    for at in range(0, file.stat().st_size, 1 << 20):
        assert os.preadv(fd, [page], at, os.RWF_NOWAIT) == len(page)
    os.close(fd)


def test_nobody_waits_for_what_is_left_to_the_reader(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "_POPULATE_READ", 9999)  # as in an older kernel
    opened(file).wait(1 << 40)
    monkeypatch.undo()
    ahead = opened(file)
    ahead.stop()
    ahead.wait(1 << 40)
    monkeypatch.setattr(read_ahead.os, "open", _refuse)  # no more descriptors
    ReadAhead(0).wait(1 << 40)


def _refuse(*_: object) -> int:
    raise OSError(24, "Too many open files")


def test_what_was_begun_for_another_file_ends(
    file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_start(cache, file.parents[1], file)
    begin(file.parents[1], "auto")
    begun = read_ahead._begun
    assert begun is not None
    read_ahead.end()
    assert begun._is_stopped and read_ahead._begun is None
    read_ahead.end()


def test_a_start_begins_with_the_file_of_the_last_one(file: Path, cache: Path) -> None:
    model = file.parents[1]
    begin(model, "auto")
    assert read_ahead._begun is None
    note_start(cache, model, file)
    begin(model, "auto")
    begun = read_ahead._begun
    assert begun is not None and opened(file) is begun
    assert read_ahead._begun is None and opened(file) is not begun
    begin(model / ".." / "model", "auto")
    assert read_ahead._begun is not None
    other = file.with_name("other.packed")
    other.write_bytes(b"x" * 5000)
    assert opened(other).file[1] == other.stat().st_ino, "another file is not mistaken for it"


@pytest.mark.parametrize("what", ["off", "gone", "open to others", "another folder", "too large"])
def test_what_is_not_begun(
    what: str, file: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, setting = file.parents[1], "auto"
    note_start(cache, model, file)
    if what == "off":
        setting = "off"
    elif what == "gone":
        file.unlink()
    elif what == "open to others":
        file.chmod(0o666)
    elif what == "another folder":
        setting = str(tmp_path / "folder")
        note_start(tmp_path / "folder", model, file)
    else:
        monkeypatch.setattr(read_ahead, "available_memory", lambda: 1000)
    begin(model, setting)
    assert read_ahead._begun is None


def test_a_record_that_another_user_could_write_is_not_used(file: Path, cache: Path) -> None:
    model = file.parents[1]
    note_start(cache, model, file)
    cache.chmod(0o777)
    begin(model, "auto")
    assert read_ahead._begun is None


def test_a_chosen_folder_has_its_own_records(file: Path) -> None:
    chosen, model = file.parent, file.parents[1]
    note_start(chosen, model, file)
    begin(model, str(chosen))
    assert read_ahead._begun is not None
    assert records_folder(chosen) == chosen
