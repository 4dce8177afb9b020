"""The measurements of prediction run, and what they print is what they say."""

from __future__ import annotations

import asyncio
import math
import time

import pytest

from bench.prediction import accuracy, orders, simulated_orders
from bench.prediction.admission import LOADS, MAX_MODEL_LEN
from bench.prediction.order_results import results_of
from bench.prediction.paced import PacedRunner
from bench.simulate.memory_policy import EMBEDDED
from serve.scheduler.step_plan import make_plan
from serve.scheduler.step_time import StepWork
from tests.support.engine.queue_rig import seq

ORDERS = ("fcfs", "mlfq", "srpt, learned", "srpt, oracle")


def test_accuracy_is_measured_at_each_stage(capsys):
    results = accuracy.measure(True)
    assert list(results) == ["arrived", "computed", "grown"]
    learned, past = results["computed"]["learned"], results["computed"]["history"]
    assert learned.count == past.count == 150
    assert learned.log_error < past.log_error
    assert 0.75 < learned.p90 < 1.0
    accuracy.show("computed", results["computed"])
    assert "log error" in capsys.readouterr().out


def test_ranks_of_equal_values_are_their_mean():
    assert accuracy._ranks([5, 1, 5, 9]).tolist() == [2.5, 1, 2.5, 4]


@pytest.mark.process
def test_orders_are_compared_in_real_runs(capsys, tmp_path):
    plan = orders.Plan(idle_layers=2, pace=1.0, shares=(0.8,), passes=2, rounds=2, count=12)
    found = asyncio.run(orders.measure(plan, tmp_path))
    assert found.capacity > 0
    assert found.step_s > EMBEDDED.fixed_s, "steps are paced"
    (rows,) = found.results.values()
    assert [row.name for row in rows] == list(ORDERS)
    assert all(row.count == 2 * 12 and 0 < row.p50_s <= row.p99_s for row in rows)
    orders.show(plan, found)
    assert "80% of it" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--shares=0.8,1.5", "between 0 and 1"),
        ("--shares=most", "--shares"),
        ("--pace=-1", "from 0 to 1000"),
        ("--pace=nan", "from 0 to 1000"),
        ("--idle-layers=-2", "at least 0"),
        ("--rounds=0", "at least 1"),
    ],
)
def test_wrong_options_of_orders_are_named(capsys, option, text):
    with pytest.raises(SystemExit):
        orders.main([option])
    assert text in capsys.readouterr().err


class Step:
    """A runner whose steps take these seconds, one after the other."""

    def __init__(self, *seconds):
        self.seconds = list(seconds)

    def run(self, plan, launched):
        launched()
        time.sleep(self.seconds.pop(0))
        return "result"


def test_a_paced_step_takes_its_time_and_is_counted_if_it_took_longer():
    plan = make_plan([seq("a")], [], 1)
    step_s = EMBEDDED.seconds(StepWork.of(plan))
    runner = PacedRunner(Step(0.0, 0.0, 0.0, 0.1), 10.0)
    began_s = time.perf_counter()
    assert [runner.run(plan, lambda: None) for _ in range(3)] == ["result"] * 3
    # a wait that was too long is made up for in the next step but the last one's
    assert 30 * step_s <= time.perf_counter() - began_s < 30 * step_s + 0.3
    assert runner.num_late == 0
    runner.run(plan, lambda: None)
    assert (runner.num_steps, runner.num_late) == (4, 1)


@pytest.mark.process
def test_orders_are_compared_under_a_virtual_clock():
    results = simulated_orders.measure(True)
    assert len(results) == 6 * 4
    for by_order in results.values():
        assert by_order["fcfs"].gain == 0 and by_order["srpt, oracle"].of_oracle == 1
        assert all(row.p50_s <= row.p99_s for row in by_order.values())


def test_the_share_of_the_oracles_gain():
    rounds = [
        {"fcfs": [2.0], "half": [2.0], "srpt, oracle": [1.0]},
        {"fcfs": [4.0], "half": [3.0], "srpt, oracle": [3.0]},
    ]
    found = {row.name: row for row in results_of(rounds)}
    assert {name: row.of_oracle for name, row in found.items()} == {
        "fcfs": 0.0,
        "half": 0.5,
        "srpt, oracle": 1.0,
    }
    half = found["half"]
    assert half.gain == pytest.approx(1 / 6)
    assert (half.gain_low, half.gain_high) == (0.0, 0.25), "those of one round alone"
    assert (half.of_oracle_low, half.of_oracle_high) == (0.0, 1.0)
    assert (half.mean_s, half.p99_s, half.count) == (2.5, 2.0, 2)


def test_no_share_where_the_oracle_gains_nothing():
    rounds = [{"fcfs": [2.0], "srpt, oracle": [2.0]}, {"fcfs": [2.0], "srpt, oracle": [1.0]}]
    row = results_of(rounds)[1]
    assert row.of_oracle == 1.0
    assert math.isnan(row.of_oracle_low), "the first round alone has no share"
    assert all(math.isnan(each.of_oracle) for each in results_of(rounds[:1]))


def test_loads_of_admission_fit_the_context():
    for load in LOADS.values():
        for call in load.calls(200):
            assert call.num_prompt + (call.num_output or 0) <= MAX_MODEL_LEN
    assert LOADS["mixed"].calls(50) == LOADS["mixed"].calls(50)
