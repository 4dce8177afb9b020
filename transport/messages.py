"""Messages that are bytes: posting them, and reading a frame in place."""

from __future__ import annotations

import ctypes

from transport.base import Endpoint, Frame, Segment


def view_of(frame: Frame) -> memoryview:
    """Returns a view of the frame's bytes, valid until the frame is released."""
    return memoryview((ctypes.c_char * frame.num_bytes).from_address(frame.address)).cast("B")


def post_bytes(endpoint: Endpoint, message: bytes, timeout_s: float = 10.0) -> None:
    """Posts a message that consists of bytes. Raises what Endpoint.post does."""
    address = ctypes.cast(ctypes.c_char_p(message), ctypes.c_void_p).value
    assert address is not None
    endpoint.post([Segment(address, 1, len(message), len(message))], timeout_s)
