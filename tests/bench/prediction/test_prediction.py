"""The measurements of prediction run, and what they print is what they say."""

from __future__ import annotations

import asyncio

import pytest

from bench.prediction import accuracy, orders, simulated_orders
from bench.prediction.admission import LOADS, MAX_MODEL_LEN
from bench.prediction.orders import results_of


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
def test_orders_are_compared_in_real_runs(capsys):
    capacity, results = asyncio.run(orders.measure(1.0, 4, 1))
    assert capacity > 0
    assert list(results) == list(orders.SHARES)
    orders.show(capacity, 4, results)
    assert "srpt, learned" in capsys.readouterr().out


@pytest.mark.process
def test_orders_are_compared_under_a_virtual_clock():
    results = simulated_orders.measure(True)
    assert len(results) == 6 * 4
    for by_order in results.values():
        assert by_order["fcfs"].gain == 0 and by_order["srpt, oracle"].of_oracle == 1
        assert all(row.p50_s <= row.p99_s for row in by_order.values())


def test_the_share_of_the_oracles_gain():
    times = {"fcfs": [2.0, 4.0], "half": [2.0, 3.0], "srpt, oracle": [1.0, 3.0]}
    found = {row.name: row.of_oracle for row in results_of(times)}
    assert found == {"fcfs": 0.0, "half": 0.5, "srpt, oracle": 1.0}


def test_loads_of_admission_fit_the_context():
    for load in LOADS.values():
        for call in load.calls(200):
            assert call.num_prompt + (call.num_output or 0) <= MAX_MODEL_LEN
    assert LOADS["mixed"].calls(50) == LOADS["mixed"].calls(50)
