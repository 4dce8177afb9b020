"""Imports point down, and the pure files know neither torch nor asyncio (DESIGN 4)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "ops": set(),
    "transport": set(),
    "quant": {"ops"},
    "memory": {"ops", "quant", "transport"},
    "serve": {"ops", "quant", "memory", "transport", "bench"},
}
OURS = {*ALLOWED, "bench", "examples", "tests"}
PURE = [
    "serve/scheduler/scheduler.py",
    "serve/scheduler/chunking.py",
    "serve/scheduler/step_time.py",
    "serve/scheduler/peak_memory.py",
    "serve/scheduler/in_flight.py",
    "serve/scheduler/admission.py",
    "serve/scheduler/waiting_queue.py",
    "serve/scheduler/fair_queue.py",
    "serve/scheduler/mlfq_queue.py",
    "serve/scheduler/orders.py",
    "serve/scheduler/step_plan.py",
    "serve/scheduler/prefix_lookup.py",
    "serve/scheduler/microbatches.py",
    "serve/scheduler/steady_decode.py",
    "serve/scheduler/step_draft.py",
    "memory/prefix/load_times.py",
    "serve/scheduler/length_predictor.py",
    "serve/scheduler/sequence.py",
    "serve/request.py",
    "memory/pages/address_space.py",
    "memory/pages/allocator.py",
    "memory/idle_ranges.py",
    "memory/kv_manager.py",
    "memory/kv_memory.py",
    "memory/pages/kv_range.py",
    "memory/pages/layer_groups.py",
    "memory/prefix/finder.py",
    "memory/range_mapper.py",
    "memory/prefix/index.py",
    "memory/pages/vmm.py",
]
FORBIDDEN_EVERYWHERE = {"pickle", "dill", "marshal", "shelve"}


def imported(path: Path) -> set[str]:
    """Top-level names of all imports, those inside functions and TYPE_CHECKING included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add((node.module or "").partition(".")[0])
    return found


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_imports_point_down(package):
    for path in sources(package):
        ours = (imported(path) & OURS) - {package}
        # only the command line may start the load generator
        allowed = ALLOWED[package] - ({"bench"} if path.name != "main.py" else set())
        assert ours <= allowed, f"{path.relative_to(ROOT)} imports {sorted(ours - allowed)}"


@pytest.mark.parametrize("name", PURE)
def test_pure_files(name):
    assert not imported(ROOT / name) & {"torch", "asyncio", "numpy", "aiohttp"}


def test_asyncio_stays_at_the_edge():
    edge = {
        "serve/engine/engine.py",
        "serve/engine/request_stream.py",
        "serve/cli/main.py",
        "serve/cli/chat.py",
    }
    for path in sources("serve"):
        name = str(path.relative_to(ROOT))
        if name not in edge and not name.startswith("serve/http/"):
            assert "asyncio" not in imported(path), name


@pytest.mark.parametrize("package", sorted(OURS - {"tests"}))
def test_nothing_unpickles_or_evaluates(package):
    for path in sources(package):
        assert not imported(path) & FORBIDDEN_EVERYWHERE, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec"}, f"{path}:{node.lineno}"
