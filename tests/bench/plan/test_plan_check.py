"""This machine as a device, single steps of a real model, and the comparison with predictions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from bench.common.ceilings import Ceiling
from bench.common.checkpoints import random_checkpoint
from bench.plan.check import QUICK, Case, check, report, run_and_report
from bench.plan.hardware import device_of, measure_here
from bench.plan.rig import StepRig, rig_config
from bench.plan.run import run
from ops.cpu import native_library
from serve.errors import ConfigError
from serve.machine import available_memory
from serve.scheduler.step_time import StepWork

needs_kernels = pytest.mark.skipif(
    not native_library.is_available(), reason="needs the native kernels"
)


def test_ceilings_are_a_device() -> None:
    device = device_of(Ceiling(40e9, 2e12, 1e12))
    assert device.bytes_per_s == 40e9
    assert device.operations == {"int8": 2e12, "bf16": 1e12, "fp32": 5e11}
    assert device.memory_bytes == pytest.approx(available_memory(), rel=0.2)
    plain = device_of(Ceiling(40e9, 4e11, 0.0))
    assert plain.operations == {"int8": 4e11, "fp32": 1e11}


@needs_kernels
def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    device = measure_here()
    assert device.kind == "cpu" and 1e9 < device.bytes_per_s < 2e12
    assert device.peak("int8") and device.peak("fp32")
    found = run("default", machines=["here"], prompt=100, output=20)
    assert found["details"]["machine"] == "here"
    assert "here" in capsys.readouterr().out


def test_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_library, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="machine here: the native kernels are not built"):
        measure_here()


@needs_kernels
def test_steps_of_a_rig(tmp_path: Path) -> None:
    """A step with decode rows and a chunk can be repeated, and its pages are released."""
    path = random_checkpoint("tiny", folder=tmp_path)
    with StepRig(rig_config(path, "int8", 16 << 20, 256)) as rig:
        plan = rig.open([10, 100], [(16, 32)])
        assert StepWork.of(plan) == StepWork(2, 110, 18, 16 * 32 + 128, 1, samples=True)
        assert rig.runtime.kv.num_in_use > 0
        assert rig.seconds(plan) > 0 and rig.seconds(plan) > 0
        rig.close(plan)
        assert rig.runtime.kv.num_in_use == 0


@needs_kernels
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_predictions_beside_measured_steps(tmp_path: Path, dtype: str) -> None:
    path = random_checkpoint("tiny", folder=tmp_path)
    cases = [Case("decode", 2, 64), Case("mixed", 1, 32, (16, 8))]
    rows = check(path, dtype, cases, repeats=1)
    assert [row.case for row in rows] == cases
    assert cases[1].rows_and_contexts() == ("1 + 16", "32 + 8")
    for row in rows:
        assert row.ratio == pytest.approx(row.predicted_s / row.measured_s)
        assert 0 < row.bound_s < row.predicted_s
        assert row.limit == pytest.approx(row.bound_s / row.predicted_s)
        assert not row.is_at_limit, "overheads are most of a tiny model's step"
        assert sum(row.stages.values()) == pytest.approx(row.predicted_s)
    console = Console(record=True, width=120)
    report(rows, console)
    assert "0 of the 0 steady steps at their limit" in console.export_text()


@pytest.mark.exhaustive
@needs_kernels
def test_the_quick_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = random_checkpoint("tiny", folder=tmp_path)
    run_and_report(quick=True, model=path)
    said = capsys.readouterr().out
    result = json.loads(said.splitlines()[-1])
    assert len(result["steps"]) == 2 * len(QUICK)
    assert {step["dtype"] for step in result["steps"]} == {"int8", "bfloat16"}
