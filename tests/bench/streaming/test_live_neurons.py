"""Which neurons are live: shares against plain loops, and a predictor of what it can learn."""

from __future__ import annotations

import pytest
import torch

from bench.streaming.live_neurons import (
    Activations,
    any_of,
    in_window,
    liveness,
    panels,
    predict,
    threshold,
)
from bench.streaming.neuron_gain import MLP_SHARE, cost, gain_row

ROWS, NEURONS, HIDDEN = 160, 96, 8


@pytest.fixture
def live() -> torch.Tensor:
    return torch.rand(ROWS, NEURONS, generator=torch.Generator().manual_seed(1)) < 0.03


def test_panels_and_groups_have_what_one_of_them_has(live: torch.Tensor) -> None:
    cut = live[:, :70]  # the last panel is smaller
    blocks = [[bool(row[at : at + 32].any()) for at in (0, 32, 64)] for row in cut]
    assert panels(cut).tolist() == blocks
    groups = [live[at : at + 8].any(0).tolist() for at in range(0, ROWS, 8)]
    assert any_of(live, 8).tolist() == groups


def test_window_is_of_the_rows_before(live: torch.Tensor) -> None:
    expected = [live[at - 5 : at].any(0).tolist() for at in range(5, ROWS)]
    assert in_window(live, 5).tolist() == expected


@pytest.mark.parametrize("recall", [0.5, 0.95, 1.0])
def test_threshold_is_the_largest_that_finds_enough(live: torch.Tensor, recall: float) -> None:
    scores = torch.rand(ROWS, NEURONS, generator=torch.Generator().manual_seed(2))
    least = threshold(scores, live, recall)
    assert (scores[live] >= least).float().mean() >= recall
    assert (scores[live] > least).float().mean() < recall


def made_layer(neurons: int = NEURONS) -> Activations:
    """A layer whose neurons depend on two directions of its input."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(ROWS * 8, HIDDEN, generator=generator)
    low = torch.randn(HIDDEN, 2, generator=generator)
    gates = inputs @ low @ torch.randn(2, neurons, generator=generator)
    return Activations(inputs, gates.relu())


def test_predictor_finds_what_has_its_rank() -> None:
    layer = made_layer(32)
    live, met = layer.values[:960] > 0, layer.values[960:] > 0

    def predicted(inputs: torch.Tensor) -> float:
        scores = predict(inputs, live, layer.inputs[960:], 2, steps=300)
        return float((scores >= threshold(scores, met, 0.95)).float().mean())

    assert predicted(layer.inputs[:960]) < 0.6
    assert predicted(layer.inputs[:960].flip(0)) > 0.8, "of other rows' neurons it learns nothing"


def test_liveness_of_a_layer() -> None:
    layer = made_layer()
    found = liveness(layer, rank=2, steps=20)
    met = layer.values[960:] > 0
    assert found.one == pytest.approx(float(met.float().mean()))
    assert found.one < found.eight <= 1
    assert found.sorted_panels[0] <= found.panels[0]
    assert found.fresh < found.one < found.window
    assert found.one < found.predicted[0] < found.predicted[1] <= found.predicted_eight


def test_gain_counts_what_knowing_takes() -> None:
    times = {"dense": 6.0, "gate": 2.0, "predictor": 0.5}
    ways = {"gate first, panels": 3.0, "predictor, neighbours": 3.0, "for nothing, neighbours": 3.0}
    assert [cost(name, times | ways) for name in ways] == [5.0, 3.5, 3.0]
    assert gain_row("", "", 0.1, 0.5)[-1] == f"{1 / (1 - MLP_SHARE / 2):.2f}x"
