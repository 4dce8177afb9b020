"""Memory nodes in virtual time: the real node's code, and faults of its machine and network."""

from __future__ import annotations

import random
from dataclasses import asdict

from memory.attention.seam import AttentionLayer
from memory.nodes.attach import AttachRequest
from memory.nodes.node_link import NodeLink
from memory.nodes.placement import Shard
from memory.nodes.server.node import MemoryNode
from memory.nodes.wire import HEADER_BYTES, Header, read_header
from tests.support.nodes.sim_world import SimEndpoint, World, connected
from transport.base import Peer, PeerLostError, TransportError, TransportTimeoutError
from transport.direct import direct_pair

_IDLE_S = 0.002


class SimNode:
    """One machine with a node process, which the engine may or may not reach."""

    def __init__(self, world: World, url: str, capacity_bytes: int, backend) -> None:
        self.world = world
        self.url = url
        self.capacity_bytes = capacity_bytes
        self.delay_s = 0.0002
        self.service_s = 0.0003
        self.is_stopped = self.is_hung = self.is_draining = False
        # messages of the engine, and of the node, are cut off
        self.is_cut_to = self.is_cut_from = False
        self.good_since: float | None = 0.0  # since when an engine could attach
        self.num_offences = 0  # of earlier processes
        self._backend = backend
        self._free_at = 0.0
        self._ends: list[tuple[SimEndpoint, SimEndpoint]] = []
        self._rivals: list[NodeLink] = []
        self._num_rivals = 0
        self.process: MemoryNode | None = None
        self.start()

    # ---- the process

    def start(self) -> None:
        if self.process is None:
            self.process = MemoryNode(self.capacity_bytes, self._backend)
            self.is_stopped = self.is_hung = self.is_draining = False
            self._changed()

    def kill(self) -> None:
        """SIGKILL: its memory, its connections and their messages are gone."""
        if self.process is None:
            return
        process, self.process = self.process, None
        for engine, node in self._ends:
            node.is_held = True  # no more messages are sent
            node.on_event = lambda: None
            engine.lose_soon()
        process.close()
        self.num_offences += process.stats().num_offences
        self._ends.clear()
        self._rivals.clear()
        self._changed()

    def stop(self) -> None:
        """Stops the process as SIGSTOP does."""
        self.is_stopped = True
        self._changed()

    def resume(self) -> None:
        self.is_stopped = False
        self._changed()
        self._process_all_messages()

    def hang(self) -> None:
        """The node does nothing, but its heartbeats arrive."""
        self.is_hung = True
        self._changed()

    def recover(self) -> None:
        self.is_hung = False
        self._changed()
        self._process_all_messages()

    def drain(self) -> None:
        """Drains the node as SIGTERM does."""
        if self.process is not None:
            self.is_draining = True
            self.process.drain(0.0)
            self._changed()
            self._process_all_messages()

    @property
    def bytes_leased(self) -> int:
        return 0 if self.process is None else self.process.stats().bytes_leased

    @property
    def offences(self) -> int:
        own = 0 if self.process is None else self.process.stats().num_offences
        return self.num_offences + own

    # ---- the network

    def cut(self, to_node: bool, from_node: bool) -> None:
        self.is_cut_to |= to_node
        self.is_cut_from |= from_node
        self._changed()

    def heal(self) -> None:
        self.is_cut_to = self.is_cut_from = False
        self._changed()
        for pair in self._ends:
            for end in pair:
                end.pump()

    def reset_connections(self) -> None:
        """Both ends lose their messages in flight."""
        for engine, node in self._ends:
            engine.lose()
            node.lose_soon()

    def hold(self) -> tuple[SimEndpoint, SimEndpoint] | None:
        """Messages of the engine stay in flight and the engine loses the connection. They arrive
        later, when there may be a newer connection."""
        if not self._ends:
            return None
        engine, node = self._ends[-1]
        engine.is_held = True
        self.world.after(0.05, engine.lose)
        return engine, node

    @staticmethod
    def unhold(ends: tuple[SimEndpoint, SimEndpoint]) -> None:
        ends[0].is_held = False
        ends[0].pump()

    def newest(self) -> tuple[SimEndpoint, SimEndpoint] | None:
        return self._ends[-1] if self._ends else None

    def connect(self, timeout_s: float) -> SimEndpoint:
        """Connects as transport.connect does; the time that it takes is owed to the clock."""
        if self.process is None:
            raise PeerLostError("there is no listener")
        if self.is_stopped or self.is_cut_to or self.is_cut_from:
            self.world.owed_s = max(self.world.owed_s, timeout_s)
            raise TransportTimeoutError("no answer in time")
        peer = Peer(self.url, {"capacity_bytes": self.capacity_bytes})
        engine, node = connected(self.world, peer)
        engine.gets_through = lambda: not self.is_cut_to
        node.gets_through = lambda: not self.is_cut_from
        for end in (engine, node):
            end.delay_s = lambda: self.delay_s * self.world.random.uniform(0.5, 2.0)
        self._ends = [pair for pair in self._ends if not pair[1].is_closed]
        self._ends.append((engine, node))
        self.process.adopt(node)
        node.on_event = lambda: self._process_messages_soon(node)
        return engine

    # ---- other engines

    def fill(self, request: AttachRequest, bytes_left: int) -> None:
        """Another engine leases the memory except for bytes_left."""
        if self.process is None:
            return
        free = self.capacity_bytes - self.bytes_leased
        page_bytes = max(4096, free - bytes_left) // 4096 * 4096
        engine_end, node_end = direct_pair()
        self.process.adopt(node_end)
        link = NodeLink("rival", engine_end, Shard("request", 0, 1), self.world.clock)
        self._num_rivals += 1
        try:
            link.attach(rival_request(request, self._num_rivals, page_bytes), 1.0)
        except TransportError:
            link.close()
            return
        self._rivals.append(link)
        self._changed()

    def empty(self) -> None:
        for link in self._rivals:
            link.close()
        self._rivals.clear()
        self._changed()

    # ---- processing of messages

    def _changed(self) -> None:
        is_good = self.process is not None and not (
            self.is_stopped
            or self.is_hung
            or self.is_draining
            or self.is_cut_to
            or self.is_cut_from
            or self._rivals
        )
        if not is_good:
            self.good_since = None
        elif self.good_since is None:
            self.good_since = self.world.now
        for engine, node in self._ends:
            engine.hear(not (self.is_stopped or self.is_cut_from))
            node.hear(not self.is_cut_to)

    def _process_all_messages(self) -> None:
        for _, node in self._ends:
            for _ in range(node.num_waiting + 2):
                self._process_messages_soon(node)

    def _process_messages_soon(self, node: SimEndpoint) -> None:
        self._free_at = max(self._free_at, self.world.now) + self.service_s
        self.world.after(self._free_at - self.world.now, lambda: self._process_messages(node))

    def _process_messages(self, node: SimEndpoint) -> None:
        if self.process is None or self.is_stopped or self.is_hung:
            return
        if not (node.num_waiting or node.is_lost or node.was_used):
            return
        had = node.num_waiting
        node.on_arrival()
        if had and self.world.random.random() < 0.5:  # it then has time for deferred work
            self.world.after(_IDLE_S, lambda: self._process_messages(node))


def rival_request(request: AttachRequest, number: int, size_bytes: int) -> AttachRequest:
    """Returns the request of an engine with one layer and about size_bytes of K/V in one page."""
    content = request.to_json() | {
        "engine": f"rival {number}",
        "epoch": 1,
        "kv_dtype": "float32",
        "layers": [asdict(AttentionLayer(1, 1, 32, 1.0))],
        "group_layers": [[0]],
        "page_tokens": [max(16, size_bytes // 256 // 16 * 16)],
        "num_places": [1],
        "num_ranges": 1,
        "num_pages": 1,
        "min_pages": 1,
    }
    return AttachRequest.from_json(content)


# ---- messages that no transport would deliver, for the sessions on both sides


class Recorder:
    """Keeps some messages of a connection, to be sent once more later."""

    def __init__(self, source: random.Random) -> None:
        self._random = source
        self.kept: bytes | None = None

    def truncated(self, message: bytes) -> list[bytes]:
        return [message[: self._random.randrange(len(message))]]

    def twice(self, message: bytes) -> list[bytes]:
        return [message, message]

    def keep(self, message: bytes) -> list[bytes]:
        self.kept = message
        return [message]

    def replayed(self, message: bytes) -> list[bytes]:
        return [message, message if self.kept is None else self.kept]

    def older_epoch(self, message: bytes) -> list[bytes]:
        header = read_header(memoryview(message))
        older: Header = header._replace(epoch=max(0, header.epoch - 1))
        return [older.packed() + message[HEADER_BYTES:], message]

    def garbage(self, message: bytes) -> list[bytes]:
        return [message, self._random.randbytes(self._random.randrange(200))]
