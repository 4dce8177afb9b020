"""Virtual time, and connections to memory nodes with every kind of fault.

The engine is the main thread: while it waits, events run until what it waits for has come. Nodes
live in the events. Nothing here reads a real clock, so that a seed determines its schedule.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import random
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future

from transport.base import (
    HEARTBEAT_S,
    LOST_AFTER_S,
    CorruptMessageError,
    Frame,
    Peer,
    PeerLostError,
    TransportTimeoutError,
)

WINDOW_BYTES = 256 << 10
_RESET_S = 0.05  # until the peer of a dead process notices


class World:
    """A clock and the events that are due."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.owed_s = 0.0  # time of connection attempts made side by side
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()
        self._is_inside = False

    def clock(self) -> float:
        return self.now

    def after(self, delay_s: float, act: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._numbers), act))

    def wait(self, seconds: float, done: Callable[[], bool] = lambda: False) -> None:
        """Lets the time pass, or less if `done` is true earlier."""
        assert not self._is_inside, "an event waits"
        end = self.now + seconds
        while not done() and self._events and self._events[0][0] <= end:
            self.now, _, act = heapq.heappop(self._events)
            self._is_inside = True
            act()
            self._is_inside = False
        if not done():
            self.now = end


class SequentialExecutor(Executor):
    """Replaces threads that connect side by side; together they take as long as the slowest."""

    def __init__(self, world: World) -> None:
        self._world = world

    def submit(self, fn, /, *args, **kwargs):
        future: Future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self, wait=True, *, cancel_futures=False):
        owed_s, self._world.owed_s = self._world.owed_s, 0.0
        self._world.wait(owed_s)


class SimEndpoint:
    """One end of a connection. gets_through: whether the network lets its bytes through."""

    def __init__(self, world: World, peer: Peer, is_engine: bool) -> None:
        self.peer = peer
        self.max_message_bytes = WINDOW_BYTES // 2
        self.on_arrival: Callable[[], object] = lambda: None
        self.other: SimEndpoint
        # changes the next sent message, once
        self.mutate: Callable[[bytes], list[bytes]] | None = None
        self.flip = False  # flips a bit of the next message in flight
        self.is_held = False  # its messages stay in flight
        self.gets_through: Callable[[], bool] = lambda: True
        self.delay_s: Callable[[], float] = lambda: 0.0
        self.was_used = False
        self._world = world
        self._is_engine = is_engine
        self._wire: deque[tuple[float, bytes | None, int]] = deque()
        self._inbox: deque[tuple[bytes, int]] = deque()
        self._frames: dict[int, ctypes.Array] = {}
        self._num_taken = self._num_posted = self._bytes_out = 0
        self.is_closed = self._has_lost = False
        self._silent_since: float | None = None
        self._silence = 0  # counts up when a silence begins or ends; odd means silent

    # ---- the Endpoint protocol

    def post(self, segments, timeout_s: float = 10.0) -> int:
        parts = [
            ctypes.string_at(s.address + row * s.stride_bytes, s.row_bytes)
            for s in segments
            for row in range(s.num_rows)
        ]
        message = b"".join(parts)
        if len(message) > self.max_message_bytes:
            raise ValueError(f"{len(message)} bytes")
        if self._is_engine and not self._has_room(len(message)):
            self._world.wait(timeout_s, lambda: self.is_lost or self._has_room(len(message)))
        if self.is_lost:
            raise PeerLostError("the peer is lost")
        if self._is_engine and not self._has_room(len(message)):
            raise TransportTimeoutError("no room in the peer's window")
        sent = [message]
        if self.mutate is not None:
            sent, self.mutate = self.mutate(message), None
        for item in sent:
            self._send(item)
        self._num_posted += 1
        return self._num_posted

    def poll(self, timeout_s: float = 0.0) -> Frame | None:
        if self.is_closed:
            raise PeerLostError("closed")
        if self._is_engine and timeout_s:
            self._world.wait(timeout_s, lambda: bool(self._inbox) or self.is_lost)
        if self._inbox:
            message, checksum = self._inbox.popleft()
            if zlib.crc32(message) != checksum:
                self.lose()
                self.other.lose_soon()
                raise CorruptMessageError("not what was sent")
            self._num_taken += 1
            self.was_used = True
            memory = ctypes.create_string_buffer(message, len(message))
            self._frames[self._num_taken] = memory
            return Frame(ctypes.addressof(memory), len(message), self._num_taken)
        if self.is_lost:
            raise PeerLostError("the peer is lost")
        return None

    def release(self, frame: Frame) -> None:
        memory = self._frames.pop(frame.number)
        self.other._bytes_out -= len(memory)

    @property
    def silence_s(self) -> float:
        return 0.0 if self._silent_since is None else self._world.now - self._silent_since

    @property
    def is_lost(self) -> bool:
        return self.is_closed or self._has_lost

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        self._inbox.clear()
        self._frames.clear()
        self._put_on_wire(None, 0)

    # ---- delivery and faults

    @property
    def num_waiting(self) -> int:
        return len(self._inbox)

    def _has_room(self, num_bytes: int) -> bool:
        return self._bytes_out + num_bytes <= WINDOW_BYTES

    def _send(self, message: bytes) -> None:
        checksum = zlib.crc32(message)
        if self.flip:
            self.flip = False
            bit = self._world.random.randrange(len(message) * 8)
            changed = bytearray(message)
            changed[bit // 8] ^= 1 << bit % 8
            message = bytes(changed)
        self._bytes_out += len(message)
        self._put_on_wire(message, checksum)

    def _put_on_wire(self, message: bytes | None, checksum: int) -> None:
        at = self._world.now + self.delay_s()
        if self._wire:
            at = max(at, self._wire[-1][0])
        self._wire.append((at, message, checksum))
        self._world.after(at - self._world.now, self.pump)

    def pump(self) -> None:
        """Delivers the messages that are due, if the network lets them through."""
        while self._wire and self._wire[0][0] <= self._world.now + 1e-9:
            if self.is_held or not self.gets_through():
                return
            _, message, checksum = self._wire.popleft()
            self.other._receive(message, checksum)

    def _receive(self, message: bytes | None, checksum: int) -> None:
        if self.is_lost:
            return
        if message is None:
            self._has_lost = True
        else:
            self._inbox.append((message, checksum))
        self.on_event()

    def on_event(self) -> None:
        """Called when a message or the end has come; the owner of this end replaces it."""

    def lose(self) -> None:
        """The peer is gone at once. Messages that arrived earlier can still be taken."""
        if not self.is_lost:
            self._has_lost = True
            self._wire.clear()
            self.on_event()

    def lose_soon(self) -> None:
        self._world.after(_RESET_S * self._world.random.random(), self.lose)

    def hear(self, hears: bool) -> None:
        """Sets whether heartbeats arrive; without them the peer is lost after a while."""
        if hears == (self._silence % 2 == 0):
            return
        self._silence += 1
        self._silent_since = None if hears else self._world.now
        if not hears:
            now_number = self._silence
            late_s = LOST_AFTER_S + self._world.random.random() * HEARTBEAT_S
            self._world.after(late_s, lambda: self._lose_if_silent(now_number))

    def _lose_if_silent(self, number: int) -> None:
        if self._silence == number:
            self.lose()


def connected(world: World, node_peer: Peer) -> tuple[SimEndpoint, SimEndpoint]:
    """Returns the engine's end and the node's."""
    engine = SimEndpoint(world, node_peer, True)
    node = SimEndpoint(world, Peer("the engine", {}), False)
    engine.other, node.other = node, engine
    return engine, node
