"""A lease that is called back ends at once, whatever its thread does."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch

from memory.nodes.server.lease import LeaseEndedError
from memory.nodes.server.lending import END_S, LendingNode
from memory.pages.layer_groups import LayerGroup
from ops import get_backend
from ops.cpu import native_library
from tests.support.engine.fakes import make_kv
from tests.support.memory.int8_kv import Cache
from transport.base import Peer

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)
PAGE, LENGTH = 64, 4000
PATIENCE_S = 5.0  # on a busy machine, and less than what the leases do would take


class Borrowers:
    """The lender's end of a connection to a borrower that never leaves."""

    def __init__(self):
        self.peer = Peer("test", {})
        self.num_posted = 0
        self.is_closed = threading.Event()

    def post(self, segments, timeout_s=10.0):
        self.num_posted += 1

    def close(self):
        self.is_closed.set()


class BlockedBorrowers(Borrowers):
    """It takes no message."""

    def post(self, segments, timeout_s=10.0):
        self.is_closed.wait(timeout_s)


class Session:
    """Holds bytes until it is closed."""

    num_queries = 0

    def __init__(self, lent, num_bytes):
        assert lent.take(num_bytes)
        self.lent, self.num_bytes, self.is_closed = lent, num_bytes, False

    def close(self):
        if not self.is_closed:
            self.is_closed = True
            self.lent.give_back(self.num_bytes)


class Loop:
    """Handles one message, which takes long; notes the error that ended it."""

    has_deferred = False

    def __init__(self, work):
        self.work, self.began, self.error = work, threading.Event(), None

    def take(self, frame):
        self.began.set()
        try:
            self.work()
        except LeaseEndedError as error:
            self.error = error
            raise

    def close(self):
        pass


@contextmanager
def lender():
    kv, _ = make_kv(
        num_pages=40, num_ranges=8, max_model_len=64, page_bytes=PAGE, groups=(LayerGroup(16),)
    )
    node = LendingNode(kv, 30 * PAGE, get_backend("cpu"), lambda job: job())
    try:
        yield kv, node
    finally:
        node.close()


@contextmanager
def leased(node, work_of, endpoint, num_bytes=20 * PAGE):
    """A lease whose thread is in the middle of work_of(its turn)."""
    lease = node._connection(endpoint)
    lease.session = Session(node.lent, num_bytes)
    lease.loop = Loop(lambda: work_of(lease.turn))
    node._connections.add(lease)

    def run():
        lease.turn.guest.enter()
        try:
            node._handle(lease, lease.loop, frame=object())
        except LeaseEndedError:
            pass
        finally:
            lease.turn.guest.leave()
        node._end(lease)

    thread = threading.Thread(target=run)
    thread.start()
    assert lease.loop.began.wait(5)
    session = lease.session
    try:
        yield lease, session
    finally:
        endpoint.close()
        lease.turn.guest.end()
        thread.join(10)
        assert not thread.is_alive()
    assert lease.session is None and lease not in node._connections


def long_attention():
    """Returns a function that attends for a minute or so in a turn."""
    cache = Cache(heads=8, kv_heads=2, dim=64, group=64, tokens=LENGTH)
    cache.fill(*torch.randn(2, LENGTH, 2, 64))
    q = torch.randn(LENGTH, 8, 64)

    def work(turn):
        for _ in range(3000):
            with turn:
                cache.attend(q, LENGTH)

    return work


def need_all(kv, node, session):
    """The lender's loop needs all pages; returns how long it took to get them, in seconds."""
    began_s = time.monotonic()
    assert kv.can_fit(64) and kv.num_lent and not session.is_closed
    first, second = kv.open(64), kv.open(64)
    while not kv.can_fit(32) and time.monotonic() < began_s + PATIENCE_S:
        pass
    took_s = time.monotonic() - began_s
    assert session.is_closed
    assert node.lent.used == 0
    for target in (first, second):
        kv.close(target)
    kv.check_integrity()
    return took_s


def test_pages_come_back_in_the_middle_of_a_kernel():
    endpoint = Borrowers()
    with lender() as (kv, node), leased(node, long_attention(), endpoint) as (lease, session):
        node.note_step(True)  # the lease rests in its kernel
        assert need_all(kv, node, session) < PATIENCE_S
        assert endpoint.num_posted == 1 and endpoint.is_closed.is_set()
        node.note_step(False)
    assert isinstance(lease.loop.error, LeaseEndedError)


def test_a_lease_that_waits_for_its_turn_or_for_pages_ends():
    def waits(turn):
        with turn:
            raise AssertionError("another one computes")

    endpoint = Borrowers()
    with lender() as (kv, node), node._computing, leased(node, waits, endpoint) as (_, session):
        assert need_all(kv, node, session) < PATIENCE_S


def test_a_borrower_that_takes_no_answer_is_cut_off():
    endpoint = BlockedBorrowers()
    with (
        lender() as (kv, node),
        leased(node, lambda turn: endpoint.post([]), endpoint) as (_, session),
    ):
        assert need_all(kv, node, session) < PATIENCE_S


def test_an_answer_of_a_lease_that_has_ended_is_not_sent():
    sent = []

    def answer(turn):
        with turn:
            turn.guest.end()
        sent.append(True)

    with lender() as (_, node), leased(node, answer, Borrowers()):
        pass
    assert not sent


@pytest.mark.timing
def test_pages_come_back_in_time_while_all_processors_are_busy():
    """Two other processes for each processor never pause."""
    command = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    others = [
        subprocess.Popen(command, stdout=subprocess.PIPE)
        for _ in range(2 * len(os.sched_getaffinity(0)))
    ]
    try:
        for other in others:
            other.stdout.readline()
        took_s = []
        for _ in range(8):
            endpoint = Borrowers()
            with lender() as (kv, node), leased(node, long_attention(), endpoint) as (_, session):
                time.sleep(0.05)
                took_s.append(need_all(kv, node, session))
    finally:
        for other in others:
            other.kill()
            other.wait()
            other.stdout.close()
    print(f"\ncalled back in {1e3 * max(took_s):.1f} ms at most")
    assert max(took_s) < END_S
