"""The exchange between hosts: each rank posts its columns to every other one over a connection."""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from serve.group.exchange.slots import BufferTooLarge, Ring, check_bounds
from transport.arena import Aborted, ExchangeError, RankMissing
from transport.base import Endpoint, Frame, Segment, TransportError, TransportTimeoutError

_SLICE_S = 0.05  # an abort is seen after this time

_HEAD = struct.Struct("<IIQIIII")
"""Generation, rank, number of the exchange, first row, rows, and the columns' begin and end."""
_ABORT = (1 << 64) - 1  # the number of a message that says that its rank has aborted
_TELL_S = 0.5  # for room in the window of a rank that is to be told of an abort


class WindowExchange:
    """Ranks of several hosts: each posts its columns to every other one over a connection.

    A message that is left over from before an abort has an older generation or number, and is
    dropped.
    """

    def __init__(
        self,
        rank: int,
        endpoints: Mapping[int, Endpoint],
        max_rows: int,
        max_row_bytes: int,
        deadline_s: float = 10.0,
    ) -> None:
        """endpoints has the connection to every other rank. One thread uses begin and complete."""
        self.rank, self.size = rank, len(endpoints) + 1
        if sorted([rank, *endpoints]) != list(range(self.size)):
            raise ValueError(f"rank {rank} has connections to {sorted(endpoints)}")
        self.waited_s = 0.0
        self.num_completed = 0
        self._endpoints = dict(sorted(endpoints.items()))
        self._ring = Ring(max_rows, max_row_bytes)
        self._deadline_s = deadline_s
        self._generation = 0
        self._number = 0
        self._is_aborted = False
        self._has_told = False
        self._kept: dict[int, Frame] = {}  # by rank: a message of this generation

    def begin(self, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
        return self._ring.take(rows, columns, dtype)

    def complete(self, buffer: Tensor, bounds: Sequence[int]) -> None:
        check_bounds(bounds, self.size, buffer.shape[1])
        self._check_aborted()
        self._number += 1
        began = time.monotonic()
        try:
            self._exchange(buffer, bounds, began + self._deadline_s)
        except BaseException:
            self._is_aborted = True
            raise
        finally:
            self.waited_s += time.monotonic() - began
        self.num_completed += 1

    def abort(self) -> None:
        """Makes this rank's `complete` raise Aborted; the others need to be told as well. A rank
        that posts to a full window sees it only after that. Any thread may call it."""
        self._is_aborted = True

    def abort_group(self) -> None:
        """Makes `complete` raise Aborted on all ranks, also one that waits. The thread that uses
        begin and complete calls it."""
        self._is_aborted = True
        if self._has_told:
            return
        self._has_told = True
        head = _HEAD.pack(self._generation, self.rank, _ABORT, 0, 0, 0, 0)
        kept = ctypes.create_string_buffer(head, _HEAD.size)
        segments = [Segment(ctypes.addressof(kept), 1, _HEAD.size, _HEAD.size)]
        for endpoint in self._endpoints.values():
            try:
                endpoint.post(segments, _TELL_S)
            except TransportTimeoutError:  # it learns of it by the lost connection
                endpoint.close()
            except TransportError:  # it is gone
                continue

    def prepare(self) -> None:
        """It is ready."""

    def settle(self) -> None:
        """The host waits in `complete`."""

    def join(self, generation: int) -> None:
        """Begins anew after an abort; the number is larger than that of every earlier one."""
        if generation <= self._generation:
            raise ValueError(f"generation {generation} follows {self._generation}")
        self._generation, self._number, self._is_aborted = generation, 0, False
        self._has_told = False
        self._ring.restart()
        for rank, endpoint in self._endpoints.items():
            self._drop_old(rank, endpoint)

    def close(self) -> None:
        for endpoint in self._endpoints.values():
            endpoint.close()

    def _drop_old(self, rank: int, endpoint: Endpoint) -> None:
        """Frees a window from messages of earlier generations, so that they do not fill it."""
        kept = self._kept.pop(rank, None)
        try:
            if kept is not None:
                endpoint.release(kept)
            while rank not in self._kept and (frame := endpoint.poll(0.0)) is not None:
                if self._is_old(frame):
                    endpoint.release(frame)
                else:
                    self._kept[rank] = frame
        except TransportError:  # the next exchange says so
            return

    def _is_old(self, frame: Frame) -> bool:
        if frame.num_bytes < _HEAD.size:
            return False
        head = ctypes.string_at(frame.address, _HEAD.size)
        return bool(_HEAD.unpack(head)[0] < self._generation)

    def _exchange(self, buffer: Tensor, bounds: Sequence[int], deadline: float) -> None:
        """Posts and receives by turns, a message to and from each rank at a time. A rank never has
        more than two messages in a window that are not taken, so no two wait for each other."""
        rows, begin, end = len(buffer), bounds[self.rank], bounds[self.rank + 1]
        to_send = dict.fromkeys(self._endpoints, rows if end > begin else 0)
        due = {r: rows if bounds[r + 1] > bounds[r] else 0 for r in self._endpoints}
        # A rank without columns sends an empty message: no rank may run ahead of one that still
        # reads.
        is_first = True
        while is_first or any(to_send.values()) or any(due.values()):
            for rank in self._endpoints:
                if is_first or to_send[rank]:
                    to_send[rank] -= self._post(
                        rank, buffer, rows - to_send[rank], bounds, deadline
                    )
            for rank in self._endpoints:
                if is_first or due[rank]:
                    due[rank] -= self._receive(rank, buffer, rows - due[rank], bounds, deadline)
            is_first = False

    def _post(
        self, rank: int, buffer: Tensor, first: int, bounds: Sequence[int], deadline: float
    ) -> int:
        """Sends own columns of some rows from the first one on; returns how many rows."""
        begin, end = bounds[self.rank], bounds[self.rank + 1]
        endpoint, item = self._endpoints[rank], buffer.element_size()
        row_bytes = (end - begin) * item
        count = len(buffer) - first if row_bytes else 0
        if row_bytes and count:
            if row_bytes > endpoint.max_message_bytes - _HEAD.size:
                raise BufferTooLarge(
                    f"a row of {row_bytes} bytes to rank {rank}, whose window takes messages of "
                    f"{endpoint.max_message_bytes} bytes"
                )
            half = (endpoint.max_message_bytes // 2 - _HEAD.size) // row_bytes
            count = min(count, max(1, half))
        head = _HEAD.pack(self._generation, self.rank, self._number, first, count, begin, end)
        kept = ctypes.create_string_buffer(head, _HEAD.size)
        segments = [Segment(ctypes.addressof(kept), 1, _HEAD.size, _HEAD.size)]
        if count:
            stride = buffer.stride(0) * item
            address = buffer.data_ptr() + first * stride + begin * item
            segments.append(Segment(address, count, row_bytes, stride))
        try:
            endpoint.post(segments, max(deadline - time.monotonic(), 1e-3))
        except TransportTimeoutError as error:
            raise RankMissing((rank,), self._deadline_s, str(error)) from error
        except TransportError as error:
            raise RankMissing((rank,), 0.0, str(error)) from error
        return count

    def _receive(
        self, rank: int, buffer: Tensor, first: int, bounds: Sequence[int], deadline: float
    ) -> int:
        """Takes a message with rows from the first one on; returns how many rows."""
        endpoint = self._endpoints[rank]
        while True:
            frame = self._poll(rank, endpoint, deadline)
            try:
                count = self._take(rank, frame, buffer, first, bounds)
            finally:
                endpoint.release(frame)
            if count is not None:
                return count

    def _poll(self, rank: int, endpoint: Endpoint, deadline: float) -> Frame:
        if rank in self._kept:
            return self._kept.pop(rank)
        began = time.monotonic()
        while True:
            self._check_aborted()
            left = deadline - time.monotonic()
            try:
                frame = endpoint.poll(min(max(left, 0.0), _SLICE_S))
            except TransportError as error:
                raise RankMissing((rank,), time.monotonic() - began, str(error)) from error
            if frame is not None:
                return frame
            if left <= 0:
                raise RankMissing((rank,), self._deadline_s)

    def _take(
        self, rank: int, frame: Frame, buffer: Tensor, first: int, bounds: Sequence[int]
    ) -> int | None:
        """Copies a message's columns into the buffer; returns None for one that is left over."""
        if frame.num_bytes < _HEAD.size:
            raise ExchangeError(f"rank {rank} sent {frame.num_bytes} bytes without a head")
        generation, sender, number, at, count, begin, end = _HEAD.unpack(
            ctypes.string_at(frame.address, _HEAD.size)
        )
        if (generation, number) < (self._generation, self._number):
            return None
        if generation == self._generation and number == _ABORT:
            raise Aborted(f"rank {rank} has aborted generation {generation}")
        if generation > self._generation:
            raise Aborted(f"rank {rank} is in generation {generation}, not {self._generation}")
        size = count * (end - begin) * buffer.element_size()
        here = (sender, number, at, begin, end, frame.num_bytes)
        due = (rank, self._number, first, bounds[rank], bounds[rank + 1], _HEAD.size + size)
        is_short = count == 0 and first < len(buffer) and end > begin
        if here != due or first + count > len(buffer) or is_short:
            raise ExchangeError(
                f"rank {rank} sent (rank, number, row, begin, end, bytes) {here}, {due} was due"
            )
        if size:
            raw = (ctypes.c_char * size).from_address(frame.address + _HEAD.size)
            columns = torch.frombuffer(raw, dtype=buffer.dtype).view(count, end - begin)
            buffer[first : first + count, begin:end].copy_(columns)
        return int(count)

    def _check_aborted(self) -> None:
        if self._is_aborted:
            raise Aborted(f"generation {self._generation} is aborted")
