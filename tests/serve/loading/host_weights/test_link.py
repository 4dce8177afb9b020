"""Page-locked memory of a link, with CUDA's calls noted."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from serve.errors import ModelLoadError
from serve.loading.host_weights.link import CudaLink


class Runtime:
    def __init__(self) -> None:
        self.locked: list[int] = []
        self.error = 0

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if not self.error:
            self.locked.append(address)
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        self.locked.remove(address)
        return 0


def lost() -> None:
    raise RuntimeError("an illegal access")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(synchronize=lost))
    return made


def test_memory_is_unlocked_though_the_device_is_lost(runtime: Runtime) -> None:
    link = CudaLink(torch.device("cpu"))
    pieces = [link.pinned(5000) for _ in range(2)]
    assert sorted(runtime.locked) == sorted(each.data_ptr() for each in pieces)
    with pytest.raises(RuntimeError, match="illegal access"):
        link.close()
    assert not runtime.locked


def test_memory_that_cannot_be_locked_is_an_error(runtime: Runtime) -> None:
    runtime.error = 2
    with pytest.raises(ModelLoadError, match=r"cannot be page-locked \(CUDA error 2\)"):
        CudaLink(torch.device("cpu")).pinned(5000)
