"""A memory node: it holds engines' K/V and attends over it (Lamina, arXiv 2405.01814).

Every engine has a connection, a thread and pages of its own. The node bounds the memory of all
engines together, and frees an engine's memory as soon as its connection ends. An engine that
attaches with a later epoch ends its earlier session; an earlier epoch is refused (fencing).
"""

from __future__ import annotations

import atexit
import errno
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from memory.nodes.attach import (
    MAX_ADDRESSES,
    NODE_MAPPINGS,
    AttachRequest,
    NodeLayout,
    accounting_bytes,
    least_mappings,
    most_pages,
)
from memory.nodes.server.connection import ArrivingEndpoint, Connection, NodeStats
from memory.nodes.server.node_lane import open_loop
from memory.nodes.server.node_loop import NodeLoop, post_error
from memory.nodes.server.striped_session import check_lists, open_session
from memory.nodes.wire import ErrorCode, Kind, WireError, pack_json, read_header, read_json
from memory.pages.linux_vmm import LinuxMemory
from memory.pages.virtual_memory import VirtualMemory
from ops.backend import Backend
from transport.base import Endpoint, Frame, Listener, TransportError
from transport.messages import post_bytes, view_of

logger = logging.getLogger(__name__)

_ATTACH_S = 5.0
_POLL_S = 0.2
_DISCONNECT_S = 2.0
_MAX_ENGINES = 1024  # whose epochs are remembered


class MemoryNode:
    """Serves the engines that a listener accepts. Any thread may call its methods."""

    def __init__(self, capacity_bytes: int, backend: Backend) -> None:
        """capacity_bytes bounds the K/V of all engines together."""
        self._capacity = capacity_bytes
        self._backend = backend
        self._lock = threading.Lock()
        self._serving = threading.Lock()
        self._computing = threading.Lock()
        self._connections: set[Connection] = set()
        self._epochs: OrderedDict[str, int] = OrderedDict()
        self._is_closing = False
        self._is_draining = False
        self._num_attached = self._num_refused = self._num_offences = self._num_queries = 0

    def stats(self) -> NodeStats:
        with self._lock:
            live = [c.session for c in self._connections if c.session is not None]
            return NodeStats(
                capacity_bytes=self._capacity,
                bytes_leased=sum(c.bytes_leased for c in self._connections),
                num_engines=len(live),
                num_attached=self._num_attached,
                num_refused=self._num_refused,
                num_offences=self._num_offences,
                num_queries=self._num_queries + sum(s.num_queries for s in live),
            )

    def serve(self, listener: Listener) -> None:
        """Accepts engines until `close`; blocks. After `drain` it refuses new ones at once."""
        atexit.register(self.close)  # no thread may wait in a transport when the interpreter ends
        self._serving.acquire()
        try:
            while not self._is_closing:
                endpoint = listener.accept(_POLL_S)
                if endpoint is not None:
                    self._begin(endpoint)
        finally:
            self._serving.release()
            atexit.unregister(self.close)

    def _connection(self, endpoint: Endpoint) -> Connection:
        return Connection(endpoint)

    def _turn(self, connection: Connection) -> AbstractContextManager[object]:
        """Returns what is held while the node computes for an engine."""
        return self._computing

    def _begin(self, endpoint: Endpoint) -> None:
        connection = self._connection(endpoint)
        thread = threading.Thread(
            target=self._run, args=(connection,), name="mergestep-node-engine", daemon=True
        )
        connection.thread = thread
        with self._lock:
            if self._is_closing or self._is_draining:
                endpoint.close()
                return
            self._connections.add(connection)
        try:
            thread.start()
        except RuntimeError as error:  # the system cannot start a thread
            logger.warning("engine at %s: refused: %s", endpoint.peer.address, error)
            with self._lock:
                self._num_refused += 1
            connection.thread = None
            self._end(connection)

    def adopt(self, endpoint: ArrivingEndpoint) -> None:
        """Serves an engine in the thread that calls the endpoint's on_arrival."""
        connection = self._connection(endpoint)
        with self._lock:
            self._connections.add(connection)
        endpoint.on_arrival = lambda: self._run_once(connection, 0.0)

    def drain(self, timeout_s: float) -> bool:
        """Asks the engines to leave and waits; returns whether all did. New engines are refused."""
        self._is_draining = True
        return self._wait(timeout_s)

    def close(self) -> None:
        """Ends all connections and frees their memory."""
        self._is_closing = True
        with self._lock:
            connections = list(self._connections)
        self._disconnect(connections)
        self._wait(_DISCONNECT_S)
        if self._serving.acquire(timeout=_DISCONNECT_S):
            self._serving.release()

    def _disconnect(self, connections: Sequence[Connection]) -> None:
        """Closes connections. Those with a thread end in it, the others at once."""
        for connection in connections:
            connection.endpoint.close()
            if connection.thread is None:
                self._end(connection)

    def _wait(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self._connections and time.monotonic() < deadline:
            time.sleep(0.01)
        return not self._connections

    # ---- one connection

    def _run(self, connection: Connection) -> None:
        while self._run_once(connection, _POLL_S):
            pass

    def _run_once(self, connection: Connection, wait_s: float) -> bool:
        """Handles a message or a deferred write; returns False when the connection has ended."""
        if connection.has_ended:
            return False
        try:
            if connection.loop is not None:
                self._work(connection, connection.loop, wait_s)
                return True
            if self._attach(connection):
                return True
        except Exception as error:
            self._failed(connection, error)
        self._end(connection)
        return False

    def _end(self, connection: Connection) -> None:
        connection.has_ended = True
        connection.endpoint.close()
        session = connection.session
        if connection.loop is not None:
            connection.loop.close()
        self._close_session(connection)
        with self._lock:
            if session is not None:
                self._num_queries += session.num_queries
                connection.session = None
            self._connections.discard(connection)

    def _close_session(self, connection: Connection) -> None:
        if connection.session is not None:
            with self._computing:
                connection.session.close()

    def _failed(self, connection: Connection, error: Exception) -> None:
        """Logs and reports the error that ends a connection."""
        address = connection.endpoint.peer.address
        if isinstance(error, TransportError):
            # An engine that only asks for the node's size leaves without attaching.
            level = logging.INFO if connection.loop is not None else logging.DEBUG
            logger.log(
                level, "engine at %s: %s", address, str(error)
            )  # without the traceback, whose frames hold K/V
            return
        if isinstance(error, WireError):
            logger.warning("engine at %s: %s (%s)", address, str(error), error.code.name)
            with self._lock:
                self._num_offences += 1
            self._report_error(connection, error)
            return
        if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
            logger.warning("engine at %s: out of memory: %s", address, error)
            self._report_error(connection, WireError(ErrorCode.FULL, "no memory is left"))
            return
        logger.error("engine at %s: internal error", address, exc_info=error)
        self._report_error(connection, WireError(ErrorCode.FAULT, type(error).__name__))

    def _report_error(self, connection: Connection, error: WireError) -> None:
        try:
            post_error(connection.endpoint, connection.epoch, error)
        except TransportError as failed:
            logger.info("the error could not be reported to the engine: %s", failed)

    def _work(self, connection: Connection, loop: NodeLoop, wait_s: float) -> None:
        frame = connection.endpoint.poll(0.0 if loop.has_deferred else wait_s)
        self._handle(connection, loop, frame)

    def _handle(self, connection: Connection, loop: NodeLoop, frame: Frame | None) -> None:
        if frame is not None:
            loop.take(frame)
        elif loop.has_deferred:
            loop.run_deferred()
        if (self._is_draining or connection.is_leaving) and not connection.has_sent_drain:
            post_bytes(connection.endpoint, pack_json(Kind.DRAIN, connection.epoch, {}))
            connection.has_sent_drain = True

    # ---- attaching

    def _attach(self, connection: Connection) -> bool:
        endpoint = connection.endpoint
        if (frame := endpoint.poll(_ATTACH_S)) is None:
            logger.info("engine at %s: did not attach", endpoint.peer.address)
            return False
        message = view_of(frame)
        try:
            header = read_header(message)
            if header.kind is not Kind.ATTACH:
                raise WireError(ErrorCode.FORM, f"{header.kind.name} before ATTACH")
            content = read_json(message)
            request = AttachRequest.from_json(content)
        finally:
            endpoint.release(frame)
        connection.epoch = request.epoch
        if request.stripe is not None:
            check_lists(request, endpoint.max_message_bytes)
        granted = self._grant(connection, request)
        if granted is None:
            return False
        if granted.is_question:
            self._post_attached(connection, granted)
            return False
        page_bytes = connection.bytes_leased // granted.num_pages
        memory = self._memory(connection, page_bytes, granted.num_pages)
        try:
            connection.session = open_session(
                granted,
                memory,
                self._backend,
                connection.num_mappings,
                lambda: self._most_mappings(connection),
            )
        except BaseException:
            memory.close()
            raise
        with self._lock:
            self._num_attached += 1
        offer = content.get("lane")
        turn = self._turn(connection)
        connection.loop, lane = open_loop(connection.session, endpoint, turn, offer)
        self._post_attached(connection, granted, lane)
        logger.info(
            "engine %s at %s: %d pages of %d KiB",
            request.engine[:16],
            endpoint.peer.address,
            granted.num_pages,
            memory.page_bytes >> 10,
        )
        return True

    def _room(self) -> int:
        """Returns the bytes of all engines together."""
        return self._capacity

    def _memory(self, connection: Connection, page_bytes: int, num_pages: int) -> VirtualMemory:
        """Returns the memory of an engine that attaches."""
        return LinuxMemory(page_bytes, num_pages)

    @staticmethod
    def _post_attached(
        connection: Connection, granted: AttachRequest, lane: dict[str, object] | None = None
    ) -> None:
        content: dict[str, object] = {
            "num_pages": granted.num_pages,
            "num_mappings": connection.num_mappings,
        } | ({} if lane is None else {"lane": lane})
        if granted.kv_policy is not None:
            content["kv_policy"] = granted.policy_answer
        post_bytes(connection.endpoint, pack_json(Kind.ATTACHED, granted.epoch, content))

    def _grant(self, connection: Connection, request: AttachRequest) -> AttachRequest | None:
        """Returns the request with the granted pages; reports a refusal and returns None."""
        try:
            if self._is_draining:
                raise WireError(ErrorCode.FULL, "the node is shutting down")
            layout = NodeLayout(request)
            if not layout.is_addressable:
                raise WireError(
                    ErrorCode.SHAPE, f"ranges of {layout.total_bytes} bytes in all are too large"
                )
            if not request.is_question:
                self._fence(connection, request)
            with self._lock:
                accounting = accounting_bytes(request.num_ranges, request.num_places)
                free = self._room() - accounting
                free -= sum(c.bytes_leased + c.bytes_accounting for c in self._connections)
                free = max(0, free)
                mappings = self._mappings_beside(connection)
                left = most_pages(request, mappings)
                num_pages = min(request.num_pages, free // layout.page_bytes, left)
                if num_pages < request.min_pages:
                    need = request.min_pages * layout.page_bytes
                    text = (
                        f"{free} bytes and {left} pages are free, {need} bytes in "
                        f"{request.min_pages} pages are needed"
                    )
                    raise WireError(ErrorCode.FULL, text)
                reserved = sum(c.bytes_reserved for c in self._connections)
                if reserved + layout.total_bytes > MAX_ADDRESSES:
                    raise WireError(ErrorCode.FULL, "no addresses are left for these ranges")
                if not request.is_question:
                    connection.bytes_leased = num_pages * layout.page_bytes
                    connection.bytes_accounting = accounting
                    connection.num_mappings = min(
                        self._promised(request, layout, num_pages), mappings
                    )
                    connection.bytes_reserved = layout.total_bytes
        except WireError as error:
            with self._lock:
                self._num_refused += 1
            level = logging.DEBUG if connection.thread is None else logging.WARNING
            address = connection.endpoint.peer.address
            logger.log(level, "engine at %s: refused: %s", address, str(error))
            self._report_error(connection, error)
            return None
        return replace(request, num_pages=num_pages)

    def _promised(self, request: AttachRequest, layout: NodeLayout, num_pages: int) -> int:
        """Returns how many mappings to promise: the pages' fraction of all, or the least needed."""
        share = NODE_MAPPINGS * num_pages * layout.page_bytes // self._capacity
        return max(share, least_mappings(request, num_pages))

    def _mappings_beside(self, connection: Connection) -> int:
        """Returns how many mappings other engines leave free. The caller holds the lock."""
        left = NODE_MAPPINGS
        for other in self._connections:
            if other is not connection:
                session = other.session
                left -= max(other.num_mappings, 0 if session is None else session.num_mappings)
        return left

    def _most_mappings(self, connection: Connection) -> int:
        with self._lock:
            return self._mappings_beside(connection)

    def _fence(self, connection: Connection, request: AttachRequest) -> None:
        """Refuses an epoch that is not the engine's latest; ends its earlier sessions."""
        with self._lock:
            latest = self._epochs.get(request.engine, 0)
            if request.epoch <= latest:
                raise WireError(
                    ErrorCode.STALE,
                    f"epoch {request.epoch} of an engine that was here with {latest} (is this node "
                    "listed under two addresses?)",
                )
            self._epochs[request.engine] = request.epoch
            self._epochs.move_to_end(request.engine)
            while len(self._epochs) > _MAX_ENGINES:
                self._epochs.popitem(last=False)
            older = [c for c in self._connections if c.engine == request.engine]
            connection.engine = request.engine
        self._disconnect(older)
        for other in older:
            if other.thread is not None:
                other.thread.join(_DISCONNECT_S)
