"""Ranks of several hosts: how they exchange results, and what they may take for K/V."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace

import pytest

from ops.cpu import native_library
from serve import LLM
from serve.config import EngineConfig
from serve.errors import ConfigError, MergestepError
from serve.group import room
from serve.group.exchange.arena import ArenaExchange
from serve.group.exchange.windows import WindowExchange
from serve.group.membership import read_group_key, read_membership
from serve.group.worker import Worker
from serve.group.worker_main import _connected
from tests.serve.group.test_group_engine import SETTINGS, outputs, requests
from tests.support.engine.checkpoints import checkpoint
from tests.support.transport.transport_rig import PATIENCE_S

MIB = 1 << 20


@pytest.fixture
def variables(monkeypatch) -> dict[str, str]:
    """Makes this process rank 0 of two; returns the variables of rank 1."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    found = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port - 1)}
    for name, value in {**found, "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    return {**found, "RANK": "1"}


@pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built")
@pytest.mark.small_pages
@pytest.mark.parametrize(("host", "kind"), [("here", ArenaExchange), ("there", WindowExchange)])
def test_tensor_ranks_of_one_host_share_memory(variables, tmp_path, monkeypatch, host, kind):
    monkeypatch.setattr(
        socket,
        "gethostname",
        lambda: host if threading.current_thread().name == "rank-1" else "here",
    )
    key_file = tmp_path / "key"
    key_file.write_bytes(b"a secret of some bytes")
    settings = SETTINGS | {"dtype": "int8", "kv_cache_bytes": MIB, "group_key_file": key_file}
    path, prompts = str(checkpoint("llama", "base")), requests(9, 2, 10)
    config = EngineConfig(path, tensor_parallel_size=2, **settings)
    member = read_membership(config, variables)
    assert member is not None
    key, workers, kinds = read_group_key(config, member), [], []

    def serve() -> None:
        workers.append(Worker(_connected(member, key), key, {}))
        workers[0].serve()

    thread = threading.Thread(target=serve, name="rank-1", daemon=True)
    thread.start()
    with LLM(path, tensor_parallel_size=2, **settings) as llm:
        found = outputs(llm, *prompts)
        kinds.append(type(workers[0]._rank.exchange))
    thread.join(PATIENCE_S)
    assert kinds == [kind] and workers[0].has_ended
    with LLM(path, **settings) as llm:
        assert outputs(llm, *prompts) == found


def test_only_serve_run_runs_other_ranks(variables, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match="this process is rank 1, which `serve run` alone runs"):
        LLM(str(checkpoint("llama", "base")), tensor_parallel_size=2, **SETTINGS)


def test_ranks_that_do_not_come_are_named(variables, monkeypatch):
    monkeypatch.setattr("serve.group.remote_workers.CONNECT_S", 0.1)
    with pytest.raises(MergestepError, match="ranks 1 did not connect"):
        LLM(str(checkpoint("llama", "base")), tensor_parallel_size=2, **SETTINGS)


@pytest.mark.parametrize(
    ("workers", "kv_cache_bytes", "expected"),
    [
        ([("a", 900)], None, 200),  # one host: 40 % of what is free here, for two ranks
        ([("a", 900)], 300, 150),
        ([("b", 500)], None, 200),
        ([("b", 5000)], None, 400),
        ([("a", 900), ("b", 2000), ("b", 1000)], None, 180),  # what is left on the fullest host
        ([("b", 2000), ("b", 1000)], None, 200),
        ([("b", 2000), ("b", 1000)], 300, 150),
    ],
)
def test_the_host_with_least_memory_decides(monkeypatch, workers, kv_cache_bytes, expected):
    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    monkeypatch.setattr(room, "available_memory", lambda: 1000 * MIB)
    monkeypatch.setattr(room, "local_kv_bytes", lambda: 400 * MIB)
    config = EngineConfig(kv_cache_bytes=None if kv_cache_bytes is None else kv_cache_bytes * MIB)
    links = [SimpleNamespace(host=host, free_bytes=free * MIB) for host, free in workers]
    own = room.RankRoom("", 0, 0)
    assert room.kv_bytes_of_a_rank(config, own, links) == expected * MIB  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("workers", "kv_cache_bytes", "expected"),
    [
        ([("a", "0", 700, 100)], None, 250),  # one device: what is left beside both ranks' steps
        ([("a", "1", 600, 200)], None, 400),  # a device each: the one with least decides
        ([("a", "1", 600, 200)], 300, 150),  # a machine's ranks divide kv_cache_bytes
        ([("b", "0", 600, 200)], 300, 300),
    ],
)
def test_the_device_with_least_memory_decides(monkeypatch, workers, kv_cache_bytes, expected):
    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    config = EngineConfig(kv_cache_bytes=None if kv_cache_bytes is None else kv_cache_bytes * MIB)
    links = [
        SimpleNamespace(host=host, device=device, free_bytes=free * MIB, needed_bytes=need * MIB)
        for host, device, free, need in workers
    ]
    own = room.RankRoom("0", 900 * MIB, 100 * MIB)
    assert room.kv_bytes_of_a_rank(config, own, links) == expected * MIB  # type: ignore[arg-type]


def test_a_device_that_is_too_small_is_named(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "a")
    link = SimpleNamespace(host="b", device="GPU-7", free_bytes=90 * MIB, needed_bytes=100 * MIB)
    own = room.RankRoom("GPU-1", 900 * MIB, 100 * MIB)
    with pytest.raises(ConfigError, match="device GPU-7 of b has 90 MiB left"):
        room.kv_bytes_of_a_rank(EngineConfig(), own, [link])  # type: ignore[list-item]
    link.free_bytes = 150 * MIB
    config = EngineConfig(kv_cache_bytes=60 * MIB)
    with pytest.raises(ConfigError, match="kv_cache_bytes: 60 MiB for each rank"):
        room.kv_bytes_of_a_rank(config, own, [link])  # type: ignore[list-item]
