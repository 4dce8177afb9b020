"""A receiver checks every byte of a window before it uses it."""

from __future__ import annotations

import random
import struct
from ctypes import c_uint8

import numpy as np
import pytest

from tests.support.transport.transport_peer import IMPOSSIBLE, crc32c, descriptor
from tests.support.transport.transport_rig import WINDOW_BYTES, noise, segment
from transport import _windows
from transport.base import CorruptMessageError, Segment

HEAD_BYTES = 40  # size of a descriptor's head; the rest has no meaning
NUMBER_AT = 8 * 32  # in bits


# ---- checksums


def test_crc32c_of_the_standard():
    """The values are those of RFC 3720 B.4 and the usual check value."""
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
    """The three streams are joined to one at any alignment, and a copy has the same checksum."""
    data = np.frombuffer(noise(size + 3, size), np.uint8)[3:]
    expected = slow_crc32c(data.tobytes())
    copied = np.zeros(size + 16, np.uint8)
    assert _windows.crc32c(data.ctypes.data, size) == expected
    assert _windows.gather(copied.ctypes.data + 5, [segment(data)]) == expected
    assert copied[5 : 5 + size].tobytes() == data.tobytes()
    assert not copied[:5].any() and not copied[5 + size :].any()
    half = _windows.crc32c(data.ctypes.data, size // 2)
    assert _windows.crc32c(data.ctypes.data + size // 2, size - size // 2, half) == expected


# ---- a window with corrupt bytes


class OpenWindow:
    """The receiving end of a pair in memory, with the window that it reads open to the test."""

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


@pytest.mark.row("M9")
def test_every_flipped_bit_of_a_head_is_detected():
    """The head holds the payload's position and length, the checksums and the number."""
    data = noise(1000)
    for bit in range(8 * HEAD_BYTES):
        window = OpenWindow()
        window.sender.post([segment(np.frombuffer(data, np.uint8))], 1.0)
        window.slot(1)[bit // 8] ^= 1 << bit % 8
        if bit == NUMBER_AT:  # 1 became 0, which says that no message has come yet
            assert window.receiver.poll(0.0) is None
            continue
        with pytest.raises(CorruptMessageError):
            window.receiver.poll(0.0)
        assert window.receiver.is_lost and window.sender.is_lost


@pytest.mark.row("M9")
def test_every_flipped_bit_of_a_payload_is_detected():
    data = noise(100)
    for bit in range(8 * len(data)):
        window = OpenWindow()
        window.sender.post([segment(np.frombuffer(data, np.uint8))], 1.0)
        window.bytes(_windows.PAYLOAD_AT, 100)[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptMessageError, match="checksum"):
            window.receiver.poll(0.0)


@pytest.mark.parametrize("what", IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_a_head_with_valid_checksums_and_impossible_fields(what):
    window = OpenWindow()
    window.write(1, descriptor(1, **what))
    with pytest.raises(CorruptMessageError):
        window.receiver.poll(0.0)


@pytest.mark.parametrize("number", [2, 63, 65, 2**63, 2**64 - 1])
@pytest.mark.row("M10")
def test_a_number_out_of_order(number):
    window = OpenWindow()
    window.write(1, descriptor(number))
    with pytest.raises(CorruptMessageError, match="1 is due"):
        window.receiver.poll(0.0)


@pytest.mark.row("M10")
def test_a_repeated_descriptor_is_no_message():
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
def test_impossible_credit(consumed):
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


# ---- posting


def test_invalid_segments_are_refused():
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
