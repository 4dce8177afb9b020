"""Which models have to give their memory back so that another one fits. Integers only."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple


class Move(StrEnum):
    """What gives memory back: the process stays (SLEEP) or ends (STOP)."""

    SLEEP = "sleep"
    STOP = "stop"


class Holder(NamedTuple):
    """A model that could give memory back. held_bytes: what it has now. asleep_bytes: what it has
    while it sleeps; the same as held_bytes if it sleeps already, or cannot sleep."""

    name: str
    held_bytes: int
    asleep_bytes: int


def choose_moves(holders: Sequence[Holder], lack_bytes: int) -> list[tuple[str, Move]] | None:
    """Returns what the fewest of the least recently used holders have to do so that lack_bytes
    become free; None if all together do not suffice.

    holders: the least recently used first. Of those that have to do something, as many as possible
    only sleep, and none does that need not.
    """
    chosen: list[Holder] = []
    freed = 0
    for holder in holders:
        if freed >= lack_bytes:
            break
        chosen.append(holder)
        freed += holder.held_bytes
    if freed < lack_bytes:
        return None
    moves: list[tuple[str, Move]] = []
    for holder in reversed(chosen):  # the most recently used ones keep what they can
        if freed - holder.held_bytes >= lack_bytes:
            freed -= holder.held_bytes
        elif holder.asleep_bytes < holder.held_bytes and freed - holder.asleep_bytes >= lack_bytes:
            freed -= holder.asleep_bytes
            moves.append((holder.name, Move.SLEEP))
        else:
            moves.append((holder.name, Move.STOP))
    return moves[::-1]
