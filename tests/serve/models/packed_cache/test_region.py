"""The data of a file is in memory, mapped or read, and every chunk of it was compared."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ops.cpu import native_library
from serve import machine
from serve.models.packed_cache import region
from serve.models.packed_cache.layout import (
    CHUNK_BYTES,
    DATA_START,
    PAGE,
    DamagedCache,
    Index,
    chunks_of,
)

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="needs the native kernels"
)
END = DATA_START + PAGE * 3 + CHUNK_BYTES * 2  # more than the probe, with a short chunk in the end


@pytest.fixture(scope="module")
def content() -> torch.Tensor:
    return torch.randint(0, 256, (END + 100,), dtype=torch.uint8)


@pytest.fixture
def file(content: torch.Tensor, tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(content.numpy().tobytes())
    fd = os.open(path, os.O_RDWR)
    yield fd
    os.close(fd)


def index_of(content: torch.Tensor) -> Index:
    checksum = native_library.library().checksum
    chunks = chunks_of(END)
    sums = [checksum(content.data_ptr() + chunk.start, chunk.num_bytes) for chunk in chunks]
    return Index(END, [], sums)


@pytest.mark.parametrize("is_huge", [False, True])
def test_the_data_are_those_of_the_file(
    is_huge: bool, content: torch.Tensor, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region._Mapping, "is_huge", lambda *_: is_huge)
    data, is_mapped = region.open_region(file, index_of(content))
    assert is_mapped == is_huge
    assert torch.equal(data[DATA_START:], content[DATA_START:END])


def test_pages_that_become_small_in_the_end_are_read(
    content: torch.Tensor, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [True, False]
    monkeypatch.setattr(region._Mapping, "is_huge", lambda *_: answers.pop(0))
    data, is_mapped = region.open_region(file, index_of(content))
    assert not is_mapped and not answers and torch.equal(data[DATA_START:], content[DATA_START:END])


@pytest.mark.parametrize("is_huge", [False, True])
@pytest.mark.parametrize("place", [DATA_START, END // 2, END - 1])
def test_a_changed_byte_is_noticed(
    is_huge: bool, place: int, content: torch.Tensor, file: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(region._Mapping, "is_huge", lambda *_: is_huge)
    os.pwrite(file, bytes([int(content[place]) ^ 16]), place)
    with pytest.raises(DamagedCache, match="damaged"):
        region.open_region(file, index_of(content))


def test_huge_pages_are_those_that_the_system_tells(content: torch.Tensor, file: int) -> None:
    """Whether there are any depends on the file system; all of them is the most."""
    mapping = region._Mapping(file, END)
    assert not mapping.is_huge(END), "nothing was read"
    assert int(mapping.data.sum()) > 0
    assert 0 <= region.huge_bytes(mapping.data.data_ptr()) <= END
    assert region.huge_bytes(1) == 0 and not mapping.is_huge(DATA_START)


def test_mapped_files_are_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system counts them as available, but weights are among them."""
    texts = {
        "/proc/meminfo": "MemAvailable: 900 kB\n",
        "/proc/self/status": "VmRSS: 300 kB\nRssFile:\t 100 kB\n",
    }
    monkeypatch.setattr(machine, "_read", lambda path: texts.get(path, ""))
    assert machine.available_memory() == 800 << 10
    texts["/sys/fs/cgroup/memory.max"] = str(1000 << 10)
    texts["/sys/fs/cgroup/memory.current"] = str(900 << 10)
    texts["/sys/fs/cgroup/memory.stat"] = f"inactive_file {300 << 10}\n"
    assert machine.available_memory() == 300 << 10
