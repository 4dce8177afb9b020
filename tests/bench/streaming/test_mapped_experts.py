"""The pages of a mapped mixture's experts, and which of them a memory keeps."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

import numpy as np
import pytest

from bench.streaming.expert_memory import Lru, Oracle

gguf = pytest.importorskip("gguf")

from bench.streaming.mapped_experts import MappedExperts  # noqa: E402  # it needs gguf

EXPERTS, ROWS, COLUMNS = 4, 33, 1024  # an expert has no whole number of pages


def test_each_expert_has_its_own_pages(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
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
    for (layer, expert), ranges in found.ranges.items():
        for name, (address, _, size) in zip(("gate", "up", "down"), ranges, strict=True):
            content = ctypes.string_at(address, size)
            assert size > 4 * (ROWS - 2) * COLUMNS and size % mmap.PAGESIZE == 0
            assert content in weights[layer, name][expert].tobytes()
    mapped.close()


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
