"""What several test files share."""

from __future__ import annotations

import logging
import os
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

import pytest
import torch

# Triton's kernels run in its interpreter where there is no GPU. It looks when they are defined.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from memory.node import MemoryNode
from ops import get_backend, native
from tests.raw_engine import NODE_BYTES

# Files whose tests neither measure time nor compute with all cores, so that two can run at once.
PARALLEL_FILES = (
    "test_bench_ablation",
    "test_bench_cli",
    "test_bench_corpus",
    "test_bench_load_datasets",
    "test_bench_load_report",
    "test_bench_load_traces",
    "test_bench_offline",
    "test_bench_plan.",
    "test_bench_plan_serving",
    "test_bench_scripts",
    "test_bench_simulate",
    "test_examples",
    "test_memory_cuda_kv",
    "test_memory_fault_schedules",
    "test_memory_kv_manager",
    "test_memory_layer_groups",
    "test_memory_placement",
    "test_memory_prefix",
    "test_memory_spill_restart",
    "test_memory_wire",
    "test_quant",
    "test_serve_chat",
    "test_serve_cli",
    "test_serve_device_sampler",
    "test_serve_equality",
    "test_serve_http.",
    "test_serve_http_anthropic",
    "test_serve_http_completions",
    "test_serve_http_fields",
    "test_serve_http_framing",
    "test_serve_http_json",
    "test_serve_http_keys",
    "test_serve_http_large",
    "test_serve_http_messages",
    "test_serve_http_openai",
    "test_serve_http_openapi",
    "test_serve_http_page",
    "test_serve_http_pairs",
    "test_serve_http_parameters",
    "test_serve_http_refused",
    "test_serve_http_responses",
    "test_serve_http_schema",
    "test_serve_http_tokenize",
    "test_serve_http_tools",
    "test_serve_http_unknown",
    "test_serve_int8",
    "test_serve_kv_store",
    "test_serve_layer_groups",
    "test_serve_models",
    "test_serve_order",
    "test_serve_overlap_walk",
    "test_serve_remote.",
    "test_serve_remote_refused",
    "test_serve_sampler",
    "test_serve_scheduler",
    "test_serve_settings",
    "test_serve_start",
    "test_serve_structured.",
    "test_serve_tokenizer",
    "test_transport_windows",
)
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
        if item.path.name.startswith(PARALLEL_FILES):
            item.add_marker(pytest.mark.parallel)
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
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
