"""Lanes between a stream and memory nodes, on a fake GPU and fake mlx5 devices
(tests/support/cuda/fakes_lane.py); the nodes are threads."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from types import SimpleNamespace

import pytest
import torch

import transport
from memory.attention.seam import AttentionStep
from memory.nodes.errors import NodesLostError
from memory.nodes.lane_layout import MAX_BYTES, LaneLayout, LaneTerms, fitting_rows
from memory.nodes.server import node_lane
from memory.nodes.server.node_loop import NodeLoop
from memory.nodes.wire import FULL_WIRE, WireError, WireFormat, WireType
from serve.loading.node_key import LOCAL_KEY
from tests.support.cuda.fakes_lane import FakeOffer, LaneHub
from tests.support.nodes.remote_rig import RemoteRig, layers_of, reference
from tests.support.nodes.served_nodes import nodes
from transport.base import PeerLostError, TransportError

pytestmark = pytest.mark.usefixtures("seeded")

MAX_LANE_ROWS = 4


class Served:
    """Nodes behind listeners, as RemoteRig takes them."""

    def __init__(self) -> None:
        self.ends: dict[str, transport.Endpoint] = {}

    def connect(self, url, timeout_s):
        self.ends[url] = transport.connect(
            url, key=LOCAL_KEY, window_bytes=1 << 22, timeout_s=timeout_s
        )
        return self.ends[url]


@pytest.fixture
def hub(monkeypatch) -> LaneHub:
    hub = LaneHub()
    monkeypatch.setattr(node_lane, "accept", hub.accept)
    return hub


class Laned:
    """A RemoteRig over served nodes with lanes."""

    def __init__(self, hub, tmp_path, num_nodes=1, layers=None, **settings) -> None:
        self.hub = hub
        self._nodes = nodes("inproc", num_nodes, tmp_path)
        self.lanes = hub.lanes(MAX_LANE_ROWS)
        urls = self._nodes.__enter__()
        layers = layers_of() if layers is None else layers
        self.rig = RemoteRig(layers, urls, nodes=Served(), lanes=self.lanes, **settings)

    def __enter__(self) -> RemoteRig:
        return self.rig

    def __exit__(self, *error) -> None:
        self.rig.close()
        self.lanes.close()
        self._nodes.__exit__(*error)
        assert self.hub.num_open == 0 and not self.hub.driver.registered
        assert not [x for x in threading.enumerate() if x.name == "mergestep-lanes"]


def inputs_of(layers, num_rows):
    def rows(heads, dim):
        return torch.randn(num_rows, heads, dim)

    return [
        (
            rows(x.num_heads, x.head_dim),
            rows(x.num_kv_heads, x.head_dim) if x.shares is None else None,
            rows(x.num_kv_heads, x.head_dim) if x.shares is None else None,
        )
        for x in layers
    ]


def lanes_of(rig):
    return [link.lane for partition in rig.set.partitions for link in partition.links]


def run(rig, steps, seed=5):
    """Returns the results of steps of two sequences, as rows of each, from the same inputs."""
    torch.manual_seed(seed)
    ranges = [rig.kvs[0].open(8) for _ in range(2)]
    lens, found = [0, 0], []
    for rows in steps:
        lens = [a + n for a, n in zip(lens, rows, strict=True)]
        inputs = inputs_of(rig.layers, sum(rows))
        found.append((inputs, rig.step(list(zip(ranges, rows, lens, strict=True)), inputs)))
    return found


STEPS = [(9, 17), (1, 1), (1, 1), (1, 2), (1, 5), *[(1, 1)] * 6]
NUM_BY_LANE = len(STEPS) - 2  # the chunks go by the endpoint


@pytest.mark.covering(2)
@pytest.mark.parametrize("partition", ["head", "sequence"])
@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("wire", [FULL_WIRE, WireFormat(WireType.BFLOAT16, WireType.BFLOAT16)])
def test_results_have_the_bits_of_those_by_the_endpoint(hub, tmp_path, partition, num_nodes, wire):
    settings = {"partition": partition, "wire": wire}
    with Laned(hub, tmp_path, num_nodes, **settings) as rig:
        by_lane = run(rig, STEPS)
        lanes = lanes_of(rig)
        assert len(lanes) == num_nodes
        assert all(lane.num_steps >= NUM_BY_LANE // 2 for lane in lanes), "the slots were reused"
        if partition == "head":
            assert all(lane.num_steps == NUM_BY_LANE for lane in lanes)
            assert hub.driver.num_waits == NUM_BY_LANE * len(rig.layers) * num_nodes
        rig.attention.check_lanes()
    plain = RemoteRig(layers_of(), [str(i) for i in range(num_nodes)], **settings)
    for (_, outs), (_, wanted) in zip(by_lane, run(plain, STEPS), strict=True):
        for out, want in zip(outs, wanted, strict=True):
            assert torch.equal(out, want)
    plain.close()


def test_results_are_attention_over_all_keys(hub, tmp_path):
    with Laned(hub, tmp_path) as rig:
        steps = run(rig, STEPS)
        for layer, shape in enumerate(rig.layers):
            keys, values = [], []
            for (inputs, outs), (n, _) in zip(steps, STEPS, strict=True):
                q, k, v = inputs[layer]
                keys.append(k[:n])
                values.append(v[:n])
                want = reference(shape, q[:n], torch.cat(keys), torch.cat(values))
                torch.testing.assert_close(outs[layer][:n].double(), want, rtol=0, atol=1e-5)


def test_two_plans_in_flight(hub, tmp_path):
    """Layers of two plans alternate, and so do slots; the next plans take them again."""
    with Laned(hub, tmp_path, layers=layers_of(3)) as rig:
        ranges = [rig.kv.open(8) for _ in range(2)]
        prompts = inputs_of(rig.layers, 6)
        for target in ranges:
            rig.step([(target, 6, 6)], prompts)
        history = [[([k], [v]) for _, k, v in prompts] for _ in ranges]
        for length in range(7, 12):
            for target in ranges:
                assert rig.kv.grow(target, length, length - 1)
            rig.kv.commit()
            steps = [AttentionStep(1, [target.start], [1], [length]) for target in ranges]
            plans = [rig.attention.plan(step) for step in steps]
            for layer, shape in enumerate(rig.layers):
                rows = [inputs_of([shape], 1)[0] for _ in ranges]
                pending = [
                    p.finish(p.begin(layer, q), k.clone(), v, None)
                    for p, (q, k, v) in zip(plans, rows, strict=True)
                ]
                for i, (waits, (q, k, v)) in enumerate(zip(pending, rows, strict=True)):
                    keys, values = history[i][layer]
                    keys.append(k)
                    values.append(v)
                    want = reference(shape, q, torch.cat(keys), torch.cat(values))
                    torch.testing.assert_close(waits.wait().double(), want, rtol=0, atol=1e-5)
        assert lanes_of(rig)[0].num_steps == 10


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_node_that_is_lost_in_mid_step_releases_the_stream(hub, tmp_path, num_nodes):
    """The stream waits for a result that never comes; the step ends with NodesLostError."""
    with Laned(hub, tmp_path, num_nodes, partition="request") as rig:
        target = rig.kvs[0].open(8)
        rig.step([(target, 6, 6)], inputs_of(rig.layers, 6))
        rig.step([(target, 1, 7)], inputs_of(rig.layers, 1))
        link = rig.set.partitions[0].links[0]
        stuck = threading.Event()

        def hang(lane, number) -> None:
            threading.Timer(0.05, link.endpoint.close).start()
            stuck.set()
            time.sleep(0.5)
            hub.on_write = lambda *_: None
            raise PeerLostError("gone")

        hub.on_write = hang
        began = time.monotonic()
        with pytest.raises(NodesLostError, match="connection has ended"):
            rig.step([(target, 1, 8)], inputs_of(rig.layers, 1))
        assert stuck.is_set() and time.monotonic() - began < 5
        assert hub.driver.num_releases > 0 and rig.set.partitions[0].is_lost
        rig.set.lose()
        rig.set.place(rig.set.partitions[0])  # frees the old lane, and opens another
        assert hub.num_open == num_nodes
        rig.kvs[0].close(target)


def test_a_node_without_an_answer_is_lost(hub, tmp_path):
    with Laned(hub, tmp_path) as rig:
        target = rig.kv.open(8)
        rig.step([(target, 6, 6)], inputs_of(rig.layers, 6))
        link = rig.set.partitions[0].links[0]
        link.answer_s = 0.2
        hub.on_write = lambda lane, number: time.sleep(0.6)
        with pytest.raises(NodesLostError, match=r"no answer for 0\.2 s"):
            rig.step([(target, 1, 7)], inputs_of(rig.layers, 1))
        assert link.is_lost
        hub.on_write = lambda *_: None


def test_a_late_answer_is_not_silence_ever_after(hub, tmp_path):
    with Laned(hub, tmp_path) as rig:
        target = rig.kv.open(8)
        rig.step([(target, 6, 6)], inputs_of(rig.layers, 6))
        [link] = rig.set.partitions[0].links
        assert link.rows_by == "lane"
        seen = []

        def be_late(lane, number) -> None:
            time.sleep(0.1)
            seen.append(link.unanswered_s)

        hub.on_write = be_late
        rig.step([(target, 1, 7)], inputs_of(rig.layers, 1))
        assert max(seen) > 0.02
        deadline = time.monotonic() + 5
        while link.unanswered_s and time.monotonic() < deadline:
            time.sleep(0.001)
        assert link.unanswered_s == 0


def test_memory_that_a_node_may_still_write_is_kept(hub, tmp_path, monkeypatch, caplog):
    """A lane whose queue pair cannot be closed keeps its memory; the engine goes on."""
    close, is_busy = FakeOffer.close, [True]

    def refuse_once(offer) -> None:
        close(offer)
        if is_busy:
            is_busy.clear()
            raise TransportError("closing a lane: busy")

    monkeypatch.setattr(FakeOffer, "close", refuse_once)
    served = Laned(hub, tmp_path)
    with served as rig:
        lanes, [lane] = served.lanes, lanes_of(rig)
        rig.set.place(rig.set.partitions[0])
        assert "its memory stays in use: closing a lane: busy" in caplog.text
        assert lanes._unfreed == [lane] and lane not in lanes._lanes
        target = rig.kv.open(8)
        rig.step([(target, 6, 6)], inputs_of(rig.layers, 6))
        rig.step([(target, 1, 7)], inputs_of(rig.layers, 1))
        assert lanes_of(rig)[0].num_steps == 1
        lane.look()  # a watcher that comes late writes nothing
    assert hub.is_closed


def test_a_step_that_is_given_up_does_not_hold_the_next_ones(hub, tmp_path):
    """A plan whose rows never come occupies its slot until another takes it."""
    with Laned(hub, tmp_path) as rig:
        target = rig.kv.open(8)
        rig.step([(target, 6, 6)], inputs_of(rig.layers, 6))
        for _ in range(3):
            rig.attention.plan(AttentionStep(1, [target.start], [1], [6]))
            rig.step([(target, 1, 7)], inputs_of(rig.layers, 1))
        rig.step([(target, 1, 8)], inputs_of(rig.layers, 1))


def test_reasons_why_the_host_posts_rows(hub, tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO)
    hub.refuses = "the GPU lacks DMA_BUF_SUPPORTED"
    with Laned(hub, tmp_path) as rig:
        run(rig, STEPS[:3])
        assert lanes_of(rig) == [None]
        [link] = rig.set.partitions[0].links
        assert link.rows_by == "endpoint: the GPU lacks DMA_BUF_SUPPORTED"
    assert "the host posts rows: the GPU lacks DMA_BUF_SUPPORTED" in caplog.text
    hub.refuses = ""
    with Laned(hub, tmp_path, wire=WireFormat(WireType.INT8, WireType.BFLOAT16)) as rig:
        assert lanes_of(rig) == [None]
    assert "memory_wire is int8" in caplog.text
    monkeypatch.undo()  # the node's own `accept`
    caplog.set_level(logging.INFO)
    with Laned(hub, tmp_path) as rig:
        run(rig, STEPS[:3])
        assert lanes_of(rig) == [None]
    assert "not connected by rdma://" in caplog.text


# ---- places


def terms(**changes) -> LaneTerms:
    values = {"version": 1, "num_slots": 2, "num_rows": 4, "rows": 1, "kv": 0} | changes
    return LaneTerms.from_json(values)


def test_places_do_not_overlap():
    layers = [*layers_of(2), *layers_of(1, heads=3, kv_heads=1, dim=20)]
    layout = LaneLayout(layers, terms(), is_partial=True)
    to_node, to_engine = [], []
    for slot in range(2):
        for i, rows in enumerate(layout.rows):
            q, kv, out = layout.q[slot][i], layout.kv[slot][i], layout.out[slot][i]
            to_node.append((q.at - 32, q.at + rows.q_bytes(4, WireType.BFLOAT16), q))
            to_node.append((kv.at - 32, kv.at + rows.kv_bytes(4, WireType.FLOAT32), kv))
            to_engine.append((out.at, out.at + layout.out_bytes(rows, 4), out))
    for places, size in ((to_node, layout.node_bytes), (to_engine, layout.engine_bytes)):
        last = 0
        for first, end, place in places:
            assert last <= first and end <= place.number_at and place.number_at % 8 == 0
            assert place.at % 64 == 0
            last = place.number_at + 8
        assert last <= size and size % 4096 == 0


def test_terms_that_are_refused():
    for changes in ({"version": 2}, {"num_slots": 0}, {"num_rows": 1 << 20}, {"rows": 2}):
        with pytest.raises(WireError):
            terms(**changes)
    with pytest.raises(WireError):
        LaneTerms.from_json({"version": 1})
    with pytest.raises(WireError, match="at most"):
        LaneLayout(layers_of(200, heads=64, dim=128), terms(num_rows=256), is_partial=False)


TERMS = {"version": 1, "num_slots": 2, "num_rows": 4, "rows": 1, "kv": 0}
OFFERS = (
    (0, "numbers"),
    ("lane", "numbers"),
    ([TERMS], "numbers"),
    ({}, "numbers"),
    (TERMS | {"num_rows": "4"}, "numbers"),
    (TERMS | {"num_rows": True}, "numbers"),
    (TERMS | {"version": 9}, "version 9"),
    (TERMS | {"num_slots": 17}, "17 slots"),
    (TERMS | {"num_rows": -1}, "-1 rows"),
    (TERMS | {"kv": 2}, "8 bits"),
    (TERMS | {"num_slots": 16, "num_rows": 4096}, "at most"),
    (TERMS, "not connected by rdma://"),
    (TERMS | {"peer": {"queue_pair": 7}}, "not connected by rdma://"),
)


@pytest.mark.parametrize(("offer", "reason"), OFFERS)
def test_a_node_refuses_an_impossible_offer_and_serves_by_the_endpoint(offer, reason):
    layers = layers_of(8, heads=32, kv_heads=8, dim=128)
    request = SimpleNamespace(layers=layers, by_segment=False, prefix_only=False, stripe=None)
    endpoint = SimpleNamespace(max_message_bytes=1 << 20)
    session = SimpleNamespace(request=request)
    loop, answer = node_lane.open_loop(session, endpoint, contextlib.nullcontext(), offer)
    assert type(loop) is NodeLoop
    assert answer.keys() == {"refused"} and reason in answer["refused"]


def test_as_many_rows_as_fit():
    layers = layers_of(32, heads=32, kv_heads=8, dim=128)
    wire = WireFormat(WireType.BFLOAT16, WireType.BFLOAT16)
    rows = fitting_rows(layers, wire, 4096)
    layout = LaneLayout(layers, terms(num_rows=rows, kv=1), is_partial=True)
    assert 64 < rows < 256 and MAX_BYTES // 2 < layout.node_bytes <= MAX_BYTES
