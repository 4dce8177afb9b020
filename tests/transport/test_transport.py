"""Every transport keeps these promises about messages (transport/base.py)."""

from __future__ import annotations

import random
import threading
import time

import numpy as np
import pytest

import transport
from tests.support.transport.transport_pair import (
    TRANSPORTS,
    encryption_of,
    listener,
    pair,
    transport_name,
    url_for,
)
from tests.support.transport.transport_rig import (
    KEY,
    PATIENCE_S,
    WINDOW_BYTES,
    bytes_of,
    fill,
    noise,
    post,
    segment,
    take,
)
from transport.base import Frame, Segment, TransportTimeoutError

__all__ = ["listener", "pair", "transport_name"]


def test_each_end_knows_its_peer(pair):
    one, other = pair
    assert one.peer.info == {"we": "serve"}
    assert other.peer.info == {"we": "connect"}
    assert not one.is_lost and not other.is_lost


def test_a_message_arrives_as_it_was_sent(pair):
    one, other = pair
    for seed, size in enumerate([0, 1, 2, 7, 63, 64, 65, 767, 768, 769, 4095, 6143, 6145, 40_000]):
        data = noise(size, seed)
        assert post(one, data) == seed + 1
        frame = other.poll(PATIENCE_S)
        assert frame is not None and frame.number == seed + 1
        assert bytes_of(frame) == data
        other.release(frame)


def test_the_largest_message_and_one_byte_more(pair):
    one, other = pair
    assert one.max_message_bytes >= WINDOW_BYTES // 8
    data = noise(one.max_message_bytes)
    post(one, data)
    assert take(other) == data
    with pytest.raises(ValueError, match="bytes"):
        post(one, data + b"x")
    post(one, b"still in order")
    assert take(other) == b"still in order"


def test_poll_returns_none_at_once_and_after_its_timeout(pair):
    one, _ = pair
    assert one.poll() is None
    began = time.monotonic()
    assert one.poll(0.05) is None
    assert time.monotonic() - began >= 0.05


@pytest.mark.timing
def test_poll_waits_for_what_comes_later(pair):
    one, other = pair
    for _ in range(3):
        timer = threading.Timer(0.05, post, (one, b"late"))
        began = time.monotonic()
        timer.start()
        assert take(other) == b"late"
        assert time.monotonic() - began < 0.5  # a sleeping poll is woken
        timer.join()


def test_many_in_flight_in_order(pair):
    one, other = pair
    for n in range(50):
        post(one, noise(n * 13, n))
    for n in range(50):
        assert take(other) == noise(n * 13, n)


def test_strided_segments_are_sent_one_after_the_other(pair):
    one, other = pair
    matrix = np.frombuffer(noise(64 * 300), np.uint8).reshape(64, 300)
    tail = np.arange(1000, dtype=np.float32)
    part = matrix[3:60:2, 10:210]
    post_segments = [
        Segment(part.ctypes.data, part.shape[0], part.shape[1], part.strides[0]),
        Segment(tail.ctypes.data, 0, 4, 4),
        segment(tail),
        Segment(matrix.ctypes.data + 63 * 300, 64, 300, -300),
    ]
    one.post(post_segments, PATIENCE_S)
    assert take(other) == part.tobytes() + tail.tobytes() + matrix[::-1].tobytes()


def test_large_strided_segments(pair):
    one, other = pair
    rows = one.max_message_bytes // 24
    matrix = np.frombuffer(noise(rows * 40), np.uint8).reshape(rows, 40)
    one.post([Segment(matrix.ctypes.data, rows, 24, 40)], PATIENCE_S)
    assert take(other) == matrix[:, :24].tobytes()


def test_no_segments_are_an_empty_message(pair):
    one, other = pair
    one.post([], PATIENCE_S)
    assert take(other) == b""


def test_the_sender_may_reuse_its_memory(pair):
    one, other = pair
    data = np.frombuffer(noise(30_000), np.uint8).copy()
    before = data.tobytes()
    one.post([segment(data)], PATIENCE_S)
    data[:] = 0
    assert take(other) == before


def test_post_waits_for_room_and_times_out(pair):
    one, other = pair
    data = noise(one.max_message_bytes)
    num_posted = fill(one, data)
    assert 2 <= num_posted <= WINDOW_BYTES // len(data)
    for _ in range(num_posted):
        assert take(other) == data
    post(one, b"room again")
    assert take(other) == b"room again"


def test_slots_are_limited(pair):
    one, other = pair
    num_posted = fill(one, b"")
    assert num_posted >= 8
    for _ in range(num_posted):
        assert take(other) == b""


def test_a_waiting_post_continues_when_there_is_room(pair):
    one, other = pair
    data = noise(one.max_message_bytes)
    received = []

    def consume():
        for _ in range(40):
            received.append(take(other) == data)

    thread = threading.Thread(target=consume)
    thread.start()
    for _ in range(40):
        post(one, data)
    thread.join()
    assert received == [True] * 40


def test_frames_stay_until_released_in_any_order(pair):
    """The window is nearly full all the time."""
    one, other = pair
    num_messages, most = 300, one.max_message_bytes // 2
    source = random.Random(3)
    sizes = [source.randrange(most) for _ in range(num_messages)]
    held: list[tuple[Frame, bytes]] = []
    sent = taken = 0
    while taken < num_messages or held:
        while sent < num_messages and sent - taken < 6:
            try:
                post(one, noise(sizes[sent], sent), timeout_s=0.01)
            except TransportTimeoutError:
                break
            sent += 1
        if sent > taken:
            frame = other.poll(PATIENCE_S)
            assert frame is not None and frame.number == taken + 1
            held.append((frame, noise(sizes[taken], taken)))
            taken += 1
        while len(held) > 8 or (held and sent == taken):
            frame, data = held.pop(source.randrange(len(held)))
            assert bytes_of(frame) == data
            other.release(frame)


def test_a_frame_is_released_once(pair):
    one, other = pair
    post(one, b"x")
    frame = other.poll(PATIENCE_S)
    other.release(frame)
    with pytest.raises(ValueError, match="held"):
        other.release(frame)
    with pytest.raises(ValueError, match="held"):
        other.release(Frame(frame.address, 1, 2))


def run_both(work, pair) -> None:
    """Runs work(end) for each of the two ends, in a thread of its own."""
    failures = []

    def run(end):
        try:
            work(end)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(end,)) for end in pair]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_both_directions_with_full_windows(pair):
    """Each end posts most of what its peer's window holds, then takes the messages."""

    def work(end):
        size = end.max_message_bytes
        for n in range(5):
            for k in range(3):
                post(end, noise(size - k, n))
            for k in range(3):
                assert take(end) == noise(size - k, n)

    run_both(work, pair)


def test_both_post_more_than_any_buffer_holds(transport_name, tmp_path):
    """A posting end goes on receiving, or both would wait without end."""
    encryption = encryption_of(transport_name)
    listener = transport.listen(url_for(transport_name, tmp_path), key=KEY, encryption=encryption)
    one = transport.connect(listener.url, key=KEY, encryption=encryption)
    ends = [one, listener.accept(PATIENCE_S)]
    data = noise(ends[0].max_message_bytes)
    taken = []

    def work(end):
        for _ in range(3):
            post(end, data)
        taken.extend([take(end) == data for _ in range(3)])

    run_both(work, ends)
    assert taken == [True] * 6
    for end in (*ends, listener):
        end.close()


@pytest.mark.timing
def test_a_peer_that_is_busy_for_long_is_not_lost(tmp_path):
    """The peer neither polls nor posts for a while, and posts to it wait. Its heartbeats arrive.
    All transports run at once, to wait once."""
    pairs, threads, closing = [], [], []
    for name in TRANSPORTS:
        encryption = encryption_of(name)
        listener = transport.listen(url_for(name, tmp_path), key=KEY, encryption=encryption)
        one = transport.connect(listener.url, key=KEY, encryption=encryption)
        other = listener.accept(PATIENCE_S)
        pairs.append((one, other))
        closing += [one, other, listener]
        data = noise(one.max_message_bytes)
        thread = threading.Thread(target=post_all, args=(one, data, 5))
        thread.start()
        threads.append(thread)
    time.sleep(1.3)
    for one, other in pairs:
        assert one.silence_s < 1.0 and other.silence_s < 1.0
        assert [take(other) == data for _ in range(5)] == [True] * 5
        assert not one.is_lost and not other.is_lost
    for thread in threads:
        thread.join()
    for end in closing:
        end.close()


def post_all(end, data: bytes, count: int) -> None:
    for _ in range(count):
        post(end, data)


def test_random_traffic_both_ways(pair):
    """Messages of all sizes, several in flight, go round the ring many times."""
    num_messages = 400
    source = random.Random(1)
    sizes = [
        min(int(source.paretovariate(0.5)), pair[0].max_message_bytes) for _ in range(num_messages)
    ]

    def work(end):
        sent = taken = 0
        while taken < num_messages:
            if sent < num_messages and sent - taken < 5:
                post(end, noise(sizes[sent], sent))
                sent += 1
            must_wait = sent - taken >= 5 or sent == num_messages
            frame = end.poll(PATIENCE_S if must_wait else 0.0)
            if frame is not None:
                assert bytes_of(frame) == noise(sizes[taken], taken)
                end.release(frame)
                taken += 1

    run_both(work, pair)
