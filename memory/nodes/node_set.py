"""The memory nodes of one engine: placement of the K/V, and recovery when a node is lost.

A *partition* is a part of the K/V memory with its own accounting. In the modes `head` and
`sequence` there is one partition, spread over all nodes; in mode `request` each node has its own.
When a node is lost, its partition is placed anew, with a later epoch, on the remaining nodes, or in
this machine's memory if no node is left. The lost K/V is computed again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NoReturn

from memory.kv_manager import KVManager
from memory.nodes.attach import AttachRequest, NodeLayout, growth_of
from memory.nodes.edit_log import EditLog
from memory.nodes.errors import NoNodeError
from memory.nodes.node_link import NodeError, NodeLink
from memory.nodes.node_states import NodeStates
from memory.nodes.placement import PageGeometry, Shard
from memory.nodes.wire import FULL_WIRE, ErrorCode, WireFormat
from transport.base import Endpoint, TransportError

if TYPE_CHECKING:
    from memory.nodes.engine_lanes import EngineLanes

logger = logging.getLogger(__name__)

_FIRST_ATTACH_S = 5.0
_ATTACH_S = 1.5  # shorter, because sequences wait or another node could be tried
_CONNECT_GRACE_S = 0.25
_CONNECT_S = 0.5  # to a nearby node that was connected before
_MOST_CONNECT_S = 1.0  # the longest wait for a node that may be gone
_SLOWER = 4.0  # how many times longer than the first connect a later one may take
FIRST_CONNECT_S = 5.0

Connect = Callable[[str, float], Endpoint]
"""Connects to (url, timeout in seconds). Raises TransportError or OSError."""


@dataclass(slots=True, eq=False)
class NodePartition:
    """A part of the K/V memory on one or several nodes, and the links to them.

    urls are the nodes that may hold it. num_pages is 0 while it has no memory. Sequences are
    admitted while there are at most max_mappings mappings.
    """

    urls: list[str]
    edits: EditLog
    links: list[NodeLink] = field(default_factory=list)
    num_pages: int = 0
    max_mappings: int = 0
    is_local: bool = False

    @property
    def is_lost(self) -> bool:
        return not self.links or any(link.is_lost for link in self.links)

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.links = []
        self.num_pages = 0


def make_kv_managers(
    partitions: Sequence[NodePartition],
    geometry: PageGeometry,
    *,
    num_ranges: int,
    max_model_len: int,
    max_rows: int,
) -> list[KVManager]:
    """Makes the accounting of placed partitions; their ranges follow each other. max_rows is the
    most rows of a sequence in a step."""
    range_tokens = geometry.range_slots(max_model_len)[0] * geometry.page_tokens[0]
    managers = [
        KVManager(
            partition.edits,
            num_pages=partition.num_pages,
            num_ranges=num_ranges,
            max_model_len=max_model_len,
            groups=geometry.groups,
            max_rows=max_rows,
            in_background=False,
            first_start=number * num_ranges * range_tokens,
            max_mappings=partition.max_mappings,
        )
        for number, partition in enumerate(partitions)
    ]
    assert managers[0].range_tokens == range_tokens
    return managers


class NodeSet:
    """The partitions and their links. The compute thread uses it, except where noted."""

    def __init__(
        self,
        partitions: Sequence[NodePartition],
        template: AttachRequest,
        partition_mode: str,
        connect: Connect,
        *,
        wire: WireFormat = FULL_WIRE,
        local: Callable[[], Endpoint] | None = None,
        bytes_per_node: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        pool: Callable[[int], Executor] = ThreadPoolExecutor,
    ) -> None:
        """template is the request to a node that would hold everything. wire is the format of
        rows. local attaches this machine's memory. bytes_per_node limits the request to each
        node; None asks for all free memory. pool(n) makes an executor for n parallel connects."""
        self.partitions = list(partitions)
        self._template = template
        self._partition_mode = partition_mode
        self._wire = wire
        self.connect = connect
        self._local = local
        self._bytes_per_node = bytes_per_node
        self._clock = clock
        self._pool = pool
        self._epoch = template.epoch
        self.min_pages = template.min_pages
        """The fewest pages of a partition; with fewer, a sequence may not fit."""
        self.connect_s = _CONNECT_S
        """The time to connect to a node that was connected before."""
        self.num_lost = 0
        self.lanes: EngineLanes | None = None
        self._last_refusals: dict[str, str] = {}  # by url, so that a repeated reason is logged once
        urls = [url for partition in partitions for url in partition.urls]
        self.states = NodeStates(urls, template.engine, clock)

    @property
    def prefix_only(self) -> bool:
        """Whether a node holds only some tokens of a sequence, so that its results are merged."""
        return self._template.prefix_only

    @property
    def num_nodes(self) -> int:
        """The number of nodes, attached or missing."""
        return sum([len(partition.urls) for partition in self.partitions])

    @property
    def missing(self) -> list[str]:
        """The configured nodes that hold no K/V."""
        held = {link.url for partition in self.partitions for link in partition.links}
        return [url for partition in self.partitions for url in partition.urls if url not in held]

    @property
    def is_leaving(self) -> bool:
        """Whether a node has asked the engine to leave."""
        return any(link.is_leaving for partition in self.partitions for link in partition.links)

    def lose(self) -> list[int]:
        """Closes the partitions that are lost or have to leave a node, so that they have no memory;
        returns their indices."""
        numbers = []
        for number, partition in enumerate(self.partitions):
            if partition.is_lost or any(link.is_leaving for link in partition.links):
                self.num_lost += any(it.is_lost and not it.is_leaving for it in partition.links)
                self.states.end(partition.links)
                partition.close()
                numbers.append(number)
        return numbers

    def place(
        self, partition: NodePartition, connect_s: float | None = None, *, needs_all: bool = False
    ) -> None:
        """Attaches a partition to all of its usable nodes that answer, else to this machine's
        memory, else to any of its nodes; if none has min_pages, to nodes with less.

        With needs_all, every node has to attach. Raises NoNodeError.
        """
        partition.close()
        partition.is_local = False
        connect_s = connect_s or self.connect_s
        reasons: dict[str, str] = {}
        if needs_all:
            began_s = self._clock()
            endpoints = self._connect_all(partition.urls, connect_s, reasons)
            # Distant nodes always take longer to connect.
            usual_s = _SLOWER * (self._clock() - began_s)
            self.connect_s = min(max(self.connect_s, usual_s), _MOST_CONNECT_S)
            if not reasons:
                self._attach(partition, endpoints, reasons, self.min_pages, _FIRST_ATTACH_S)
        else:
            self._place_anywhere(partition, connect_s, reasons)
        self.states.hold(partition.links)
        held = {link.url for link in partition.links}
        self.states.probe([url for url in reasons if url in partition.urls and url not in held], ())
        if not partition.links:
            self._refuse(reasons)

    def _place_anywhere(
        self, partition: NodePartition, connect_s: float, reasons: dict[str, str]
    ) -> None:
        def is_full(url: str) -> bool:  # its shard may be smaller beside more nodes
            return reasons.get(url, "").startswith(ErrorCode.FULL.name)

        usable = self.states.usable(partition.urls)
        if self._place_on(partition, usable, connect_s, reasons, self.min_pages):
            return
        if self._place_locally(partition, reasons):
            return
        untried = [url for url in partition.urls if url not in reasons or is_full(url)]
        if len(usable) < len(partition.urls) and self._place_on(
            partition, untried, connect_s, reasons, self.min_pages
        ):
            return
        full = [url for url in partition.urls if is_full(url)]
        self._place_on(partition, full, connect_s, reasons, 1)

    @staticmethod
    def _refuse(reasons: Mapping[str, str]) -> NoReturn:
        texts = [text if url in text else f"{url}: {text}" for url, text in reasons.items()]
        raise NoNodeError("; ".join(texts))

    def _place_on(
        self,
        partition: NodePartition,
        urls: Sequence[str],
        connect_s: float,
        reasons: dict[str, str],
        least: int,
    ) -> bool:
        endpoints = self._connect_all(urls, connect_s, reasons)
        while endpoints:
            failed = self._attach(partition, endpoints, reasons, least, _ATTACH_S)
            if failed is None:
                return True
            # the others need new connections, because a connection has one session
            left = [url for url in endpoints if url != failed]
            endpoints = self._connect_all(left, connect_s, reasons)
        return False

    def _place_locally(self, partition: NodePartition, reasons: dict[str, str]) -> bool:
        if self._local is None:
            return False
        own = {"this machine": self._local()}
        if self._attach(partition, own, reasons, self.min_pages, _ATTACH_S) is not None:
            return False
        partition.is_local = True
        where = " of one node" if len(self.partitions) > 1 else ""
        logger.warning("no memory node takes the K/V%s: it is in this machine's memory", where)
        return True

    def find_returned(self, is_over: Callable[[], bool] = lambda: False) -> list[str]:
        """Returns the missing nodes that could hold their shard again, if all returned nodes share
        the K/V with the attached ones. Any thread may call it; is_over stops it early."""
        missing = self.missing
        found = [url for url in missing if not is_over() and self._has_room(url, None)]
        num_there = self.num_nodes - len(missing) + len(found)
        if self._partition_mode == "request" or not found or num_there == self.num_nodes:
            return found
        return [url for url in found if not is_over() and self._has_room(url, num_there)]

    def _has_room(self, url: str, count: int | None) -> bool:
        """Returns whether a node answers and has memory for one of `count` shards. None counts all
        nodes of its partition."""
        try:
            endpoint = self.connect(url, self.connect_s)
        except (TransportError, OSError):
            return False
        [most] = [len(partition.urls) for partition in self.partitions if url in partition.urls]
        shard = Shard(self._partition_mode, 0, count or most)
        link = NodeLink(url, endpoint, shard, self._clock)
        request = replace(self._request(link.shard, self.min_pages), is_question=True)
        try:
            link.attach(request, self.connect_s, self._wire)
        except TransportError:
            return False
        finally:
            link.close()
        return True

    def look(self) -> bool:
        """Reads unsolicited messages of all nodes; returns whether a node is lost or shuts down."""
        for partition in self.partitions:
            for link in partition.links:
                try:
                    link.look()
                except TransportError as error:
                    logger.warning("memory node %s: %s", link.url, error)
                    link.close()
            self.states.look(partition.links)
        return self.is_leaving or any(
            partition.links and partition.is_lost for partition in self.partitions
        )

    def _connect_all(
        self, urls: Sequence[str], timeout_s: float, reasons: dict[str, str]
    ) -> dict[str, Endpoint]:
        """Connects to all urls in parallel; returns those that answer, in the order of urls."""
        found: dict[str, Endpoint] = {}
        if not urls:
            return found
        try:
            pool = self._pool(len(urls))
            futures = [pool.submit(self.connect, url, timeout_s) for url in urls]
        except RuntimeError as error:  # the system has no thread left
            reasons.update({url: str(error) for url in urls})
            return found
        # A name look-up has no timeout of its own, so the wait is limited here.
        wait(futures, timeout_s + _CONNECT_GRACE_S)
        pool.shutdown(wait=False)
        for url, future in zip(urls, futures, strict=True):
            if not future.done():
                future.add_done_callback(_close_late)
                reasons[url] = f"{url} took longer than {timeout_s:.3g} s"
                continue
            try:
                found[url] = future.result()
            except (TransportError, OSError) as error:
                reasons[url] = str(error) or type(error).__name__
        return found

    def _attach(
        self,
        partition: NodePartition,
        endpoints: Mapping[str, Endpoint],
        reasons: dict[str, str],
        least: int,
        timeout_s: float,
    ) -> str | None:
        """Attaches the partition to these nodes; returns the url of one that refuses, else None."""
        self._epoch += 1
        shards = [Shard(self._partition_mode, i, len(endpoints)) for i in range(len(endpoints))]
        pace, lanes = self.states.pace, self.lanes
        links = [
            NodeLink(url, endpoint, shard, self._clock, pace=pace(url), lanes=lanes)
            for (url, endpoint), shard in zip(endpoints.items(), shards, strict=True)
        ]
        requests = [self._request(link.shard, least) for link in links]
        wanted = [
            self._wanted(request, link) for request, link in zip(requests, links, strict=True)
        ]
        granted: list[int] = []
        order = sorted(range(len(links)), key=wanted.__getitem__)  # the smallest node refuses first
        for link, request in [(links[i], requests[i]) for i in order]:
            try:
                if min(wanted) < request.min_pages:
                    raise NodeError(ErrorCode.FULL, f"{min(wanted)} pages are too few")
                request = replace(request, num_pages=min(wanted), epoch=self._epoch)
                granted.append(link.attach(request, timeout_s, self._wire))
            except TransportError as error:
                reasons[link.url] = str(error)
                if self._last_refusals.get(link.url) != str(error):  # reasons repeat
                    logger.info("memory node %s: %s", link.url, error)
                self._last_refusals[link.url] = str(error)
                for other in links:
                    other.close()
                return link.url
        self._last_refusals.clear()
        partition.links = links
        partition.num_pages = min(granted)
        promised = min([link.num_mappings for link in links])
        partition.max_mappings = promised - growth_of(self._template, partition.num_pages)
        return None

    def _request(self, shard: Shard, least: int) -> AttachRequest:
        return replace(shard_request(self._template, shard), min_pages=least)

    def _wanted(self, request: AttachRequest, link: NodeLink) -> int:
        """Returns the pages for which the node may have room."""
        capacity = link.endpoint.peer.info.get("capacity_bytes")
        most = capacity if isinstance(capacity, int) and capacity > 0 else 1 << 62
        if self._bytes_per_node is not None:
            most = min(most, self._bytes_per_node)
        return min(request.num_pages, most // NodeLayout(request).page_bytes)

    def interrupt(self) -> None:
        """Ends all waits for answers by closing the endpoints. Any thread may call it."""
        for partition in self.partitions:
            for link in list(partition.links):
                link.endpoint.close()

    def close(self) -> None:
        for partition in self.partitions:
            partition.close()


def shard_request(template: AttachRequest, shard: Shard) -> AttachRequest:
    """Returns the request to the node of one shard."""
    return replace(
        template,
        layers=[shard.layer(layer) for layer in template.layers],
        page_tokens=[shard.page_tokens(tokens) for tokens in template.page_tokens],
        stripe=(shard.index, shard.count) if template.prefix_only and template.kv_policy else None,
    )


def _close_late(future: Future[Endpoint]) -> None:
    if future.exception() is None:
        future.result().close()
