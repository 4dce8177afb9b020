"""What a memory node knows of each engine that is connected to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from memory.nodes.server.node_loop import NodeLoop
from memory.nodes.server.node_session import NodeSession
from transport.base import Endpoint


@dataclass(frozen=True, slots=True)
class NodeStats:
    """A node's counters. bytes_leased of capacity_bytes are granted to num_engines engines. The
    others count since the start: engines attached, engines refused (by the node, not by the
    transport), sessions ended by an engine's protocol error, and queries."""

    capacity_bytes: int
    bytes_leased: int
    num_engines: int
    num_attached: int
    num_refused: int
    num_offences: int
    num_queries: int


@dataclass(slots=True, eq=False)
class Connection:
    """An engine's connection and what it was granted."""

    endpoint: Endpoint
    thread: threading.Thread | None = None
    engine: str = ""
    epoch: int = 0
    bytes_leased: int = 0
    bytes_accounting: int = 0
    num_mappings: int = 0  # promised to the engine
    bytes_reserved: int = 0
    session: NodeSession | None = None
    loop: NodeLoop | None = None
    is_leaving: bool = False  # the engine is asked to leave
    has_sent_drain: bool = False
    began_s: float = 0.0
    has_ended: bool = False


class ArrivingEndpoint(Endpoint, Protocol):
    """An Endpoint that calls on_arrival for each message and when the peer closes."""

    on_arrival: Callable[[], object]
