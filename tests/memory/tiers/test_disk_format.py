"""A directory that an earlier release wrote can be read by the present code (docs/storage.md)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.memory.disk_pages import PAGE, found, open_store, put
from tests.support.memory.faulty_storage import Pages, repeated

ID = "af8ce26041ab9f245b1499267cf4b97c"
INDEX = bytes.fromhex(
    f"""
    4d534b565350494c 01000000 40000000 0020000000000000 {ID}
    9372c470eeadd5ecd9c3c74c2b3cb633f8e2f2fad799250a0f70d652b6b825e4
    62ccd191e9178920608aba99cc90d35b {"00" * 40}

    01 05 0200 00000000 6669727374{"00" * 27}
    e9e8ca6602c04e6c 0100000000000000 07f4f9618a2f9ea1
    01 20 0200 01000000 0102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f20
    b8adbb05fb25481b 0200000000000000 e8704af1960d6552
    01 07 0200 02000000 64726f70706564{"00" * 25}
    80539c475452efd7 0300000000000000 f76609f26d2ff174
    02 07 0000 00000000 64726f70706564{"00" * 25}
    0000000000000000 0400000000000000 faa6a10b8df17d2b
    01 04 0100 02000000 68616c66{"00" * 28}
    d91463def71299bc 0500000000000000 068d3abb4d5b3fb6
    """
)
"""Version 1, as a process left it that was killed: the header and five records. The page "dropped"
was dropped and its slot given to "half", which has half a page. A change of the format needs a new
version; these bytes stay."""
LONG_KEY = bytes(range(1, 33))


@pytest.fixture
def pages():
    return Pages(PAGE, 64)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write(tmp_path / "index", INDEX)
    content = repeated(b"first", PAGE) + repeated(LONG_KEY, PAGE) + repeated(b"half", PAGE // 2)
    write(tmp_path / f"pages-{ID}.kv", content.ljust(4 * PAGE, b"\0"))
    return tmp_path


def write(path: Path, content: bytes) -> None:
    path.touch(mode=0o600)
    path.write_bytes(content)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_pages_of_version_1_are_found(directory, pages, caplog):
    for _ in range(2):  # the first store writes a new index when it closes
        store = open_store(directory, slots=4, persistent=True)
        assert set(store._slots.entries) == {b"first", LONG_KEY, b"half"}
        assert found(store, pages, b"first") and found(store, pages, LONG_KEY)
        assert store.load(b"half", pages.fill(5, b"-")).result()
        assert pages.content(5) == repeated(b"half", PAGE // 2) + b"-" * (PAGE // 2)
        store._slots.check_integrity()
        store.close()
    assert names(directory) == ["index", "lock", f"pages-{ID}.kv"]
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_the_format_is_still_written(directory, pages, monkeypatch):
    """The same steps as those behind INDEX write the same bytes."""
    monkeypatch.setattr(os, "urandom", lambda size: (bytes.fromhex(ID) * size)[:size])
    store = open_store(directory / "new", slots=4, persistent=True)
    assert put(store, pages, b"first", LONG_KEY, b"dropped") == [True] * 3
    assert store.discard(b"dropped")
    assert store.store(b"half", pages.fill(9, b"half"), PAGE // 2).result()
    assert store.flush()
    assert (directory / "new" / "index").read_bytes() == INDEX
    store.close()


@pytest.mark.parametrize(
    ("position", "value", "log"),
    [(0, b"X", "is not ours"), (8, b"\2", "version 2, this is 1")],
    ids=["magic", "version"],
)
@pytest.mark.row("X9")
def test_another_format_is_not_read(directory, pages, position, value, log, caplog):
    """A file with another magic is kept under another name; one of another version is replaced."""
    other = INDEX[:position] + value + INDEX[position + 1 :]
    write(directory / "index", other)
    store = open_store(directory, slots=4, persistent=True)
    assert not store._slots.entries and log in caplog.text
    put(store, pages, b"first")
    store.close()
    aside = list(directory.glob("index.aside-*"))
    assert [path.read_bytes() for path in aside] == ([other] if position == 0 else [])
    assert not (directory / f"pages-{ID}.kv").exists()
    assert len(list(directory.glob("pages-*.kv"))) == 1
    store = open_store(directory, slots=4, persistent=True)
    assert found(store, pages, b"first")
    store.close()
