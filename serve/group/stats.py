"""Counts what the engine's rank knows of its group."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from serve.group.group import Group
from serve.group_stats import GroupStats, RankState


@contextmanager
def timed(group: Group) -> Iterator[None]:
    """Counts the seconds of the engine's part of a step."""
    began_s, (wait_s, exchange_s) = time.monotonic(), _waited_s(group)
    try:
        yield
    finally:
        now_wait_s, now_exchange_s = _waited_s(group)
        wait_s, exchange_s = now_wait_s - wait_s, now_exchange_s - exchange_s
        group.seconds.wait += wait_s
        group.seconds.exchange += exchange_s
        group.seconds.busy += max(0.0, time.monotonic() - began_s - wait_s - exchange_s)


def _waited_s(group: Group) -> tuple[float, float]:
    """Returns for how long the engine's rank has waited since the group was formed: for the stage
    before, and for the other ranks of its stage."""
    exchange = group.own.exchange
    return group.waited_s, 0.0 if exchange is None else exchange.waited_s


def group_stats(group: Group) -> GroupStats:
    """Any thread may call it."""
    own = group.own
    ranks = [RankState(*own.place, socket.gethostname(), "up")]
    for rank, link in sorted(group.links.items()):
        ranks.append(
            RankState(*group.grid.place(rank), link.host, "lost" if link.is_lost else "up")
        )
    num_restarts = max(0, group.num_formed - 1)
    return GroupStats(tuple(ranks), own.place.stage, replace(group.seconds), num_restarts)
