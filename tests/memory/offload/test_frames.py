"""Frames that are taken are each there once, and their memory comes when it is used."""

from __future__ import annotations

import ctypes
import errno
import random

import numpy as np
import pytest

from memory.offload.frames import Frames

FRAME = 5 * 4096


@pytest.fixture
def frames():
    made = Frames(FRAME, 100)
    yield made
    made.close()


def test_what_is_taken_is_nobody_elses(frames):
    dice = random.Random(1)
    taken = np.empty(0, dtype=np.int64)
    for _ in range(200):
        more = frames.take(dice.randrange(frames.num_free + 1))
        taken = np.concatenate((taken, more))
        assert len(np.unique(taken)) == len(taken) == 100 - frames.num_free
        assert frames.used_bytes == len(taken) * FRAME
        numbers, rest = np.divmod(taken - frames.address, FRAME)
        assert (rest == 0).all() and (numbers >= 0).all() and (numbers < 100).all()
        dice.shuffle(taken)
        back = dice.randrange(len(taken) + 1)
        frames.give_back(taken[:back])
        taken = taken[back:]


def test_frames_hold_what_is_written_to_them(frames):
    places = frames.take(100)
    for number, place in enumerate(places.tolist()):
        ctypes.memset(place, number, FRAME)
    for number, place in enumerate(places.tolist()):
        assert ctypes.string_at(place, FRAME) == bytes([number]) * FRAME


def test_no_more_frames_than_there_are(frames):
    places = frames.take(99)
    with pytest.raises(AssertionError):
        frames.take(2)
    frames.give_back(places)
    with pytest.raises(AssertionError):
        frames.give_back(np.zeros(1, dtype=np.int64))


def test_memory_comes_when_it_is_used(frames):
    """What is not used takes none, and the lowest frames are used first."""
    before = resident_bytes(frames.address)
    (place,) = frames.take(1).tolist()
    assert before == 0 and place == frames.address
    ctypes.memset(place, 1, FRAME)
    assert FRAME <= resident_bytes(frames.address) <= 2 << 20


def resident_bytes(address):
    """Returns the memory of the mapping with this address, as the system counts it."""
    with open("/proc/self/smaps") as lines:
        for line in lines:
            first, dash, rest = line.split()[0].partition("-")
            if dash and int(first, 16) <= address < int(rest, 16):
                found = next(line for line in lines if line.startswith("Rss:"))
                return int(found.split()[1]) << 10
    raise AssertionError("nothing is mapped there")


def test_more_addresses_than_there_are():
    with pytest.raises(OSError, match="Cannot allocate memory") as raised:
        Frames(4096, 1 << 36)
    assert raised.value.errno == errno.ENOMEM
