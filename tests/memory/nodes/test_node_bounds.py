"""A memory node bounds what all engines together get: pages that can become mappings, addresses
and threads. A request for more is refused with the reason and does not affect other engines."""

from __future__ import annotations

import random
import threading
import weakref
from dataclasses import replace

import pytest
import torch

import transport
from memory.nodes.attach import NODE_MAPPINGS, NodeLayout, growth_of, least_mappings, most_pages
from memory.nodes.node_link import NodeError, NodeLink
from memory.nodes.placement import Shard
from memory.nodes.server.node import MemoryNode
from memory.nodes.server.node_session import NodeSession
from memory.nodes.wire import Edit, EditKind, ErrorCode, NodePlan, pack_plan
from memory.pages.linux_vmm import LinuxMemory
from ops import get_backend
from tests.support.engine.raw_engine import (
    PATIENCE_S,
    REQUEST,
    WHOLE,
    RawEngine,
    Witness,
    page_bytes,
)
from tests.support.transport.transport_rig import KEY, wait_until
from transport.base import PeerLostError
from transport.direct import direct_pair

LINUX_MAPPINGS = 65_530  # default of vm.max_map_count
MANY = 30_000
MIB = 1 << 20


@pytest.fixture
def node():
    made = MemoryNode(4 * LINUX_MAPPINGS * page_bytes(), get_backend("cpu"))
    yield made
    made.close()
    assert made.stats().bytes_leased == 0


def ask(node, engine, **changed) -> tuple[NodeLink, int]:
    """Attaches and returns the link and the granted number of pages; raises NodeError when
    refused."""
    ours, theirs = direct_pair()
    node.adopt(theirs)
    link = NodeLink("node", ours, Shard("head", 0, 1))
    return link, link.attach(replace(REQUEST, engine=engine, **changed), 0.0)


def num_mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum(1 for _ in maps)


def test_pages_of_all_engines_can_be_mappings_of_one_process():
    """The node has memory for many more pages; the mappings of a process are the limit."""
    node = MemoryNode(4 * LINUX_MAPPINGS * page_bytes(), get_backend("cpu"))
    granted = []
    while True:
        try:
            granted.append(ask(node, str(len(granted)), num_pages=MANY)[1])
        except NodeError:
            break
    assert len(granted) == 1 and granted[0] > MANY * 0.99
    # each page may become two mappings, and the rest of the process has some
    assert 29_500 < sum(granted) <= NODE_MAPPINGS // 2 < (LINUX_MAPPINGS - 5000) // 2
    node.close()
    assert node.stats().bytes_leased == 0


def test_an_engine_that_asks_for_more_mappings_is_refused(node, monkeypatch):
    most = least_mappings(REQUEST, 40) * 2 + least_mappings(REQUEST, 20)
    monkeypatch.setattr("memory.nodes.server.node.NODE_MAPPINGS", most)
    witness = Witness.beside(node)  # it has 40 pages
    one, num_pages = ask(node, "one")
    assert num_pages == 40
    before = node.stats()
    mappings = num_mappings()
    for number in range(30):  # refusals do not accumulate
        with pytest.raises(
            NodeError, match=r"and 20 pages are free, .* 21 pages are needed"
        ) as error:
            ask(node, f"refused {number}", min_pages=21)
        assert error.value.code is ErrorCode.FULL
    assert node.stats() == replace(before, num_refused=before.num_refused + 30)
    assert num_mappings() <= mappings + 5
    witness.check()
    assert ask(node, "two", min_pages=20)[1] == 20, "20 pages are left"
    with pytest.raises(NodeError, match="and 0 pages are free"):
        ask(node, "refused")
    one.close()
    assert node.stats().bytes_leased == 60 * page_bytes()
    assert ask(node, "three", min_pages=40)[1] == 40
    witness.check()
    witness.close()


def test_pages_mapped_many_times_leave_mappings_for_other_engines(monkeypatch):
    """Every second page slot of many ranges maps the same page."""
    monkeypatch.setattr("memory.nodes.server.node.NODE_MAPPINGS", 700)
    node = MemoryNode(1000 * page_bytes(), get_backend("cpu"))
    witness = Witness.beside(node)
    request = replace(REQUEST, engine="hog", num_ranges=100)
    hog = RawEngine.beside(node, request)
    assert hog.attach() == 40
    [session] = [c.session for c in node._connections if c.engine == "hog"]
    before, own = num_mappings(), least_mappings(request, 40)
    others = least_mappings(REQUEST, 40)
    slots = [(part, slot) for part in range(100) for slot in (1, 3, 5, 7)]
    while session.num_mappings < 700 - others - 10:
        hog.plan([(EditKind.MAP, *slots.pop(), 7, 1)])
    assert session.num_mappings > own, "free mappings may be used"
    assert abs(num_mappings() - before - session.num_mappings) <= 3
    with pytest.raises(NodeError, match="and 0 pages are free"):
        ask(node, "late")  # no mapping is left to grant
    hog.plan([(EditKind.MAP, *slots.pop(), 7, 1) for _ in range(10)])
    assert hog.error() is ErrorCode.FULL
    assert num_mappings() <= before + 3
    witness.check()
    assert ask(node, "later")[1] == 40
    witness.close()
    node.close()


@pytest.mark.parametrize("limit", [1, 64])
def test_mappings_are_counted_as_the_system_counts_them(limit, monkeypatch):
    monkeypatch.setattr("memory.nodes.server.page_slots._SMALL_COUNT", limit)
    rng = random.Random(3)
    request = replace(REQUEST, num_ranges=4)
    memory = LinuxMemory(page_bytes(), request.num_pages)
    began = num_mappings()
    session = NodeSession(request, memory, get_backend("cpu"))
    for number in range(1, 200):
        part = rng.randrange(8)
        most = request.num_places[part // 4]
        slot = rng.randrange(most)
        count = rng.randint(1, most - slot)
        kind = rng.choice([EditKind.MAP, EditKind.UNMAP])
        page = rng.randrange(request.num_pages - count) if kind is EditKind.MAP else 0
        plan = NodePlan([Edit(kind, part, slot, page, count)], [], [])
        message = memoryview(pack_plan(request.epoch, number, plan))
        session.plan(session.header(message), message)
        # gaps at the ends of neighbouring parts merge
        assert session.num_mappings - 8 <= num_mappings() - began <= session.num_mappings + 2
    assert session.num_mappings > 5
    session.close()


def test_pages_and_mappings():
    for num_ranges in (1, 3, 50):
        request = replace(REQUEST, num_ranges=num_ranges)
        for num_mappings in range(68, 900):
            fit = most_pages(request, num_mappings)
            least = least_mappings(request, fit)
            assert least <= num_mappings < least_mappings(request, fit + 1)
            assert least - growth_of(request, fit) >= fit, "each page may be a mapping of its own"


def test_a_share_of_a_node_has_that_share_of_its_mappings():
    node = MemoryNode(1000 * page_bytes(), get_backend("cpu"))
    for name, num_pages, num_mappings in (("a", 250, 15_000), ("b", 500, 30_000)):
        link, granted = ask(node, name, num_pages=num_pages)
        assert (granted, link.num_mappings) == (num_pages, num_mappings)
    node.close()


def test_a_probe_reports_the_free_memory_and_replaces_no_engine(node, monkeypatch):
    most = least_mappings(REQUEST, 40) + least_mappings(REQUEST, 10)
    monkeypatch.setattr("memory.nodes.server.node.NODE_MAPPINGS", most)
    one, _ = ask(node, "one")
    for epoch in (1, 2):
        assert ask(node, "one", epoch=epoch, is_question=True)[1] == 10
    with pytest.raises(NodeError, match="FULL"):
        ask(node, "one", epoch=2, is_question=True, min_pages=11)
    assert not one.is_lost
    assert ask(node, "one", epoch=2, min_pages=40)[1] == 40, "the question did not attach epoch 2"
    assert one.is_lost


def test_addresses_of_all_engines_are_bounded_by_the_process(node, monkeypatch):
    """Ranges are reserved in full, however few pages they have."""
    bound = NodeLayout(REQUEST).total_bytes * 5 // 2
    monkeypatch.setattr("memory.nodes.server.node.MAX_ADDRESSES", bound)
    link, _ = ask(node, "one")
    ask(node, "two")
    leased = node.stats().bytes_leased
    with pytest.raises(NodeError, match="FULL: no addresses are left"):
        ask(node, "refused")
    assert node.stats().bytes_leased == leased
    link.close()
    assert ask(node, "three")[1] == 40


def test_the_accounting_of_many_slots_counts_as_memory():
    """Each page slot takes 4 bytes of the node, however little K/V there is."""
    node = MemoryNode(64 << 20, get_backend("cpu"))
    _, granted = ask(node, "few", num_pages=1 << 20)
    assert granted == 64 * MIB // page_bytes()
    node.close()
    node = MemoryNode(64 << 20, get_backend("cpu"))
    slots = [1 << 20, 1 << 20]  # page slots of three ranges: 24 MiB, of which 16 are free
    _, many = ask(node, "many", num_pages=1 << 20, num_places=slots)
    assert many == 56 * MIB // page_bytes()
    with pytest.raises(NodeError, match="FULL"):
        ask(node, "more", num_places=slots)
    node.close()
    with pytest.raises(NodeError, match="FULL"):
        ask(MemoryNode(4 << 20, get_backend("cpu")), "large", num_places=slots)


def test_edits_of_a_plan_are_bounded_in_time(node, monkeypatch):
    monkeypatch.setattr("memory.nodes.server.node_session._MAX_EDITED", 20)
    engine = RawEngine.beside(node)
    engine.attach()
    engine.plan([(EditKind.MAP, 0, 0, 0, 8), (EditKind.UNMAP, 0, 0, 0, 8)])
    engine.query(engine.plan(appends=[]), 0, torch.ones(1, 4, 16))
    assert engine.error() is ErrorCode.SHAPE, "no rows are due"
    engine = RawEngine.beside(node, replace(REQUEST, epoch=2))
    engine.attach()
    engine.plan([(EditKind.UNMAP, 0, 0, 0, 8)] * 3)
    assert engine.error() is ErrorCode.RANGE


def test_kept_plans_are_bounded_in_views(node, monkeypatch):
    """A plan's queries are views into each layer, and older plans are dropped for newer ones."""
    monkeypatch.setattr("memory.nodes.server.node_session._MAX_VIEWS", 9)  # for three layers
    engine = RawEngine.beside(node)
    engine.attach()
    engine.map_ranges()
    rows = torch.ones(1, 4, 16)
    numbers = [engine.plan(queries=[(0, 1, 1)]) for _ in range(4)]
    for number in numbers[1:]:
        engine.query(number, 0, rows)
        engine.partial(0)
    largest = engine.plan(queries=[(0, 1, 1), (1, 1, 1), (2, 1, 1)])
    engine.query(largest, 0, torch.ones(3, 4, 16))
    engine.partial(0)
    engine.query(numbers[3], 1, rows)
    assert engine.error() is ErrorCode.STALE
    monkeypatch.setattr("memory.nodes.server.node_session._MAX_VIEWS", 8)
    engine = RawEngine.beside(node, replace(REQUEST, epoch=2))
    engine.attach()
    engine.map_ranges()
    engine.plan(queries=[(0, 1, 1), (1, 1, 1), (2, 1, 1)])
    assert engine.error() is ErrorCode.SHAPE


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_one_q_at_a_time_waits_for_its_k_and_v(node, monkeypatch, kv_dtype):
    """The sums of every layer of every kept plan stayed: memory that no lease counted."""
    sums: list[weakref.ref[torch.Tensor]] = []
    empty = torch.empty

    def recorded(*size, **options):
        made = empty(*size, **options)
        if len(size) == 4:
            sums.append(weakref.ref(made))
        return made

    monkeypatch.setattr(torch, "empty", recorded)
    engine = RawEngine.beside(node, replace(WHOLE, kv_dtype=kv_dtype))
    engine.attach()
    engine.map_ranges()
    numbers = [engine.plan(queries=[(0, 1, 40)]) for _ in range(3)]
    for number in numbers:
        for layer in range(3):
            engine.query(number, layer, torch.ones(1, 4, 16))
            assert sum(one() is not None for one in sums) == 1
    engine.own(numbers[2], 2, *[torch.ones(1, 2, 16)] * 2)
    engine.result(2)
    assert len(sums) == 9 and not any(one() is not None for one in sums)
    engine.query(engine.plan(queries=[(0, 1, 40)]), 0, torch.ones(1, 4, 16))
    engine.own(numbers[2], 0, *[torch.ones(1, 2, 16)] * 2)
    assert engine.error() is ErrorCode.STALE, "k and v of another plan"
    assert not any(one() is not None for one in sums)


def test_without_a_thread_an_engine_is_refused_and_the_next_one_is_not(tmp_path, monkeypatch):
    node = MemoryNode(100 * page_bytes(), get_backend("cpu"))
    url = f"inproc://{tmp_path.name}"
    listener = transport.listen(url, key=KEY)
    server = threading.Thread(target=node.serve, args=(listener,))
    server.start()
    start = threading.Thread.start

    def fail(thread):
        if thread.name == "mergestep-node-engine":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        for number in range(1, 4):
            endpoint = transport.connect(url, key=KEY)
            with pytest.raises(PeerLostError):
                endpoint.poll(PATIENCE_S)
            assert node.stats().num_refused == number
    wait_until(lambda: not node._connections)  # drain would wait for them
    engine = RawEngine(transport.connect(url, key=KEY))
    assert engine.attach() == 40
    engine.map_ranges()
    engine.query(engine.plan(queries=[(0, 1, 1)]), 0, torch.ones(1, 4, 16))
    engine.partial(0)
    listener.close()
    node.close()
    server.join(PATIENCE_S)
    assert not server.is_alive()
