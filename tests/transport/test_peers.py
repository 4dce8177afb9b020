"""Every transport keeps these promises about peers (transport/base.py): how they connect and
end."""

from __future__ import annotations

import threading
import time

import pytest

import transport
from tests.support.transport.transport_pair import (
    encryption_of,
    listener,
    pair,
    transport_name,
    url_for,
)
from tests.support.transport.transport_rig import (
    KEY,
    PATIENCE_S,
    bytes_of,
    noise,
    post,
    take,
    wait_until,
)
from transport.base import PeerLostError

pytestmark = pytest.mark.process

__all__ = ["listener", "pair", "transport_name"]


def test_what_arrived_before_the_end_is_taken_first(pair):
    one, other = pair
    post(one, b"first")
    post(one, b"last words")
    frame = other.poll(PATIENCE_S)
    one.close()
    assert bytes_of(frame) == b"first"
    assert take(other) == b"last words"
    with pytest.raises(PeerLostError):
        other.poll(PATIENCE_S)
    assert other.is_lost
    assert bytes_of(frame) == b"first"
    other.release(frame)
    with pytest.raises(PeerLostError):
        post(other, b"too late")


@pytest.mark.parametrize("which", ["poll", "post"])
def test_close_from_another_thread_ends_a_wait(pair, which):
    one, _ = pair
    ended = []

    def wait():
        try:
            if which == "poll":
                one.poll(PATIENCE_S)
            else:
                while True:
                    post(one, noise(one.max_message_bytes))
        except PeerLostError:
            ended.append(time.monotonic())

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    closed = time.monotonic()
    one.close()
    thread.join(PATIENCE_S)
    assert ended and ended[0] - closed < PATIENCE_S / 2
    one.close()
    assert one.is_lost
    with pytest.raises(PeerLostError):
        one.poll()
    with pytest.raises(PeerLostError):
        post(one, b"x")


def test_a_frame_outlives_close(pair):
    """A frame's memory is freed at its release, so that a computation on it is safe."""
    one, other = pair
    data = noise(30_000)
    post(one, data)
    frame = other.poll(PATIENCE_S)
    one.close()
    other.close()
    assert bytes_of(frame) == data
    other.release(frame)
    with pytest.raises(ValueError, match="held"):
        other.release(frame)


def test_windows_of_different_sizes(listener, transport_name):
    encryption = encryption_of(transport_name)
    one = transport.connect(listener.url, key=KEY, window_bytes=64 << 10, encryption=encryption)
    other = listener.accept(PATIENCE_S)
    assert one.max_message_bytes > other.max_message_bytes
    for _ in range(20):
        post(one, noise(one.max_message_bytes))
        assert take(other) == noise(one.max_message_bytes)
        post(other, noise(other.max_message_bytes))
        assert take(one) == noise(other.max_message_bytes)
    one.close()
    other.close()


def test_a_listener_has_many_peers_and_a_limit(transport_name, tmp_path):
    said = {"key": KEY, "window_bytes": 64 << 10, "encryption": encryption_of(transport_name)}
    listener = transport.listen(url_for(transport_name, tmp_path), max_peers=3, **said)
    ends = []
    for n in range(3):
        ends.append(transport.connect(listener.url, **said))
        ends.append(listener.accept(PATIENCE_S))
        post(ends[-2], b"%d" % n)
    for n in range(3):
        assert take(ends[2 * n + 1]) == b"%d" % n
    with pytest.raises(transport.base.RefusedError, match="3 peers"):
        transport.connect(listener.url, **said)
    wait_until(lambda: listener.num_refused == 1)  # counted after the refusal is sent
    ends[0].close()
    with pytest.raises(PeerLostError):
        ends[1].poll(PATIENCE_S)
    again = transport.connect(listener.url, **said)
    listener.close()
    listener.close()
    assert take_or_lost(again) is None
    post(ends[2], b"accepted ones stay")
    assert take(ends[3]) == b"accepted ones stay"
    assert listener.accept(1.0) is None
    for end in [again, *ends]:
        end.close()


def take_or_lost(endpoint) -> bytes | None:
    try:
        return take(endpoint)
    except PeerLostError:
        return None


def test_accept_gives_up(listener):
    assert listener.accept(0.0) is None
    assert listener.accept(0.05) is None


def test_close_wakes_accept(listener):
    found = []
    thread = threading.Thread(target=lambda: found.append(listener.accept()))
    thread.start()
    time.sleep(0.05)
    listener.close()
    thread.join(PATIENCE_S)
    assert found == [None]
