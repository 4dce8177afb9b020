"""Weights that outlive the engine they were loaded for."""

from __future__ import annotations

import os
import shutil
import threading

import pytest

from ops.cpu import native_library
from serve import LLM
from serve.config import EngineConfig
from serve.group import worker as worker_module
from serve.group.grid import Grid
from serve.group.kept_rank import KeptRank
from serve.group.membership import read_group_key, read_membership
from serve.group.rank import Rank
from serve.group.worker import Worker
from serve.group.worker_main import _connected
from tests.serve.group.test_group_engine import SETTINGS, outputs, requests
from tests.serve.group.test_hosts import variables  # noqa: F401
from tests.support.engine.checkpoints import checkpoint
from tests.support.transport.transport_rig import PATIENCE_S


class Loads:
    """Counts loads, each of which returns another object."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Rank:
        self.count += 1
        return object.__new__(Rank)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(100))
    return folder


GRID = Grid(1, ((0, 1), (1, 1)))


def test_the_same_rank_is_kept(model):
    kept, loads = KeptRank(), Loads()
    first = kept.get(EngineConfig(str(model)), GRID, 1, loads)
    assert kept.get(EngineConfig(str(model)), GRID, 1, loads) is first
    assert loads.count == 1


@pytest.mark.parametrize("what", ["setting", "grid", "rank", "size", "time", "file"])
def test_another_rank_is_loaded(model, what):
    kept, loads = KeptRank(), Loads()
    first = kept.get(EngineConfig(str(model)), GRID, 1, loads)
    config, grid, rank = EngineConfig(str(model)), GRID, 1
    weights = model / "model.safetensors"
    if what == "setting":
        config = EngineConfig(str(model), dtype="int8")
    elif what == "grid":
        grid = Grid(1, ((0, 2), (2, 1)))
    elif what == "rank":
        rank = 0
    elif what == "size":
        status = weights.stat()
        weights.write_bytes(bytes(101))
        os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif what == "time":
        os.utime(weights, ns=(0, 1))
    else:
        shutil.copy(weights, model / "more.safetensors")
    assert kept.get(config, grid, rank, loads) is not first
    assert loads.count == 2


def test_a_load_that_fails_leaves_nothing(model):
    kept, loads = KeptRank(), Loads()
    kept.get(EngineConfig(str(model)), GRID, 1, loads)

    def failing() -> Rank:
        raise MemoryError

    other = EngineConfig(str(model), dtype="int8")
    with pytest.raises(MemoryError):
        kept.get(other, GRID, 1, failing)
    kept.get(other, GRID, 1, loads)
    assert loads.count == 2


@pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built")
@pytest.mark.small_pages
@pytest.mark.parametrize(
    "ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=["tp", "pp"]
)
def test_a_new_engine_finds_the_weights_loaded(variables, tmp_path, monkeypatch, ranks):  # noqa: F811
    """Three engines, one after the other; the last one has other settings."""
    key_file = tmp_path / "key"
    key_file.write_bytes(b"a secret of some bytes")
    settings = SETTINGS | {"dtype": "int8", "kv_cache_bytes": 1 << 20, "group_key_file": key_file}
    path, prompts = str(checkpoint("llama", "base")), requests(9, 2, 10)
    config = EngineConfig(path, **ranks, **settings)
    member = read_membership(config, variables)
    assert member is not None
    key, loaded, load = read_group_key(config, member), [], worker_module.read_source

    def counted(config, local_rank):
        loaded.append(config.max_num_seqs)
        return load(config, local_rank)

    monkeypatch.setattr(worker_module, "read_source", counted)
    kept = KeptRank()

    def serve() -> None:
        num_ends = 0
        while num_ends < 3:  # a listener that is about to close may still answer
            worker = Worker(_connected(member, key), key, {}, kept=kept)
            worker.serve()
            num_ends += worker.has_ended

    thread = threading.Thread(target=serve, name="rank-1", daemon=True)
    thread.start()
    found = []
    for more in ({}, {}, {"max_num_seqs": 3}):
        with LLM(path, **ranks, **settings | more) as llm:
            found.append(outputs(llm, *prompts))
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert found[0] == found[1] == found[2]
    assert loaded == [settings["max_num_seqs"], 3]
