"""What a start measures and takes before the first step."""

from __future__ import annotations

import ctypes
import errno
import zlib
from math import inf
from pathlib import Path

import pytest
import torch
from torch import Tensor

from memory.tiers.block_file import Transfer, os_error
from ops.cpu import native_library
from serve.config import DEFAULT_MODEL, EngineConfig
from serve.errors import ConfigError, ModelLoadError
from serve.loading.footprint import streamed_bytes
from serve.loading.precision import resolve_precision
from serve.loading.streaming import build, speeds
from serve.loading.streaming.placement import least_bytes
from serve.loading.streaming.units import PIECE_BYTES
from serve.models import read_spec
from serve.models.packed_cache import folder as folders
from tests.support.models.packed_models import copy_of_model, logits, start
from tests.support.models.streamed import (
    FaultyFile,
    least_budget,
    make_small,
    noted_needs,
    stream_of,
    streaming,
    use_faulty,
)

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not native_library.is_available(), reason="needs the native kernels"),
]
PAGE = 4096
_libc = ctypes.CDLL(None, use_errno=True)


def num_absent(memory: Tensor) -> int:
    """Returns how many pages of a tensor are not in memory."""
    first = memory.data_ptr() // PAGE * PAGE
    count = -(-(memory.data_ptr() + memory.nbytes - first) // PAGE)
    found = (ctypes.c_ubyte * count)()
    size = ctypes.c_size_t(count * PAGE)
    assert _libc.mincore(ctypes.c_void_p(first), size, found) == 0, ctypes.get_errno()
    return sum(not flags & 1 for flags in found)


def test_the_ring_has_its_memory_before_its_first_layers_have_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K/V is sized after that, by the memory that is free."""
    make_small(monkeypatch)
    monkeypatch.setattr(build, "_HUGE_FROM", 0)  # memory that nobody has used before
    path = copy_of_model("llama", "base", tmp_path)
    logits(path)
    budget, files, held = least_budget(path), use_faulty(monkeypatch), []

    def hold(file: FaultyFile, transfers: list[Transfer]) -> None:
        held.extend(transfers)

    with monkeypatch.context() as patch:
        patch.setattr(FaultyFile, "read", hold)
        stream = stream_of(start(path, streaming(budget)))
    assert held and stream.ring is not None
    assert [num_absent(part) for part in stream._memory] == [0] * len(stream._memory)
    files[-1].read(held)
    stream.close()


@pytest.mark.parametrize("dtype", ["int8", "int4", "bfloat16"])
def test_the_least_memory_is_known_before_packing(dtype: str, tmp_path: Path) -> None:
    config = EngineConfig(DEFAULT_MODEL, dtype=dtype, backend="cpu")
    spec = read_spec(config.model_path)
    precision = resolve_precision(config, spec, is_trial=True)
    _, least = streamed_bytes(config, spec, precision)
    with noted_needs() as found, pytest.raises(ConfigError):
        start(config.model_path, streaming(1, tmp_path), weights=dtype)
    need = least_bytes(found[-1])
    assert 0.99 * need < least <= need


def test_a_lack_of_memory_does_not_cost_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small(monkeypatch)
    path = copy_of_model("llama", "base", tmp_path)
    logits(path)

    def fail(*_: object) -> None:
        raise os_error(errno.ENOMEM)

    removed: list[Path] = []
    monkeypatch.setattr(folders, "remove", removed.append)
    monkeypatch.setattr(build, "huge_pages", fail)
    monkeypatch.setattr(build, "_HUGE_FROM", 0)
    with pytest.raises(ModelLoadError, match=r"\.packed: Cannot allocate memory"):
        start(path, streaming(1 << 30))
    assert not removed


def test_memory_is_read_by_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Although packing leaves torch one of them."""
    seen = []

    def clock() -> float:
        seen.append(torch.get_num_threads())
        return float(len(seen))

    monkeypatch.setattr(speeds, "_MEMORY_BYTES", PAGE)
    monkeypatch.setattr(native_library, "num_threads", lambda: 3)
    monkeypatch.setattr(speeds.time, "monotonic", clock)
    before = torch.get_num_threads()
    assert speeds.memory_speed() == PAGE
    assert seen and set(seen) == {3} and torch.get_num_threads() == before


def test_a_folder_is_measured_with_what_cannot_be_compressed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    measure = speeds._speed

    def speed(path: Path, folder: Path) -> float:
        content = path.read_bytes()
        assert len(content) == PIECE_BYTES <= len(zlib.compress(content, 1))
        assert not list(folder.iterdir()), "whatever ends the process, no file stays"
        return measure(path, folder, (), 0.01)

    monkeypatch.setattr(speeds, "_FILE_BYTES", PIECE_BYTES)
    monkeypatch.setattr(speeds, "_IN_FLIGHT", 1)
    monkeypatch.setattr(speeds, "_speed", speed)
    assert 1e6 < speeds.folder_speed(tmp_path) < inf
    assert not list(tmp_path.iterdir())
