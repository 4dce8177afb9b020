"""Where the stages of a model are put, and what is said if there is no room."""

from __future__ import annotations

import pytest

from serve.cluster.placement import (
    Node,
    Shape,
    choose_cpus,
    place_stages,
    placement_lines,
    too_few,
)
from serve.errors import ConfigError


def nodes(*cpus: float) -> list[Node]:
    return [Node(f"node{number}", f"10.0.0.{number}", each) for number, each in enumerate(cpus)]


@pytest.mark.parametrize(
    ("cpus", "tensor", "num_stages", "most"),
    [
        ((16,), 1, 1, 16),
        ((16, 16), 2, 2, 8),
        ((16, 4), 1, 2, 8),  # two stages on the larger node are faster than one on the smaller
        ((16, 16, 16, 4), 1, 4, 8),
        ((3.5, 3.5), 2, 2, 1),
        ((0, 2, 2), 1, 2, 2),
    ],
)
def test_each_rank_gets_as_many_cpus_as_fit(cpus, tensor, num_stages, most):
    assert choose_cpus(nodes(*cpus), tensor, num_stages) == most
    places = place_stages(nodes(*cpus), Shape(tensor, num_stages, most))
    assert places is not None and len(places) == num_stages
    assert place_stages(nodes(*cpus), Shape(tensor, num_stages, most + 1)) is None


def test_stages_are_spread():
    places = place_stages(nodes(8, 8, 4), Shape(2, 3, 2))
    assert places is not None
    assert [place.id for place in places] == ["node0", "node1", "node2"]
    places = place_stages(nodes(8, 8, 2), Shape(2, 3, 2))  # the third is too small
    assert places is not None
    assert [place.id for place in places] == ["node0", "node1", "node0"]


@pytest.mark.parametrize("cpus", [(), (0.5,), (1, 1), (3, 0)])
def test_too_little_room_is_said_in_numbers(cpus):
    """Two tensor ranks of a stage need one node, whatever others have."""
    with pytest.raises(ConfigError, match="Asked for: 2") as caught:
        choose_cpus(nodes(*cpus), 2, 2)
    assert "2 CPUs on one node for each of 2 stages" in str(caught.value)
    assert all(f"{each:g} on 10.0.0.{at}" in str(caught.value) for at, each in enumerate(cpus))


def test_the_error_names_the_setting_and_what_is_free():
    text = str(too_few(nodes(1.5), Shape(1, 1, 4)))
    assert text.startswith("cpus_per_rank 4: ") and "free: 1.5 on 10.0.0.0 (node0)" in text
    assert str(too_few([], Shape(1, 1, 4))).endswith("free: none")


def test_the_last_stage_has_rank_0():
    """As serve/group/grid.py counts them."""
    from serve.group.grid import Grid

    shape, grid = Shape(2, 3, 1), Grid(2, ((0, 1), (1, 1), (2, 1)))
    assert [shape.place(rank) for rank in range(6)] == [tuple(grid.place(r)) for r in range(6)]
    assert [shape.bundle(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]


def test_the_table():
    shape = Shape(2, 2, 3)
    by_bundle = placement_lines(shape, nodes(8, 8))
    assert by_bundle[0].split() == ["rank", "stage", "tensor", "CPUs", "node"]
    assert [line.split()[:5] for line in by_bundle[1:]] == [
        ["0", "1", "0", "3", "10.0.0.0"],
        ["1", "1", "1", "3", "10.0.0.0"],
        ["2", "0", "0", "3", "10.0.0.1"],
        ["3", "0", "1", "3", "10.0.0.1"],
    ]
    places = [node for node in nodes(8, 8) for _ in range(2)]
    with_processes = placement_lines(shape, places, [11, 12, 13, 14])
    assert [line.split()[-1] for line in with_processes] == ["process", "11", "12", "13", "14"]
