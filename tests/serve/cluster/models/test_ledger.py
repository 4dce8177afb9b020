"""Which models give memory back: enough of them, the least recently used, and none in vain."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serve.cluster.models.ledger import Holder, Move, choose_moves

sizes = st.integers(0, 100)
holders = st.lists(st.tuples(sizes, sizes), max_size=6).map(
    lambda pairs: [Holder(str(i), max(p), min(p)) for i, p in enumerate(pairs)]
)


def freed(moves: list[tuple[str, Move]], given_holders: list[Holder]) -> int:
    by_name = {holder.name: holder for holder in given_holders}
    return sum(
        by_name[name].held_bytes - (by_name[name].asleep_bytes if move is Move.SLEEP else 0)
        for name, move in moves
    )


@given(holders, st.integers(1, 400))
def test_enough_is_freed_or_nothing_is_moved(given_holders: list[Holder], lack: int) -> None:
    moves = choose_moves(given_holders, lack)
    total = sum(holder.held_bytes for holder in given_holders)
    if moves is None:
        assert total < lack
        return
    assert freed(moves, given_holders) >= lack
    for left_out in moves:  # none goes that need not
        assert freed([move for move in moves if move is not left_out], given_holders) < lack
    before = [holder.name for holder in given_holders]
    names = [name for name, _ in moves]
    assert names == sorted(names, key=before.index)
    last = before.index(names[-1])
    assert sum(holder.held_bytes for holder in given_holders[:last]) < lack, "a prefix suffices"


@given(holders, st.integers(1, 400))
def test_a_model_sleeps_where_that_suffices(given_holders: list[Holder], lack: int) -> None:
    for name, move in choose_moves(given_holders, lack) or ():
        if move is Move.STOP:
            continue
        holder = next(each for each in given_holders if each.name == name)
        assert holder.asleep_bytes < holder.held_bytes, "what sleeps already is stopped"


def test_examples() -> None:
    a, b = Holder("a", 100, 10), Holder("b", 100, 10)
    asleep = Holder("z", 10, 10)
    assert choose_moves([a, b], 90) == [("a", Move.SLEEP)]
    assert choose_moves([a, b], 95) == [("a", Move.STOP)]
    assert choose_moves([a, b], 180) == [("a", Move.SLEEP), ("b", Move.SLEEP)]
    assert choose_moves([a, b], 190) == [("a", Move.STOP), ("b", Move.SLEEP)]
    assert choose_moves([asleep, a], 5) == [("z", Move.STOP)]
    assert choose_moves([asleep, a], 50) == [("a", Move.SLEEP)]
    assert choose_moves([a, b], 201) is None
