"""The cut into stages is the best of all cuts."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.scheduler.stage_cut import cut_stages

# sums of eighths are exact, so costs can be compared
SECONDS = st.integers(0, 80).map(lambda eighths: eighths / 8)


def stage_seconds(stages, layers, first_extra, last_extra):
    seconds = [sum(layers[first : first + count]) for first, count in stages]
    seconds[0] += first_extra
    seconds[-1] += last_extra
    return seconds


def cost(stages, *model):
    seconds = stage_seconds(stages, *model)
    return max(seconds), sum([each**2 for each in seconds])


def all_cuts(num_layers, num_stages):
    for inner in combinations(range(1, num_layers), num_stages - 1):
        ends = [*inner, num_layers]
        yield [(a, b - a) for a, b in zip([0, *inner], ends, strict=True)]


@given(st.lists(SECONDS, min_size=1, max_size=9), SECONDS, SECONDS, st.data())
def test_no_cut_is_better(layers, first_extra, last_extra, data):
    num_stages = data.draw(st.integers(1, len(layers)))
    found = cut_stages(layers, first_extra, last_extra, num_stages)
    assert found in list(all_cuts(len(layers), num_stages))
    model = layers, first_extra, last_extra
    best = min(cost(stages, *model) for stages in all_cuts(len(layers), num_stages))
    assert cost(found, *model) == best


@pytest.mark.parametrize(
    ("num_layers", "extras", "counts"),
    [
        (16, (0.0, 0.0), [4, 4, 4, 4]),
        (15, (1.0, 4.0), [4, 5, 5, 1]),  # the head takes as long as four layers
        (16, (0.0, 9.0), [5, 5, 5, 1]),  # the head alone is slower than the other stages
        (4, (5.0, 5.0), [1, 1, 1, 1]),
    ],
)
def test_the_head_and_the_embedding_count(num_layers, extras, counts):
    stages = cut_stages([1.0] * num_layers, *extras, 4)
    assert [count for _, count in stages] == counts


def test_layers_differ():
    """A dense layer after three cheap ones has a stage to itself."""
    assert cut_stages([1.0, 1.0, 1.0, 3.0], 0.0, 0.0, 2) == [(0, 3), (3, 1)]


@pytest.mark.parametrize("num_stages", [0, 5])
def test_a_stage_has_at_least_one_layer(num_stages):
    with pytest.raises(ValueError, match="num_stages"):
        cut_stages([1.0] * 4, 0.0, 0.0, num_stages)


def test_a_large_model_is_cut_at_once():
    stages = cut_stages([1.0 + 0.01 * i for i in range(126)], 0.5, 8.0, 16)
    assert sum(count for _, count in stages) == 126 and len(stages) == 16
