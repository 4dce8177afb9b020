"""The check of the simulator against measured stages, by stages that were simulated otherwise."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from bench.mnemosyne.__main__ import NOT_MET, main
from bench.simulate.stage_check import compare, load_measured
from serve.errors import ConfigError

HOP_S = 0.002


def busy_s(stage: int, rows: int, pairs: int) -> float:
    """The seconds of a stage: a fixed time, its rows and their pairs with tokens before them."""
    return (1.0 + 0.2 * stage) * (0.004 + 0.0002 * rows + 1e-7 * pairs)


def chunk_s(stage: int, rows: int, context: int) -> float:
    return busy_s(stage, rows, rows * context + rows * rows // 2)


def measured(noise: float = 0.0) -> dict[str, object]:
    """Stages measured one at a time, and a prompt of 2,048 tokens in 16 chunks on both."""
    drawn = random.Random(1)
    steps = []
    for _ in range(64):
        rows, context = drawn.choice((32, 64, 128, 256)), drawn.randrange(0, 4096)
        seconds = [chunk_s(s, rows, context) * drawn.uniform(1 - noise, 1 + noise) for s in (0, 1)]
        steps.append({"chunks": [[rows, context]], "samples": 0, "stage_s": seconds})
        decodes = [drawn.randrange(0, 4096) for _ in range(drawn.randint(1, 8))]
        seconds = [busy_s(s, len(decodes), 0) for s in (0, 1)]
        steps.append({"decodes": decodes, "samples": len(decodes), "stage_s": seconds})
    # the first stage is never idle: it is the second one that is slower, and launches wait for it
    free, ends = [0.0, 0.0], []
    for index in range(16):
        began = ends[index - 2] if index > 1 else 0.0
        free[0] = max(free[0], began) + chunk_s(0, 128, 128 * index)
        free[1] = max(free[1], free[0] + HOP_S) + chunk_s(1, 128, 128 * index)
        ends.append(free[1])
    pass_s = sum(busy_s(stage, 1, 0) for stage in (0, 1)) + HOP_S
    run = {
        "name": "2 k alone",
        "max_num_batched_tokens": 128,
        "requests": [{"arrival_s": 0.0, "prompt": 2048, "output": 4}],
        "first_s": [ends[-1]],
        "last_s": [ends[-1] + 3 * pass_s],
    }
    return {"num_stages": 2, "hop_s": HOP_S, "steps": steps, "runs": [run]}


def write(folder: Path, values: dict[str, object]) -> Path:
    file = folder / "stages.json"
    file.write_text(json.dumps(values))
    return file


@pytest.mark.parametrize(("noise", "most"), [(0.0, 0.02), (0.1, 0.06)])
def test_a_run_is_predicted_from_its_stages(tmp_path: Path, noise: float, most: float) -> None:
    found = compare(*load_measured(write(tmp_path, measured(noise))))
    assert [(one.what, one.request) for one in found] == [("first", 0), ("last", 0)]
    assert all(abs(one.error) <= most and one.is_within for one in found), found


def test_stages_that_wait_for_each_other_are_seen(tmp_path: Path) -> None:
    """A run without overlap takes nearly the sum of both stages, which is out of tolerance."""
    values = measured()
    (run,) = values["runs"]  # type: ignore[misc]
    alone = sum(chunk_s(s, 128, 128 * i) for s in (0, 1) for i in range(16))
    run["first_s"] = [alone]
    first, _ = compare(*load_measured(write(tmp_path, values)))
    assert not first.is_within and first.error < -0.3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_stages": 3}, r"steps\[0\].stage_s has 2 of 3 stages"),
        ({"hop_s": "soon"}, "has no measured stages"),
        ({"steps": [{"chunks": [[1, 0]], "stage_s": [1, 1]}]}, "needs 32 steps, not 1"),
        ({"steps": []}, "a fit of stages needs steps"),
        ({"runs": [{"name": "x"}]}, "has no measured stages: KeyError"),
    ],
)
def test_files_that_are_no_measurement(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_measured(write(tmp_path, measured() | change))


def test_a_run_has_times_for_each_request(tmp_path: Path) -> None:
    values = measured()
    values["runs"][0]["last_s"] = []  # type: ignore[index]
    with pytest.raises(ConfigError, match="run 2 k alone needs first_s and last_s"):
        load_measured(write(tmp_path, values))
    with pytest.raises(ConfigError, match="No such file"):
        load_measured(tmp_path / "none.json")


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path, measured())
    monkeypatch.setattr(sys, "argv", ["mnemosyne", "--check", str(file)])
    assert main() == 0
    said = capsys.readouterr().out
    assert "2 of 2 times are within 15%" in said and "stage 1: a fit of 128 steps" in said
    values = measured()
    values["runs"][0]["first_s"] = [1e-3]  # type: ignore[index]
    write(tmp_path, values)
    assert main() == NOT_MET and "NOT REACHED" in capsys.readouterr().out
    file.write_text("[]")
    assert main() == 2 and "error: check" in capsys.readouterr().err
