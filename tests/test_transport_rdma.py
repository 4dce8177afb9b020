"""rdma://: what of it needs no device, and what only a device can show (`make test-rdma`)."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

import transport
from tests.child import output_of
from tests.rdma_device import device
from transport import control, verbs
from transport._windows import DESCRIPTOR_SENT_BYTES, PAYLOAD_AT, Link, Memory, MirroredChannel
from transport.base import (
    CorruptMessageError,
    PeerLostError,
    RefusedError,
    Segment,
    TransportError,
    TransportTimeoutError,
)
from transport.queue_pair import QueuePairAddress
from transport.verbs import RdmaUnavailableError, open_port

__all__ = ["device"]

KEY = b"a key for tests, 32 bytes or so."
WINDOW_BYTES = 64 << 10
PATIENCE_S = 20.0
ADDRESS = QueuePairAddress(
    queue_pair=17,
    packet_number=1 << 23,
    lid=0,
    gid="0000:0000:0000:0000:0000:ffff:7f4d:0001",
    mtu=5,
    window_key=0x1234,
    window_address=0x7F0000000000,
)


def eventually(is_so) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- without a device


def test_an_address_survives_the_wire():
    assert QueuePairAddress.from_wire(json.loads(json.dumps(ADDRESS.to_wire()))) == ADDRESS


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("queue_pair", 0),
        ("queue_pair", 1),
        ("queue_pair", 1 << 24),
        ("queue_pair", -2),
        ("queue_pair", 17.0),
        ("queue_pair", "17"),
        ("queue_pair", True),
        ("packet_number", 1 << 24),
        ("packet_number", -1),
        ("lid", 0xC000),
        ("mtu", 0),
        ("mtu", 6),
        ("mtu", True),
        ("window_key", 1 << 32),
        ("window_address", 0),
        ("window_address", (1 << 64) - 4096),
        ("window_address", 0x7F0000000001),
        ("gid", ""),
        ("gid", "ff02:0000:0000:0000:0000:0000:0000:0001"),
        ("gid", "0000:0000:0000:0000:0000:ffff:7f4d:0001\n"),
        ("gid", None),
        ("more", 1),
    ],
)
def test_an_absurd_address_is_refused(name, value):
    with pytest.raises(RefusedError, match="queue pair"):
        QueuePairAddress.from_wire(ADDRESS.to_wire() | {name: value})


@pytest.mark.parametrize("values", [None, [], "queue_pair", {}, {"queue_pair": 17}])
def test_what_is_no_address_is_refused(values):
    with pytest.raises(RefusedError, match="fields"):
        QueuePairAddress.from_wire(values)


@pytest.mark.parametrize(
    "url",
    [
        "rdma://",
        "rdma://host",
        "rdma://host:7070?gid=-1",
        "rdma://host:7070?gid=",
        "rdma://host:7070?port=one",
        "rdma://host:7070?imm=2",
        "rdma://host:7070?mtu=4096",
        "rdma://host:7070?gid=1&gid=2",
    ],
)
def test_a_url_that_cannot_be(url):
    for call in (transport.connect, transport.listen):
        with pytest.raises(ValueError, match="rdma://"):
            call(url, key=KEY)


def test_a_window_that_would_take_the_machine():
    with pytest.raises(ValueError, match="window_bytes"):
        transport.connect("rdma://127.0.0.1:7070", key=KEY, window_bytes=2 << 30)


def test_what_to_install_is_named(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(verbs, "DEBIAN_PYVERBS", tmp_path / "pyverbs")
    monkeypatch.setattr(verbs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RdmaUnavailableError, match="python3-pyverbs"):
        transport.listen("rdma://127.0.0.1:0", key=KEY)


def test_without_a_device_it_says_so():
    try:
        open_port().context.close()
    except RdmaUnavailableError:
        with pytest.raises(RdmaUnavailableError):
            transport.listen("rdma://127.0.0.1:0", key=KEY)
        with pytest.raises(TransportError):
            transport.connect("rdma://127.0.0.1:9", key=KEY)
    else:
        pytest.skip("there is a device")


def test_the_library_leaves_the_log_alone():
    try:
        verbs.pyverbs("device")
    except RdmaUnavailableError as error:
        pytest.skip(str(error))
    program = """
import logging
from transport import verbs
verbs.pyverbs("device")
root = logging.getLogger()
print(root.handlers, root.level == logging.WARNING)
"""
    assert output_of("-c", program) == "[] True\n"


# ---- a channel whose device is a copy, made when the test says so


class Copier:
    """Writes into the other end's window: at once, or when `deliver` is called, and then with
    descriptors ahead of their payloads if that is asked for."""

    def __init__(self, mirror: Memory) -> None:
        self.mirror = mirror
        self.target: Memory | None = None
        self.peer: Copier | None = None
        self.is_held = False
        self.waiting: list[tuple[int, int]] = []
        self.num_written = self.num_arrived_here = 0
        self.error = ""
        self.num_sleeps = 0

    def copy(self, offset: int, num_bytes: int) -> None:
        ctypes.memmove(self.target.address + offset, self.mirror.address + offset, num_bytes)

    def write(self, payload: int, payload_bytes: int, descriptor: int) -> None:
        if self.error:
            raise PeerLostError(self.error)
        assert payload >= PAYLOAD_AT and payload + payload_bytes <= self.mirror.num_bytes
        if self.is_held:
            self.waiting.append((payload, payload_bytes))
        else:
            self.copy(payload, payload_bytes)
            self.peer.num_arrived_here += 1
        self.copy(descriptor, DESCRIPTOR_SENT_BYTES)

    def deliver(self) -> None:
        for piece in self.waiting:
            self.copy(*piece)
            self.peer.num_arrived_here += 1
        self.waiting.clear()

    def tell(self) -> None:
        self.copy(0, 8)

    def num_arrived(self) -> int:
        return self.num_arrived_here

    def sleep(self, timeout_s: float) -> None:
        self.num_sleeps += 1
        time.sleep(min(timeout_s, 0.001))


@dataclasses.dataclass
class Mirrored:
    channel: MirroredChannel
    writer: Copier
    link: Link


def mirrored_pair(is_ordered: bool, max_message_bytes: int = 1 << 20) -> list[Mirrored]:
    links = Link.pair()
    owns = [Memory.anonymous(WINDOW_BYTES) for _ in links]
    writers = [Copier(Memory.anonymous(WINDOW_BYTES)) for _ in links]
    for i in (0, 1):
        writers[i].target, writers[i].peer = owns[1 - i], writers[1 - i]
    return [
        Mirrored(
            MirroredChannel(own, writer.mirror, link, writer, max_message_bytes, is_ordered),
            writer,
            link,
        )
        for own, writer, link in zip(owns, writers, links, strict=True)
    ]


def post(channel, data: bytes, timeout_s: float = PATIENCE_S) -> int:
    kept = ctypes.create_string_buffer(data, len(data))
    return channel.post([Segment(ctypes.addressof(kept), 1, len(data), len(data))], timeout_s)


def take(channel, timeout_s: float = PATIENCE_S) -> bytes:
    address, num_bytes, number = channel.poll(timeout_s)
    data = ctypes.string_at(address, num_bytes)
    channel.release(number)
    return data


@pytest.mark.parametrize("is_ordered", [True, False])
def test_laps_of_the_ring_through_a_mirror(is_ordered):
    one, other = mirrored_pair(is_ordered)
    assert one.channel.max_message_bytes == WINDOW_BYTES // 4
    for n in range(300):
        data = bytes([n % 251]) * (37 * n % one.channel.max_message_bytes)
        post(one.channel, data)
        assert take(other.channel) == data
        if n % 3 == 0:
            post(other.channel, data[::2])
            assert take(one.channel) == data[::2]


@pytest.mark.parametrize("is_ordered", [True, False])
def test_credits_come_by_themselves(is_ordered):
    """Nothing is sent back, so the receiver must tell what it has freed."""
    one, other = mirrored_pair(is_ordered)
    largest = b"x" * one.channel.max_message_bytes
    for data in [b""] * 200 + [largest] * 40:
        post(one.channel, data, timeout_s=0.5)
        assert take(other.channel) == data
    while True:
        try:
            post(one.channel, largest, timeout_s=0.01)
        except TransportTimeoutError:
            break
    assert take(other.channel) == largest


def test_a_descriptor_ahead_of_its_payload_is_not_believed():
    one, other = mirrored_pair(is_ordered=False)
    one.writer.is_held = True
    post(one.channel, b"later")
    assert other.channel.poll(0.0) is None
    assert other.channel.poll(0.02) is None
    assert other.writer.num_sleeps >= 1
    one.writer.deliver()
    assert take(other.channel) == b"later"


def test_a_device_that_breaks_its_promise_is_found_out():
    one, other = mirrored_pair(is_ordered=True)
    one.writer.is_held = True
    post(one.channel, b"later")
    with pytest.raises(CorruptMessageError, match="checksum"):
        other.channel.poll(PATIENCE_S)
    assert one.channel.is_lost and other.channel.is_lost


def test_a_device_takes_only_so_much_at_a_time():
    one, _ = mirrored_pair(is_ordered=True, max_message_bytes=100)
    assert one.channel.max_message_bytes == 100
    with pytest.raises(ValueError, match="101"):
        post(one.channel, b"x" * 101)


def test_what_the_writer_raises_is_seen_by_the_sender():
    one, _ = mirrored_pair(is_ordered=True)
    one.writer.error = "the cable is cut"
    with pytest.raises(PeerLostError, match="cable"):
        post(one.channel, b"x")


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_wait_ends_with_the_link(is_ordered):
    one, other = mirrored_pair(is_ordered)
    post(one.channel, b"last")
    threading.Timer(0.05, one.link.end, ("gone",)).start()
    assert take(other.channel) == b"last"
    with pytest.raises(PeerLostError):
        other.channel.poll(PATIENCE_S)


# ---- with a device


@pytest.fixture
def listener(device):
    made = transport.listen("rdma://127.77.0.1:0", key=KEY, window_bytes=WINDOW_BYTES)
    yield made
    made.close()


def connected(listener):
    one = transport.connect(listener.url, key=KEY, window_bytes=WINDOW_BYTES)
    other = listener.accept(PATIENCE_S)
    assert other is not None
    return one, other


def resources() -> dict[str, int]:
    """What the kernel holds for RDMA: queue pairs, registrations, ..."""
    text = subprocess.run(["rdma", "-j", "resource", "show"], capture_output=True, check=True)
    return {
        name: count
        for device in json.loads(text.stdout)
        for name, count in device.items()
        if name in ("pd", "cq", "qp", "mr", "ctx")
    }


def taken(endpoint) -> bytes:
    frame = endpoint.poll(PATIENCE_S)
    assert frame is not None
    data = ctypes.string_at(frame.address, frame.num_bytes)
    endpoint.release(frame)
    return data


def post_and_poll(endpoint) -> None:
    while True:
        post(endpoint, b"x" * endpoint.max_message_bytes)
        endpoint.poll(0.01)


@pytest.mark.rdma
def test_the_port_and_gid_are_chosen(device):
    port = open_port()
    port.context.close()
    assert port.gid.startswith("0000:0000:0000:0000:0000:ffff:")
    other_gid = open_port(port.device, port.number, 0, "127.77.0.1")
    other_gid.context.close()
    assert other_gid.gid_index == 0 and other_gid.gid != port.gid
    here = open_port(local_ip="127.77.0.1")
    here.context.close()
    assert here.gid == "0000:0000:0000:0000:0000:ffff:7f4d:0001"
    for wrong, message in [
        ({"device": "mlx5_77"}, "no RDMA device 'mlx5_77' here, only rxe0"),
        ({"port": 9}, "port=9"),
        ({"gid_index": 900}, "gid=900"),
    ]:
        with pytest.raises(RdmaUnavailableError, match=message):
            open_port(**wrong)


@pytest.mark.rdma
@pytest.mark.parametrize("modes", ["01", "10"])
def test_each_end_says_how_it_wants_to_be_written_to(device, modes):
    listener = transport.listen(f"rdma://127.77.0.1:0?imm={modes[0]}", key=KEY)
    url = listener.url.partition("?")[0] + f"?imm={modes[1]}"
    one = transport.connect(url, key=KEY)
    other = listener.accept(PATIENCE_S)
    for n in range(100):
        post(one, b"there %d" % n)
        assert taken(other) == b"there %d" % n
        post(other, b"back %d" % n)
        assert taken(one) == b"back %d" % n
    for end in (one, other, listener):
        end.close()


@pytest.mark.rdma
@pytest.mark.parametrize(
    "absurd",
    [
        {"queue_pair": None},
        {"queue_pair": ADDRESS.to_wire() | {"queue_pair": 1 << 40}},
        {"queue_pair": ADDRESS.to_wire() | {"gid": "0000:0000:0000:0000:0000:0000:0000:0000"}},
        {"queue_pair": ADDRESS.to_wire(), "window_bytes": 4 << 30},
    ],
)
def test_an_absurd_peer_is_refused_and_nothing_else_happens(listener, absurd):
    before = resources()
    host, port = listener.url.removeprefix("rdma://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        session = control.authenticate_to(sock, KEY, time.monotonic() + PATIENCE_S)
        session.send(control.hello("rdma", {}, WINDOW_BYTES) | absurd)
        assert "refused" in session.receive()
    eventually(lambda: listener.num_refused == 1 and resources() == before)
    one, other = connected(listener)
    post(one, b"others are served")
    assert taken(other) == b"others are served"
    one.close()
    other.close()


@pytest.mark.rdma
def test_a_write_that_the_device_refuses_ends_the_connection(listener):
    one, other = connected(listener)
    pair = one._wire._pair
    pair._peer = dataclasses.replace(pair._peer, window_key=pair._peer.window_key ^ 0x5A)
    with pytest.raises(TransportError, match=r"access error|flush|closed|broke"):
        post_and_poll(one)
    assert one.is_lost
    with pytest.raises(PeerLostError):
        other.poll(PATIENCE_S)
    one.close()
    other.close()


@pytest.mark.rdma
def test_all_is_given_back(listener):
    for n in range(11):
        one, other = connected(listener)
        post(one, b"x" * n)
        assert taken(other) == b"x" * n
        one.close()
        other.close()
        del one, other
        if n == 0:  # what stays for good is there now
            before, num_files = resources(), len(os.listdir("/proc/self/fd"))
    assert resources() == before
    assert len(os.listdir("/proc/self/fd")) == num_files


PEER = """
import sys, transport
end = transport.connect(sys.argv[1], key=sys.argv[2].encode(), window_bytes=65536)
frame = end.poll(20.0)
while True:
    end.poll(20.0)
"""


@pytest.mark.rdma
@pytest.mark.parametrize("which", ["poll", "post"])
def test_a_killed_process_is_missed_at_once(listener, which):
    process = subprocess.Popen([sys.executable, "-c", PEER, listener.url, KEY.decode()])
    try:
        end = listener.accept(PATIENCE_S)
        post(end, b"hello")
        assert end.poll(0.3) is None and not end.is_lost
        process.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(PeerLostError):
            end.poll(PATIENCE_S) if which == "poll" else post_and_poll(end)
        assert time.monotonic() - killed < 1.0  # on a machine that is emulated
        end.close()
    finally:
        process.kill()
        process.wait()
