"""Under a simulated clock, prompts do not stall streams, and that costs hardly any throughput."""

from __future__ import annotations

import pytest

from bench.simulate.stalls import OUTPUT, StepTable, machines
from tests.serve.scheduler.test_step_time import make_work

COUNT = 100


@pytest.mark.parametrize(("name", "most"), [("1B in int8", 4), ("8B on a GPU", 4)])
def test_the_default_chunks(name, most):
    """The 99th percentile between tokens is at most 4 times the median, at half of what the
    machine serves; whole steps stall the streams longer. A crowd costs at most 5 % of the
    throughput, and the first token of a prompt comes hardly later."""
    machine = machines()[name]
    whole = machine.chunks[-1]
    crowd = machine.run(None, whole, COUNT)
    assert machine.run(None, None, COUNT).tokens_per_s > 0.95 * crowd.tokens_per_s
    rate = 0.5 * crowd.tokens_per_s / OUTPUT
    default, static = machine.run(rate, None, COUNT), machine.run(rate, whole, COUNT)
    assert default.ratio <= most < static.ratio
    assert default.tokens_per_s > 0.98 * static.tokens_per_s
    assert default.ttft_ms["p50"] < 1.5 * static.ttft_ms["p50"]


def test_a_table_of_steps():
    table = StepTable(((4, 1.0), (8, 2.0), (16, 10.0)), 0.25, 0.5)
    seconds = [table.seconds(make_work(rows, 0)) for rows in (1, 4, 6, 8, 12, 16)]
    assert seconds == [1.0, 1.0, 1.5, 2.0, 6.0, 10.0]
    assert table.seconds(make_work(4, 2)) == 1.0 + 4 * 2 * 0.25
    assert table.seconds(make_work(0, 0, 8, 3)) == 2.0 + (8 * 3 + 8 * 8 // 2) * 0.5
