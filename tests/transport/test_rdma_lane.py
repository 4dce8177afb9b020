"""transport/rdma_lane.py on a fake GPU and fake mlx5 devices
(tests/support/cuda/fakes_lane.py, fakes_verbs.py)."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from tests.support.cuda.fakes_gpu_rdma import DEVICE, PAGE
from tests.support.cuda.fakes_lane import RELEASE_STREAM, STREAM, HostDriver
from tests.support.cuda.fakes_verbs import CONSTANTS, FakeVerbs
from transport import rdma_lane
from transport import verbs as verbs_module
from transport.base import PeerLostError, RefusedError, TransportError
from transport.gpu import Gpu, GpuUnavailableError, send_queue_of
from transport.lane import DeviceMemory
from transport.rdma_lane import RdmaLaneOpener, accept
from transport.verbs import RdmaUnavailableError, open_port

NODE_BYTES, ENGINE_BYTES = 2 * PAGE, PAGE
NUM_MESSAGES = 4


class Rig:
    """Two ends that are connected by rdma://, of which one has a GPU."""

    def __init__(self) -> None:
        self.verbs = FakeVerbs()
        self.driver = HostDriver()
        self.verbs.read_device = self.driver.read
        self.driver.nics = self.verbs.nics
        self.calls: list[str] = []
        self.opener = RdmaLaneOpener(
            Gpu(self.driver, DEVICE),
            STREAM,
            RELEASE_STREAM,
            lambda: self.calls.append("enter"),
            lambda: self.calls.append("free"),
        )
        blocks = self.driver.allocate(ENGINE_BYTES), self.driver.allocate(NODE_BYTES)
        self.window_tensor, self.source_tensor = blocks
        self.window, self.source = [DeviceMemory(x.data_ptr(), x.numel()) for x in blocks]

    def start(self) -> None:
        self.endpoint = SimpleNamespace(port=open_port("mlx5_0"))
        self.before = set(self.verbs.open)

    def offer(self):
        return self.opener.offer(self.endpoint, self.window, self.source, NUM_MESSAGES)

    def accept(self, terms):
        return accept(self.endpoint, terms, NODE_BYTES, ENGINE_BYTES)

    def pair(self):
        offer = self.offer()
        host = self.accept(dict(offer.terms))
        return offer.connect(dict(host.terms)), host

    @property
    def is_released(self) -> bool:
        return self.verbs.open == self.before and not self.driver.registered


@pytest.fixture
def rig(monkeypatch):
    rig = Rig()
    for name, module in rig.verbs.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    verbs_module.constants.cache_clear()
    library = SimpleNamespace(mlx5dv_init_obj=rig.verbs.direct)
    found = lambda context, pair: send_queue_of(context, pair, library)  # noqa: E731
    monkeypatch.setattr(rdma_lane, "send_queue_of", found)
    rig.start()
    yield rig
    rig.verbs.fails.clear()
    for context in {thing.context for thing in rig.verbs.open}:
        context.close()
    verbs_module.constants.cache_clear()


def put(rig: Rig, at: int, data: bytes) -> None:
    rig.driver.write(rig.source.address + at, data)


def test_messages_both_ways_and_release_of_everything(rig):
    lane, host = rig.pair()
    put(rig, 64, b"rows")
    lane.send(64, 4, 128, 7, reports=True)
    assert host.number(128) == 7 and bytes(host.window[64:68]) == b"rows"
    host.outgoing[192:198] = b"result"
    host.write(192, 6, 256, 9)
    lane.wait(256, 9)
    lane.mark(3)
    assert lane.progress == 3
    assert rig.driver.read(rig.window.address + 192, 6) == b"result"
    lane.collect()
    # the device reads where the stream sends from, and the peer writes the window alone
    regions = {region.address: region.access for region in rig.verbs.regions.values()}
    assert (regions[rig.window.address], regions[rig.source.address]) == (3, 1)
    lane.close()
    assert rig.driver.num_synchronized == 1
    host.close()
    assert rig.is_released
    rig.opener.enter()
    rig.opener.close()
    assert rig.calls == ["enter", "free"]


def test_a_release_ends_a_wait_for_a_lost_host(rig):
    lane, host = rig.pair()
    host.close()
    lane.release(256, 5)
    lane.wait(256, 5)
    assert rig.driver.num_releases == 1
    lane.close()
    assert rig.is_released


def test_laps_of_the_send_queue(rig):
    rig.verbs.num_blocks = 8  # four messages
    lane, host = rig.pair()
    for number in range(1, 100):
        lane.collect()
        at = 64 * (number % 8)
        put(rig, at, number.to_bytes(4, "little"))
        lane.send(at, 4, 1024, number, reports=True)
        assert host.number(1024) == number
        assert int.from_bytes(host.window[at : at + 4], "little") == number
    assert rig.verbs.nics[0].num_done == 2 * 99
    for number in range(100, 103):
        lane.send(0, 4, 1024, number, reports=True)
    with pytest.raises(TransportError, match="full"):
        lane.send(0, 4, 1024, 103, reports=True)
    lane.collect()
    lane.send(0, 4, 1024, 103, reports=True)
    assert host.number(1024) == 103


def test_many_posts_of_the_host(rig):
    lane, host = rig.pair()
    for number in range(1, 400):
        host.outgoing[64:68] = number.to_bytes(4, "little")
        host.write(64, 4, 128, number)
        lane.wait(128, number)
    assert rig.driver.read(rig.window.address + 64, 4) == (399).to_bytes(4, "little")


def test_sends_that_fail(rig):
    lane, host = rig.pair()
    host_sends = host._pair
    completions = lane._end.num_reports.__self__._sent
    completions.add(1, CONSTANTS["IBV_WC_RETRY_EXC_ERR"])
    with pytest.raises(PeerLostError, match="in error"):
        lane.collect()
    completions.add(1, CONSTANTS["IBV_WC_REM_ACCESS_ERR"])
    with pytest.raises(TransportError, match="in error"):
        lane.collect()
    lane.close()
    host.write(64, 4, 128, 1)
    with pytest.raises(PeerLostError, match="in error"):
        host_sends.reap()
    host.close()
    assert rig.is_released


WRONG = (
    ("queue_pair", 1),
    ("queue_pair", "7"),
    ("packet_number", 1 << 24),
    ("lid", -1),
    ("gid", "ff02:0000:0000:0000:0000:0000:0000:0001"),
    ("gid", "0000:0000:0000:0000:0000:0000:0000:0000"),
    ("mtu", 6),
    ("window_key", 1 << 32),
    ("window_key", True),
    ("window_address", 4097),
    ("window_address", 1 << 63),
    ("window_address", None),
    ("more", 1),
)


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_impossible_terms_are_refused_by_both_ends(rig, name, value):
    offer = rig.offer()
    with pytest.raises(RefusedError):
        rig.accept(dict(offer.terms) | {name: value})
    host = rig.accept(dict(offer.terms))
    with pytest.raises(RefusedError):
        offer.connect(dict(host.terms) | {name: value})
    offer.close()
    host.close()
    assert rig.is_released


@pytest.mark.parametrize("terms", [None, {}, [], "x", {"queue_pair": 5}])
def test_missing_terms_are_refused_by_both_ends(rig, terms):
    offer = rig.offer()
    with pytest.raises(RefusedError):
        rig.accept(terms)
    with pytest.raises(RefusedError):
        offer.connect(terms)
    offer.close()
    assert rig.is_released


def test_an_endpoint_of_another_transport(rig):
    rig.endpoint = SimpleNamespace()
    with pytest.raises(GpuUnavailableError, match="rdma://"):
        rig.offer()
    with pytest.raises(RefusedError, match="rdma://"):
        rig.accept({})


NEEDED = ("CAN_USE_64_BIT_STREAM_MEM_OPS", "CAN_FLUSH_REMOTE_WRITES", "DMA_BUF_SUPPORTED")


@pytest.mark.parametrize("what", NEEDED)
def test_what_the_gpu_lacks(rig, what):
    rig.driver.lacks.add(what)
    with pytest.raises(GpuUnavailableError, match=what):
        rig.offer()
    assert rig.is_released


@pytest.mark.parametrize("name", ["_Context", "_Thing", "_Channel", "_Queue", "_Pair", "_Region"])
def test_verbs_that_fail_while_an_offer_is_made(rig, name):
    rig.verbs.fails.add(name)
    with pytest.raises(TransportError, match=name):
        rig.offer()
    with pytest.raises(TransportError):
        rig.accept(TERMS)
    assert rig.is_released


TERMS = {
    "queue_pair": 7,
    "packet_number": 1,
    "lid": 0,
    "gid": "0000:0000:0000:0000:0000:ffff:0a00:0002",
    "mtu": 5,
    "window_key": 9,
    "window_address": 1 << 20,
}


def test_a_pyverbs_that_registers_under_offsets_only(rig, monkeypatch):
    mr = rig.verbs.modules["pyverbs.mr"]
    made = mr.MREx
    monkeypatch.delattr(mr, "MREx")
    offsets = lambda domain, size, access, dmabuf, offset: made(  # noqa: E731
        domain, size, access, fd=dmabuf, iova=1
    )
    monkeypatch.setattr(mr, "DmaBufMR", offsets, raising=False)
    with pytest.raises(GpuUnavailableError, match="MREx"):
        rig.offer()
    assert rig.is_released


def not_mlx5(rig) -> None:
    rig.verbs.vendor = 0x8086


def no_pair_address(rig) -> None:
    rig.verbs.has_pair_address = False


def no_order(rig) -> None:
    rig.verbs.is_ordered = False


def no_answer(rig) -> None:
    rig.verbs.fails.add("query_device")


def no_connection(rig) -> None:
    rig.verbs.fails.add("to_rts")


CONNECTS = (
    (not_mlx5, "mlx5"),
    (no_pair_address, "pyverbs"),
    (no_order, "in order"),
    (no_answer, "opening a lane: query_device failed"),
    (no_connection, "connecting a queue pair: to_rts failed"),
)


@pytest.mark.parametrize(("change", "reason"), CONNECTS)
def test_reasons_why_a_stream_is_not_connected(rig, change, reason):
    if change is no_pair_address:
        change(rig)
    offer = rig.offer()
    if change is not no_pair_address:
        change(rig)
    with pytest.raises(TransportError, match=reason):
        offer.connect(TERMS)
    offer.close()
    assert rig.is_released


def test_a_doorbell_that_the_driver_does_not_map(rig, monkeypatch):
    refused = (rig.driver.CUresult.CUDA_ERROR_NOT_PERMITTED,)
    monkeypatch.setattr(rig.driver, "cuMemHostRegister", lambda *_: refused)
    offer = rig.offer()
    with pytest.raises(GpuUnavailableError, match="doorbell"):
        offer.connect(TERMS)
    offer.close()
    assert rig.is_released


def test_a_host_whose_device_has_no_order(rig):
    rig.verbs.is_ordered = False
    with pytest.raises(RdmaUnavailableError, match="in order"):
        rig.accept(TERMS)
    assert rig.is_released


def test_a_host_without_memory(rig, monkeypatch):
    def refuse(num_bytes):
        raise MemoryError("none is left")

    monkeypatch.setattr(rdma_lane, "Memory", SimpleNamespace(anonymous=refuse))
    with pytest.raises(TransportError, match=f"{NODE_BYTES + ENGINE_BYTES} bytes for a lane"):
        rig.accept(TERMS)
    assert rig.is_released


def test_a_lane_that_cannot_be_closed(rig, caplog):
    lane, host = rig.pair()
    rig.verbs.fails.add("_Pair.close")
    with pytest.raises(TransportError, match="closing a lane"):
        lane.close()
    assert not rig.driver.registered, "what can be freed is"
    host.close()
    assert "closing a lane" in caplog.text
