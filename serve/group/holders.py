"""Holders of segments for a group: all ranks attach to a holder and leave it together.

The engine's own sessions stand for those of all ranks: they are the links that it watches. A
session that another rank loses is lost for all.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from memory.kv_manager import KVManager
from memory.nodes.attach import NODE_MAPPINGS, NodeLayout, accounting_bytes, growth_of, most_pages
from memory.nodes.errors import NodesLostError, NoNodeError
from memory.nodes.node_link import NodeError, NodeLink
from memory.nodes.node_set import NodePartition, NodeSet
from memory.nodes.placement import Shard
from memory.nodes.rank_links import Granted
from memory.nodes.wire import ErrorCode
from serve.group.errors import GroupLostError
from serve.group.group import Group
from serve.group.links.messages import Kind
from serve.group.links.worker_link import WorkerLink
from serve.group.recovery import GroupRecovery
from serve.group.stats import group_stats
from serve.group_stats import GroupStats
from serve.loading.kvp import SegmentSizes
from serve.request import FinishReason
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence as Running
from transport.base import TransportError

logger = logging.getLogger(__name__)

_ANSWER_S = 15.0  # for a worker to attach, beyond the time to connect
_ASK_S = 0.05  # between two questions to a node that still frees earlier sessions
_NUM_ASKED = 20
_LOOK_S = 1.0  # between two times that a pipeline is emptied to look for holders


class GroupHolders(NodeSet):
    """The holders and the engine's links to them, with those of all workers behind."""

    def __init__(self, group: Group, sizes: SegmentSizes, bytes_per_node: int | None) -> None:
        self._whole = sizes.template
        super().__init__(
            sizes.partitions(), self._whole, "request", sizes.connect, bytes_per_node=bytes_per_node
        )
        self._group = group
        self._sizes = sizes
        self._attached = itertools.count(1)
        self._epochs = [0] * len(self.partitions)

    # ---- placing

    def place(
        self, partition: NodePartition, connect_s: float | None = None, *, needs_all: bool = False
    ) -> None:
        """Attaches all ranks to a holder. Raises NoNodeError if one is refused."""
        number, [url] = self.partitions.index(partition), partition.urls
        self._leave([number])
        try:
            self._group.begin_epoch()
            self._note_losses()
            num_pages = self._free_pages(url, connect_s or self.connect_s)
            granted = self._attach_all(number, num_pages, connect_s or self.connect_s)
        except (TransportError, OSError, NodesLostError) as error:
            self._leave([number])
            if not isinstance(error, GroupLostError):  # which is not the holder's fault
                self.states.probe([url], ())
            text = str(error) or type(error).__name__
            raise NoNodeError(text if url in text else f"{url}: {text}") from error
        partition.links = self._own_links(number)
        partition.num_pages = granted.num_pages
        growth = growth_of(self._whole, granted.num_pages)
        partition.max_mappings = granted.num_mappings - growth
        self.states.hold(partition.links)

    def _free_pages(self, url: str, connect_s: float) -> int:
        """Returns how many pages each rank can have on a node, which all have alike. A node may
        still free earlier sessions: it is asked until it has no more."""
        pages, most = 0, self._most_pages
        for _ in range(_NUM_ASKED):
            before, pages = pages, min(most, self._ask(url, connect_s))
            if pages == most or 0 < pages <= before:
                break
            time.sleep(_ASK_S)
        if not pages:
            raise NodeError(ErrorCode.FULL, "no page is free for each rank")
        return pages

    @property
    def _most_pages(self) -> int:
        share = NODE_MAPPINGS // self._group.grid.size
        return min(self._sizes.num_pages, most_pages(self._whole, share))

    def _ask(self, url: str, connect_s: float) -> int:
        whole = self._whole
        link = NodeLink(url, self.connect(url, connect_s), Shard("request", 0, 1))
        try:
            granted = link.attach(replace(whole, is_question=True), connect_s + 1.0)
        except NodeError as error:
            if error.code is ErrorCode.FULL:
                return 0
            raise
        finally:
            link.close()
        tables = accounting_bytes(whole.num_ranges, whole.num_places)
        num_bytes = granted * NodeLayout(whole).page_bytes - (self._group.grid.size - 1) * tables
        return max(0, num_bytes // self._sizes.page_bytes)

    def _attach_all(self, number: int, num_pages: int, connect_s: float) -> Granted:
        """Returns the least that a rank was granted."""
        group, epoch = self._group, next(self._attached)
        self._epochs[number] = epoch
        content = {
            "holder": number,
            "num_pages": num_pages,
            "epoch": epoch,
            "connect_s": connect_s,
        }
        own = group.own.holders
        assert own is not None, "a group with holders"
        for link in group.links.values():
            link.post_json(Kind.HOLDER, group.epoch, content)
        failed: Exception | None = None
        granted: list[Granted] = []
        try:
            granted.append(own.attach(number, num_pages, epoch, connect_s))
        except (TransportError, OSError) as error:
            failed = error
        for link in group.links.values():  # every rank answers
            try:
                granted.append(self._answer(link, connect_s, epoch))
            except (TransportError, OSError) as error:
                failed = failed or error
        if failed is not None:
            raise failed
        return Granted(min(x.num_pages for x in granted), min(x.num_mappings for x in granted))

    def _answer(self, link: WorkerLink, connect_s: float, epoch: int) -> Granted:
        reply: dict[str, Any] = {}
        while reply.get("epoch") != epoch:  # an answer may have come too late for an earlier one
            reply = link.await_json(Kind.HELD, connect_s + _ANSWER_S, epoch=self._group.epoch)
        if "error" in reply:
            raise TransportError(f"rank {link.rank}: {reply['error']}")
        return Granted(int(reply["num_pages"]), int(reply["num_mappings"]))

    def _own_links(self, number: int) -> list[NodeLink]:
        own = self._group.own.holders
        return [] if own is None else own.partitions[number].links

    # ---- losing

    def look(self) -> bool:
        """As NodeSet.look, for the sessions of all ranks."""
        self._note_losses()
        return super().look()

    def lose(self) -> list[int]:
        """As NodeSet.lose, for the sessions of all ranks."""
        self._note_losses()
        numbers = super().lose()
        self._leave(numbers)
        return numbers

    def _note_losses(self) -> None:
        """Closes this rank's sessions on holders that another rank has lost since it attached."""
        for worker in self._group.links.values():
            for number, epoch in worker.lost_holders:
                if epoch == self._epochs[number]:
                    for link in self.partitions[number].links:
                        link.close()
            worker.lost_holders = set()

    def _leave(self, numbers: list[int]) -> None:
        """Ends the sessions of all ranks on these holders."""
        own = self._group.own.holders
        for number in numbers:
            self.partitions[number].close()
            if own is not None:
                own.detach(number)
            for link in self._group.links.values():
                with contextlib.suppress(TransportError):  # the rank is lost, and its sessions too
                    content = {"holder": number, "num_pages": 0, "epoch": 0}
                    link.post_json(Kind.HOLDER, self._group.epoch, content)


class HolderRecovery(Protocol):
    """What recovers K/V that holders have lost: as Recovery (serve/engine/node_recovery.py)."""

    num_recomputed: int

    @property
    def is_short(self) -> bool: ...

    def handle_loss(self, error: NodesLostError) -> None: ...

    def update_nodes(self) -> bool: ...

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


class HeldGroupRecovery:
    """Implements Recovery for a group with holders.

    A holder that is lost costs the sequences with segments there, as on one process. If a rank is
    lost, all K/V is, and the holders are attached again when the group is whole.
    """

    def __init__(
        self,
        group: Group,
        nodes: GroupHolders,
        memories: Sequence[KVManager],
        make_group: Callable[..., GroupRecovery],
        make_holders: Callable[..., HolderRecovery],
        scheduler: Scheduler,
        end: Callable[[Running, FinishReason, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """memories: the accounting of each holder. make_group, make_holders: make the recovery of
        each from the scheduler and `end`."""
        self.nodes = nodes
        self._group, self._memories = group, list(memories)
        self._of_group = make_group(scheduler, end)
        self._of_holders = make_holders(scheduler, end)
        self._scheduler = scheduler
        self._clock = clock
        self._num_formed = group.num_formed
        self._look_at = 0.0

    @property
    def num_recomputed(self) -> int:
        return self._of_group.num_recomputed + self._of_holders.num_recomputed

    @property
    def is_short(self) -> bool:
        return self._of_holders.is_short

    @property
    def group(self) -> GroupStats:
        return group_stats(self._group)

    def handle_loss(self, error: NodesLostError) -> None:
        if isinstance(error, GroupLostError) or self._group.is_lost():
            self._of_group.handle_loss(error)
        else:
            self._of_holders.handle_loss(error)

    def update_nodes(self) -> bool:
        """As Recovery says. False while steps are in flight means that they have to be completed
        first, because holders may have to be attached or left."""
        if not self._of_group.update_nodes():
            return False
        now_s = self._clock()
        if self._scheduler.launched:
            return now_s < self._look_at or not (self.nodes.is_leaving or self.nodes.missing)
        self._look_at = now_s + _LOOK_S
        if self._group.num_formed != self._num_formed:
            self._attach_again()
            self._num_formed = self._group.num_formed
        return self._of_holders.update_nodes()

    def _attach_again(self) -> None:
        """Attaches to all holders that may be used, after the group was formed anew. The others
        are attached when they are found (NodeRecovery)."""
        for partition, memory in zip(self.nodes.partitions, self._memories, strict=True):
            partition.close()
            memory.reset(0)
            partition.edits.take()
            if not self.nodes.states.usable(partition.urls):
                continue
            try:
                self.nodes.place(partition)
            except NoNodeError as error:
                logger.warning("no memory for K/V: %s", error)
                continue
            memory.reset(partition.num_pages, partition.max_mappings)
            partition.edits.take()

    def interrupt(self) -> None:
        self._of_group.interrupt()
        self._of_holders.interrupt()

    def close(self) -> None:
        self._of_group.close()
        self._of_holders.close()
