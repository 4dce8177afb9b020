"""Guesses are compared with the experts that are used next, in the layer that they were about."""

from __future__ import annotations

from bench.streaming.expert_guesses import (
    ALWAYS,
    Guess,
    GuessTrace,
    guess_table,
    reading_guesses,
    right_share,
)
from serve.loading.streaming import experts


def test_a_guess_meets_the_next_use_of_its_layer() -> None:
    trace = GuessTrace()
    trace.use(0, [1, 2])  # nothing was guessed
    trace.guess(1, [3, 4], [4])
    trace.use(1, [4, 5])
    trace.guess(2, [6], [])
    trace.use(0, [6])  # a step ended before
    trace.use(1, [3])
    assert trace.guesses == [Guess(1, [3, 4], [4], [4, 5])]


def test_shares_are_of_experts() -> None:
    every = [Guess(1, [1, 2, 3], [3], [1, 2]), Guess(2, [1], [1], [1, 2])]
    assert right_share(every, of_missing=False) == 3 / 4
    assert right_share(every, of_missing=True) == 1 / 2
    assert right_share([], of_missing=True) == 0
    table = guess_table({4: every}, num_experts=8)
    cells = [list(column.cells) for column in table.columns]
    assert cells == [
        ["4", "4", "4"],
        ["1", "2", "all"],
        ["67%", "100%", "75%"],
        ["0%", "100%", "50%"],
        ["25%", "25%", "25%"],
        ["1", "1", "2"],
    ]


def test_the_bound_of_guesses_is_restored() -> None:
    before = experts.LEAST_PRECISION
    with reading_guesses(ALWAYS):
        assert experts.LEAST_PRECISION == ALWAYS
    assert before == experts.LEAST_PRECISION == 0.8
