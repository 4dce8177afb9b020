"""What several test files share."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

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

from memory.nodes.node import MemoryNode
from ops import get_backend
from ops.cpu import native
from tests.support.engine.raw_engine import NODE_BYTES

TESTS = Path(__file__).parent

# Files whose tests neither measure time nor compute with all cores, so that two can run at once.
PARALLEL_FILES = {
    "bench/ablation/test_ablation",
    "bench/cli/test_bench_cli",
    "examples/test_corpus",
    "bench/load/report/test_report",
    "bench/load/report/test_report_failed",
    "bench/load/report/test_report_files",
    "bench/load/report/test_report_html",
    "bench/load/report/test_report_search",
    "bench/load/workload/test_datasets",
    "bench/load/workload/test_traces",
    "bench/offline/test_offline",
    "bench/plan/test_plan",
    "bench/plan/test_plan_serving",
    "bench/simulate/test_simulate",
    "bench/simulate/test_simulate_command",
    "bench/test_scripts",
    "memory/attention/test_cuda_kv",
    "memory/nodes/test_fault_schedules",
    "memory/nodes/test_placement",
    "memory/nodes/test_wire",
    "memory/pages/test_layer_groups",
    "memory/prefix/test_prefix_copies",
    "memory/prefix/test_prefix_index",
    "memory/prefix/test_prefix_store",
    "memory/test_kv_manager",
    "memory/tiers/test_disk_restart",
    "memory/tiers/test_prefix_disk",
    "memory/tiers/test_prefix_hung",
    "quant/test_checkpoint_formats",
    "quant/test_refused_formats",
    "serve/cli/test_chat_terminal",
    "serve/cli/test_cli",
    "serve/cli/test_cli_models",
    "serve/cli/test_settings",
    "serve/cli/test_start",
    "serve/engine/test_overlap_walk",
    "serve/http/anthropic/test_anthropic",
    "serve/http/anthropic/test_anthropic_client",
    "serve/http/anthropic/test_anthropic_errors",
    "serve/http/anthropic/test_anthropic_refused",
    "serve/http/calls/test_parameters",
    "serve/http/calls/test_tools",
    "serve/http/calls/test_tools_client",
    "serve/http/calls/test_tools_refused",
    "serve/http/edge/test_framing",
    "serve/http/edge/test_json_body",
    "serve/http/edge/test_keys",
    "serve/http/edge/test_large_bodies",
    "serve/http/monitoring/test_openapi",
    "serve/http/monitoring/test_page",
    "serve/http/openai/test_completions",
    "serve/http/openai/test_openai_client",
    "serve/http/openai/test_refused",
    "serve/http/openai/test_requests",
    "serve/http/openai/test_tokenize_endpoint",
    "serve/http/responses/test_responses",
    "serve/http/responses/test_responses_client",
    "serve/http/responses/test_responses_refused",
    "serve/http/schema/test_fields",
    "serve/http/schema/test_pairs",
    "serve/http/schema/test_unknown_fields",
    "serve/http/test_http_server",
    "serve/loading/test_engine_layer_groups",
    "serve/loading/test_kv_store",
    "serve/models/test_models",
    "serve/models/test_models_loading",
    "serve/models/test_models_refused",
    "serve/runner/test_device_sampler",
    "serve/runner/test_sampler",
    "serve/scheduler/test_queue_policies",
    "serve/scheduler/test_queue_promises",
    "serve/scheduler/test_queue_scheduling",
    "serve/scheduler/test_scheduler",
    "serve/scheduler/test_scheduler_walk",
    "serve/structured/test_structured",
    "serve/text/chat_parser/test_chat_grammar",
    "serve/text/chat_parser/test_chat_parser",
    "serve/text/test_chat_template",
    "serve/text/test_tokenizer",
    "serve/text/test_tokenizer_files",
    "transport/test_windows",
    "whole/nodes/test_engine_nodes",
    "whole/nodes/test_nodes_refused",
    "whole/test_equality",
    "whole/test_examples",
    "whole/test_int8",
}
TRITON_FILES = {
    "bench/gpu/test_gpu_report",
    "ops/cuda/test_cuda_attention",
    "ops/cuda/test_cuda_mask",
    "ops/cuda/test_cuda_prefill",
    "ops/cuda/test_cuda_sampling",
    "ops/cuda/test_cuda_tune",
    "ops/triton_kernels/test_triton_attention_compiled",
    "ops/triton_kernels/test_triton_decode",
    "ops/triton_kernels/test_triton_few",
    "ops/triton_kernels/test_triton_kv",
    "ops/triton_kernels/test_triton_linear",
    "ops/triton_kernels/test_triton_linear4",
    "ops/triton_kernels/test_triton_linear_compiled",
    "ops/triton_kernels/test_triton_prefill",
    "ops/triton_kernels/test_triton_rows",
    "ops/triton_kernels/test_triton_sampling",
    "ops/triton_kernels/test_triton_sampling_compiled",
    "serve/loading/test_cuda_tuning",
    "serve/runner/test_cuda_runner",
    "whole/cuda/test_cuda_engine",
    "whole/cuda/test_cuda_growth",
    "whole/cuda/test_cuda_prompts",
}


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are printed whole, however narrow the terminal that the tests were started in."""
    monkeypatch.setenv("COLUMNS", "150")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of the CUDA back end, which TRITON_FILES names. Those that compile share
    what is compiled for a whole file. Where there is a GPU the engine's tests run on it."""
    has_gpu = torch.cuda.is_available()
    for item in items:
        if has_gpu and item.get_closest_marker("small_pages"):
            item.add_marker(pytest.mark.skip(reason="a CUDA device maps 2 MiB at a time"))
        name = str(item.path.relative_to(TESTS).with_suffix(""))
        if name in PARALLEL_FILES:
            item.add_marker(pytest.mark.parallel)
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        if name in TRITON_FILES:
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
