"""`serve plan --prefill-apart`: three ways on simulated servers, and steps that are not exact."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.simulate import parted_plan
from bench.simulate.fleet_figures import Mix
from bench.simulate.noise import NoisyCost
from bench.simulate.parted_plan import Parts, parse_parts, run_parted
from serve.cli.main import app
from serve.errors import ConfigError
from serve.scheduler.step_time import StepWork

MACHINE = "zen5-2vcpu"


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast measurement."""
    monkeypatch.setattr(parted_plan, "NUM_CALLS", 60)
    monkeypatch.setattr(parted_plan, "_WAITING", 16)


def planned(parts: Parts, mix: Mix, **more: Any) -> dict[str, Any]:
    return run_parted("llama-3.2-1b", parts, machine=MACHINE, mix=mix, **more)


def by_way(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    rows = result["rows"]
    assert [row["way"] for row in rows] == ["merged", "apart", "auto"]
    return {row["way"]: row for row in rows}


def test_parting_saves_stalls_and_costs_the_first_token(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    found = planned(Parts(1, 1), Mix(512, 256), rate=1.2, json_file=file)
    said = capsys.readouterr().out
    assert "apart 1:1" in said and "in the SLO" in said
    rows = by_way(found)
    assert rows["apart"]["tpot_p99"] < rows["merged"]["tpot_p99"]
    assert rows["apart"]["ttft_p99"] > rows["merged"]["ttft_p99"]
    assert rows["auto"]["num_parted"] > 0 and rows["merged"]["num_parted"] is None
    assert json.loads(file.read_text()) == json.loads(json.dumps(found))


@pytest.mark.exhaustive
def test_too_few_servers_for_the_prompts_have_a_queue() -> None:
    """Long prompts and short answers: one of four servers cannot compute all prompts."""
    mix = Mix(1024, 16)
    rate = 0.8 * planned(Parts(1, 3), mix, rate=1.0)["capacity"]
    few, many = (by_way(planned(parts, mix, rate=rate)) for parts in (Parts(1, 3), Parts(3, 1)))
    assert few["merged"] == many["merged"] and few["auto"] == many["auto"]
    assert few["apart"]["ttft_p50"] > 5 * many["apart"]["ttft_p50"]
    assert few["auto"]["qps"] > 2 * few["apart"]["qps"]


def test_rates_and_objectives_follow_from_the_machine() -> None:
    found = planned(Parts(1, 1), Mix(128, 16))
    rates = [row["rate"] for row in found["rows"]]
    expected = [share * found["capacity"] for share in (0.5, 0.8) for _ in range(3)]
    assert rates == pytest.approx(expected)
    slo = found["slo"]
    given = planned(Parts(1, 1), Mix(128, 16), rate=1.0, ttft_s=2.0, tpot_ms=30.0)["slo"]
    assert given == {"ttft_s": 2.0, "tpot_s": 0.03} != slo


@pytest.mark.parametrize("text", ["", "1", "1:0", "0:1", "a:b", "1:1:1", "30:30", "-1:1"])
def test_wrong_parts(text: str) -> None:
    with pytest.raises(ConfigError, match="prefill-apart must be PREFILL:DECODE"):
        parse_parts(text)
    assert parse_parts("2:6") == Parts(2, 6)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--rate 1", "rate needs prefill-apart"),
        ("--prefill-apart 1:1", "prefill-apart needs exactly one machine"),
        ("--prefill-apart 1:1 --machine l4 --machine l40s", "needs exactly one machine"),
        ("--prefill-apart 1:1 --machine l4 --rate 0", "rate must be above 0"),
        ("--prefill-apart 1:1 --machine l4 --rate inf", "rate must be above 0 and finite"),
        ("--prefill-apart 1:1 --machine l4 --prompt 1", "prompt and output must be at least 2"),
        ("--prefill-apart 1:1 --machine h100-sxm:8x4", "h100-sxm:8x4"),
        ("--prefill-apart 1:1 --machine l4 --batch 4", "batch cannot be used with prefill-apart"),
        ("--prefill-apart 1:1 --machine l4 --tpot -3", "tpot must be above 0"),
        ("--prefill-apart 1:1 --machine none", "none"),
    ],
)
def test_wrong_options_are_named(options: str, said: str) -> None:
    result = CliRunner().invoke(app, ["plan", "llama-3.1-8b", *options.split()])
    assert result.exit_code == 2 and said in " ".join(result.output.split()), result.output


class Exact:
    def seconds(self, work: StepWork) -> float:
        return 0.01


def test_errors_of_steps_have_the_given_quantiles() -> None:
    noisy = NoisyCost(Exact(), 0.05, 0.15)
    factors = [noisy.seconds(StepWork()) / 0.01 for _ in range(4000)]
    errors = sorted(abs(factor - 1.0) for factor in factors)
    assert errors[2000] == pytest.approx(0.05, rel=0.1)
    assert errors[3600] == pytest.approx(0.15, rel=0.15)
    assert statistics.fmean(factors) == pytest.approx(1.0, abs=0.01)
    assert min(factors) >= 0.5 and max(factors) <= 2.0
    again = NoisyCost(Exact(), 0.05, 0.15)
    assert [again.seconds(StepWork()) / 0.01 for _ in range(4000)] == factors
    assert NoisyCost(Exact(), 0.0, 0.0).seconds(StepWork()) == 0.01
