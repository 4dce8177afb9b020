"""Without an SLO a step with prompt rows takes at most a multiple of its decode rows' time."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest

from serve.engine.early_rejection import predicted_ttft_s
from serve.scheduler.step_time import StepTimeModel
from tests.serve.scheduler.test_step_time import cpu, gpu, make_work, trained
from tests.support.engine.step_simulation import Simulation

FACTOR = 3.0


def sluggish(work):
    """Seconds of a step on a machine whose kernels are slow in small chunks: 10 ms for each."""
    return cpu(work) + 10e-3 * work.num_chunks


def run_prompts(simulation, prefix, count, length):
    names = {f"{prefix} {number}" for number in range(count)}
    for name in sorted(names):
        simulation.add(name, length)
    simulation.run_until(lambda: names <= simulation.ttft_s.keys())


@pytest.mark.parametrize("machine", [cpu, gpu, sluggish])
def test_prompts_beside_streams(machine):
    """Steps keep the factor, and use most of it."""
    simulation = Simulation(None, 2048, machine, noise=0.03, factor=FACTOR)
    simulation.warm_up()
    simulation.start_streams(8)
    alone_s = machine(make_work(8, 200))
    for number in range(6):
        run_prompts(simulation, f"prompt {number}", 1, 1500)
        for _ in range(10):
            simulation.step()
    times = sorted(seconds for seconds, names in simulation.steps if names)
    assert times[int(0.98 * len(times))] <= FACTOR * alone_s
    assert sum(times) / len(times) > 0.6 * FACTOR * alone_s


def test_the_first_prompts_of_a_cold_engine():
    """Nothing is known but one prompt: the next one does not stall the first one's stream."""
    simulation = Simulation(None, factor=FACTOR)
    simulation.add("first", 256, num_tokens=2000)
    simulation.run_until(lambda: "first" in simulation.ttft_s)
    simulation.steps.clear()
    run_prompts(simulation, "second", 1, 256)
    assert max(seconds for seconds, _ in simulation.steps) < 4 * cpu(make_work(1, 300))
    for _ in range(20):
        simulation.step()
    simulation.steps.clear()
    run_prompts(simulation, "third", 1, 256)
    chunks = [sum(names.values()) for _, names in simulation.steps]
    assert min(chunks[:-1]) == 32, "the model has learned that there is room for more"


def test_a_prompt_without_streams_gets_the_whole_budget():
    simulation = Simulation(None, factor=1.01)
    simulation.warm_up()
    simulation.add("alone", 1000)
    simulation.run_until(lambda: "alone" in simulation.ttft_s)
    assert [names["alone"] for _, names in simulation.steps] == [256, 256, 256, 232]


def test_many_waiting_prompts_get_larger_chunks():
    """The first ones are computed in chunks of a few dozen rows, those of a crowd in whole steps,
    and the last ones of the crowd in small chunks again."""
    simulation = Simulation(None, factor=FACTOR, max_num_seqs=64)
    simulation.warm_up()
    simulation.start_streams(4)
    run_prompts(simulation, "few", 2, 300)
    small = max(sum(names.values()) for _, names in simulation.steps)
    simulation.steps.clear()
    run_prompts(simulation, "crowd", 40, 300)
    rows = [sum(names.values()) for _, names in simulation.steps if names]
    assert small < 64 and max(rows[:10]) == 252
    assert max(rows[-4:]) <= small + 16


@pytest.mark.parametrize("reason", ["slots", "memory"])
def test_requests_that_cannot_run_do_not_stall_the_streams(reason):
    """A crowd that waits for slots or for memory is not there to be computed."""
    seqs, pages = (5, 4096) if reason == "slots" else (64, 40)
    simulation = Simulation(None, factor=FACTOR, max_num_seqs=seqs, num_pages=pages)
    simulation.warm_up()
    simulation.start_streams(4)
    for number in range(80):
        simulation.add(f"waiting {number}", 250, num_tokens=20)
    for _ in range(200):
        simulation.step()
    assert 10 < len(simulation.scheduler.waiting) < 76
    times = sorted(seconds for seconds, names in simulation.steps if names)
    assert times[int(0.95 * len(times))] < FACTOR * cpu(make_work(10, 300))


def test_a_crowd_costs_no_throughput():
    """All requests at once take at most 5 % longer than without a limit, from a cold start."""

    def seconds(factor):
        simulation = Simulation(None, factor=factor, noise=0.03, max_num_seqs=64)
        names = [f"{number}" for number in range(80)]
        for name in names:
            simulation.add(name, 256, num_tokens=64)
        simulation.run_until(lambda: not simulation.scheduler.has_work())
        return simulation.now_s

    assert seconds(FACTOR) < 1.05 * seconds(math.inf)


def test_an_slo_comes_before_the_factor():
    simulation = Simulation(0.2, factor=1.01)
    simulation.warm_up()
    simulation.start_streams(8)
    run_prompts(simulation, "prompt", 1, 1000)
    assert max(seconds for seconds, _ in simulation.steps) > 0.12


def test_the_predicted_ttft_knows_the_factor():
    simulation = Simulation(None, factor=FACTOR)
    simulation.warm_up()
    simulation.start_streams(8)
    scheduler = simulation.scheduler
    request = SimpleNamespace(prompt_token_ids=range(2000))
    predicted_s = predicted_ttft_s(scheduler, request, 2000, 0.0, 0)
    simulation.add("prompt", 2000)
    simulation.run_until(lambda: "prompt" in simulation.ttft_s)
    assert simulation.ttft_s["prompt"] == pytest.approx(predicted_s, rel=0.2)
    chunks = scheduler.chunks
    assert chunks.slowdown(scheduler.running, 40) < chunks.slowdown(scheduler.running)


def test_a_step_in_which_nothing_can_be_admitted_predicts_no_chunk():
    """The slots are full and requests wait: most steps of a busy engine."""
    simulation = Simulation(None, factor=FACTOR, max_num_seqs=4)
    simulation.warm_up()
    simulation.start_streams(4)
    simulation.add("waiting", 100)
    calls = []
    simulation.scheduler.chunks.model.most_rows = lambda *args: calls.append(args)
    for _ in range(10):
        simulation.step()
    assert calls == []


@pytest.mark.parametrize("true_seconds", [cpu, gpu])
def test_the_time_of_decode_rows_is_known_beside_prompts(true_seconds):
    """More streams run than in any step without prompts."""
    rng = random.Random(3)
    model = StepTimeModel(256)
    for _ in range(200):
        model.learn(make_work(1, 300), true_seconds(make_work(1, 300)))
        work = make_work(rng.randint(1, 24), 300, rng.randint(2, 256))
        model.learn(work, true_seconds(work))
    for decodes in (1, 4, 24):
        work = make_work(decodes, 300)
        assert model.decode_seconds(work) == pytest.approx(true_seconds(work), rel=0.3)


def test_the_time_of_decode_rows_before_and_after_learning():
    assert StepTimeModel(256).decode_seconds(make_work(4, 100)) == 0.0
    model = trained(cpu, random.Random(5))
    work = make_work(4, 500)
    assert model.decode_seconds(work) == pytest.approx(cpu(work), rel=0.1)
    model = StepTimeModel(256)
    model.learn(make_work(0, 0, 256), 0.32)
    assert model.decode_seconds(make_work(1, 256)) == pytest.approx(0.02), "as 16 rows"
    assert model.decode_seconds(make_work(32, 256)) == pytest.approx(0.04)
    model.learn(make_work(1, 256), 0.03)
    assert model.decode_seconds(make_work(2, 256)) == pytest.approx(0.03, rel=0.05)
