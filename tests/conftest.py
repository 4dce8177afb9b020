"""What several test files share."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Iterator

# Threads of two libraries on two cores only get in each other's way in tests.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Nothing is ever downloaded.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Where several tests run at once each has a core: threads that wait for each other on shared ones
# take ten times as long. Before torch and our own kernels count them.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
if WORKER.startswith("gw"):
    CORES = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {CORES[int(WORKER[2:]) % len(CORES)]})

# A shell without job control starts background commands with SIGINT ignored.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
import torch

# Triton's kernels run in its interpreter where there is no GPU. It looks when they are defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from memory.nodes.server.node import MemoryNode
from ops import get_backend
from ops.cpu import native_library
from tests.support.cuda.quick_interpreter import quicken
from tests.support.engine.raw_engine import NODE_BYTES
from tests.support.profile import THOROUGH, mark_the_rest
from tests.support.text.trials import save_child_processes, skip_trials

HAS_GPU = torch.cuda.is_available()


def pytest_runtest_setup() -> None:
    # not before a test has imported Triton, which takes a while and prints what it leaks at exit
    if not HAS_GPU:
        quicken()


@pytest.fixture(autouse=True, scope="module")
def freed_here() -> Iterator[None]:
    """What a file's tests leave behind is freed at its end, in the thread that made it, so that a
    crash in doing so is seen there. Too slow for every day."""
    yield
    if THOROUGH:
        gc.collect()


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are printed whole, however narrow the terminal that the tests were started in."""
    monkeypatch.setenv("COLUMNS", "150")


@pytest.fixture(autouse=True, scope="session")
def few_child_processes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        save_child_processes(monkeypatch)
        yield


@pytest.fixture(scope="module")
def no_trials(few_child_processes: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        skip_trials(monkeypatch)
        yield


@pytest.fixture(autouse=True)
def own_log_handlers() -> Iterator[None]:
    """A command that a test runs here sets up logging to a stream that is closed with the test;
    every later log line of this process would then print a traceback."""
    root = logging.getLogger()
    level = root.level
    before = set(root.handlers)
    yield
    for handler in [handler for handler in root.handlers if handler not in before]:
        root.removeHandler(handler)
    root.setLevel(level)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks property-based tests, which the thorough profile runs again with more examples, and
    combinations of parameters that are not for every day, and skips what a GPU's page size rules
    out: where there is a GPU the engine's tests run on it."""
    mark_the_rest(items)
    for item in items:
        if HAS_GPU and item.get_closest_marker("small_pages"):
            item.add_marker(pytest.mark.skip(reason="a CUDA device maps 2 MiB at a time"))
        function = getattr(item, "function", None)
        if getattr(function, "is_hypothesis_test", False):
            item.add_marker(pytest.mark.property)


@pytest.fixture(
    params=native_library.library().instruction_sets() if native_library.is_available() else []
)
def isa(request):
    """Each set of native kernels that runs on this machine, in turn."""
    before = native_library.instruction_set()
    assert native_library.library().choose_instruction_set(request.param)
    yield request.param
    assert native_library.library().choose_instruction_set(before)


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
