"""Messages between engine and memory node, as segments that are posted from where they lie."""

from __future__ import annotations

import ctypes

from torch import Tensor

from memory.nodes.wire import HEADER_BYTES, Header
from transport.base import Endpoint, Segment


def segment_of(tensor: Tensor) -> Segment:
    """Returns a dense tensor as one segment."""
    assert tensor.is_contiguous()
    size_bytes = tensor.numel() * tensor.element_size()
    return Segment(tensor.data_ptr(), 1, size_bytes, size_bytes)


class Outgoing:
    """Posts messages whose headers share one buffer."""

    def __init__(self) -> None:
        self._buffer = bytearray(HEADER_BYTES)
        self._pin = (ctypes.c_char * HEADER_BYTES).from_buffer(self._buffer)
        address = ctypes.addressof(self._pin)
        self._segment = Segment(address, 1, HEADER_BYTES, HEADER_BYTES)

    def post(self, endpoint: Endpoint, header: Header, parts: list[Segment]) -> None:
        header.pack_into(self._buffer)
        endpoint.post([self._segment, *parts])
