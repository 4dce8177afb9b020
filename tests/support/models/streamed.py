"""Small models whose weights stream, and files that fail."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from memory.tiers.block_file import BlockFile, Transfer, os_error
from serve.errors import ConfigError
from serve.loading import model_source
from serve.loading.footprint import streamed_bytes
from serve.loading.streaming import cache, placement, tables
from serve.loading.streaming.cache import StreamingCache
from serve.loading.streaming.placement import Needs, Placement, Speeds, least_bytes, place
from serve.loading.streaming.stream import WeightStream
from serve.models import Decoder
from tests.support.models.packed_models import cache_for, start

SPEEDS = Speeds(disk=1e9, memory=1e10)


def make_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets tables and last products of test models stream as those of large ones do."""
    monkeypatch.setattr(tables, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(tables, "READ_BLOCKS", 3)
    monkeypatch.setattr(placement, "MIN_HEAD_BYTES", 0)


def streaming(budget: int, folder: Path | None = None) -> StreamingCache:
    return StreamingCache(cache_for(folder=folder), budget, 64 << 20, SPEEDS)


def stream_of(model: Decoder) -> WeightStream:
    stream = model.weights.stream
    assert isinstance(stream, WeightStream)
    return stream


def least_budget(path: Path, weights: str = "int8") -> int:
    """Returns the least budget with which a model can be loaded."""
    with noted_needs() as found, pytest.raises(ConfigError):
        start(path, streaming(1), weights=weights)
    return least_bytes(found[-1])


@contextmanager
def noted_needs() -> Iterator[list[Needs]]:
    """Yields a list that gets what the models that are loaded meanwhile are made of."""
    found: list[Needs] = []

    def noting(needs: Needs, budget: int) -> Placement:
        found.append(needs)
        return place(needs, budget)

    def about_alone(*given: Any) -> tuple[int, int]:
        return streamed_bytes(*given)[0], 0  # packed, however little memory there is

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "place", noting)
        patch.setattr(model_source, "streamed_bytes", about_alone)
        yield found


class FaultyFile:
    """A BlockFile of which `fault` decides for each transfer: None: it is read; an errno: it fails
    with that; "short": less than asked for comes; "flipped": a wrong bit comes."""

    def __init__(self, file: BlockFile) -> None:
        self.file, self.io, self.is_direct = file, file.io, file.is_direct
        self.fault: Callable[[Transfer], int | str | None] = lambda _: None
        self.num_reads = 0

    def read(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            self.num_reads += 1
            fault = self.fault(transfer)
            if fault == "short":
                transfer.done(OSError(errno.EIO, "the file ends inside the block"))
            elif fault == "flipped":
                self.file.read([replace(transfer, done=_flipping(transfer))])
            elif fault is None:
                self.file.read([transfer])
            else:
                assert isinstance(fault, int)
                transfer.done(os_error(fault))

    def write(self, transfers: Sequence[Transfer]) -> None:
        raise AssertionError("weights are not written")

    def register(self, regions: Sequence[tuple[int, int]]) -> bool:
        return False

    def fileno(self) -> int:
        return self.file.fileno()

    def preallocate(self, size_bytes: int) -> None:
        raise AssertionError("weights are not written")

    def flush(self) -> None:
        raise AssertionError("weights are not written")

    def close(self, timeout_s: float | None = None) -> bool:
        return self.file.close(timeout_s)


def _flipping(transfer: Transfer) -> Callable[[OSError | None], None]:
    def done(error: OSError | None) -> None:
        (ctypes.c_ubyte * 1).from_address(transfer.address + transfer.length // 2)[0] ^= 4
        transfer.done(error)

    return done


def use_faulty(monkeypatch: pytest.MonkeyPatch, module: ModuleType = cache) -> list[FaultyFile]:
    """Returns a list that gets the files that the module opens from now on."""
    made: list[FaultyFile] = []
    opened = module.open_block_file

    def open_faulty(fd: int, **settings: object) -> FaultyFile:
        made.append(FaultyFile(opened(fd, **settings)))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(module, "open_block_file", open_faulty)
    return made
