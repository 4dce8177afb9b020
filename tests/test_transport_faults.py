"""What a peer, the network or the memory between may do to a connection that is made."""

from __future__ import annotations

import random
import signal
import socket
import struct
import threading
import time
from ctypes import c_uint8

import numpy as np
import pytest

import transport
from tests.test_transport import bytes_of, fill, noise, post, segment, take
from tests.transport_peer import KEY, WINDOW_BYTES, child, crc32c, descriptor, raw_tcp_peer
from transport import _windows
from transport.base import (
    HEARTBEAT_S,
    LOST_AFTER_S,
    CorruptMessageError,
    PeerLostError,
    Segment,
    TransportError,
    TransportTimeoutError,
)

PATIENCE_S = 20.0
HEAD_BYTES = 40  # of a descriptor; the rest means nothing
NUMBER_AT = 8 * 32  # bits


@pytest.fixture(params=["shm", "tcp"])
def listener(request, tmp_path):
    url = "tcp://127.0.0.1:0" if request.param == "tcp" else f"shm://{tmp_path}/s"
    made = transport.listen(url, key=KEY, window_bytes=WINDOW_BYTES)
    yield made
    made.close()


@pytest.fixture
def tcp_listener():
    made = transport.listen("tcp://127.0.0.1:0", key=KEY, window_bytes=WINDOW_BYTES)
    yield made
    made.close()


def accepted(listener):
    endpoint = listener.accept(PATIENCE_S)
    assert endpoint is not None
    return endpoint


# ---- checksums


def test_crc32c_of_the_standard():
    """RFC 3720 B.4, and the usual check value."""
    assert crc32c(b"123456789") == 0xE3069283
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert crc32c(bytes(range(31, -1, -1))) == 0x113FDB5C


def slow_crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize("size", [0, 1, 7, 8, 767, 768, 769, 6143, 6144, 6145, 20_001])
def test_crc32c_of_all_lengths(size):
    """The three streams joined are one, at any alignment; a copy has the same."""
    data = np.frombuffer(noise(size + 3, size), np.uint8)[3:]
    expected = slow_crc32c(data.tobytes())
    copied = np.zeros(size + 16, np.uint8)
    assert _windows.crc32c(data.ctypes.data, size) == expected
    assert _windows.gather(copied.ctypes.data + 5, [segment(data)]) == expected
    assert copied[5 : 5 + size].tobytes() == data.tobytes()
    assert not copied[:5].any() and not copied[5 + size :].any()
    half = _windows.crc32c(data.ctypes.data, size // 2)
    assert _windows.crc32c(data.ctypes.data + size // 2, size - size // 2, half) == expected


# ---- a window whose bytes are not what was sent


class OpenWindow:
    """The receiving end of a pair in memory, with the window it reads from in our hands."""

    def __init__(self) -> None:
        self.memory = _windows.Memory.anonymous(WINDOW_BYTES)
        peers = _windows.Memory.anonymous(WINDOW_BYTES)
        link, self._other = _windows.Link.pair()
        self.receiver = _windows.SharedChannel(self.memory, peers, link)
        self.sender = _windows.SharedChannel(peers, self.memory, self._other)

    def bytes(self, at: int, size: int) -> np.ndarray:
        return np.ctypeslib.as_array((c_uint8 * size).from_address(self.memory.address + at))

    def slot(self, number: int) -> np.ndarray:
        slots = _windows.DESCRIPTORS_AT + number % _windows.NUM_SLOTS * _windows.DESCRIPTOR_BYTES
        return self.bytes(slots, _windows.DESCRIPTOR_BYTES)

    def write(self, number: int, head: bytes) -> None:
        self.slot(number)[:] = np.frombuffer(head, np.uint8)


def test_every_flipped_bit_of_a_head_is_seen():
    """Of the payload's place and length, the checksums and the number."""
    data = noise(1000)
    for bit in range(8 * HEAD_BYTES):
        window = OpenWindow()
        window.sender.post([segment(np.frombuffer(data, np.uint8))], 1.0)
        window.slot(1)[bit // 8] ^= 1 << bit % 8
        if bit == NUMBER_AT:  # 1 became 0, which says that nothing has come yet
            assert window.receiver.poll(0.0) is None
            continue
        with pytest.raises(CorruptMessageError):
            window.receiver.poll(0.0)
        assert window.receiver.is_lost and window.sender.is_lost


def test_every_flipped_bit_of_a_payload_is_seen():
    data = noise(100)
    for bit in range(8 * len(data)):
        window = OpenWindow()
        window.sender.post([segment(np.frombuffer(data, np.uint8))], 1.0)
        window.bytes(_windows.PAYLOAD_AT, 100)[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptMessageError, match="checksum"):
            window.receiver.poll(0.0)


IMPOSSIBLE = {
    "length 2^63": {"length": 2**63},
    "length 2^31": {"length": 2**31},
    "length -1": {"length": 2**64 - 1},
    "larger than a message": {"length": WINDOW_BYTES // 4 + 1},
    "past the end": {"offset": WINDOW_BYTES - 64, "length": 65},
    "offset 2^64-64": {"offset": 2**64 - 64, "length": 128},
    "offset 2^63": {"offset": 2**63, "length": 64},
    "not aligned": {"offset": 8, "length": 64},
    "credit for what was never sent": {"consumed": 1},
    "credit -1": {"consumed": 2**64 - 1},
}


@pytest.mark.parametrize("what", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_head_that_is_whole_but_impossible(what):
    window = OpenWindow()
    window.write(1, descriptor(1, **what))
    with pytest.raises(CorruptMessageError):
        window.receiver.poll(0.0)


@pytest.mark.parametrize("number", [2, 63, 65, 2**63, 2**64 - 1])
def test_a_number_that_is_not_due(number):
    window = OpenWindow()
    window.write(1, descriptor(number))
    with pytest.raises(CorruptMessageError, match="1 is due"):
        window.receiver.poll(0.0)


def test_an_old_descriptor_again_is_no_message():
    window = OpenWindow()
    for n in range(1, _windows.NUM_SLOTS + 1):
        window.sender.post([], 1.0)
        found = window.receiver.poll(0.0)
        assert found is not None and found[2] == n
        window.receiver.release(n)
    old = window.slot(1).tobytes()
    window.write(1, old)
    assert window.receiver.poll(0.0) is None
    window.write(1, descriptor(_windows.NUM_SLOTS + 2))
    with pytest.raises(CorruptMessageError):
        window.receiver.poll(0.0)


@pytest.mark.parametrize("consumed", [1, 2**63, 2**64 - 1])
def test_credit_that_nobody_can_have_given(consumed):
    window = OpenWindow()
    window.bytes(0, 8)[:] = np.frombuffer(struct.pack("<Q", consumed), np.uint8)
    with pytest.raises(CorruptMessageError):
        window.receiver.post([], 1.0)
    assert window.receiver.is_lost


def test_random_heads_never_lead_out_of_the_window():
    source = random.Random(5)
    edges = [0, 1, 63, 64, WINDOW_BYTES // 4, WINDOW_BYTES - 64, WINDOW_BYTES, 2**32, 2**64 - 64]
    num_taken = 0
    for _ in range(3000):
        window = OpenWindow()
        offset = max(0, source.choice(edges) + source.choice([-64, 0, 64])) % 2**64
        length = max(0, source.choice(edges) + source.randrange(-2, 3)) % 2**64
        inside = offset <= WINDOW_BYTES and length <= WINDOW_BYTES - offset
        payload = bytes(length) if inside else b""
        window.write(1, descriptor(1, payload, offset=offset, length=length))
        try:
            found = window.receiver.poll(0.0)
        except CorruptMessageError:
            continue
        assert found is not None
        begin = found[0] - window.memory.address - _windows.PAYLOAD_AT
        assert begin == offset and inside and length <= WINDOW_BYTES // 4
        num_taken += 1
    assert num_taken > 100


# ---- a stream that is not what was sent


def frame_of(number: int, payload: bytes, **what) -> bytes:
    return descriptor(number, payload, **what) + payload


def test_frames_by_hand_arrive(tcp_listener):
    """The other tests of streams change what here is right."""
    with raw_tcp_peer(tcp_listener.url) as data:
        endpoint = accepted(tcp_listener)
        for n in range(1, 4):
            data.sendall(frame_of(n, noise(500, n), offset=512 * n))
        for n in range(1, 4):
            assert take(endpoint) == noise(500, n)
        data.sendall(b"".join(frame_of(n, b"") for n in range(4, 60)))
        for _ in range(4, 60):
            assert take(endpoint) == b""
        whole = frame_of(60, noise(3000))
        for byte in range(0, len(whole), 7):
            data.sendall(whole[byte : byte + 7])
        assert take(endpoint) == noise(3000)
        endpoint.close()


def take_all(endpoint) -> tuple[TransportError, list[bytes]]:
    """What comes until the connection ends, held; and why it ended."""
    taken = []
    try:
        while frame := endpoint.poll(PATIENCE_S):
            taken.append(bytes_of(frame))
    except TransportError as error:
        return error, taken
    raise AssertionError("a connection that does not end")


STREAMS = {
    "random": lambda: noise(5000),
    "http": lambda: b"GET / HTTP/1.1\r\nHost: node.example\r\nAccept: everything\r\n\r\n" * 2,
    "a flipped bit in the head": lambda: b"\x01" + frame_of(1, b"x")[1:],
    "a flipped bit in the payload": lambda: frame_of(1, b"x" * 99)[:-1] + b"y",
    "replayed": lambda: frame_of(1, b"x") * 2,
    "reordered": lambda: frame_of(2, b"y") + frame_of(1, b"x"),
    "one is missing": lambda: frame_of(1, b"x") + frame_of(3, b"y"),
    "credit with a payload": lambda: frame_of(0, b"x"),
    "credit for what was never sent": lambda: descriptor(0, consumed=1),
    "more than there are slots": lambda: b"".join(frame_of(n, b"") for n in range(1, 66)),
} | {name: (lambda what=what: descriptor(1, **what)) for name, what in IMPOSSIBLE.items()}


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS)
def test_streams_that_nobody_sent(tcp_listener, stream):
    with raw_tcp_peer(tcp_listener.url) as data:
        endpoint = accepted(tcp_listener)
        data.sendall(stream())
        error, taken = take_all(endpoint)
        assert isinstance(error, CorruptMessageError)
        assert set(taken) <= {b"x", b""}
        assert endpoint.is_lost
        with pytest.raises(PeerLostError):
            post(endpoint, b"x")
        endpoint.close()


def test_corrupt_input_is_seen_by_who_posts(tcp_listener):
    with raw_tcp_peer(tcp_listener.url) as data:
        endpoint = accepted(tcp_listener)
        fill(endpoint, noise(1000))
        data.sendall(noise(500))
        with pytest.raises(CorruptMessageError):
            post(endpoint, noise(1000))
        endpoint.close()


def test_random_streams_end_the_connection_only(tcp_listener):
    """Whatever comes: frames up to the first bad one, then an error, and the next peer is well."""
    source = random.Random(9)
    for n in range(60):
        with raw_tcp_peer(tcp_listener.url) as data:
            endpoint = accepted(tcp_listener)
            good = [frame_of(k, noise(200, k), offset=256 * k) for k in range(1, 4)]
            stream = bytearray(b"".join(good))
            at = source.randrange(len(stream) * 8)
            while at // 8 % len(good[0]) in range(HEAD_BYTES, _windows.DESCRIPTOR_BYTES):
                at = source.randrange(len(stream) * 8)
            stream[at // 8] ^= 1 << at % 8
            data.sendall(stream)
            error, taken = take_all(endpoint)
            assert isinstance(error, CorruptMessageError)
            whole = at // 8 // len(good[0])
            assert taken == [noise(200, k + 1) for k in range(whole)], n
            endpoint.close()


def test_a_truncated_frame_is_a_lost_peer(tcp_listener):
    with raw_tcp_peer(tcp_listener.url) as data:
        endpoint = accepted(tcp_listener)
        data.sendall(frame_of(1, b"whole") + frame_of(2, noise(1000), offset=64)[:-1])
        assert take(endpoint) == b"whole"
        data.close()
        with pytest.raises(PeerLostError):
            endpoint.poll(PATIENCE_S)
        endpoint.close()


def test_a_frame_that_stalls_half_way_ends_the_connection(tcp_listener):
    with raw_tcp_peer(tcp_listener.url) as data:
        endpoint = accepted(tcp_listener)
        data.sendall(frame_of(1, noise(1000))[:-1])
        began = time.monotonic()
        with pytest.raises(PeerLostError, match="within a message"):
            endpoint.poll(PATIENCE_S)
        assert 1.5 < time.monotonic() - began < 10.0
        endpoint.close()


def post_in_time(endpoint, data: bytes) -> bool:
    try:
        return post(endpoint, data, timeout_s=0.2) > 0
    except TransportTimeoutError:
        return False


def test_a_peer_that_stops_reading_costs_only_its_own_connection(tcp_listener):
    """It gives credit, so that nothing but the socket is full."""
    with raw_tcp_peer(tcp_listener.url) as data:
        stuck = accepted(tcp_listener)
        one = transport.connect(tcp_listener.url, key=KEY, window_bytes=WINDOW_BYTES)
        other = accepted(tcp_listener)
        chunk = noise(stuck.max_message_bytes)
        num_posted = 0
        while post_in_time(stuck, chunk):
            num_posted += 1
            data.sendall(descriptor(0, consumed=num_posted))
            assert num_posted * len(chunk) < 64 << 20  # what the kernel keeps is bounded
        assert stuck.is_lost
        post(one, b"alive")
        assert take(other) == b"alive"
        for end in (stuck, one, other):
            end.close()


def test_noise_on_the_control_connection_ends_it():
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    link = _windows.Link.of_socket(ours.detach())
    link.watch()
    theirs.sendall(b"not a heartbeat")
    wait_until(lambda: link.is_over)
    assert "heartbeat" in link.reason
    theirs.close()


def wait_until(is_so) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# ---- a process that dies, hangs, or is only slow


def wait_for_end_of(endpoint, how: str) -> float:
    """When the loss was seen by who waits in poll or post."""
    data = noise(endpoint.max_message_bytes)
    with pytest.raises(PeerLostError):
        endpoint.poll(PATIENCE_S) if how == "poll" else post(endpoint, data)
    assert endpoint.is_lost
    return time.monotonic()


@pytest.mark.parametrize("how", ["poll", "post"])
def test_a_killed_peer_is_seen_at_once(listener, how):
    with child(listener.url, "idle") as process:
        endpoint = accepted(listener)
        assert take(endpoint) == b"here"
        if how == "post":
            fill(endpoint, noise(endpoint.max_message_bytes))
        killed = []

        def kill():
            killed.append(time.monotonic())
            process.kill()

        threading.Timer(0.1, kill).start()
        assert wait_for_end_of(endpoint, how) - killed[0] < 0.25
        endpoint.close()


def test_a_stopped_peer_is_seen_in_time(listener):
    with child(listener.url, "idle") as process:
        endpoint = accepted(listener)
        assert take(endpoint) == b"here"
        process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        silent = wait_for_end_of(endpoint, "poll") - began
        assert LOST_AFTER_S - HEARTBEAT_S - 0.05 <= silent < 1.5
        endpoint.close()


def test_a_short_stop_is_no_loss(listener):
    with child(listener.url, "echo") as process:
        endpoint = accepted(listener)
        assert take(endpoint) == b"here"
        process.send_signal(signal.SIGSTOP)
        post(endpoint, b"are you there?")
        time.sleep(0.5)
        assert endpoint.poll() is None
        assert endpoint.silence_s > 0.2
        process.send_signal(signal.SIGCONT)
        assert take(endpoint) == b"are you there?"
        assert not endpoint.is_lost
        endpoint.close()


def test_a_busy_interpreter_is_no_loss(listener):
    """The heart beats in a thread that needs no interpreter."""
    one = transport.connect(listener.url, key=KEY, window_bytes=WINDOW_BYTES)
    other = accepted(listener)
    began = time.monotonic()
    size = 1_000_000
    while time.monotonic() - began < LOST_AFTER_S + 0.2:  # each of them without a pause
        before = time.monotonic()
        assert pow(3, size, None) > 0
        if time.monotonic() - before < 0.5:
            size *= 2
    assert one.silence_s < 2 * HEARTBEAT_S + 0.2
    assert not one.is_lost and not other.is_lost
    one.close()
    other.close()


def test_data_by_a_process_of_its_own(listener):
    with child(listener.url, "echo"):
        endpoint = accepted(listener)
        assert take(endpoint) == b"here"
        sent = [noise(size, size) for size in (0, 1, 4000, endpoint.max_message_bytes)]
        for _ in range(20):
            for data in sent:
                post(endpoint, data)
            for data in sent:
                assert take(endpoint) == data
        endpoint.close()


def test_segments_must_be_segments():
    window = OpenWindow()
    data = np.zeros(8, np.uint8)
    for segments in ([1], [(1, 2, 3)], [("a", 1, 1, 1)], 5, [None]):
        with pytest.raises(TypeError):
            window.sender.post(segments, 1.0)
    for segments in (
        [Segment(data.ctypes.data, 2**40, 2**40, 1)],
        [Segment(data.ctypes.data, 1, 2**63, 1)] * 2,
        [Segment(data.ctypes.data, 1, WINDOW_BYTES, 1)],
    ):
        with pytest.raises((ValueError, OverflowError)):
            window.sender.post(segments, 1.0)
    with pytest.raises(OverflowError):
        window.sender.post([Segment(data.ctypes.data, -1, 8, 8)], 1.0)
    assert window.receiver.poll(0.0) is None
