"""A memory node leases its memory to engines over a transport: leases, epochs, and how they end."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from dataclasses import replace

import pytest
import torch

import transport
from memory.nodes.node_link import NodeLink
from memory.nodes.placement import Shard
from memory.nodes.server.node import MemoryNode
from memory.nodes.wire import EditKind, ErrorCode, Kind, WireError, pack_json
from ops import get_backend
from tests.support.engine.raw_engine import (
    LAYER,
    PATIENCE_S,
    REQUEST,
    RawEngine,
    Witness,
    page_bytes,
)
from transport.base import PeerLostError, TransportError

KEY = b"a key for tests, 32 bytes or so."
CAPACITY = 100 * page_bytes()
WINDOW_BYTES = 256 << 10


class Served:
    """A memory node that serves a listener."""

    def __init__(self, url):
        self.node = MemoryNode(CAPACITY, get_backend("cpu"))
        self.listener = transport.listen(url, key=KEY, window_bytes=WINDOW_BYTES)
        self.thread = threading.Thread(target=self.node.serve, args=(self.listener,))
        self.thread.start()

    def connect(self):
        return transport.connect(self.listener.url, key=KEY, window_bytes=WINDOW_BYTES)

    def engine(self, **changed) -> RawEngine:
        return RawEngine(self.connect(), replace(REQUEST, **changed))

    def wait(self, is_so):
        deadline = time.monotonic() + PATIENCE_S
        while not is_so(self.node.stats()):
            assert time.monotonic() < deadline, self.node.stats()
            time.sleep(0.002)

    def close(self):
        self.listener.close()
        self.node.close()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        stats = self.node.stats()
        assert (stats.bytes_leased, stats.num_engines) == (0, 0)


@pytest.fixture
def served(tmp_path):
    made = Served(f"inproc://{tmp_path.name}")
    yield made
    made.close()


def refused(engine) -> ErrorCode:
    engine.send(pack_json(Kind.ATTACH, engine.request.epoch, engine.request.to_json()))
    return engine.error()


def is_lost(engine) -> bool:
    with contextlib.suppress(PeerLostError):
        while engine.endpoint.poll(PATIENCE_S) is not None:
            pass
    return engine.endpoint.is_lost


# ---- leases


def test_engines_share_the_memory_of_a_node(served):
    one, two = served.engine(engine="one", num_pages=70), served.engine(engine="two", num_pages=70)
    assert one.attach() == 70
    assert two.attach() == 30
    assert served.node.stats().bytes_leased == CAPACITY
    assert refused(served.engine(engine="three")) is ErrorCode.FULL
    assert served.node.stats().num_refused == 1
    one.close()
    served.wait(lambda stats: stats.bytes_leased == 30 * page_bytes())
    four = served.engine(engine="four", num_pages=71, min_pages=71)
    assert refused(four) is ErrorCode.FULL
    five = served.engine(engine="five", num_pages=71, min_pages=70)
    assert five.attach() == 70
    assert served.node.stats().num_attached == 3


def test_an_engine_cannot_use_pages_that_it_was_not_granted(served):
    """Each lease numbers its own pages and cannot reach those of another lease."""
    one, two = served.engine(engine="one", num_pages=95), served.engine(engine="two", num_pages=9)
    one.attach()
    assert two.attach() == 5
    two.plan([(EditKind.MAP, 0, 0, 5, 1)])
    assert two.error() is ErrorCode.RANGE
    served.wait(lambda stats: stats.bytes_leased == 95 * page_bytes())


@pytest.mark.row("M5")
def test_engines_do_not_see_each_other(served):
    """Two engines write the same pages of the same ranges in turn."""
    engines = [served.engine(engine=name) for name in ("one", "two")]
    for value, engine in enumerate(engines):
        engine.attach()
        engine.map_ranges()
        plan = engine.plan(appends=[(0, 1, 0)])
        k = torch.full((1, 2, 16), 1.0 + value)
        engine.update(plan, 0, k, k)
    for value, engine in enumerate(engines):
        engine.query(engine.plan(queries=[(0, 1, 1)]), 0, torch.ones(1, 4, 16))
        assert torch.equal(engine.partial(0)[0], torch.full((1, 4, 16), 1.0 + value))


def test_memory_is_free_after_a_protocol_error(served):
    witness = Witness(served.connect())
    engine = served.engine()
    engine.attach()
    engine.plan([(EditKind.MAP, 99, 0, 0, 1)])
    assert engine.error() is ErrorCode.RANGE
    served.wait(lambda stats: stats.num_engines == 1)
    assert served.engine(epoch=2, min_pages=40).attach() == 40
    witness.check()
    assert served.node.stats().num_offences == 1


# ---- epochs


def test_a_later_epoch_replaces_the_earlier_one(served):
    witness = Witness(served.connect())
    one = served.engine(epoch=3, num_pages=60, min_pages=60)
    one.attach()
    one.map_ranges()
    two = served.engine(epoch=4, num_pages=60, min_pages=60)
    assert two.attach() == 60, "the older lease ends before the new one is granted"
    assert is_lost(one)
    assert served.node.stats().num_engines == 2
    two.map_ranges()
    two.query(two.plan(queries=[(0, 1, 1)]), 0, torch.ones(1, 4, 16))
    assert not bool(two.partial(0)[0].any()), "pages of the older lease are zero"
    witness.check()


@pytest.mark.parametrize("epoch", [1, 3])
@pytest.mark.row("M11")
def test_an_epoch_that_is_over_is_refused(served, epoch):
    """An engine with an old epoch cannot return, whether its successor is alive or not."""
    one = served.engine(epoch=3)
    one.attach()
    assert refused(served.engine(epoch=epoch)) is ErrorCode.STALE
    assert served.node.stats().num_engines == 1 and not one.endpoint.is_lost
    one.close()
    served.wait(lambda stats: stats.num_engines == 0)
    assert refused(served.engine(epoch=epoch)) is ErrorCode.STALE
    assert served.engine(epoch=4).attach() == 40
    assert served.engine(engine="another", epoch=1).attach() == 40


@pytest.mark.row("M11")
def test_messages_of_the_epoch_before_are_refused(served):
    engine = served.engine(epoch=5)
    engine.attach()
    engine.plan(epoch=4)
    assert engine.error() is ErrorCode.STALE


def test_an_engine_is_replaced_while_its_query_is_computed(served):
    """The new epoch's engine waits for the kernel that reads the memory and then gets all of it."""
    one = served.engine(epoch=1, num_pages=100, num_ranges=1, num_places=[50, 25])
    one.attach()
    one.plan([(EditKind.MAP, 0, 0, 0, 50), (EditKind.MAP, 1, 0, 50, 25)])
    for _ in range(20):
        one.query(one.plan(queries=[(0, 64, 1600)]), 0, torch.ones(64, 4, 16))
    two = served.engine(epoch=2, num_pages=100, min_pages=100)
    assert two.attach() == 100
    assert is_lost(one)


# ---- the end


def test_drain_asks_engines_to_leave_and_waits_for_them(served):
    engines = [served.engine(engine=str(number)) for number in range(2)]
    for engine in engines:
        engine.attach()
    done = []
    waiting = threading.Thread(target=lambda: done.append(served.node.drain(PATIENCE_S)))
    waiting.start()
    for engine in engines:
        assert engine.receive()[0].kind is Kind.DRAIN
        engine.map_ranges()  # the node serves it until it leaves
        engine.query(engine.plan(queries=[(0, 1, 1)]), 0, torch.ones(1, 4, 16))
        engine.partial(0)
    assert not done
    late = served.engine(engine="late")
    with contextlib.suppress(TransportError):
        late.send(pack_json(Kind.ATTACH, 1, late.request.to_json()))
    for engine in engines:
        engine.close()
    waiting.join(PATIENCE_S)
    assert done == [True]
    assert served.node.stats().num_attached == 2


@pytest.mark.timing
def test_drain_ends_at_its_time_limit(served):
    engine = served.engine()
    engine.attach()
    began = time.monotonic()
    assert not served.node.drain(0.1)
    assert time.monotonic() - began < 2
    assert not engine.endpoint.is_lost, "drain only asks; close disconnects"


def test_an_engine_learns_that_its_node_is_draining(served):
    link = NodeLink("node", served.connect(), Shard("head", 0, 1))
    assert link.attach(REQUEST, PATIENCE_S) == 40
    assert not served.node.drain(0.01)
    deadline = time.monotonic() + PATIENCE_S
    while not link.is_leaving and time.monotonic() < deadline:
        link.look()
        time.sleep(0.01)
    assert link.is_leaving
    link.close()


@pytest.mark.parametrize("num_engines", [1, 3])
def test_close_while_engines_are_served(served, num_engines):
    """Windows and pages that kernels read during the close stay valid until they end."""
    engines = [served.engine(engine=str(i), num_pages=30) for i in range(num_engines)]
    for engine in engines:
        engine.attach()
        engine.map_ranges()
    stop = threading.Event()
    served_once = threading.Semaphore(0)

    def work(engine):
        q, k = torch.ones(64, 4, 16), torch.ones(20, 2, 16)
        with contextlib.suppress(TransportError, AssertionError, WireError):
            while not stop.is_set():
                plan = engine.plan(queries=[(0, 64, 64)], appends=[(1, 20, 0)])
                for layer in range(3):
                    engine.query(plan, layer, q)
                    engine.update(plan, layer, k, k)
                for layer in range(3):
                    engine.partial(layer)
                served_once.release()

    threads = [threading.Thread(target=work, args=(engine,)) for engine in engines]
    for thread in threads:
        thread.start()
    for _ in range(10):
        assert served_once.acquire(timeout=PATIENCE_S)
    served.close()
    stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_an_engine_that_never_attaches_is_disconnected(served, monkeypatch):
    monkeypatch.setattr("memory.nodes.server.node._ATTACH_S", 0.05)
    endpoint = served.connect()
    with pytest.raises(PeerLostError):
        endpoint.poll(PATIENCE_S)
    served.wait(lambda stats: stats.num_attached == 0)


def test_updates_are_written_while_the_node_is_idle(served):
    """No plan follows the updates, and the messages still leave the window."""
    engine = served.engine()
    engine.attach()
    engine.map_ranges()
    k = torch.ones(60, 2, 16)
    for _ in range(40):  # several times what the window holds
        plan = engine.plan(appends=[(0, 60, 0)])
        for layer in range(3):
            engine.update(plan, layer, k, k)
    (connection,) = served.node._connections
    engine.query(engine.plan(queries=[(0, 1, 60)]), 0, torch.ones(1, 4, 16))
    assert torch.allclose(engine.partial(0)[0], torch.ones(1, 4, 16))
    assert connection.session is not None
    engine.close()


def test_a_failed_mapping_ends_one_session(served, monkeypatch):
    """An engine gets FULL when the system has no more mappings, and the other one is served."""
    witness = Witness(served.connect())
    engine = served.engine()
    engine.attach()

    def fails(self, offset, first_page, num_pages):
        raise OSError(12, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("memory.pages.linux_vmm.LinuxMemory.map", fails)
        engine.map_ranges()
        assert engine.error() is ErrorCode.FULL
    served.wait(lambda stats: stats.num_engines == 1)
    witness.check()


def test_a_fault_of_the_node_ends_one_session(served, monkeypatch):
    witness = Witness(served.connect())
    engine = served.engine()
    engine.attach()
    with monkeypatch.context() as patch:
        patch.setattr("memory.nodes.server.node_session.read_plan", lambda message: 1 / 0)
        engine.plan()
        assert engine.error() is ErrorCode.FAULT
    witness.check()
    assert served.node.stats().num_offences == 0


# ---- many engines one after another


def in_use() -> tuple[int, int, int, int]:
    """Returns the numbers of descriptors, threads, mappings and resident bytes."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        num_mappings = sum(1 for _ in maps)
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * 4096
    return len(os.listdir("/proc/self/fd")), threading.active_count(), num_mappings, resident


@pytest.mark.parametrize("scheme", ["inproc", "shm", "tcp"])
def test_200_engines_attach_and_leave(scheme, tmp_path):
    url = {
        "inproc": f"inproc://{tmp_path.name}",
        "shm": f"shm://{tmp_path}/node",
        "tcp": "tcp://127.0.0.1:0",
    }[scheme]
    served = Served(url)

    def attach_and_leave(number):
        served.wait(lambda stats: stats.num_engines < 2)  # there is memory for two engines at once
        engine = served.engine(engine=str(number))
        engine.attach()
        engine.map_ranges(4)
        k = torch.ones(60, 2, 16)
        engine.update(engine.plan(appends=[(0, 60, 0)]), 0, k, k)
        engine.query(engine.plan(queries=[(0, 1, 60)]), 0, torch.ones(1, 4, 16))
        engine.partial(0)
        if number % 3 == 1:
            engine.plan([(EditKind.MAP, 99, 0, 0, 1)])
            engine.error()
        if number % 3 == 2:  # with messages in flight
            for _ in range(10):
                engine.update(engine.num_plans, 0, k[:0], k[:0])
        engine.close()

    for number in range(20):
        attach_and_leave(number)
    served.wait(lambda stats: stats.num_engines == 0)
    before = in_use()
    for number in range(20, 220):
        attach_and_leave(number)
    served.wait(lambda stats: stats.num_engines == 0)
    deadline = time.monotonic() + PATIENCE_S
    while (after := in_use())[:2] > before[:2] and time.monotonic() < deadline:
        time.sleep(0.05)  # threads that are about to end
    assert after[0] <= before[0] and after[1] <= before[1]
    assert after[2] <= before[2] + 20, "mappings"
    assert after[3] <= before[3] + (16 << 20), "memory"
    assert served.node.stats().num_attached == 220
    served.close()


def test_epochs_of_many_engines_do_not_accumulate(served):
    for number in range(1100):
        served.node._fence(_Fake(), replace(REQUEST, engine=str(number)))
    assert len(served.node._epochs) == 1024


class _Fake:
    engine = ""


def test_layers_without_int8_kernels_are_refused(served):
    layers = [replace(LAYER, head_dim=20)] * 2 + [replace(LAYER, head_dim=20, window=40)]
    engine = served.engine(kv_dtype="int8", layers=layers)
    assert refused(engine) is ErrorCode.SHAPE
