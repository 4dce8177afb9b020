"""The states of an engine's memory nodes (node_health.py), and a log line when one changes."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Collection, Iterable, Sequence

from memory.nodes.node_health import AnswerPace, NodeHealth, NodeState
from memory.nodes.node_link import NodeLink
from transport.base import HEARTBEAT_S, LOST_AFTER_S

logger = logging.getLogger(__name__)

_LATE_S = 3 * HEARTBEAT_S  # silence after which a node is late
_SILENT_S = LOST_AFTER_S - HEARTBEAT_S  # silence of a node that did not close its connection
_LOG_S = 10.0  # from one log line of a node to the next


class NodeStates:
    """What the engine knows of each node, by its URL. The compute thread changes it."""

    def __init__(self, urls: Iterable[str], engine: str, clock: Callable[[], float]) -> None:
        """engine: its name, from which the jitter of probations follows."""
        self._clock = clock
        self._nodes = {url: NodeHealth(_jitter(engine + url)) for url in urls}
        self._logged = dict.fromkeys(self._nodes, NodeState.HEALTHY)
        self._log_at = dict.fromkeys(self._nodes, 0.0)

    def by_url(self) -> dict[str, NodeState]:
        """Returns all states. Any thread may call it."""
        return {url: node.state for url, node in self._nodes.items()}

    def pace(self, url: str) -> AnswerPace:
        """Returns the pace of a node, which its links share, or a new one for this machine."""
        node = self._nodes.get(url)
        return AnswerPace() if node is None else node.pace

    def late(self) -> set[str]:
        """Returns the nodes that hold K/V and are late."""
        return {url for url, node in self._nodes.items() if node.state is NodeState.LATE}

    def usable(self, urls: Iterable[str]) -> list[str]:
        """Returns the nodes on which K/V may be placed, in the same order."""
        now_s = self._clock()
        return [url for url in urls if self._nodes[url].may_be_used(now_s)]

    def hold(self, links: Sequence[NodeLink]) -> None:
        """These links hold K/V from now on."""
        for link in links:
            if (node := self._nodes.get(link.url)) is not None:
                node.hold(self._clock())
        self._log()

    def end(self, links: Sequence[NodeLink]) -> None:
        """Notes which of these links are lost, and which nodes ask to leave."""
        for link in links:
            node = self._nodes.get(link.url)
            if node is None:
                continue
            if link.is_leaving:
                node.leave(self._clock())
            elif link.is_lost:
                if link.stalled_s:
                    node.stall(self._clock(), link.stalled_s)
                silence_s = max(link.endpoint.silence_s, link.unanswered_s)
                node.lose(self._clock(), was_silent=silence_s >= _SILENT_S)
        self._log()

    def probe(self, urls: Iterable[str], found: Collection[str]) -> None:
        """Notes which of the nodes without K/V a probe found."""
        for url in urls:
            self._nodes[url].probe(self._clock(), is_found=url in found)
        self._log()

    def look(self, links: Sequence[NodeLink]) -> None:
        """Notes which links are late, and closes those that stall too often."""
        for link in links:
            node = self._nodes.get(link.url)
            if node is None or link.is_lost:
                continue
            if link.was_late or link.endpoint.silence_s >= _LATE_S:
                node.be_late(self._clock())
                link.was_late = False
            if link.stalled_s:
                node.stall(self._clock(), link.stalled_s)
                link.stalled_s = 0.0
                if node.stalls_too_often:
                    logger.warning("memory node %s stalls too often: it is given up", link.url)
                    link.close()
        for node in self._nodes.values():
            node.update(self._clock())
        self._log()

    def _log(self) -> None:
        """Logs new states; of a node whose state changes often, only some."""
        now_s = self._clock()
        for url, node in self._nodes.items():
            if node.state is not self._logged[url] and now_s >= self._log_at[url]:
                self._logged[url] = node.state
                self._log_at[url] = now_s + _LOG_S
                logger.info("memory node %s: %s", url, _text(node))


def _text(node: NodeHealth) -> str:
    if node.state is NodeState.LATE:
        return "late; steps wait for it"
    if node.state is NodeState.LOST:
        # a node that left, was full or could not be reached has had no loss
        what = f"lost ({node.num_losses} in a row)" if node.num_losses else "not in use"
        return f"{what}; it is used again when it has answered for {node.probation_s:.0f} s"
    if node.state is NodeState.PROBATION:
        return f"it answers again; probation for {node.probation_s:.0f} s"
    return "healthy"


def _jitter(name: str) -> Callable[[int], float]:
    return lambda number: zlib.crc32(f"{name} {number}".encode()) / 2**32
