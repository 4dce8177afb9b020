"""What several test files share."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

# Threads of two libraries on two cores only get in each other's way in tests.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Nothing is ever downloaded.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

# Triton's kernels run in its interpreter where there is no GPU. It looks when they are defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from memory.node import MemoryNode
from ops import get_backend, native
from tests.raw_engine import NODE_BYTES

TRITON_FILES = ("test_ops_triton", "test_ops_cuda", "test_serve_cuda", "test_bench_gpu")


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are printed whole, however narrow the terminal that the tests were started in."""
    monkeypatch.setenv("COLUMNS", "150")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of the CUDA back end, whose files' names say it. Those that compile share
    what is compiled for a whole file. Where there is a GPU the engine's tests run on it."""
    has_gpu = torch.cuda.is_available()
    for item in items:
        if has_gpu and item.get_closest_marker("small_pages"):
            item.add_marker(pytest.mark.skip(reason="a CUDA device maps 2 MiB at a time"))
        if item.path.name.startswith(TRITON_FILES):
            item.add_marker(pytest.mark.triton)
            if item.path.stem.endswith("_compiled"):
                item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.fixture(params=native.library().instruction_sets() if native.is_available() else [])
def isa(request):
    """Each set of native kernels that runs on this machine, in turn."""
    before = native.instruction_set()
    assert native.library().choose_instruction_set(request.param)
    yield request.param
    assert native.library().choose_instruction_set(before)


@pytest.fixture
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Models this small are slower on several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def nothing_in_the_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever clients do, it is no error of ours."""
    yield
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def node() -> Iterator[MemoryNode]:
    """A memory node that has nothing leased in the end."""
    made = MemoryNode(NODE_BYTES, get_backend("cpu"))
    yield made
    made.close()
    assert made.stats().bytes_leased == 0
