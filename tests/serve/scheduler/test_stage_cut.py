"""The cut into stages is the best of all cuts."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.scheduler.stage_cut import cut_stages

# sums of eighths are exact, so costs can be compared
SECONDS = st.integers(0, 80).map(lambda eighths: eighths / 8)


def cost(stages, layers):
    seconds = [sum(layers[first : first + count]) for first, count in stages]
    return max(seconds), sum([each**2 for each in seconds])


def all_cuts(num_layers, num_stages):
    for inner in combinations(range(1, num_layers), num_stages - 1):
        ends = [*inner, num_layers]
        yield [(a, b - a) for a, b in zip([0, *inner], ends, strict=True)]


@given(st.lists(SECONDS, min_size=1, max_size=9), st.data())
def test_no_cut_is_better(layers, data):
    num_stages = data.draw(st.integers(1, len(layers)))
    found = cut_stages(layers, num_stages)
    assert found in list(all_cuts(len(layers), num_stages))
    best = min(cost(stages, layers) for stages in all_cuts(len(layers), num_stages))
    assert cost(found, layers) == best


def test_layers_differ():
    """A dense layer after three cheap ones has a stage to itself."""
    assert cut_stages([1.0, 1.0, 1.0, 3.0], 2) == [(0, 3), (3, 1)]


@pytest.mark.parametrize("num_stages", [0, 5])
def test_a_stage_has_at_least_one_layer(num_stages):
    with pytest.raises(ValueError, match="num_stages"):
        cut_stages([1.0] * 4, num_stages)


def test_a_large_model_is_cut_at_once():
    stages = cut_stages([1.0 + 0.01 * i for i in range(126)], 16)
    assert sum(count for _, count in stages) == 126 and len(stages) == 16
