"""Estimates of what tables keep, against what is allocated for them."""

from __future__ import annotations

import threading
import tracemalloc
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import pytest

from serve.kept import Kept, size_of

COUNT = 5000


@dataclass(slots=True)
class Node:
    key: bytes
    children: set[int] = field(default_factory=set)


class Open:
    def __init__(self, number: int) -> None:
        self.text = f"text {number}" * 10
        self.shared = SHARED


SHARED = ["a list of all entries"] * 1000

TABLES: dict[str, Callable[[], Collection[object]]] = {
    "a dict of slots": lambda: {b"%16d" % i: Node(b"%32d" % i) for i in range(COUNT)},
    "an ordered dict": lambda: OrderedDict((f"name {i}", [i + 1000] * 20) for i in range(COUNT)),
    "a deque of tuples": lambda: deque((float(i), f"text {i}") for i in range(COUNT)),
    "a list of objects": lambda: [Open(i) for i in range(COUNT)],
    "a set of texts": lambda: {f"text {i}" * 20 for i in range(COUNT)},
}


@pytest.mark.parametrize("name", TABLES)
def test_an_estimate_is_near_what_was_allocated(name: str) -> None:
    tracemalloc.start()
    try:
        table = TABLES[name]()
        allocated, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    kept = size_of(table)
    assert kept.entries == COUNT
    assert 0.6 * allocated < kept.num_bytes < 1.5 * allocated, (kept, allocated)


def test_nothing_and_several_containers() -> None:
    assert size_of() == Kept(0, 0)
    assert size_of({}).entries == 0
    one, two = {1: b"a" * 1000}, [b"b" * 5000]
    assert size_of(one, two).entries == 1
    assert 6000 < size_of(one, two).num_bytes < 7000


def test_a_table_that_changes_meanwhile() -> None:
    table: dict[int, int] = {}
    stop = threading.Event()

    def change() -> None:
        number = 0
        while not stop.is_set():
            table[number] = number
            table.pop(number - 100, None)
            number += 1

    thread = threading.Thread(target=change)
    thread.start()
    try:
        for _ in range(2000):
            assert 0 <= size_of(table).num_bytes < 1 << 20
    finally:
        stop.set()
        thread.join()
