"""What is measured of stages: their shares of a step by hand, and a short run of one stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.simulate.measure_stages import QUICK, measure, stage_steps
from bench.simulate.stage_check import compare, load_measured
from serve.engine.step_trace import TracedStep
from serve.scheduler.step_time import StepWork
from tests.support.engine.checkpoints import checkpoint


def traced(seconds: float, *chunk: int, decodes: int = 0, samples: bool = False) -> TracedStep:
    work = StepWork(decodes, 10 * decodes, decodes, samples=samples)
    if chunk:
        work.add(*chunk)
    return TracedStep(5.0, 5.0 + seconds, work, 0, 0, 0)


def test_stages_share_a_step_by_layers_and_the_last_has_the_head() -> None:
    """A fifth of a decode step of 10 s is the last product, which a chunk does not have unless it
    ends a prompt."""
    steps = stage_steps(
        [
            traced(10.0, decodes=2, samples=True),
            traced(12.0, 32, 0),
            traced(14.0, 32, 32, samples=True),
            traced(1.0, 2, 0, samples=True),
        ],
        (3, 1),
        head_share=0.2,
    )
    assert [step["stage_s"] for step in steps] == [
        pytest.approx([6.0, 4.0]),
        pytest.approx([9.0, 3.0]),
        pytest.approx([9.0, 5.0]),
        pytest.approx([0.0, 1.0]),
    ]
    assert steps[1]["work"]["num_rows"] == 32 and not steps[1]["work"]["samples"]


@pytest.mark.exhaustive
def test_one_stage_is_measured(tmp_path: Path) -> None:
    """The file of a real engine is what the check reads; its times are this machine's."""
    found = measure(checkpoint("llama"), 1, QUICK)
    assert found["stage_layers"] == [2] and found["hop_s"] == 0.0
    file = tmp_path / "stages.json"
    file.write_text(json.dumps(found))
    cost, runs = load_measured(file)
    assert [len(run.requests) for run in runs] == [1, 2]
    for run in runs:
        assert all(0 < first <= last for first, last in zip(run.first_s, run.last_s, strict=True))
    assert len(compare(cost, runs)) == 6
