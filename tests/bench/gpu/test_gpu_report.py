"""The GPU report without a GPU: outcomes of sections, budget, targets, and dry runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from bench.common.checkpoints import SHAPES
from bench.gpu import report as gpu_report
from bench.gpu.engine import idle_times
from bench.gpu.record import Record, is_device_fault
from bench.gpu.report import SECTIONS, Parent, Section
from bench.gpu.steps import ModelSizes, Step, gap_share, late_periods, periods, with_growth
from bench.gpu.targets import Ceilings, markdown, targets
from bench.gpu.timing import relative_error, time_works

DEVICE = Section("environment", "tests.support.cuda.gpu_sections:named", 20, "")


def section(name: str, limit_s: float = 20, stage: str = "") -> Section:
    return Section(name, f"tests.support.cuda.gpu_sections:{name}", limit_s, "", stage)


def run(out: Path, *sections: Section, budget_s: float = 100) -> tuple[dict, str, Parent]:
    parent = Parent(out, budget_s=budget_s)
    parent.run([DEVICE, *sections])
    report = json.loads((out / "nvidia-test-9000.json").read_text())
    return report, (out / "nvidia-test-9000.md").read_text(), parent


def is_alive(pid: int) -> bool:
    """Returns whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_sections_that_fail_cost_only_themselves(tmp_path, capfd):
    names = ("crash", "half", "lose_device", "good")
    report, text, parent = run(tmp_path, *map(section, names))
    found = report["sections"]
    assert report["device"] == "NVIDIA Test 9000"
    assert found["good"]["status"] == "ok" and found["good"]["cases"]["copy"] == {"rate": 4e12}
    assert found["crash"]["status"].startswith("ended with code -")
    assert found["crash"]["cases"] == {"before": {"seconds": 1.0}}
    assert found["half"]["status"] == "ok" and list(found["half"]["cases"]) == ["first", "last"]
    assert "ZeroDivisionError" in found["half"]["errors"]["broken"]
    # After each fault a new process goes on with the next case.
    lost = found["lose_device"]
    assert lost["status"] == "ok" and len(lost["cases"]) == len(lost["errors"]) == 4
    assert len({case["process"] for case in lost["cases"].values()}) == 4
    assert parent.num_failures() == 1 + 1 + 4
    shown = capfd.readouterr().err
    assert "half: first: seconds 0.001" in shown
    assert "failure in half: broken: ZeroDivisionError" in shown
    assert "### half, broken" in text and "### crash: ended with code" in text


def test_a_device_that_goes_on_is_not_lost(monkeypatch):
    """cuBLAS refuses a shape with the message of a fault."""
    refused = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert is_device_fault(refused) and not is_device_fault(RuntimeError("another"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: torch.ones(shape))
    assert not is_device_fault(refused)

    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    assert is_device_fault(refused)


@pytest.mark.timing
def test_a_section_that_hangs_is_killed_with_its_children(tmp_path):
    began = time.monotonic()
    report, text, _ = run(tmp_path, section("hang", 2.0), section("good"))
    assert time.monotonic() - began < 20
    found = report["sections"]
    assert found["hang"]["status"] == "killed at its limit of 2 s"
    assert not is_alive(found["hang"]["cases"]["before"]["child"])
    assert found["good"]["status"] == "ok"
    assert "### hang: killed at its limit" in text


@pytest.mark.timing
@pytest.mark.process
def test_the_budget_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report, "_MIN_S", 0.5)
    budget_s = gpu_report._RESERVE_S + 3.0
    began = time.monotonic()
    report, _, _ = run(tmp_path, section("hang", 60.0), section("good"), budget_s=budget_s)
    assert time.monotonic() - began < budget_s
    assert report["sections"]["hang"]["status"].startswith("killed at its limit")
    assert report["sections"]["good"]["status"] == "no time was left"
    assert report["sections"]["good"]["cases"] == {}


@pytest.mark.timing
def test_sections_of_one_stage_run_at_once(tmp_path):
    began = time.monotonic()
    hanging = [
        Section(f"hang {i}", "tests.support.cuda.gpu_sections:hang", 2.0, "", "one")
        for i in range(3)
    ]
    report, _, _ = run(tmp_path, *hanging)
    assert time.monotonic() - began < 5.5
    assert all("before" in report["sections"][s.name]["cases"] for s in hanging)


def test_what_runs_in_the_background(tmp_path):
    """Later sections run beside a background section, except one that names it in `after`."""
    slow = Section("slow", "tests.support.cuda.gpu_sections:slow", 20, "", is_background=True)
    later = Section("later", "tests.support.cuda.gpu_sections:moment", 20, "", after="slow")
    beside = Section("beside", "tests.support.cuda.gpu_sections:moment", 20, "")
    report, _, _ = run(tmp_path, slow, beside, later)
    found = {name: entry["cases"] for name, entry in report["sections"].items()}
    assert (
        found["beside"]["moment"]["s"] < found["slow"]["end"]["s"] < found["later"]["moment"]["s"]
    )


def test_the_report_is_written_after_each_section(tmp_path, monkeypatch):
    monkeypatch.setenv("GPU_REPORT_SEEN", str(tmp_path / "nvidia-test-9000.json"))
    report, _, _ = run(tmp_path, section("half"), section("look"))
    seen = json.loads(report["sections"]["look"]["cases"]["seen"]["text"])
    assert seen["sections"]["half"]["status"] == "ok"
    assert seen["sections"]["look"]["status"] == "running"


@pytest.mark.process
def test_what_is_ended_from_outside_leaves_a_report_and_no_process(tmp_path):
    code = "import signal; from bench.gpu import report as r\n"
    code += "signal.signal(signal.SIGTERM, r._interrupt)\n"
    code += "p = r.Parent(r.Path(r.sys.argv[1]), budget_s=60)\n"
    code += "p.run([r.Section('environment', 'tests.support.cuda.gpu_sections:named', 9, ''),\n"
    code += "       r.Section('hang', 'tests.support.cuda.gpu_sections:hang', 50, '')])\n"
    parent = subprocess.Popen([sys.executable, "-c", code, tmp_path], stderr=subprocess.PIPE)
    path = tmp_path / "nvidia-test-9000.json"
    while not (path.is_file() and '"before"' in path.read_text()):
        time.sleep(0.05)
        assert parent.poll() is None
    parent.send_signal(signal.SIGTERM)
    parent.communicate(timeout=10)
    entry = json.loads(path.read_text())["sections"]["hang"]
    assert entry["status"] == "interrupted"
    assert not is_alive(entry["cases"]["before"]["child"])


def test_a_record_goes_on_where_another_process_ended(tmp_path):
    path = tmp_path / "record.json"
    Record(path).run("one", lambda: {"a": 1})
    again = Record(path)
    assert again.run("one", lambda: {"a": 2}) == {"a": 1}
    assert again.run("two", lambda: {"a": 3}) == {"a": 3}
    assert json.loads(path.read_text())["cases"] == {"one": {"a": 1}, "two": {"a": 3}}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path):
    command = [sys.executable, "-m", "bench.gpu.report", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "no CUDA device" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.process
def test_the_command_line(tmp_path):
    """The command writes its files, with sections that need no device."""
    options = ["--dry-run", "--only", "memory,build", "--out", tmp_path]
    command = [sys.executable, "-m", "bench.gpu.report", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"dry-run.json", "dry-run.md"}
    report = json.loads((tmp_path / "dry-run.json").read_text())
    assert set(report["sections"]) == {"environment", "build", "memory"}
    assert report["is_dry_run"] and done.stdout.startswith("0 failures")
    bad = subprocess.run([*command, "--only", "nothing"], capture_output=True, text=True)
    assert bad.returncode != 0 and "unknown sections: nothing" in bad.stderr


# ---- targets, by hand


def fake_report(**sections: dict) -> dict:
    ceilings = {"copy": 4e12, "read": 4.5e12, "int8": 1.5e15, "bf16": 0.75e15}
    cases = {"ceilings": {name: {"rate": rate} for name, rate in ceilings.items()}, **sections}
    entries = {
        name.replace("_", "-"): {"status": "ok", "seconds": 1.0, "cases": found, "errors": {}}
        for name, found in cases.items()
    }
    return {"device": "NVIDIA Test", "when": "now", "seconds": 3.0, "sections": entries}


def row_of(report: dict, beginning: str):
    (row,) = [row for row in targets(report) if row.target.startswith(beginning)]
    return row


def test_shares_by_hand():
    ceilings = Ceilings.of(fake_report())
    case = {"seconds": 1e-3, "bytes": 2e9, "operations": 0.9e12, "unit": "int8"}
    assert ceilings.copy_share(case) == pytest.approx(0.5)
    assert ceilings.read_share(case) == pytest.approx(2e9 / 4.5e12 / 1e-3)
    assert ceilings.peak_share(case) == pytest.approx(0.6)
    assert ceilings.bound_share(case) == pytest.approx(0.6)
    assert ceilings.bound_share(case | {"operations": 1e9}, 5e12) == pytest.approx(0.4)
    assert ceilings.peak_share(case | {"unit": "fp8"}) is None
    assert Ceilings.of({"sections": {}}).bound_share(case) is None


def test_targets_that_are_reached_and_that_are_not():
    square = {"seconds": 1e-3, "operations": 1.2e12, "unit": "int8"}
    layers = ("qkv", "o", "up", "down", "head")
    thin = {f"int8 {layer} M={m}": {"seconds": 1e-3, "bytes": 3.4e9}
            for layer in layers for m in (1, 16, 64)}  # fmt: skip
    decode = {"seconds": 1e-3, "bytes": 3.0e9, "operations": 1.0}
    engine = {
        "decode 1": {"seconds": 4e-3, "bytes": 14.4e9, "operations": 1.6e10, "unit": "int8"},
        "decode 64": {"seconds": 4e-3, "bytes": 9e9, "operations": 1e12, "unit": "int8",
                      "gap_share": 0.029, "late_growth_steps": 2, "steps": 90},
        "streams 64": {"tokens_per_s": 9000.0},
    }  # fmt: skip
    report = fake_report(
        linear={"int8 8192x4096x4096": square, **thin},
        attention={
            "decode int8 64 x 4096": decode,
            "rival decode 64 x 4096 sdpa flash": {"seconds": 1.5e-3},
            "rival decode 64 x 4096 flashinfer": {"seconds": 1.7e-3},
            "prefill 8192 own bf16": {"seconds": 1e-3, "operations": 0.5e12, "unit": "bf16"},
        },
        engine_8b=engine,
        transformers={"load": {"load_s": 1.0}, "a": {"tokens_per_s": 1000.0},
                      "b": {"tokens_per_s": 500.0}},
        tests={"counts": {"passed": 10, "failed": 0, "skipped": 1, "is_complete": True}},
    )  # fmt: skip
    reached = {row.target: row.reached for row in targets(report)}
    assert list(reached.values()) == [
        *(True, True, True),  # products: 80 % of the peak, 85 % of the copy
        *(False, False),  # 75 % of the copy; 1.5x the better rival
        True,  # 67 % of the bf16 peak
        *(True, False),  # 80 % and 50 % of the bound
        None,  # no prompt was measured
        *(True, False),  # gap, growth
        True,  # 9x the better mode
        True,
    ]
    assert "1.50x" in row_of(report, "the same").measured
    assert row_of(report, "against Transformers").measured == "9.0x"
    # A missing figure leaves the target open; a figure below it decides.
    del report["sections"]["linear"]["cases"]["int8 o M=1"]
    row = row_of(report, "int8 GEMM, M <= 16")
    assert row.reached is None and "not measured: o M=1" in row.measured
    report["sections"]["linear"]["cases"]["int8 qkv M=16"]["bytes"] = 1e9
    assert row_of(report, "int8 GEMM, M <= 16").reached is False
    report["sections"]["tests"]["cases"]["counts"]["failed"] = 1
    assert row_of(report, "the engine's").reached is False


def test_markdown():
    report = fake_report(linear={"a | b": {"seconds": 2e-5, "bytes": 4e7, "choice": "x", "n": [1]}})
    report["sections"]["linear"]["errors"]["bad"] = "Traceback\nValueError: ```no```"
    report["sections"]["gone"] = {"status": "no time was left", "seconds": 0.0, "cases": {}}
    lines = markdown(report).splitlines()
    assert lines[0] == "# GPU report: NVIDIA Test"
    assert r"| a \| b | 20 us | 50% |  | 50% | choice x |" in lines
    assert "### linear, bad" in lines and "### gone: no time was left" in lines
    assert "ValueError: '''no'''" in lines
    assert sum(line.endswith("| ? |") for line in lines) == len(targets(report))
    assert all(
        line.count("|") - line.count(r"\|") == 7 for line in lines if line.startswith(r"| a \|")
    )


# ---- steps and bounds, by hand


def test_bounds_of_the_8b_model_by_hand():
    sizes = ModelSizes.of(SHAPES["llama-8b"])
    layer = 4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert sizes.layer_weights == 32 * layer == 6_979_321_856
    assert sizes.head_weights == 128256 * 4096
    step = sizes.decode(64, 1000, 65536)
    assert step["bytes"] == 6_979_321_856 + 525_336_576 + 64 * 1000 * 65536
    assert step["operations"] == 2 * 64 * (6_979_321_856 + 525_336_576)
    prompt = sizes.prefill(8192)
    assert prompt["product_operations"] == 2 * (6_979_321_856 * 8192 + 525_336_576)
    pairs = 8192 * 8193 // 2
    assert prompt["operations"] - prompt["product_operations"] == 4 * 32 * 128 * 32 * pairs


def test_gaps_and_late_steps_by_hand():
    steps = [Step(t, t, t + 0.9) for t in (0.0, 1.0, 2.0, 3.5)]
    assert periods(steps) == [1.0, 1.0, 1.5]
    assert gap_share(steps) == pytest.approx((0.1 + 0.1 + 0.6) / 3.5)
    # Growing contexts make no step late; twice the time does.
    times = [1 + 0.001 * i for i in range(60)]
    assert late_periods(times) == []
    times[3], times[40], times[59] = 2.0, 1.08, 2.0
    assert late_periods(times) == [3, 40, 59]
    assert late_periods([1.0, 1.0, 2.0]) == [2]
    # The period that begins at 2 is late, and pages are mapped from 3 to 3.1.
    assert with_growth([2], steps, [(3.0, 3.1)]) == [2]
    assert with_growth([2], steps, [(0.2, 0.3), (4.0, 4.1)]) == []
    assert idle_times([(0, 2), (1, 5), (3, 4), (7, 8), (8, 9)]) == [2]


@pytest.mark.timing
def test_timing_on_the_host():
    calls: list[int] = []
    timing = time_works([lambda: (calls.append(1), time.sleep(0.01)), lambda: time.sleep(0.03)])
    assert 0.02 <= timing.seconds < 0.2 and calls == [1]
    one = torch.ones(3)
    assert relative_error(1.1 * one, one) == pytest.approx(0.1)
    assert relative_error(one * float("nan"), one) == float("inf")


# ---- dry runs: every section's code, interpreted


def test_every_section_exists():
    for each in SECTIONS:
        module, _, name = each.target.partition(":")
        assert callable(getattr(__import__(module, fromlist=[name]), name))
    assert len({each.name for each in SECTIONS}) == len(SECTIONS)


SMOKE = ("smoke-linear", "smoke-formats", "smoke-attention", "smoke-sampling", "smoke-states")
DRY = ("ceilings", *SMOKE, "linear", "attention", "rows", "states", "transformers", "lanes")
DRY += ("smoke-selection", "selection", "weights")


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs for real where there is a GPU")
@pytest.mark.parametrize("name", DRY)
def test_dry_run(name, tmp_path):
    (found,) = [each for each in SECTIONS if each.name == name]
    record = Record(tmp_path / "record.json", is_dry=True)
    gpu_report.run_section(found.target, record)
    assert record.errors == {} and record.cases


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available(), reason="runs for real where there is a GPU")
def test_dry_run_of_the_engine(tmp_path):
    """It runs in a process of its own, as it notes the steps of every device."""
    options = ["--dry-run", "--only", "engine-8b,nodes,warm-up", "--out", str(tmp_path)]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "bench.gpu.report", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "dry-run.json").read_text())
    for name, entry in report["sections"].items():
        assert entry["status"] == "ok" and entry["errors"] == {}, (name, entry)
    engine = report["sections"]["engine-8b"]["cases"]
    assert engine["decode 2"]["steps"] >= 1 and engine["prefill 17"]["seconds"] > 0
    nodes = report["sections"]["nodes"]["cases"]
    assert nodes["decode 2"]["steps"] >= 1 and nodes["equality, sequence"]["equal"] == 3
    assert report["sections"]["warm-up"]["cases"]["candidates"]["ran"] >= 1
