"""The connection over which a stage of a pipeline sends its hidden states to the next one."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import torch
from torch import Tensor

from serve.group.links import messages
from serve.group.links.messages import HEADER_BYTES, Kind
from transport import connect
from transport.base import Endpoint, Listener, Segment, TransportError, TransportTimeoutError
from transport.messages import view_of

_SLICE_S = 0.25
# Lost peers are seen much earlier. A chunk behind a million tokens may take a stage minutes.
_RECEIVE_S = 1800.0
_SEND_S = 60.0  # the next stage takes messages between two steps, and there is room for several
_ACCEPT_S = 20.0
_ACCEPT_SLICE_S = 0.05
IsOver = Callable[[], bool]
_TYPES = (torch.float32, torch.bfloat16, torch.float16)


class StageFailed(Exception):
    """The stage before has no result of a step."""


class StageLost(StageFailed):
    """A connection between ranks is lost."""


class StageLink:
    """One end of the connection. One thread uses it."""

    def __init__(self, endpoint: Endpoint, epoch: int) -> None:
        self.endpoint = endpoint
        self.epoch = epoch
        self.waited_s = 0.0

    @classmethod
    def connect(cls, url: str, key: bytes, epoch: int, window_bytes: int) -> StageLink:
        """Connects to the stage before. Raises TransportError."""
        info = {"epoch": epoch}
        return cls(connect(url, key=key, info=info, window_bytes=window_bytes), epoch)

    def send(self, number: int, hidden: Tensor) -> None:
        """Sends the result of a step, [T, hidden]. Raises TransportError."""
        hidden = hidden.contiguous()
        rows, size = len(hidden), hidden.numel() * hidden.element_size()
        kind = _TYPES.index(hidden.dtype)
        head = messages.pack(Kind.HIDDEN, self.epoch, number, rows, bytes((0, kind)) + bytes(6))
        self._post(head, [Segment(hidden.data_ptr(), 1, size, size)] if size else [])

    def send_failure(self, number: int, text: str, *, is_loss: bool) -> None:
        """Says that a step has no result. is_loss: because a connection is lost. Raises
        TransportError."""
        body = bytes((2 if is_loss else 1, 0)) + bytes(6) + text.encode()[:1000]
        self._post(messages.pack(Kind.HIDDEN, self.epoch, number, 0, body), [])

    def _post(self, head: bytes, segments: list[Segment]) -> None:
        kept = ctypes.create_string_buffer(head, len(head))
        first = Segment(ctypes.addressof(kept), 1, len(head), len(head))
        self.endpoint.post([first, *segments], _SEND_S)

    def receive(self, number: int, rows: int, is_over: IsOver = lambda: False) -> Tensor:
        """Returns the result of a step, [rows, hidden]. is_over: whether to give up waiting.

        Raises StageFailed, TransportError, and TransportTimeoutError after half an hour.
        """
        began_s = time.monotonic()
        try:
            while time.monotonic() < began_s + _RECEIVE_S:
                frame = self.endpoint.poll(_SLICE_S)
                if frame is None:
                    if is_over():
                        raise StageFailed(f"step {number} is given up: a rank is lost")
                    continue
                message = None
                try:
                    message = messages.read(view_of(frame))
                    is_due = (message.epoch, message.number) == (self.epoch, number)
                    if message.kind is Kind.HIDDEN and is_due:
                        return _hidden(message, rows)
                except messages.MessageError as error:
                    raise TransportError(str(error)) from error
                finally:
                    message = None  # its view must go before the frame
                    self.endpoint.release(frame)
        finally:
            self.waited_s += time.monotonic() - began_s
        raise TransportTimeoutError(f"no hidden states of step {number} for {_RECEIVE_S:.0f} s")

    def close(self) -> None:
        self.endpoint.close()


class StageListener:
    """Accepts the next stage, once in each epoch."""

    def __init__(self, listener: Listener) -> None:
        self.url = listener.url
        self._listener = listener
        self._newer: Endpoint | None = None  # of an epoch that this rank has not been told of

    def accept(self, epoch: int, is_over: IsOver = lambda: False) -> StageLink:
        """Waits for the next stage of this epoch. is_over: whether to give up waiting. Raises
        TransportError."""
        end_s = time.monotonic() + _ACCEPT_S
        while time.monotonic() < end_s and not is_over():
            endpoint = self._newer or self._listener.accept(_ACCEPT_SLICE_S)
            self._newer = None
            theirs = None if endpoint is None else endpoint.peer.info.get("epoch")
            if endpoint is not None and theirs == epoch:
                return StageLink(endpoint, epoch)
            if endpoint is not None and isinstance(theirs, int) and theirs > epoch:
                self._newer = endpoint
                break
            if endpoint is not None:  # left over from an earlier epoch
                endpoint.close()
        raise TransportTimeoutError(f"the next stage did not connect in epoch {epoch}")

    def close(self) -> None:
        if self._newer is not None:
            self._newer.close()
        self._listener.close()


def _hidden(message: messages.Message, rows: int) -> Tensor:
    """Returns a copy of a message's rows."""
    body = message.body
    if len(body) < 8 or body[1] >= len(_TYPES):
        raise TransportError("hidden states without a head")
    if body[0]:
        failure = StageLost if body[0] == 2 else StageFailed
        raise failure(bytes(body[8:]).decode(errors="replace"))
    dtype = _TYPES[body[1]]
    if message.rows != rows or (len(body) - 8) % (rows * dtype.itemsize):
        raise TransportError(f"{message.rows} rows of hidden states instead of {rows}")
    return torch.frombuffer(bytearray(body[8:]), dtype=dtype).view(rows, -1)


def largest_hidden(rows: int, hidden_size: int) -> int:
    """Returns the size of the largest message of hidden states."""
    return HEADER_BYTES + 8 + rows * hidden_size * 4
