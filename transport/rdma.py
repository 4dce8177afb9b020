"""rdma://host:port?device=rxe0&port=1&gid=1&imm=0: windows written by the device, over a reliable
queue pair. host:port is where the control connection is made (TCP); it carries the set-up and the
heartbeats. The rest names what to send from, and each is chosen if it is not given:

    device, port, gid   of this machine: an active port whose GID is the address that leads to the
                        peer, if there is one; else the first, RoCE v2 with IPv4 before others
    imm                 1: the peer's writes come with immediate data, and completions tell what
                        has arrived; 0: memory is polled. By itself 0 only where the device
                        promises that memory fills in order
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from transport import control
from transport._windows import DESCRIPTOR_SENT_BYTES, NUM_SLOTS, Link, Memory, MirroredChannel
from transport.base import Peer, PeerLostError, RefusedError, TransportError
from transport.endpoint import ChannelEndpoint
from transport.listener import SocketListener
from transport.queue_pair import QueuePair, QueuePairAddress
from transport.tcp import address_of, connected_to, server_at, set_options
from transport.verbs import Port, RdmaUnavailableError, open_port

__all__ = ["RdmaTransport", "RdmaUnavailableError"]

MAX_WINDOW_BYTES = 1 << 30
"""Both ends register this much memory, which stays locked."""
SET_UP_S = 5.0
"""The time to set up queue pairs with a known peer. Registering memory touches all of it."""
FLUSH_S = 0.5
_LOOK_AGAIN_S = 0.1  # a full send queue wakes no thread, so it is polled


@dataclasses.dataclass(frozen=True)
class Options:
    """The options in a url's query."""

    device: str | None = None
    port: int | None = None
    gid: int | None = None
    imm: bool | None = None

    def for_both(self) -> str:
        """Returns the options of a listener that also hold for a peer on another machine."""
        return "" if self.imm is None else f"?imm={self.imm:d}"


class RdmaTransport:
    @staticmethod
    def connect(
        url: str, *, key: bytes, info: Mapping[str, object], window_bytes: int, timeout_s: float
    ) -> ChannelEndpoint:
        address, options = _parse(url)
        control.check_key(key)
        _check_window(window_bytes)
        deadline = time.monotonic() + timeout_s
        with contextlib.ExitStack() as undo:
            # before the handshake, for which the listener allows little time
            end = _End(options, window_bytes, _ip_towards(*address, url))
            undo.callback(end.pair.close)
            ours = control.hello("rdma", info, window_bytes, queue_pair=end.pair.address.to_wire())
            sock = undo.enter_context(connected_to(*address, url, deadline))
            session = control.authenticate_to(sock, key, deadline)
            theirs = control.exchange_hellos(session, ours)
            end.connect(theirs)
            session.send({"imm": end.needs_immediate})
            endpoint = end.endpoint(session, theirs, bool(theirs.get("imm")), url)
            undo.pop_all()
            return endpoint

    @staticmethod
    def listen(
        url: str, *, key: bytes, info: Mapping[str, object], window_bytes: int, max_peers: int
    ) -> RdmaListener:
        (host, port), options = _parse(url)
        control.check_key(key)
        _check_window(window_bytes)
        control.hello("rdma", info, window_bytes)
        open_port(
            options.device, options.port, options.gid
        ).context.close()  # raises if there is none
        sock, where = server_at(host, port, url)
        return RdmaListener(
            options,
            sock,
            f"rdma://{where}{options.for_both()}",
            key=key,
            info=info,
            window_bytes=window_bytes,
            max_peers=max_peers,
        )


class RdmaListener(SocketListener):
    name = "rdma"

    def __init__(self, options: Options, *arguments: Any, **settings: Any) -> None:
        self._options = options
        super().__init__(*arguments, **settings)

    def _establish(
        self, session: control.Session, theirs: Mapping[str, Any], address: str
    ) -> ChannelEndpoint:
        session.deadline = time.monotonic() + SET_UP_S
        with contextlib.ExitStack() as undo:
            try:
                end = _End(self._options, self.window_bytes, session.sock.getsockname()[0])
                undo.callback(end.pair.close)
                end.connect(theirs)
            except TransportError as error:
                reason = error if isinstance(error, RefusedError) else "no queue pair could be made"
                session.send({"refused": str(reason)})
                raise
            session.send(
                {
                    **self._own_hello(),
                    "queue_pair": end.pair.address.to_wire(),
                    "imm": end.needs_immediate,
                }
            )
            ready = session.receive()
            endpoint = end.endpoint(session, theirs, bool(ready.get("imm")), address)
            undo.pop_all()
            return endpoint


class _End:
    """One end's memory and queue pair during set-up."""

    def __init__(self, options: Options, window_bytes: int, local_ip: str) -> None:
        self._options = options
        self._port = open_port(options.device, options.port, options.gid, local_ip)
        self._own = Memory.anonymous(window_bytes)
        self._own.keep_from_forks()
        self.pair = QueuePair(self._port, (self._own.address, self._own.num_bytes), NUM_SLOTS)
        self.needs_immediate = True

    def connect(self, theirs: Mapping[str, Any]) -> None:
        """Connects to the peer's end; raises RefusedError if its description is impossible."""
        peer = QueuePairAddress.from_wire(theirs.get("queue_pair"))
        window_bytes = theirs["window_bytes"]  # a possible size, as in every hello
        if window_bytes > MAX_WINDOW_BYTES:
            raise RefusedError(f"a window of {window_bytes} bytes, at most {MAX_WINDOW_BYTES}")
        self._mirror = Memory.anonymous(window_bytes)
        self._mirror.keep_from_forks()
        self.pair.connect(peer, (self._mirror.address, self._mirror.num_bytes))
        asked = self._options.imm
        self.needs_immediate = not self.pair.is_ordered() if asked is None else asked

    def endpoint(
        self,
        session: control.Session,
        theirs: Mapping[str, Any],
        peer_needs_immediate: bool,
        address: str,
    ) -> RdmaEndpoint:
        set_options(session.sock)
        link = Link.of_socket(session.detach())
        link.watch()
        wire = _Wire(self.pair, link, (self._own, self._mirror), peer_needs_immediate)
        channel = MirroredChannel(
            self._own,
            self._mirror,
            link,
            wire,
            self._port.max_message_bytes,
            not self.needs_immediate,
        )
        if len(os.sched_getaffinity(0)) == 1:  # the peer may need this CPU
            channel.spin_s = 0.0
        return RdmaEndpoint(channel, wire, Peer(address, theirs["info"]), self._port)


class _Wire:
    """Writes for the channel (transport/csrc/mirrored_channel.h). The thread that posts and polls
    calls it; any thread may call `flush` and `close`."""

    def __init__(
        self, pair: QueuePair, link: Link, memory: tuple[Memory, Memory], notifies: bool
    ) -> None:
        """notifies: whether the peer wants immediate data with each message."""
        self._pair: QueuePair | None = pair
        self._link = link
        self._memory: tuple[Memory, ...] = memory  # as long as it is registered
        self._message: int | None = 1 if notifies else None
        self._credit: int | None = 0 if notifies else None
        self._news = select.poll()
        for fd in (pair.event_fd, link.event_fd()):
            self._news.register(fd, select.POLLIN)
        self._lock = threading.Lock()
        self._num_arrived = 0

    @contextlib.contextmanager
    def _using(self) -> Iterator[QueuePair]:
        """Yields the queue pair; any error of it ends the connection."""
        with self._lock:
            if self._pair is None:
                raise PeerLostError("the connection is closed")
            try:
                yield self._pair
            except TransportError as error:
                self._link.end(str(error))
                raise

    def write(self, payload: int, payload_bytes: int, descriptor: int) -> None:
        pieces = [(descriptor, DESCRIPTOR_SENT_BYTES)]
        if payload_bytes:
            pieces.insert(0, (payload, payload_bytes))
        with self._using() as pair:
            pair.write(pieces, self._message)

    def tell(self) -> None:
        with contextlib.suppress(TransportError), self._using() as pair:
            pair.write([(0, 8)], self._credit)

    def num_arrived(self) -> int:
        # An error ends the link; the channel sees that after the messages that arrived before.
        with contextlib.suppress(TransportError), self._using() as pair:
            self._num_arrived = pair.num_arrived
            pair.reap()
            self._num_arrived = pair.num_arrived
        return self._num_arrived

    def sleep(self, timeout_s: float) -> None:
        is_quiet = False
        with contextlib.suppress(TransportError), self._using() as pair:
            is_quiet = pair.arm()
        if is_quiet:
            self._news.poll(1000 * min(timeout_s, _LOOK_AGAIN_S))
            with self._lock:
                if self._pair is not None:
                    self._pair.disarm()

    def flush(self) -> None:
        """Waits until the peer has all posted messages or is lost, for FLUSH_S at most."""
        deadline = time.monotonic() + FLUSH_S
        with contextlib.suppress(TransportError):
            with self._using() as pair:
                if self._link.is_over:
                    return
                pair.write([(0, 8)], self._credit, reports=True)
            while time.monotonic() < deadline and not self._link.is_over:
                with self._using() as pair:
                    pair.reap()
                    if pair.is_idle:
                        return
                time.sleep(0.0002)

    def close(self) -> None:
        with self._lock:
            pair, self._pair = self._pair, None
            if pair is not None:
                pair.close()
            self._memory = ()


class RdmaEndpoint(ChannelEndpoint):
    def __init__(self, channel: MirroredChannel, wire: _Wire, peer: Peer, port: Port) -> None:
        super().__init__(channel, peer)
        self._wire = wire
        self.port = port
        """The port of this end, which a lane opens again (transport/rdma_lane.py)."""

    def close(self) -> None:
        self._wire.flush()
        super().close()
        self._wire.close()


def _check_window(window_bytes: int) -> None:
    control.check_window(window_bytes)
    if window_bytes > MAX_WINDOW_BYTES:
        raise ValueError(f"window_bytes={window_bytes}: at most {MAX_WINDOW_BYTES} for rdma")


def _ip_towards(host: str, port: int, url: str) -> str:
    """Returns our address on the route to the peer, without sending anything."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect(address)
            return str(sock.getsockname()[0])
    except OSError as error:
        raise control.connection_error(url, error) from error


def _parse(url: str) -> tuple[tuple[str, int], Options]:
    values: dict[str, Any] = {}
    for name, value in parse_qsl(urlsplit(url).query, keep_blank_values=True):
        if name not in {field.name for field in dataclasses.fields(Options)} or name in values:
            raise ValueError(f"{url}: {name!r}: only device, port, gid and imm, each once")
        if name != "device" and not (value.isascii() and value.isdigit()):
            raise ValueError(f"{url}: {name}={value!r}: a number is needed")
        if name == "imm" and value not in ("0", "1"):
            raise ValueError(f"{url}: imm={value!r}: 0 or 1")
        values[name] = value if name == "device" else int(value)
    if "imm" in values:
        values["imm"] = bool(values["imm"])
    return address_of(url), Options(**values)
