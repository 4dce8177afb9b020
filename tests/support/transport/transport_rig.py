"""Makes, sends and takes messages for tests of the transports."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable

import numpy as np

from transport.base import Endpoint, Frame, Segment, TransportTimeoutError

KEY = b"a key for tests, 32 bytes or so."
WINDOW_BYTES = 256 << 10
PATIENCE_S = 20.0


def segment(array: np.ndarray) -> Segment:
    return Segment(array.ctypes.data, 1, array.nbytes, array.nbytes)


def post(endpoint: Endpoint, data: bytes, timeout_s: float = PATIENCE_S) -> int:
    return endpoint.post([segment(np.frombuffer(data, np.uint8))], timeout_s)


def bytes_of(frame: Frame) -> bytes:
    return ctypes.string_at(frame.address, frame.num_bytes)


def take(endpoint: Endpoint, timeout_s: float = PATIENCE_S) -> bytes:
    """Returns the next message and releases its frame."""
    frame = endpoint.poll(timeout_s)
    assert frame is not None
    data = bytes_of(frame)
    endpoint.release(frame)
    return data


def fill(endpoint: Endpoint, data: bytes) -> int:
    """Posts until there is no room; returns how many were posted."""
    for num_posted in range(1000):
        try:
            post(endpoint, data, timeout_s=0.05)
        except TransportTimeoutError:
            return num_posted
    raise AssertionError("a window that is never full")


def noise(num_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.002)
