"""Opening the lanes of an engine on a GPU, on a fake driver."""

from __future__ import annotations

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from memory.nodes.lane_layout import MAX_BYTES
from memory.pages.cuda_device import CudaError, CudaUnavailableError
from serve import EngineConfig
from serve.runner import cuda_lanes
from serve.runner.cuda_lanes import open_lanes, reserved_bytes

GPU = SimpleNamespace(device=torch.device("cuda:0"), stream=77)
RDMA = ("rdma://a:1", "rdma://b:1", "tcp://c:1")


class Context:
    """Stands in for CudaDevice."""

    def __init__(self, driver, index: int) -> None:
        if self.fails == "open":
            raise CudaUnavailableError("CUDA device 0: no device")
        self.calls: list[str] = []
        made.append(self)

    fails = ""

    def call(self, name: str, *arguments):
        if name == self.fails:
            raise CudaError(5, f"{name}: CUDA_ERROR_UNKNOWN")
        self.calls.append(name)
        return "stream"

    def enter(self) -> None:
        self.calls.append("enter")

    def close(self) -> None:
        self.calls.append("close")


made: list[Context] = []


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    made.clear()
    monkeypatch.setattr(Context, "fails", "")
    monkeypatch.setattr(cuda_lanes, "CudaDevice", Context)
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))


def config_of(*urls: str) -> EngineConfig:
    return EngineConfig(memory_nodes=urls, memory_node_key_file="key", max_num_seqs=9)


def test_lanes_of_a_gpu_over_rdma():
    lanes = open_lanes(config_of(*RDMA), GPU)
    opener = lanes._opener
    assert (opener.stream, opener.release_stream, lanes._max_rows) == (77, "stream", 9)
    opener.enter()
    assert made[0].calls == ["cuStreamCreate", "enter"]
    lanes.close()
    assert made[0].calls[2:] == ["enter", "cuStreamDestroy", "close"]
    assert reserved_bytes(config_of(*RDMA), GPU) == 2 * 2 * MAX_BYTES


def test_no_lanes_without_a_gpu_or_without_rdma():
    host = SimpleNamespace(device=torch.device("cpu"), stream=0)
    assert open_lanes(config_of(*RDMA), host) is None
    assert open_lanes(config_of("tcp://c:1"), GPU) is None
    assert made == [] and reserved_bytes(config_of(*RDMA), host) == 0
    assert reserved_bytes(config_of("tcp://c:1"), GPU) == 0


@pytest.mark.parametrize(
    ("fails", "reason", "calls"),
    [("open", "no device", []), ("cuStreamCreate", "CUDA_ERROR_UNKNOWN", [["close"]])],
)
def test_a_reason_in_the_log(fails, reason, calls, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(Context, "fails", fails)
    assert open_lanes(config_of(*RDMA), GPU) is None
    assert "the host posts rows" in caplog.text and reason in caplog.text
    assert [context.calls for context in made] == calls, "the context is released"


def test_without_the_bindings(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    assert open_lanes(config_of(*RDMA), GPU) is None
    assert "the host posts rows" in caplog.text and made == []
