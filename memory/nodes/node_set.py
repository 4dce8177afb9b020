"""The memory nodes of one engine: who holds what, and what happens when one is lost.

A *member* is a part of the K/V memory with books of its own. With the head and sequence
partitions there is one, spread over all nodes; with the request partition every node is one. When
a node is lost its member is placed anew, with a later epoch, on the nodes that are left, or in
this machine's memory if none is; what it held is computed again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import NoReturn

from memory.kv_manager import KVManager
from memory.nodes.attach import AttachRequest, NodeLayout, growth_of
from memory.nodes.edit_log import EditLog
from memory.nodes.node_link import NodeError, NodeLink
from memory.nodes.placement import PageGeometry, Shard
from memory.nodes.wire import ErrorCode, WireType
from transport.base import Endpoint, TransportError

logger = logging.getLogger(__name__)

_FIRST_ATTACH_S = 5.0
_ATTACH_S = 1.5  # others wait, or could be asked
_CONNECT_GRACE_S = 0.25
_CONNECT_S = 0.5  # to somebody who was there before, and close by
_MOST_CONNECT_S = 1.0  # nobody waits longer for one that may be gone
_SLOWER = 4.0  # than the first time
FIRST_CONNECT_S = 5.0

Connect = Callable[[str, float], Endpoint]
"""url, timeout in seconds -> an endpoint, or TransportError (or OSError)."""


class NoNodeError(Exception):
    """Nobody takes the K/V. The text says why."""


@dataclass(slots=True, eq=False)
class NodePartition:
    """urls: of the nodes it may lie on. num_pages: 0 while it is nowhere. max_mappings: with
    which sequences may begin."""

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
    """Of members that have their places: ranges of one after those of the other. max_rows: of a
    sequence in a step."""
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
    """Members and their links. Used by the thread that computes."""

    def __init__(
        self,
        partitions: Sequence[NodePartition],
        template: AttachRequest,
        partition_mode: str,
        connect: Connect,
        *,
        wire: WireType = WireType.FLOAT32,
        local: Callable[[], Endpoint] | None = None,
        bytes_per_node: int | None = None,
        clock: Callable[[], float] = time.monotonic,
        pool: Callable[[int], Executor] = ThreadPoolExecutor,
    ) -> None:
        """template: what a node that holds everything would be asked for. wire: of q and results.
        local: attaches this machine's memory. bytes_per_node: asked for at most; None: all that
        is free. pool: so many connect side by side in it."""
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
        """Of a member: with less, a sequence may find itself without room."""
        self.connect_s = _CONNECT_S
        """How long a node may take that was there before."""
        self.num_lost = 0
        self._last_refusals: dict[str, str] = {}  # why nodes did not take us, the last time
        self._leaving: set[str] = set()  # they want to go, and are not asked at once

    @property
    def num_nodes(self) -> int:
        """That there are, attached or missing."""
        return sum([len(partition.urls) for partition in self.partitions])

    @property
    def missing(self) -> list[str]:
        """Nodes that hold nothing, although they could."""
        held = {link.url for partition in self.partitions for link in partition.links}
        return [url for partition in self.partitions for url in partition.urls if url not in held]

    @property
    def is_leaving(self) -> bool:
        """A node has asked us to go."""
        return any(link.is_leaving for partition in self.partitions for link in partition.links)

    def lose(self) -> list[int]:
        """Numbers of the members that are lost (again), or have to leave a node; they are
        nowhere from now on."""
        numbers = []
        for number, partition in enumerate(self.partitions):
            if partition.is_lost or any(link.is_leaving for link in partition.links):
                self.num_lost += any(link.is_lost for link in partition.links)
                self._leaving |= {link.url for link in partition.links if link.is_leaving}
                partition.close()
                numbers.append(number)
        return numbers

    def place(
        self, partition: NodePartition, connect_s: float | None = None, *, needs_all: bool = False
    ) -> None:
        """Attach to every node that answers, else to this machine's memory; where neither has
        min_pages, to what nodes have. NoNodeError.

        needs_all: nobody may be missing."""
        partition.close()
        partition.is_local = False
        connect_s = connect_s or self.connect_s
        reasons: dict[str, str] = {}
        if needs_all:
            began_s = self._clock()
            endpoints = self._connect_all(partition.urls, connect_s, reasons)
            # Far nodes take longer, every time.
            usual_s = _SLOWER * (self._clock() - began_s)
            self.connect_s = min(max(self.connect_s, usual_s), _MOST_CONNECT_S)
            if not reasons:
                self._attach(partition, endpoints, reasons, self.min_pages, _FIRST_ATTACH_S)
            if partition.links:
                return
            self._refuse(reasons)
        leaving = self._leaving & {*partition.urls}
        urls = [url for url in partition.urls if url not in leaving]
        reasons.update(dict.fromkeys(leaving, "it wants to go"))
        self._leaving -= leaving
        if not self._place_on(partition, urls, connect_s, reasons, self.min_pages):
            if self._place_locally(partition, reasons):
                return
            full = [url for url in urls if reasons[url].startswith(ErrorCode.FULL.name)]
            self._place_on(partition, full, connect_s, reasons, 1)
        if not partition.links:
            self._refuse(reasons)

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
            # who is left is asked anew: a connection has one session
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
        """Of the nodes that are missing, those that have memory for us, sharing with all that
        would be there then. From any thread. is_over: nobody wants to know any more."""
        missing = self.missing
        found = [url for url in missing if not is_over() and self._has_room(url, None)]
        num_there = self.num_nodes - len(missing) + len(found)
        if self._partition_mode == "request" or not found or num_there == self.num_nodes:
            return found
        return [url for url in found if not is_over() and self._has_room(url, num_there)]

    def _has_room(self, url: str, count: int | None) -> bool:
        """Whether it is there and has memory for one of `count` shares; None: of all nodes."""
        try:
            endpoint = self.connect(url, self.connect_s)
        except (TransportError, OSError):
            return False
        [most] = [len(partition.urls) for partition in self.partitions if url in partition.urls]
        shard = Shard(self._partition_mode, 0, count or most)
        link = NodeLink(url, endpoint, shard, self._clock)
        try:
            link.attach(
                replace(self._request(link.shard, self.min_pages), is_question=True),
                self.connect_s,
                self._wire,
            )
        except TransportError:
            return False
        finally:
            link.close()
        return True

    def look(self) -> bool:
        """Take what links say without being asked; whether somebody is lost or wants to go."""
        for partition in self.partitions:
            for link in partition.links:
                try:
                    link.look()
                except TransportError as error:
                    logger.warning("memory node %s: %s", link.url, error)
                    link.close()
        return self.is_leaving or any(
            partition.links and partition.is_lost for partition in self.partitions
        )

    def _connect_all(
        self, urls: Sequence[str], timeout_s: float, reasons: dict[str, str]
    ) -> dict[str, Endpoint]:
        """Those that answer, in the order of urls."""
        found: dict[str, Endpoint] = {}
        if not urls:
            return found
        try:
            pool = self._pool(len(urls))
            futures = [pool.submit(self.connect, url, timeout_s) for url in urls]
        except RuntimeError as error:  # the system has no thread left
            reasons.update({url: str(error) for url in urls})
            return found
        # Looking up a name takes what it takes: nobody waits for that.
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
        """Share the K/V among them; the url of one that does not take part, else None."""
        self._epoch += 1
        links = [
            NodeLink(url, endpoint, Shard(self._partition_mode, index, len(endpoints)), self._clock)
            for index, (url, endpoint) in enumerate(endpoints.items())
        ]
        requests = [self._request(link.shard, least) for link in links]
        wanted = [
            self._wanted(request, link) for request, link in zip(requests, links, strict=True)
        ]
        granted: list[int] = []
        order = sorted(range(len(links)), key=wanted.__getitem__)  # the smallest says no first
        for link, request in [(links[i], requests[i]) for i in order]:
            try:
                if min(wanted) < request.min_pages:
                    raise NodeError(ErrorCode.FULL, f"{min(wanted)} pages are too few")
                request = replace(request, num_pages=min(wanted), epoch=self._epoch)
                granted.append(link.attach(request, timeout_s, self._wire))
            except TransportError as error:
                reasons[link.url] = str(error)
                if self._last_refusals.get(link.url) != str(error):  # it may be so for long
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
        """Pages that the node may have room for."""
        capacity = link.endpoint.peer.info.get("capacity_bytes")
        most = capacity if isinstance(capacity, int) and capacity > 0 else 1 << 62
        if self._bytes_per_node is not None:
            most = min(most, self._bytes_per_node)
        return min(request.num_pages, most // NodeLayout(request).page_bytes)

    def interrupt(self) -> None:
        """From any thread: nobody waits for an answer any more."""
        for partition in self.partitions:
            for link in list(partition.links):
                link.endpoint.close()

    def close(self) -> None:
        for partition in self.partitions:
            partition.close()


def shard_request(template: AttachRequest, shard: Shard) -> AttachRequest:
    """What one node is asked for."""
    return replace(
        template,
        layers=[shard.layer(layer) for layer in template.layers],
        page_tokens=[shard.page_tokens(tokens) for tokens in template.page_tokens],
    )


def _close_late(future: Future[Endpoint]) -> None:
    if future.exception() is None:
        future.result().close()
