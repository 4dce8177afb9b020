"""Which units leave first: those that are read seldom, then those whose layer comes last."""

from __future__ import annotations

import numpy as np

from memory.offload.unit_states import DIRTY, HELD, OPEN, RESIDENT, WRITING, UnitStates

NONE = np.empty(0, dtype=np.int64)
ALL = np.arange(10)


def filled(num_layers=4):
    states = UnitStates(num_layers, 10)
    states.flags[:] = RESIDENT
    return states


def chosen(states, num, order=None):
    """Returns (layer, tile) of the units that leave first."""
    order = states.farthest_first() if order is None else order
    victims = states.choose(order, num)
    return [(layer, tile) for layer, tiles in victims for tile in tiles.tolist()]


def a_step(states, *read):
    for layer, tiles in enumerate(read):
        states.visit(layer, np.array(tiles, dtype=np.int64), NONE)


def test_units_that_are_never_read_leave_first():
    states = filled()
    a_step(states, range(9), range(10), range(8), range(10))
    assert chosen(states, 3) == [(2, 8), (2, 9), (0, 9)]


def test_a_visit_counts_what_was_fetched_ahead_of_it():
    states = UnitStates(2, 10)
    states.expect(1, np.array([1, 2, 3, 4]))
    states.add(1, np.array([2, 7]), RESIDENT)
    assert states.visit(0, ALL, NONE) == (0, 0), "another layer"
    assert states.visit(1, np.array([2, 3, 7]), np.array([4])) == (3, 2), "3 and 4 are on their way"
    assert states.visit(1, ALL, NONE) == (0, 0), "they were fetched for the visit before"
    states.expect(1, np.array([5, 6]))
    states.erase(4, 6)
    assert states.visit(1, ALL, NONE) == (1, 1), "what is erased was never fetched"


def test_units_that_are_read_often_leave_last():
    states = filled(num_layers=1)
    for step in range(8):
        a_step(states, [t for t in range(10) if t > 4 or t == step % 4])
    a_step(states, [])
    states.unpin()
    order = [tile for _, tile in chosen(states, 10)]
    assert order[0] == 4  # never
    assert set(order[1:5]) == {0, 1, 2, 3}  # once or twice
    assert set(order[5:]) == {5, 6, 7, 8, 9}  # always but the last time


def test_of_equals_those_leave_that_are_read_last():
    states = filled()
    for _ in range(8):
        a_step(states, ALL, ALL, ALL, ALL)
    states.visit(0, ALL, NONE)
    states.visit(1, ALL, NONE)
    assert chosen(states, 40) == [(layer, tile) for layer in (0, 3, 2) for tile in range(10)]


def test_for_a_later_layer_only_units_leave_that_are_read_after_it():
    states = filled()
    a_step(states, ALL, ALL, ALL, ALL)
    states.visit(0, ALL, NONE)
    assert states.farthest_first() == [0, 3, 2, 1]
    assert states.farthest_first(before=2) == [0, 3]
    assert states.farthest_first(before=0) == []


def test_what_cannot_leave():
    states = filled(num_layers=1)
    for tile, flag in enumerate((DIRTY, WRITING, HELD)):
        states.add(0, np.array([tile]), flag)
    states.visit(0, np.array([5, 5]), np.array([6]))
    assert [tile for _, tile in chosen(states, 10)] == [3, 4, 7, 8, 9]
    states.unpin()
    assert [tile for _, tile in chosen(states, 10)] == [3, 4, 7, 8, 9, 5, 6]


def test_what_is_freed_can_leave_later():
    states = filled(num_layers=1)
    states.add(0, ALL, DIRTY)
    assert chosen(states, 1) == []
    states.remove(0, ALL[:2], DIRTY)
    states.freed(0)
    assert chosen(states, 5) == [(0, 0), (0, 1)]


def test_what_is_written_to_again_is_open():
    states = filled(num_layers=2)
    states.visit(0, NONE, np.array([1, 2]))
    states.mark_written(0, np.array([1, 2]))
    assert states.complete == set()
    states.visit(1, NONE, NONE)
    assert states.dirty(0, with_open=False).tolist() == []
    assert states.dirty(0, with_open=True).tolist() == [1, 2]
    states.visit(0, NONE, np.array([2, 3]))
    states.mark_written(0, np.array([2, 3]))
    assert states.complete == {0}
    assert states.dirty(0, with_open=True).tolist() == [1]  # the others are pinned
    states.unpin()
    assert states.dirty(0, with_open=False).tolist() == [1]
    assert (states.flags[0][[1, 2, 3]] & OPEN).tolist() == [0, OPEN, OPEN]
