"""Back ends are found by name, and "auto" chooses one."""

from __future__ import annotations

import logging

import pytest
import torch

import ops
from serve.config import EngineConfig
from serve.loading.precision import choose_backend
from serve.models import read_spec
from tests.support.engine.checkpoints import checkpoint


@pytest.fixture
def gpu(monkeypatch):
    """Returns a function that simulates a device of some capability and importable packages."""

    def make(capability=(9, 0), missing=(), triton=(3, 6)):
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: "a GPU")
        monkeypatch.setattr(ops, "_can_import", lambda name: name not in missing)
        monkeypatch.setattr(ops, "_triton_version", lambda: triton)

    return make


def test_auto_chooses_a_usable_gpu(gpu):
    gpu()
    assert ops.best_backend() == "cuda"


@pytest.mark.parametrize(
    ("kwargs", "why"),
    [
        ({"capability": (7, 5)}, "a GPU is not used: compute capability 7.5, not 8.0"),
        ({"missing": ("triton",)}, "triton cannot be imported"),
        ({"missing": ("triton", "cuda.bindings")}, "triton and cuda.bindings cannot be imported"),
        ({"triton": (3, 2)}, "not 3.5 or later"),
    ],
)
def test_an_unusable_gpu_is_named_and_the_cpu_is_used(gpu, caplog, kwargs, why):
    gpu(**kwargs)
    with caplog.at_level(logging.WARNING):
        assert ops.best_backend() == "cpu"
    assert why in caplog.text


def test_the_interpreter_is_only_used_on_request(gpu, monkeypatch):
    gpu()
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert ops.best_backend() == "cpu"


def test_auto_chooses_a_back_end_with_the_required_features(gpu, caplog):
    gpu()
    spec = read_spec(checkpoint("llama", "base"))
    assert choose_backend(EngineConfig(), spec) == "cuda"
    assert choose_backend(EngineConfig(backend="cpu"), spec) == "cpu"
    with caplog.at_level(logging.WARNING):
        nodes = EngineConfig(memory_nodes=("tcp://127.0.0.1:7000",))
        assert choose_backend(nodes, spec) == "cpu"
    assert "memory nodes are used" in caplog.text


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("deepseek_v3", {}, None),
        ("llama4_text", {}, "do not attend within chunks"),
        ("llama4_text", {"max_model_len": 32}, None),
        ("gpt_oss", {}, None),
    ],
)
def test_auto_takes_the_cpu_for_layers_without_cuda_kernels(gpu, caplog, family, settings, reason):
    """reason: why the CPU is taken; None: the GPU is taken."""
    gpu()
    spec = read_spec(checkpoint(family, "long"))
    with caplog.at_level(logging.WARNING):
        found = choose_backend(EngineConfig(**settings), spec)
    assert found == ("cuda" if reason is None else "cpu")
    assert reason is None or reason in caplog.text


def test_missing_packages_are_named(monkeypatch):
    def no_triton(name):
        raise ImportError("No module named 'triton'")

    monkeypatch.setattr(ops.importlib, "import_module", no_triton)
    with pytest.raises(ValueError, match=r"No module named 'triton'.*mergestep\[cuda\]"):
        ops.get_backend("cuda")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="it is the processor")
def test_the_device_is_the_current_one():
    assert ops.get_backend("cuda").device == torch.device("cuda", torch.cuda.current_device())
