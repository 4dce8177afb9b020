"""`serve bench --simulate`, machines of the plan, and the comparison with a real run."""

from __future__ import annotations

import random

import pytest

from bench.cli.load import run as run_load
from bench.load.client.record import Outcome
from bench.load.workload.online_options import OnlineOptions
from bench.load.workload.work import Call
from bench.plan.calibrate import FittedCost
from bench.simulate.check import calibrate, calibrate_without, compare, compare_rate
from bench.simulate.command import simulated
from bench.simulate.load import simulate
from bench.simulate.machine import simulated_machine
from bench.simulate.policies import run as run_policy
from bench.simulate.replay import replay
from bench.simulate.resampled import ResampledCost
from bench.simulate.settings import PoolDelays, SimulationSettings
from memory.pages.layer_groups import LayerGroup
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.scheduler.step_time import StepWork


def options(**others):
    given = {
        "model": "llama-3.2-1b",
        "simulate": True,
        "qps": "20",
        "requests": 40,
        "warmup_s": 0.5,
    }
    return OnlineOptions(**(given | others))


def test_a_run_of_the_command():
    engine = {"max_model_len": 16384, "max_num_seqs": 8}
    result = simulated(options(dataset="azure-conv", engine=engine))(20.0, 3)
    assert result.target == "llama-3.2-1b on h100-sxm, simulated"
    assert (result.qps, result.seed, result.window[0]) == (20.0, 3, 0.5)
    assert all(record.outcome is Outcome.OK for record in result.records)
    assert max(step.num_running for step in result.steps) <= 8
    again = simulated(options(dataset="azure-conv", engine=engine))(20.0, 3)
    assert again == result
    slower = simulated(options(dataset="azure-conv", engine=engine, machine="l4"))(20.0, 3)
    assert slower.window[1] > 1.5 * result.window[1]


def test_a_grid_is_a_machine():
    """Four stages have room for more, and each token takes the hops more."""
    engine = {"max_model_len": 16384, "max_num_seqs": 8}

    def run(machine):
        given = options(dataset="azure-conv", engine=engine, machine=machine)
        return simulated(given)(20.0, 3)

    one, four, holders = (run(f"h100-sxm:{grid}") for grid in ("8x1", "2x4", "1x2x2"))
    for result in (one, four, holders):
        assert all(record.outcome is Outcome.OK for record in result.records)
    assert any("counts as one memory" in note for note in holders.notes)
    assert not any("counts as one memory" in note for note in four.notes)
    gaps = [
        min(r.chunks_s[1] - r.chunks_s[0] for r in result.records if len(r.chunks_s) > 1)
        for result in (one, four)
    ]
    assert gaps[1] > gaps[0] + 3 * 10e-6


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ("h100:8x1", "h100 is not one of"),
        ("h100-sxm:16x1", "tp 16 is more than the 8 devices"),
        ("h100-sxm:8x17", "pp 17 is more than the 16 layers"),
        ("l4:0x1", "tp must be at least 1"),
    ],
)
def test_grids_that_are_refused(machine, message):
    with pytest.raises(ConfigError, match=message):
        simulated_machine("llama-3.2-1b", machine, {})


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ("h100-sxm", ["assumed, not measured", "never run on a GPU"]),
        ("mi300x", ["assumed, not measured", "no back end for it"]),
        ("epyc-9755", ["assumed, not measured"]),
        ("zen5-2vcpu", []),
    ],
)
def test_the_report_says_which_step_times_are_assumed(machine, expected, capsys):
    assert run_load(options(dataset="azure-conv", machine=machine, warmup_s=0.0))
    starts = (f"note: step times of {machine}: ", f"note: machine {machine}: ")
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith(starts)]
    assert len(notes) == len(expected)
    assert all(words in note for words, note in zip(expected, notes, strict=True))


def test_how_many_requests_can_be_said_for_each_rate():
    once = simulated(options(dataset="azure-conv", engine={"max_model_len": 16384}))
    assert [len(once(20.0, 0, count).records) for count in (None, 7)] == [40, 7]


def test_answers_that_the_model_would_decide():
    result = simulated(options(dataset="mixed", model="default"))(20.0, 0)
    assert {record.output_tokens for record in result.records} == {128}
    assert any("128 tokens" in note for note in result.notes)


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"cancel_rate": 0.5}, "cancel_rate cannot be simulated"),
        ({"machine": "abacus"}, "machine 'abacus'"),
        ({"machine": "abacus.json"}, "abacus.json"),
        ({"model": "llama-3.1-405b"}, "no room for the weights"),
        ({"engine": {"max_model_len": 1 << 20}}, "max_model_len"),
        ({"engine": {"kv_cache_bytes": 4 << 20, "max_model_len": 4096}}, "kv_cache_bytes"),
        ({"engine": {"colour": "red"}}, "colour"),
    ],
)
def test_what_cannot_be(wrong, match):
    with pytest.raises(ConfigError, match=match):
        simulated(options(dataset="azure-conv", **wrong))(20.0, 0)


def test_a_fitted_cost_is_a_machine(tmp_path):
    cost = FittedCost(8, (1e-3, 1e-5, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), 100, 0.0, 0.0, 0.0)
    cost.save(tmp_path / "here.json")
    file = str(tmp_path / "here.json")
    with pytest.raises(ConfigError, match="needs kv_cache_bytes"):
        simulated_machine("default", file, {})
    made = simulated_machine("default", file, {"kv_cache_bytes": 64 << 20})
    assert made.cost == cost and made.settings.engine.batched_tokens == 256
    kv = made.settings.make_kv()
    assert kv.max_model_len == 1024 and kv.num_pages * kv.page_bytes <= 64 << 20


def test_the_plans_sizes():
    """A GPU has its page size and rows, K/V beside the weights, and the context that fits."""
    made = simulated_machine("llama-3.1-8b", None, {})
    engine = made.settings.engine
    assert engine.kv_page_bytes == 2 << 20 and engine.batched_tokens == 2048
    assert 40 << 30 < engine.kv_cache_bytes < 80 << 30
    assert made.settings.groups[0].token_bytes == 32 * 2 * 1024 * (1 + 2 / 64)  # and scales
    small = simulated_machine("llama-3.1-8b", None, {"kv_cache_bytes": 1 << 30})
    assert 10_000 < small.settings.max_model_len < 16_384
    small.settings.make_kv()


def simulated_run(seed, count=400, qps=60.0, factor=1.0):
    rng = random.Random(seed)
    calls = [Call(rng.randint(5, 60), rng.randint(1, 40)) for _ in range(count)]
    arrivals_s = sorted(count / qps * rng.random() for _ in range(count))
    config = EngineConfig(max_model_len=1024, kv_cache_bytes=64 << 20, kv_page_bytes=64 << 10)
    delays = PoolDelays(tokenize_s=0.7e-3, output_s=0.4e-3)
    coefficients = [factor * value for value in (1e-3, 2e-5, 0.0, 2e-8, 1e-8, 2e-4, 1e-5, 0.0)]
    cost = FittedCost(8, tuple(coefficients), 100, 0.0, 0.0, 0.0)
    settings = SimulationSettings(config, (LayerGroup(1320, 16),), delays)
    return simulate(calls, arrivals_s, cost, settings, qps=qps), calls, arrivals_s, settings


def test_a_calibration_finds_what_a_run_was_made_of():
    """It finds the step times, the delay before the loop (within a step's time) and after it."""
    real, calls, arrivals_s, settings = simulated_run(3)
    assert all(record.queue_s is not None for record in real.records)
    found = calibrate([real], simulated_run(4, qps=400.0)[0])
    assert found.factor == pytest.approx(1.0, abs=0.02)
    assert found.delays.output_s == pytest.approx(0.4e-3, rel=0.01)
    assert found.delays.tokenize_s == pytest.approx(0.7e-3, rel=0.4)
    settings = SimulationSettings(settings.engine, settings.groups, found.delays)
    again = simulate(calls, arrivals_s, found.cost, settings)
    for row in compare(0.5, [real], [again]):
        assert abs(row.error) < 0.05, row
    for row in compare(0.5, [real], [simulated_run(3, factor=1.5)[0]]):
        assert row.error > 0.3, row


@pytest.mark.exhaustive
def test_a_run_is_checked_with_a_fit_that_has_not_seen_it(monkeypatch):
    """One run of three is three times as slow, which a fit of the other two does not see."""
    burst = simulated_run(9, qps=400.0)[0]
    made = [simulated_run(seed, factor=3.0 if seed == 0 else 1.0) for seed in range(3)]
    runs, settings = [run for run, *_ in made], made[0][3]
    work = StepWork(4, 200, 4, samples=True)
    unseen, seen = calibrate_without(0, runs, burst), calibrate(runs[:1], burst)
    true_s = 1e-3 + 4 * 2e-5 + 200 * 2e-8 + 4 * 1e-5
    assert unseen.fitted.seconds(work) == pytest.approx(true_s, rel=0.05)
    assert seen.fitted.seconds(work) > 1.5 * true_s
    fitted = []

    def spied(given, burst, **options):
        fitted.append(given)
        return calibrate(given, burst, **options)

    monkeypatch.setattr("bench.simulate.check.calibrate", spied)
    result = compare_rate(
        0.5,
        [(run, calls) for run, calls, *_ in made],
        burst,
        lambda delays: SimulationSettings(settings.engine, settings.groups, delays),
    )
    a, b, c = runs
    assert fitted == [[a], [b], [c], [b, c], [a, c], [a, b]]
    assert [row.metric for row in result.held_out] == ["TTFT", "TPOT"]
    assert result.held_out != result.fitted


def test_resampled_steps_are_those_of_their_size():
    """Some small steps with prompts stall, and large steps take half as long as fitted."""
    base = FittedCost(8, (1e-3, 0.0, 0.0, 0.0, 0.0, 0.0, 1e-3, 0.0), 100, 0.0, 0.0, 0.0)
    small, large = StepWork(1, 50, 1, samples=True), StepWork(100, 5000, 100, samples=True)
    first = StepWork(0, 0, 30, 450, 1, samples=True)
    times = [(small, base.seconds(small))] * 40 + [(large, base.seconds(large) / 2)] * 40
    times += [(first, base.seconds(first) * (9 if i % 4 == 0 else 1)) for i in range(40)]
    cost = ResampledCost(base, times)
    assert cost.seconds(small) == base.seconds(small)
    nearly = StepWork(90, 4500, 90, samples=True)
    assert cost.seconds(nearly) == pytest.approx(base.seconds(nearly) / 2)
    drawn = [round(cost.seconds(first) / base.seconds(first), 6) for _ in range(400)]
    assert set(drawn) == {1.0, 9.0} and 40 < drawn.count(9.0) < 200
    assert ResampledCost(base, times[:40]).seconds(first) == base.seconds(first)


def test_replay_and_policies():
    figures, result = replay(60, 30.0)
    assert figures.answered == 60 == len(result.records)
    assert figures.prompt == pytest.approx(1154.7, rel=0.01)
    assert figures.output == pytest.approx(211.1, rel=0.01)
    tight = run_policy("prompt_only", "fcfs", 60, 50.0, 2 << 30)
    safe = run_policy("worst_case", "fcfs", 60, 50.0, 2 << 30)
    assert tight.answered == safe.answered == 1.0 and safe.preempted == 0.0
    assert safe.ttft_p50_s > tight.ttft_p50_s and safe.running < tight.running
