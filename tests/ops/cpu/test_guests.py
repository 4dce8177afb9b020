"""A guest's kernels: the same bits, a pause while the process computes a prompt, and an end between
two tasks."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from ops.cpu import native_library
from ops.cpu.native_library import library
from tests.support.memory.int8_kv import Cache

pytestmark = [
    pytest.mark.skipif(not native_library.is_available(), reason="native kernels not built"),
    pytest.mark.usefixtures("seeded"),
]
LENGTH, HEADS, DIM = 1100, 8, 64


def as_guest(guest, compute):
    """Returns compute's result in a thread that is a guest."""
    found = []

    def run():
        guest.enter()
        try:
            found.append(compute())
        finally:
            guest.leave()

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert found, "the guest does not end"
    return found[0]


def filled():
    cache = Cache(heads=HEADS, kv_heads=2, dim=DIM, group=64, tokens=LENGTH)
    cache.fill(*torch.randn(2, LENGTH, 2, DIM))
    return cache, torch.randn(LENGTH, HEADS, DIM)


def test_a_guests_smaller_tasks_give_the_same_bits():
    cache, q = filled()
    whole = cache.attend(q, LENGTH)
    guest = library().Guest(library().Host())
    assert torch.equal(as_guest(guest, lambda: cache.attend(q, LENGTH)), whole)
    assert torch.equal(as_guest(guest, lambda: cache.attend(q[-1:], LENGTH)), whole[-1:])


def test_a_guest_that_has_ended_computes_nothing_more():
    """Its kernel would take long; the lender's prompt keeps it in the middle of one."""
    cache, q = filled()
    host = library().Host()
    guest = library().Guest(host)
    host.begin()
    finished = threading.Event()

    def compute():
        for _ in range(10_000):
            if guest.has_ended:
                break
            cache.attend(q, LENGTH)
        finished.set()
        return True

    thread = threading.Thread(target=as_guest, args=(guest, compute))
    thread.start()
    time.sleep(0.1)
    assert not finished.is_set()
    guest.end()
    assert finished.wait(5)
    thread.join(5)
    assert guest.has_ended and not guest.admit()


def test_guests_wait_for_a_prompt_and_go_on_after_it():
    host = library().Host()
    one, other = library().Guest(host), library().Guest(host)
    assert one.admit()
    host.begin()
    began_s = time.monotonic()
    assert one.admit()  # after a pause: a long prompt does not stop guests altogether
    assert time.monotonic() - began_s > 0.03
    host.end()
    assert other.admit()
    host.begin()
    threading.Timer(0.005, host.end).start()
    assert other.admit()
    other.end()
    assert one.admit() and not other.admit()


def test_a_guest_gets_a_small_part_of_a_long_prompts_time():
    """At most about 2 ms in 40; a task that has begun before counts, too."""
    host = library().Host()
    guest = library().Guest(host)
    host.begin()
    used_s, until_s = 0.0, time.monotonic() + 0.4
    while time.monotonic() < until_s:
        assert guest.admit()
        began_s = time.thread_time()
        while time.thread_time() < began_s + 0.0005:
            pass
        used_s += 0.0005
    host.end()
    assert 0.0005 <= used_s <= 0.04
