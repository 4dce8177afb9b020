"""Sections of the GPU report that are not figures: the build, the tests, the driver's memory.

The module is also a pytest plugin (-p bench.gpu.tests) that writes every result to a file at once,
so that the results of a run that is killed count, too.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from bench.gpu.record import Figures, Record

ROOT = Path(__file__).parents[2]
_RESULTS = "GPU_REPORT_TESTS"  # environment variable with the path of the plugin's file
_LIBRARIES = {"ops._native": "_native*.so", "transport._windows": "_windows*.so"}

# First the tests of kernels, then those of code that calls them.
TESTS = (
    "tests/ops/triton_kernels/test_*.py",
    "tests/ops/cuda/test_*.py",
    "tests/serve/runner/test_cuda_runner.py",
    "tests/serve/loading/test_cuda_tuning.py",
    "tests/whole/cuda/test_*.py",
    "tests/whole/nodes/test_cuda_nodes.py",
    "tests/memory/pages/test_cuda_*.py",
    "tests/memory/attention/test_cuda_kv.py",
    "tests/ops/test_operators.py",
    "tests/serve/engine/test_engine.py",
    "tests/whole/test_equality.py",
    "tests/serve/engine/test_llm.py",
    "tests/whole/test_int8.py",
    "tests/whole/test_prefix_cache.py",
    "tests/serve/loading/test_engine_layer_groups.py",
    "tests/serve/scheduler/test_queue_policies.py",
    "tests/serve/engine/test_engine_faults.py",
)
_COMPILED = "_compiled.py"  # tests that compile for other devices
_END_S = 12.0  # seconds of the limit that are kept for ending pytest


def build(record: Record) -> None:
    record.run("native", _build)


def _build() -> Figures:
    """Builds in build/gpu with this Python's headers, and copies the libraries to the folders from
    which they are imported."""
    began_s = time.monotonic()
    if all(_is_importable(name) for name in _LIBRARIES):
        return {"built": False, "build_s": 0.0}
    folder = ROOT / "build" / "gpu"
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), *generator]
    _call([*configure, f"-DPython_EXECUTABLE={sys.executable}"])
    _call(["cmake", "--build", str(folder), "--parallel"])
    for name, pattern in _LIBRARIES.items():
        for library in folder.glob(pattern):
            # The library is replaced at once, since other sections import it meanwhile.
            target = ROOT / name.partition(".")[0] / library.name
            part = target.with_suffix(".part")
            shutil.copy2(library, part)
            part.replace(target)
        assert _is_importable(name), f"{name} cannot be imported"
    return {"built": True, "build_s": time.monotonic() - began_s}


def _is_importable(name: str) -> bool:
    command = [sys.executable, "-c", f"import {name}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True).returncode == 0


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{(done.stdout + done.stderr)[-2000:]}")


# ---- the driver's virtual memory


def memory(record: Record) -> None:
    """Runs bench.kernels.cuda_vmm, which checks and times the driver's virtual memory."""
    record.run("driver", partial(_memory, record))


def _memory(record: Record) -> Figures:
    if record.is_dry:
        return {"skipped": "needs a driver"}
    command = [sys.executable, "-m", "bench.kernels.cuda_vmm", "--repeats", "50"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.strip().splitlines()
    if not lines or not lines[-1].startswith("{"):
        raise RuntimeError(f"bench.kernels.cuda_vmm:\n{(done.stdout + done.stderr)[-2000:]}")
    found = json.loads(lines[-1])
    for what, holds in found["checks"].items():
        if not holds:
            record.fail(f"driver: {what}", "this does not hold")
    figures: Figures = {"checks": found["checks"], "us": found["us"]}
    for row in found["us"]:
        figures[f"map {row['pages']} pages us"] = round(row["map_us"], 1)
    return figures


# ---- pytest


def files(patterns: tuple[str, ...] = TESTS) -> list[str]:
    found: list[str] = []
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            name = str(path.relative_to(ROOT))
            if name not in found and not name.endswith(_COMPILED):
                found.append(name)
    return found


def run(record: Record) -> None:
    names = files(("tests/ops/triton_kernels/test_triton_rows.py",)) if record.is_dry else files()
    record.put("files", count=len(names), names=names)
    results = Path(tempfile.mkdtemp(prefix="gpu-tests-")) / "results"
    results.touch()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "bench.gpu.tests", "-W", "default"]
    command += ["-p", "no:cacheprovider", "--tb=short", *names]
    if importlib.util.find_spec("xdist") and not record.is_dry:
        command += ["-n", str(min(8, max(1, (os.cpu_count() or 2) // 2)))]
    if importlib.util.find_spec("pytest_timeout"):
        command += ["--timeout", "120"]
    if record.is_dry:
        command += ["-k", "norm"]
    environment = os.environ | {_RESULTS: str(results)}
    with results.with_suffix(".log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT
        )
    ends_s = time.monotonic() + record.left_s() - _END_S
    while process.poll() is None and time.monotonic() < ends_s:
        time.sleep(0.3)
        _count(record, results, False)
    code = process.poll()
    if code is None:
        process.kill()
        process.wait()
    _count(record, results, code in (0, 1))
    if code not in (0, 1, None):
        output = results.with_suffix(".log").read_text(errors="replace")
        record.fail("pytest", f"ended with code {code}\n{output[-1500:]}")


def _count(record: Record, results: Path, is_complete: bool) -> None:
    """Records the counts of outcomes. A test counts once; errors at its set-up and end count as
    failures."""
    outcomes: dict[str, str] = {}
    for line in results.read_text().splitlines():
        entry = json.loads(line)
        outcomes[entry["name"]] = entry["outcome"]
        if entry["outcome"] == "failed":
            record.errors[entry["name"]] = entry["text"]
    counts: dict[str, Any] = {
        outcome: sum(found == outcome for found in outcomes.values())
        for outcome in ("passed", "failed", "skipped")
    }
    counts["is_complete"] = is_complete
    if counts != record.cases.get("counts"):
        record.put("counts", **counts)


def pytest_runtest_logreport(report: Any) -> None:
    """Writes a result, as pytest's hook, in the main process if there are several workers."""
    path = os.environ.get(_RESULTS)
    if path is None or os.environ.get("PYTEST_XDIST_WORKER"):
        return
    if report.when == "call" or report.outcome != "passed":
        text = str(report.longrepr)[-1500:] if report.outcome == "failed" else ""
        entry = {"name": report.nodeid, "outcome": report.outcome, "text": text}
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
