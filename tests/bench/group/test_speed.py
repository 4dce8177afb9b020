"""The figures of `python -m bench.group`, from readings that are made up."""

from __future__ import annotations

import pytest

from bench.group.measured_engine import Timed
from bench.group.message_cost import message_cost
from bench.group.readings import gaps, load, medians, ratios, save, waits
from bench.group.speed import SMOKE
from bench.group.variants import ONE, STAGES, TENSOR
from serve.errors import ConfigError


def timed(first_s: float, rate: float, waited_s: float = 0.0, results: int = 0) -> Timed:
    return Timed(first_s, rate, 2.0, waited_s, 0.5, results, 10)


READINGS = {
    (ONE, "prefill 512"): [timed(1.0, 0.0), timed(2.0, 0.0), timed(4.0, 0.0)],
    (TENSOR, "prefill 512"): [timed(0.5, 0.0, 0.1, 90), timed(2.0, 0.0), timed(1.0, 0.0, 0.1, 40)],
    (ONE, "decode 16"): [timed(1.0, 10.0), timed(1.0, 20.0), timed(1.0, 40.0)],
    (TENSOR, "decode 16"): [timed(1.0, 15.0), timed(1.0, 20.0), timed(1.0, 80.0)],
    (STAGES, "first of 8000"): [timed(3.0, 0.0)],
}


def test_medians_are_rates_or_seconds():
    assert medians(READINGS) == {
        "prefill 512": {ONE: 256.0, TENSOR: 512.0},
        "decode 16": {ONE: 20.0, TENSOR: 20.0},
        "first of 8000": {STAGES: 3.0},
    }


def test_ratios_are_medians_of_rounds():
    assert ratios(READINGS, TENSOR, ONE) == {"prefill 512": 2.0, "decode 16": 1.5}
    assert ratios(READINGS, STAGES, ONE) == {}
    both = READINGS | {(ONE, "first of 8000"): [timed(6.0, 0.0)]}
    assert ratios(both, STAGES, ONE) == {"first of 8000": 2.0}


def test_waits_are_shares_of_the_time():
    found = waits(READINGS, TENSOR)["prefill 512"]
    assert found == {"waits": pytest.approx(0.3), "results a step": 4.0}


def test_a_message_has_the_same_size_for_all_contexts():
    costs = [message_cost(256, context) for context in (1024, 1 << 20)]
    assert costs[0].num_bytes == costs[1].num_bytes < 8192
    assert all(cost.pack_us > 0 and cost.read_us > 0 for cost in costs)


def test_gaps_are_those_of_all_rounds():
    column = "first of 300, beside 3"
    each = [Timed(1.0, 0.0, 1.0, 0.0, 0.0, 0, 1, times) for times in ([0.3, 0.1], [0.2, 0.9])]
    assert gaps({(STAGES, column): each}) == {column: {STAGES: [0.3, 0.9, 0.9, 0.9]}}


def test_rounds_are_added_to_those_of_earlier_calls(tmp_path):
    file, what = tmp_path / "rounds.json", {"model": "random:tiny"}
    assert load(file, what) == {}
    save(file, what, READINGS)
    assert load(file, what) == READINGS
    with pytest.raises(ConfigError, match="random:tiny"):
        load(file, {"model": "random:llama-1b"})


def test_a_round_that_warms_up_is_shorter():
    warm, full = (SMOKE.tasks(["short", "long"], number) for number in (-1, 0))
    columns = [task.column for task in full]
    assert [task.column for task in warm] == columns[2:]
    for one, other in zip(warm, full[2:], strict=True):
        assert (one.length, one.answer) <= (other.length, other.answer)
