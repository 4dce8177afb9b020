"""Tests of rdma://, without a device and with one (`make test-rdma`)."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

import transport
from tests.support.engine.child import output_of
from tests.support.transport.rdma_device import device
from tests.support.transport.transport_rig import KEY, PATIENCE_S, post, take, wait_until
from transport import control, verbs
from transport.base import PeerLostError, RefusedError, TransportError
from transport.queue_pair import QueuePairAddress
from transport.verbs import RdmaUnavailableError, open_port

__all__ = ["device"]

WINDOW_BYTES = 64 << 10
ADDRESS = QueuePairAddress(
    queue_pair=17,
    packet_number=1 << 23,
    lid=0,
    gid="0000:0000:0000:0000:0000:ffff:7f4d:0001",
    mtu=5,
    window_key=0x1234,
    window_address=0x7F0000000000,
)


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
def test_invalid_addresses_are_refused(values):
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
def test_an_invalid_url_is_refused(url):
    for call in (transport.connect, transport.listen):
        with pytest.raises(ValueError, match="rdma://"):
            call(url, key=KEY)


def test_a_window_larger_than_the_machine_is_refused():
    with pytest.raises(ValueError, match="window_bytes"):
        transport.connect("rdma://127.0.0.1:7070", key=KEY, window_bytes=2 << 30)


def test_the_missing_package_is_named(monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(verbs, "DEBIAN_PYVERBS", tmp_path / "pyverbs")
    monkeypatch.setattr(verbs.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(RdmaUnavailableError, match="python3-pyverbs"):
        transport.listen("rdma://127.0.0.1:0", key=KEY)


def test_a_missing_device_is_named():
    try:
        open_port().context.close()
    except RdmaUnavailableError:
        with pytest.raises(RdmaUnavailableError):
            transport.listen("rdma://127.0.0.1:0", key=KEY)
        with pytest.raises(TransportError):
            transport.connect("rdma://127.0.0.1:9", key=KEY)
    else:
        pytest.skip("there is a device")


def test_the_library_leaves_logging_unchanged():
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
    """Returns the kernel's counts of RDMA objects: queue pairs, registrations, ..."""
    text = subprocess.run(["rdma", "-j", "resource", "show"], capture_output=True, check=True)
    return {
        name: count
        for device in json.loads(text.stdout)
        for name, count in device.items()
        if name in ("pd", "cq", "qp", "mr", "ctx")
    }


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
def test_each_end_says_how_to_write_to_it(device, modes):
    listener = transport.listen(f"rdma://127.77.0.1:0?imm={modes[0]}", key=KEY)
    url = listener.url.partition("?")[0] + f"?imm={modes[1]}"
    one = transport.connect(url, key=KEY)
    other = listener.accept(PATIENCE_S)
    for n in range(100):
        post(one, b"there %d" % n)
        assert take(other) == b"there %d" % n
        post(other, b"back %d" % n)
        assert take(one) == b"back %d" % n
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
@pytest.mark.row("M13")
def test_an_absurd_peer_is_refused_without_other_effects(listener, absurd):
    before = resources()
    host, port = listener.url.removeprefix("rdma://").split(":")
    with socket.create_connection((host, int(port))) as sock:
        session = control.authenticate_to(sock, KEY, time.monotonic() + PATIENCE_S)
        session.send(control.hello("rdma", {}, WINDOW_BYTES) | absurd)
        assert "refused" in session.receive()
    wait_until(lambda: listener.num_refused == 1 and resources() == before)
    one, other = connected(listener)
    post(one, b"others are served")
    assert take(other) == b"others are served"
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
def test_all_resources_are_freed(listener):
    for n in range(11):
        one, other = connected(listener)
        post(one, b"x" * n)
        assert take(other) == b"x" * n
        one.close()
        other.close()
        del one, other
        if n == 0:  # permanent objects exist now
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


@pytest.mark.process
@pytest.mark.rdma
@pytest.mark.parametrize("which", ["poll", "post"])
def test_a_killed_process_is_noticed_at_once(listener, which):
    process = subprocess.Popen([sys.executable, "-c", PEER, listener.url, KEY.decode()])
    try:
        end = listener.accept(PATIENCE_S)
        post(end, b"hello")
        assert end.poll(0.3) is None and not end.is_lost
        process.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        with pytest.raises(PeerLostError):
            end.poll(PATIENCE_S) if which == "poll" else post_and_poll(end)
        assert time.monotonic() - killed < 1.0  # an emulated machine is slow
        end.close()
    finally:
        process.kill()
        process.wait()
