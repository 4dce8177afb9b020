"""The pages of a mapped mixture's experts, and which of them a memory keeps."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from bench.streaming.expert_memory import Expert, Lru, Oracle

gguf = pytest.importorskip("gguf")

from bench.streaming.mapped_experts import MappedExperts, begin_with  # noqa: E402  # it needs gguf

EXPERTS, ROWS, COLUMNS = 4, 33, 1024  # an expert has no whole number of pages


def write_mixture(path: Path) -> dict[tuple[int, str], np.ndarray]:
    """Writes a file with two mixtures. Returns the weights of each layer and name."""
    writer = gguf.GGUFWriter(path, "olmoe")
    weights = {}
    for layer in range(2):
        for name in ("gate", "up", "down"):
            values = np.random.default_rng(layer).random((EXPERTS, ROWS, COLUMNS), np.float32)
            weights[layer, name] = values
            writer.add_tensor(f"blk.{layer}.ffn_{name}_exps.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with path.open("r+b") as file:
        os.fsync(file)  # what is not on the disk yet cannot be dropped
    return weights


def test_each_expert_has_its_own_pages(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    weights = write_mixture(path)
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    found = MappedExperts(path)
    assert sorted(found.ranges) == [(layer, e) for layer in range(2) for e in range(EXPERTS)]
    mapped.read()
    every = found.num_bytes(found.ranges)
    assert every == found.resident_bytes(found.ranges)
    found.keep({(1, 2), (0, 0)})
    kept = found.resident_bytes([(1, 2), (0, 0)])
    assert kept == found.num_bytes([(1, 2), (0, 0)]), "they stay"
    every_one = set(found.ranges)
    found.keep(set())
    found.read(every_one)
    assert found.resident_bytes(every_one) == every
    for (layer, expert), ranges in found.ranges.items():
        for name, (address, _, size) in zip(("gate", "up", "down"), ranges, strict=True):
            content = ctypes.string_at(address, size)
            assert size > 4 * (ROWS - 2) * COLUMNS and size % mmap.PAGESIZE == 0
            assert content in weights[layer, name][expert].tobytes()
    mapped.close()


class Pages:
    """The experts that are in memory, of three with a byte each."""

    def __init__(self, here: set[Expert]) -> None:
        self.ranges = dict.fromkeys([(0, 0), (0, 1), (0, 2)])
        self.here = here

    def read(self, experts: set[Expert]) -> None:
        self.here |= experts

    def keep(self, experts: set[Expert]) -> None:
        self.here &= experts

    def resident_bytes(self, experts: set[Expert]) -> int:
        return len(self.here & experts)

    def num_bytes(self, experts: set[Expert]) -> int:
        return len(experts)


def test_a_measurement_begins_with_its_own_experts() -> None:
    """Whatever the one before left there."""
    pages = Pages({(0, 0), (0, 2)})
    begin_with(pages, {(0, 0), (0, 1)})  # type: ignore[arg-type]
    assert pages.here == {(0, 0), (0, 1)}
    pages.keep = lambda experts: None  # type: ignore[method-assign]
    with pytest.raises(SystemExit, match="do not stay"):
        begin_with(pages, {(0, 2)})  # type: ignore[arg-type]


def test_what_lru_keeps() -> None:
    memory = Lru(3, [(0, 0), (0, 1), (1, 0), (1, 1)])
    assert memory.kept == {(0, 0), (0, 1), (1, 0)}
    memory.use(0, [1, 2])
    assert memory.kept == {(1, 0), (0, 1), (0, 2)}
    assert (memory.hits, memory.uses) == (1, 2)
    memory.use(1, [0, 1, 2, 3])
    assert memory.kept == {(1, expert) for expert in range(4)}, "what is used now stays"


def test_what_the_oracle_keeps() -> None:
    trace = [(0, [1]), (0, [2]), (0, [1]), (0, [0])]
    memory = Oracle(2, [(0, 0), (0, 3)], trace)
    kept = []
    for access in trace:
        memory.use(*access)
        kept.append({expert for _, expert in memory.kept})
    assert kept[:3] == [{0, 1}, {1, 2}, {1, 2}] and 0 in kept[3]
    assert memory.hits == 1
