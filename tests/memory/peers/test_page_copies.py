"""Copies of pages of others' running sequences: their bound, their order of eviction, their end."""

from __future__ import annotations

import ctypes
import random

from memory.peers.page_copies import PageCopies
from tests.support.memory.peer_rig import PAGE, Pages, content_of, name_of


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make(num_pages: int = 4):
    clock = Clock()
    return PageCopies(PAGE, num_pages * PAGE, kept_s=60.0, clock=clock), clock


def put(copies: PageCopies, number: int, stream=("a", 1)) -> bool:
    """Copies a page as a link does; returns whether it was wanted."""
    address = copies.place(stream, name_of(number))
    if address is None:
        return False
    ctypes.memmove(address, content_of(number)[:PAGE], PAGE)
    copies.filled(name_of(number), is_there=True)
    return True


def here(copies: PageCopies, *numbers: int) -> list[int]:
    return [number for number in numbers if copies.contains(name_of(number))]


def test_a_page_is_here_once_it_has_come():
    copies, _ = make()
    address = copies.place(("a", 1), name_of(1))
    assert address is not None and not here(copies, 1)
    own = Pages(1)
    assert not copies.read(name_of(1), own.address(0))
    copies.filled(name_of(1), is_there=False)
    assert copies.stats().pages == 0
    assert put(copies, 1, ("a", 2)) and not put(copies, 1, ("a", 3))
    assert copies.read(name_of(1), own.address(0))
    assert own.read(0) == content_of(1)[:PAGE]
    assert copies.stats().used == 1
    copies.check_integrity()


def test_running_sequences_keep_their_copies_and_others_are_declined():
    copies, _ = make(4)
    assert all(put(copies, number) for number in range(4))
    assert not put(copies, 9, ("b", 1))
    assert here(copies, *range(10)) == [0, 1, 2, 3]
    assert copies.stats().declined == 1
    copies.end(("a", 1))
    assert not put(copies, 10, ("b", 1)), "its page before is not here"
    assert put(copies, 20, ("b", 2)) and put(copies, 21, ("b", 2))
    assert here(copies, 0, 1, 2, 3, 20, 21) == [0, 1, 20, 21], "the last pages are dropped first"
    copies.check_integrity()


def test_what_a_sequence_leaves_is_kept_for_a_while_and_memory_goes_back_to_zero():
    copies, clock = make()
    for number in range(3):
        put(copies, number)
    put(copies, 3, ("b", 1))
    copies.end_all("a")
    clock.now_s = 59.0
    copies.expire()
    assert here(copies, *range(4)) == [0, 1, 2, 3]
    clock.now_s = 61.0
    copies.expire()
    assert here(copies, *range(4)) == [3]
    copies.end(("b", 1))
    clock.now_s = 200.0
    copies.expire()
    assert (copies.stats().pages, copies.stats().num_bytes) == (0, 0)
    copies.check_integrity()


def test_a_page_that_two_sequences_use_stays_until_both_have_ended():
    copies, _ = make(2)
    put(copies, 1), put(copies, 1, ("b", 1)), put(copies, 2)
    copies.end(("a", 1))
    assert put(copies, 5, ("c", 1)) and here(copies, 1, 2, 5) == [1, 5]
    copies.end(("b", 1))
    assert put(copies, 6, ("c", 1)) and here(copies, 1, 5, 6) == [5, 6]
    copies.check_integrity()


def test_endless_sequences_take_bounded_memory():
    copies, _ = make(4)
    for number in range(5000):
        put(copies, 1, ("a", number))
        put(copies, number + 10, ("b", number))
    assert copies.stats().pages <= 4
    assert len(copies._declined) <= 1024
    assert copies._num_held <= 4 * 4
    for number in range(5000):  # pages that never come
        if copies.place(("c", number), name_of(number + 10**6)) is not None:
            copies.filled(name_of(number + 10**6), is_there=False)
    assert len(copies._streams) <= 4 * 4 and len(copies._declined) <= 1024
    copies.end_all("a"), copies.end_all("b"), copies.end_all("c")
    assert not copies._streams and not copies._num_held and not copies._declined
    copies.check_integrity()


def test_a_sequence_that_ends_while_its_page_comes_leaves_it():
    copies, _ = make()
    assert copies.place(("a", 1), name_of(1)) is not None
    copies.end(("a", 1))
    copies.check_integrity()
    copies.filled(name_of(1), is_there=True)
    assert here(copies, 1) == [1]
    copies.check_integrity()
    assert copies.place(("a", 2), name_of(2)) is not None
    copies.end_all("a")
    copies.filled(name_of(2), is_there=False)
    assert copies.stats().pages == 1
    copies.check_integrity()


def test_random_use_keeps_the_books():
    rng = random.Random(3)
    copies, clock = make(8)
    coming: list[bytes] = []
    for step in range(4000):
        stream = (rng.choice("abc"), rng.randrange(6))
        action = rng.random()
        if action < 0.6:
            name = name_of(rng.randrange(30))
            if copies.place(stream, name) is not None:
                coming.append(name)
        elif action < 0.85 and coming:
            copies.filled(coming.pop(rng.randrange(len(coming))), is_there=rng.random() < 0.9)
        elif action < 0.97:
            copies.end(stream)
        else:
            copies.end_all(stream[0])
        clock.now_s += rng.random()
        copies.expire()
        if step % 50 == 0:
            copies.check_integrity()
    assert copies.stats().copied > 200
