"""Windows written through a mirror (transport/csrc/mirrored_channel.h); a copy that the test
triggers stands in for the device."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
import time

import pytest

from tests.support.transport.transport_rig import PATIENCE_S, post
from transport._windows import DESCRIPTOR_SENT_BYTES, PAYLOAD_AT, Link, Memory, MirroredChannel
from transport.base import CorruptMessageError, PeerLostError, TransportTimeoutError

WINDOW_BYTES = 64 << 10


class Copier:
    """Writes into the other end's window, at once or when `deliver` is called, and if asked for,
    descriptors before their payloads."""

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
def test_credits_are_sent_without_messages(is_ordered):
    """The receiver sends no message, so it must report what it has freed."""
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


def test_a_descriptor_before_its_payload_is_not_taken():
    one, other = mirrored_pair(is_ordered=False)
    one.writer.is_held = True
    post(one.channel, b"later")
    assert other.channel.poll(0.0) is None
    assert other.channel.poll(0.02) is None
    assert other.writer.num_sleeps >= 1
    one.writer.deliver()
    assert take(other.channel) == b"later"


def test_a_device_that_reorders_writes_is_detected():
    one, other = mirrored_pair(is_ordered=True)
    one.writer.is_held = True
    post(one.channel, b"later")
    with pytest.raises(CorruptMessageError, match="checksum"):
        other.channel.poll(PATIENCE_S)
    assert one.channel.is_lost and other.channel.is_lost


def test_messages_are_limited_to_what_the_device_takes_at_once():
    one, _ = mirrored_pair(is_ordered=True, max_message_bytes=100)
    assert one.channel.max_message_bytes == 100
    with pytest.raises(ValueError, match="101"):
        post(one.channel, b"x" * 101)


def test_an_error_of_the_writer_reaches_the_sender():
    one, _ = mirrored_pair(is_ordered=True)
    one.writer.error = "the cable is cut"
    with pytest.raises(PeerLostError, match="cable"):
        post(one.channel, b"x")


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        ranges = [line.split(" ", 1)[0].split("-") for line in maps]
    return any(int(first, 16) <= address < int(end, 16) for first, end in ranges)


def test_a_message_whose_credit_fails_is_not_held_any_more():
    """It counted as held, so that the windows stayed after the end was closed."""
    one, other = mirrored_pair(is_ordered=True)
    address, one.writer.target = one.writer.target.address, None
    one.writer.copy = lambda offset, num_bytes: ctypes.memmove(
        address + offset, one.writer.mirror.address + offset, num_bytes
    )

    def fail():
        raise PeerLostError("the cable is cut")

    other.writer.tell = fail
    for _ in range(2):  # half of the window: a credit is due
        post(one.channel, b"x" * one.channel.max_message_bytes)
    take(other.channel)
    with pytest.raises(PeerLostError, match="cable"):
        take(other.channel)
    with pytest.raises(ValueError, match="not held"):
        other.channel.release(2)
    assert is_mapped(address)
    other.channel.close()
    assert not is_mapped(address)


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_wait_ends_with_the_link(is_ordered):
    one, other = mirrored_pair(is_ordered)
    post(one.channel, b"last")
    threading.Timer(0.05, one.link.end, ("gone",)).start()
    assert take(other.channel) == b"last"
    with pytest.raises(PeerLostError):
        other.channel.poll(PATIENCE_S)
