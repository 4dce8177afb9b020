"""Faults of a peer, the network or the shared memory on an established connection."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
import warnings

import pytest

import transport
from tests.support.transport.transport_peer import IMPOSSIBLE, child, descriptor, raw_tcp_peer
from tests.support.transport.transport_rig import (
    KEY,
    PATIENCE_S,
    WINDOW_BYTES,
    bytes_of,
    fill,
    noise,
    post,
    take,
    wait_until,
)
from transport import _windows
from transport.base import (
    HEARTBEAT_S,
    LOST_AFTER_S,
    CorruptMessageError,
    PeerLostError,
    TransportError,
    TransportTimeoutError,
)

pytestmark = pytest.mark.timing

HEAD_BYTES = 40  # size of a descriptor's head; the rest has no meaning


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


# ---- corrupt streams


def frame_of(number: int, payload: bytes, **what) -> bytes:
    return descriptor(number, payload, **what) + payload


def test_hand_made_frames_arrive(tcp_listener):
    """The other tests of streams change a frame that is valid here."""
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
    """Takes messages until the connection ends; returns the error and the messages, which were
    held."""
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
@pytest.mark.row("M4")
def test_corrupt_streams_end_the_connection(tcp_listener, stream):
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


def test_corrupt_input_is_seen_by_a_waiting_post(tcp_listener):
    with raw_tcp_peer(tcp_listener.url) as data:
        endpoint = accepted(tcp_listener)
        fill(endpoint, noise(1000))
        data.sendall(noise(500))
        with pytest.raises(CorruptMessageError):
            post(endpoint, noise(1000))
        endpoint.close()


@pytest.mark.row("M3")
def test_random_streams_end_the_connection_only(tcp_listener):
    """Frames up to the first bad one arrive, then an error, and the next peer is not affected."""
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


@pytest.mark.row("M10")
def test_a_truncated_frame_is_a_lost_peer(tcp_listener):
    with raw_tcp_peer(tcp_listener.url) as data:
        endpoint = accepted(tcp_listener)
        data.sendall(frame_of(1, b"whole") + frame_of(2, noise(1000), offset=64)[:-1])
        assert take(endpoint) == b"whole"
        data.close()
        with pytest.raises(PeerLostError):
            endpoint.poll(PATIENCE_S)
        endpoint.close()


@pytest.mark.row("M7")
def test_a_frame_that_stalls_midway_ends_the_connection(tcp_listener):
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


@pytest.mark.row("M8")
def test_a_peer_that_stops_reading_costs_only_its_own_connection(tcp_listener):
    """The peer gives credit, so that only the socket is full."""
    with raw_tcp_peer(tcp_listener.url) as data:
        stuck = accepted(tcp_listener)
        one = transport.connect(tcp_listener.url, key=KEY, window_bytes=WINDOW_BYTES)
        other = accepted(tcp_listener)
        chunk = noise(stuck.max_message_bytes)
        num_posted = 0
        while post_in_time(stuck, chunk):
            num_posted += 1
            data.sendall(descriptor(0, consumed=num_posted))
            assert num_posted * len(chunk) < 64 << 20  # the kernel keeps a bounded amount
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


def test_silence_does_not_grow_after_the_end():
    ours, theirs = socket.socketpair()
    link = _windows.Link.of_socket(ours.detach())
    link.watch()
    theirs.close()
    wait_until(lambda: link.is_over)
    silence_s = link.silence_s
    time.sleep(0.05)
    assert link.silence_s == silence_s < HEARTBEAT_S
    one, other = _windows.Link.pair()
    time.sleep(0.05)
    one.end("closed")
    assert one.silence_s == other.silence_s == 0.0, "ends in one process are never silent"


def test_an_end_without_heartbeats_resets_the_connection():
    """It sends a reset, which arrives even where data is not acknowledged any more."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    ours.setblocking(False)
    link = _windows.Link.of_socket(ours.detach())
    link.watch()
    theirs.settimeout(PATIENCE_S)
    began = time.monotonic()
    received = []
    with pytest.raises(ConnectionResetError):
        received.extend(iter(lambda: theirs.recv(100), b""))
    assert received and time.monotonic() - began < LOST_AFTER_S + 0.25
    while not link.is_over and time.monotonic() - began < PATIENCE_S:
        time.sleep(0.001)  # the reset is out before its sender has noted it
    assert link.is_over and "nothing was heard" in link.reason
    theirs.close()


# ---- a process that dies, hangs or is slow


def wait_for_end_of(endpoint, how: str) -> float:
    """Returns when a waiting poll or post saw the loss."""
    data = noise(endpoint.max_message_bytes)
    with pytest.raises(PeerLostError):
        endpoint.poll(PATIENCE_S) if how == "poll" else post(endpoint, data)
    assert endpoint.is_lost
    return time.monotonic()


@pytest.mark.parametrize("how", ["poll", "post"])
def test_a_killed_peer_is_noticed_at_once(listener, how):
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


def test_a_forked_copy_does_not_end_the_connection(listener):
    one = transport.connect(listener.url, key=KEY, window_bytes=WINDOW_BYTES)
    other = accepted(listener)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about other threads
        pid = os.fork()
    if pid == 0:
        try:
            one.close()
            other.close()
        finally:
            os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    time.sleep(HEARTBEAT_S + 0.05)
    post(one, b"still here")
    assert take(other) == b"still here"
    one.close()
    other.close()


def test_python_and_the_library_agree_on_heartbeats():
    assert (_windows.HEARTBEAT_S, _windows.LOST_AFTER_S) == (HEARTBEAT_S, LOST_AFTER_S)


def test_stopped_peers_are_noticed_in_time(tmp_path):
    """Runs one of each transport, to wait once."""
    seen = []

    def watch(url):
        listener = transport.listen(url, key=KEY, window_bytes=WINDOW_BYTES)
        with child(listener.url, "idle") as process:
            endpoint = accepted(listener)
            assert take(endpoint) == b"here"
            process.send_signal(signal.SIGSTOP)
            began = time.monotonic()
            seen.append(wait_for_end_of(endpoint, "poll") - began)
            endpoint.close()
        listener.close()

    threads = [
        threading.Thread(target=watch, args=(url,))
        for url in (f"shm://{tmp_path}/s", "tcp://127.0.0.1:0")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 2
    assert all(LOST_AFTER_S - HEARTBEAT_S - 0.05 <= silent < 1.5 for silent in seen)


def test_a_short_stop_is_no_loss(listener):
    with child(listener.url, "echo") as process:
        endpoint = accepted(listener)
        assert take(endpoint) == b"here"
        process.send_signal(signal.SIGSTOP)
        post(endpoint, b"are you there?")
        time.sleep(2 * HEARTBEAT_S)
        assert endpoint.poll() is None
        assert endpoint.silence_s > 0.2
        process.send_signal(signal.SIGCONT)
        assert take(endpoint) == b"are you there?"
        assert not endpoint.is_lost
        endpoint.close()


def test_a_busy_interpreter_is_no_loss(tcp_listener):
    """The heartbeat thread needs no interpreter."""
    one = transport.connect(tcp_listener.url, key=KEY, window_bytes=WINDOW_BYTES)
    other = accepted(tcp_listener)
    began = time.monotonic()
    size = 1_000_000
    while time.monotonic() - began < LOST_AFTER_S + 0.2:  # posts without a pause
        before = time.monotonic()
        assert pow(3, size, None) > 0
        if time.monotonic() - before < 0.5:
            size *= 2
    assert one.silence_s < 2 * HEARTBEAT_S + 0.2
    assert not one.is_lost and not other.is_lost
    one.close()
    other.close()


def test_messages_to_another_process(listener):
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
