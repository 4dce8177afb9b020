"""Publishes events of the K/V cache over ZeroMQ, as vLLM does, from a thread of its own.

A message has three frames: the topic, a number in 8 bytes and the batch [time, events, 0] as
msgpack. Numbers begin at the start's time in microseconds, so that a restart is a gap to whoever
counts. A follower gets the whole index when it subscribes, in a batch that all others get as well,
and when it asks the replay socket for what it has missed: an answer with old batches would end at
the size of their buffer, one with the index is always complete.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from memory.prefix.block_recorder import AllRemoved, BlockRecorder, PageEvent
from serve.errors import ConfigError
from serve.events.blocks import Event, PublishedBlocks, as_map
from serve.kept import Kept

if TYPE_CHECKING:
    import zmq

logger = logging.getLogger(__name__)

_GATHER_S = 0.1  # changes of so long a time share a message: each message has its own cost
_SNAPSHOT_S = 1.0  # the shortest time between two snapshots for new subscribers
_LINGER_MS = 1000  # how long the last messages may take to leave
_MAX_EVENTS = 2048  # pages of one message
_MAX_QUEUED = 10_000  # messages for a follower that is slower; more are dropped, and it sees a gap
_MAX_REQUEST_BYTES = 1024
_END = (-1).to_bytes(8, "big", signed=True)  # vLLM's number of the message that ends an answer
_EVERY_HOST = ("*", "0.0.0.0", "[::]")


class EventPublisher:
    """The sockets and their thread. It follows the index that the recorder listens to."""

    def __init__(
        self,
        recorder: BlockRecorder,
        endpoint: str,
        topic: str,
        replay_endpoint: str | None = None,
        *,
        as_maps: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Opens the sockets. Raises ConfigError. replay_endpoint: None takes the port after the
        endpoint's, where it has one. as_maps: events, and the frames of an answer, are those of
        vLLM's later versions."""
        try:
            import msgpack
            import zmq
        except ImportError as error:
            raise ConfigError(
                f"kv_events needs pyzmq and msgpack ({error.name} is missing):"
                " pip install 'mergestep[events]'"
            ) from error
        self._zmq, self._pack = zmq, msgpack.Packer(use_bin_type=True).pack
        self._recorder, self._topic, self._clock = recorder, topic.encode(), clock
        self._blocks, self._as_maps = PublishedBlocks(), as_maps
        self._number = int(clock() * 1e6)  # of the next message
        self._answer: tuple[int, bytes] | None = None  # the last snapshot and its number
        self._wants_snapshot, self._snapshot_s = False, 0.0
        self._is_stopping = False
        self._context = zmq.Context()
        try:
            # XPUB is a PUB that says when somebody subscribes.
            self._live = self._open(zmq.XPUB, "kv_events", endpoint)
            replay = replay_endpoint or next_port(endpoint)
            name = "kv_events_replay_endpoint"
            self._replay = None if replay is None else self._open(zmq.ROUTER, name, replay)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._waking, self._woken = socket.socketpair()
        self._waking.setblocking(False)
        recorder.wake = self._wake
        self._thread = threading.Thread(target=self._run, name="mergestep-kv-events", daemon=True)

    def start(self) -> None:
        live, replay = self.endpoints
        topic = self._topic.decode()
        logger.info("K/V events at %s, replay at %s, topic %s", live, replay or "no address", topic)
        self._thread.start()

    @property
    def endpoints(self) -> tuple[str, str | None]:
        """The addresses of the live and the replay socket."""
        return _address(self._live), None if self._replay is None else _address(self._replay)

    def kept(self) -> Kept:
        """Returns what is kept of the published blocks. Any thread may call it."""
        return Kept(len(self._blocks), self._blocks.num_bytes)

    def close(self) -> None:
        """Publishes what is recorded, gives it a second to leave, and closes the sockets."""
        self._is_stopping = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._context.destroy(linger=_LINGER_MS)
        self._waking.close()
        self._woken.close()

    # ---- any thread

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # woken often enough, or closed
            self._waking.send(b"\0")

    # ---- sockets

    def _open(self, kind: int, setting: str, endpoint: str) -> zmq.Socket[bytes]:
        opened = self._context.socket(kind)
        opened.setsockopt(self._zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
        opened.setsockopt(self._zmq.SNDHWM, _MAX_QUEUED)
        opened.setsockopt(self._zmq.IPV6, "[" in endpoint)
        if kind == self._zmq.XPUB:
            opened.setsockopt(self._zmq.XPUB_VERBOSE, 1)
        try:
            if kind == self._zmq.ROUTER or is_bound(endpoint):
                opened.bind(endpoint)
            else:
                opened.connect(endpoint)
        except self._zmq.ZMQError as error:
            raise ConfigError(f"{setting}: {endpoint} cannot be opened: {error}") from error
        return opened

    # ---- the thread

    def _run(self) -> None:
        try:
            self._publish(self._blocks.apply([AllRemoved()]))
            poller = self._zmq.Poller()
            for each in (self._live, self._replay, self._woken):
                if each is not None:
                    poller.register(each, self._zmq.POLLIN)
            while not self._is_stopping:
                # a snapshot that is due must not wait for another event
                ready = dict(poller.poll(int(_SNAPSHOT_S * 1e3) if self._wants_snapshot else None))
                self._serve(ready)
            self._publish_changes()
        except Exception:
            logger.exception("publishing K/V events failed; no more are published")

    def _serve(self, ready: dict[object, int]) -> None:
        if self._woken.fileno() in ready:
            self._woken.recv(4096)
            time.sleep(_GATHER_S)
        self._publish_changes()
        if self._live in ready:
            self._read_subscriptions()
        if self._wants_snapshot and time.monotonic() - self._snapshot_s >= _SNAPSHOT_S:
            self._wants_snapshot, self._snapshot_s = False, time.monotonic()
            self._publish(self._blocks.snapshot())
        if self._replay is not None and self._replay in ready:
            self._answer_request(self._replay)

    def _publish_changes(self) -> None:
        while changes := self._recorder.take(_MAX_EVENTS):
            self._publish(self._apply(changes))

    def _apply(self, changes: list[PageEvent]) -> list[Event]:
        if any(isinstance(change, AllRemoved) for change in changes):
            logger.warning("K/V events came faster than they were published; all were forgotten")
        return self._blocks.apply(changes)

    def _publish(self, events: list[Event]) -> None:
        if events:
            number = self._number.to_bytes(8, "big")
            self._live.send_multipart([self._topic, number, self._encoded(events)])
            self._number += 1

    def _encoded(self, events: list[Event]) -> bytes:
        written = [as_map(event) for event in events] if self._as_maps else events
        packed = self._pack([self._clock(), written, 0])
        assert isinstance(packed, bytes)
        return packed

    def _read_subscriptions(self) -> None:
        """Notes that somebody new wants the topic."""
        try:
            while True:
                message = self._live.recv(self._zmq.NOBLOCK)
                self._wants_snapshot |= message[:1] == b"\1" and self._topic.startswith(message[1:])
        except self._zmq.Again:
            pass

    def _answer_request(self, replay: zmq.Socket[bytes]) -> None:
        """Answers a question for the messages from a number on with one message, the index as it
        is now, under the newest number: a REQ socket reads no second one."""
        try:
            frames = replay.recv_multipart(self._zmq.NOBLOCK)
        except self._zmq.Again:
            return
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            logger.debug("a question to the K/V events' replay socket is not a number")
            return
        newest, client = self._number - 1, frames[0]
        if int.from_bytes(frames[2], "big") <= newest:
            if self._answer is None or self._answer[0] != newest:
                self._answer = newest, self._encoded(self._blocks.snapshot())
            number = newest.to_bytes(8, "big")
            replay.send_multipart([client, *self._head(self._topic), number, self._answer[1]])
        replay.send_multipart([client, *self._head(b""), _END, b""])

    def _head(self, topic: bytes) -> list[bytes]:
        """Returns what comes before the number of an answer."""
        return [b"", topic] if self._as_maps else [b""]


def _address(opened: zmq.Socket[bytes]) -> str:
    last = opened.last_endpoint
    assert isinstance(last, bytes)
    return last.decode()


def is_bound(endpoint: str) -> bool:
    """Returns whether vLLM would listen there: with the name of a host it connects."""
    scheme, _, rest = endpoint.partition("://")
    return scheme in ("ipc", "inproc") or rest.rpartition(":")[0] in _EVERY_HOST


def next_port(endpoint: str) -> str | None:
    """Returns the address of the replay socket beside a socket that listens; None for one that
    connects."""
    if not is_bound(endpoint):
        return None
    address, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://"):
        return f"{endpoint}-replay"
    return f"{address}:{int(port) + 1 if int(port) else 0}"
