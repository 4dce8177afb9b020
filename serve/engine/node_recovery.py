"""Handles memory nodes that are lost, ask to leave, or come back.

The engine has the tokens of all sequences, so K/V that is out of reach is computed again. Its
sequences wait like preempted ones, the memory is placed on other nodes (memory/nodes/node_set.py),
and clients notice only a pause. If no memory is found for a while, requests end with an error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import abc
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from memory.kv_memory import KVPartition
from memory.nodes.errors import NodesLostError, NoNodeError
from memory.pages.kv_range import Range
from memory.partitioned_kv import PartitionedKV
from memory.segmented_kv import SegmentedKV
from serve.errors import (
    GROUP_LOST,
    KV_LOST,
    WEIGHTS_LOST,
    GenerationError,
    MemoryLostError,
    OffloadLostError,
    RankLostError,
    WeightsLostError,
)
from serve.group_stats import GroupStats
from serve.request import FinishReason
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from memory.nodes.node_set import NodePartition, NodeSet

logger = logging.getLogger(__name__)

NODES_LOST = "the memory nodes are lost; try again later"
TOO_LITTLE_LEFT = "memory nodes are lost, and what is left is too small for this request"


def generation_error(text: str) -> GenerationError:
    """Returns the error of a sequence that has ended with this text."""
    if text == GROUP_LOST:
        return RankLostError(text)
    if text == WEIGHTS_LOST:
        return WeightsLostError(text)
    if text == KV_LOST:
        return OffloadLostError(text)
    kind = MemoryLostError if text in (NODES_LOST, TOO_LITTLE_LEFT) else GenerationError
    return kind(text)


_RETRY_S = 0.25  # between two attempts to place memory
_POLL_S = 0.1  # between two looks at what idle nodes have sent
_GIVE_UP_S = 5.0  # without memory, or without enough for a sequence; then requests end
_MIN_TRIES = 3  # attempts to place memory before requests end
_PROBE_S = 0.5  # between two searches for missing nodes; none misses a pause of a second
_MAX_RECOMPUTE_S = 2.0  # recomputing the K/V may take this long for a node to be taken back
_MAX_LOST = 2  # a sequence that lost its K/V this often is not moved to a node that is back
SETTLED_S = 5.0  # after a change, before memory is placed again without need
_MAX_SETTLED_S = 300.0  # the same, after placements that did not help
_MAX_LOCAL_S = 60.0  # with this machine's memory alone; then a node is taken at any cost


class Recovery(Protocol):
    """Recovers from lost K/V. Only the loop's thread calls it, except `interrupt`."""

    @property
    def num_recomputed(self) -> int:
        """The sequences whose K/V was computed again."""

    @property
    def nodes(self) -> NodeSet | None:
        """The memory nodes; None where ranks hold the K/V."""

    @property
    def is_short(self) -> bool:
        """There is memory, but too little for a sequence of full length."""

    @property
    def group(self) -> GroupStats | None:
        """What is known of the group; None on one rank."""

    def handle_loss(self, error: NodesLostError) -> None:
        """Releases what was lost, after a step has failed because of it."""

    def update_nodes(self) -> bool:
        """Returns whether there is memory to compute with. The loop calls it before each step and
        when it is idle."""

    def interrupt(self) -> None:
        """Ends a wait within a step. Any thread may call it."""

    def close(self) -> None:
        """Ends its threads."""


MakeRecovery = Callable[[Scheduler, Callable[[Sequence, FinishReason, str], None]], Recovery]
"""Makes it from the scheduler and what ends a sequence with an error."""


class NodeRecovery:
    """Recovers from lost memory nodes. Only the loop's thread calls it."""

    def __init__(
        self,
        nodes: NodeSet,
        partitions: abc.Sequence[KVPartition],
        scheduler: Scheduler,
        end: Callable[[Sequence, FinishReason, str], None],
        clock: Callable[[], float] = time.monotonic,
        prober: NodeProber | None = None,
    ) -> None:
        """partitions: the K/V accounting of each partition of nodes. end: ends a sequence with an
        error. prober: looks for nodes that are missing; a thread of its own by default."""
        self.nodes = nodes
        self.group = None
        self._partitions = list(partitions)
        self._scheduler = scheduler
        # with segments this machine computes sequences of one segment while nodes are lost
        self._has_own = isinstance(scheduler.kv, SegmentedKV)
        self._end = end
        self._clock = clock
        self._lost_at: float | None = None
        self._short_at: float | None = None  # since when a sequence of full length does not fit
        self._changed_at = clock()
        self._try_at = self._poll_at = 0.0
        self._settled_s = SETTLED_S
        self._last_error = ""  # of the last attempt to place memory, so that it is logged once
        self._num_tries = 0  # attempts to place memory since there was some
        self.num_recomputed = 0  # sequences
        self._prober = NodeProber(nodes) if prober is None else prober

    def handle_loss(self, error: Exception) -> None:
        """Releases the lost memory after a step has failed because nodes were lost."""
        logger.warning("%s", error)
        self._prober.invalidate()
        self._release_lost()
        if self._lost_at is None:
            self._lost_at = self._clock()
        self._try_at = 0.0

    def _release_lost(self) -> None:
        """Preempts the sequences whose K/V is lost, and empties those partitions' accounting."""
        numbers = set(self.nodes.lose())
        starts = [partition.ranges[0].start for partition in self._partitions]
        ends = [*starts[1:], 1 << 62]
        kv = self._scheduler.kv

        def is_lost(target: Range) -> bool:
            if isinstance(kv, SegmentedKV):
                return kv.has_part_on(target, numbers)
            return any(starts[i] <= target.start < ends[i] for i in numbers)

        for sequence in self._scheduler.running:
            if sequence.kv_range is not None:
                sequence.num_lost += is_lost(sequence.kv_range)
        num_lost = self._scheduler.preempt_lost(is_lost)
        self.num_recomputed += num_lost
        for number in numbers:
            self._partitions[number].reset(0)
            self.nodes.partitions[number].edits.take()
        if num_lost:
            logger.info("K/V of %d sequences is computed again", num_lost)

    def update_nodes(self) -> bool:
        """Leaves nodes that ask to leave, takes nodes back and places memory that has no node.

        Returns whether there is memory to compute with. The loop calls it before each step and
        when it is idle.
        """
        now_s = self._clock()
        # Nodes to which nothing is sent at present may ask to leave too.
        is_due = now_s >= self._poll_at
        if is_due:
            self._poll_at = now_s + _POLL_S
        if self.nodes.is_leaving or (is_due and self.nodes.look()):
            self._prober.invalidate()
            self._release_lost()
            self._try_at = 0.0
        if is_due:
            self._note_states()
        empty = [i for i, partition in enumerate(self.nodes.partitions) if not partition.num_pages]
        if empty:
            self._place(empty)
        elif self.nodes.missing:
            self._rejoin()
        if self.nodes.missing:
            self._prober.start()
        if self._has_own or any(partition.num_pages for partition in self.nodes.partitions):
            self._lost_at = None
            self._num_tries = 0
            self._end_too_long()
            return True
        self._give_up()
        return False

    def _note_states(self) -> None:
        """Notes what the last probes found, and keeps new sequences away from late nodes."""
        found = self._prober.take()
        if found is not None:
            self.nodes.states.probe(self.nodes.missing, found)
        kv = self._scheduler.kv
        if isinstance(kv, PartitionedKV):
            late, numbers = self.nodes.states.late(), enumerate(self.nodes.partitions)
            kv.avoided = frozenset(i for i, p in numbers if late.intersection(p.urls))

    def _place(self, numbers: abc.Sequence[int]) -> None:
        """Places the memory of these partitions on nodes that can be reached."""
        now_s = self._clock()
        has_memory = self._has_own or len(numbers) < len(self.nodes.partitions)
        if has_memory:  # go on with that: do not wait for a node that does not answer
            numbers = [i for i in numbers if self._is_back(self.nodes.partitions[i])]
        if now_s < self._try_at or not numbers:
            return
        self._num_tries += 1
        for number in numbers:
            partition = self.nodes.partitions[number]
            try:
                self.nodes.place(partition)
            except NoNodeError as error:
                if str(error) != self._last_error:
                    logger.warning("no memory for K/V yet: %s", error)
                self._last_error = str(error)
                continue
            self._partitions[number].reset(partition.num_pages, partition.max_mappings)
            partition.edits.take()
            self._changed_at = now_s
            self._last_error = ""
            where = ", ".join([link.url for link in partition.links])
            logger.info("K/V has %d pages again, on %s", partition.num_pages, where)
            if partition.is_local:  # one partition on this machine is enough
                break
        self._try_at = self._clock() + _RETRY_S

    def _is_back(self, partition: NodePartition) -> bool:
        return bool(self._found(partition.urls))

    def _found(self, urls: abc.Sequence[str]) -> list[str]:
        """Returns the nodes that can be reached and whose probation is over, or is cut short
        because memory is."""
        found = [url for url in urls if self._prober.is_back(url)]
        return found if self.is_short else self.nodes.states.usable(found)

    def _rejoin(self) -> None:
        """Takes nodes back that can be reached again, if recomputing the K/V is cheap."""
        waiting = [m for m in self.nodes.partitions if any(u in self.nodes.missing for u in m.urls)]
        back = [partition for partition in waiting if self._is_back(partition)]
        now_s = self._clock()
        if not back or now_s < self._changed_at + self._settled_s:
            return
        running = self._scheduler.running
        num_tokens = sum([sequence.num_computed_tokens for sequence in running])
        seconds = self._scheduler.chunks.model.prefill_seconds(num_tokens, 0)
        is_local_only = any(partition.is_local for partition in back)
        has_waited = is_local_only and now_s >= self._changed_at + _MAX_LOCAL_S
        is_spared = any(sequence.num_lost >= _MAX_LOST for sequence in running)
        if running and (seconds > _MAX_RECOMPUTE_S or is_spared) and not has_waited:
            return
        urls = self._found(self.nodes.missing)
        logger.info("memory nodes are back: %s", ", ".join(urls))
        self._place_again(back)

    def _place_again(self, partitions: abc.Sequence[NodePartition]) -> None:
        """Places the memory of these partitions anew. If that does not help, the next time comes
        later."""
        num_missing, num_pages = len(self.nodes.missing), self._scheduler.kv.num_pages
        for partition in partitions:
            partition.close()
        self._release_lost()
        self._try_at = 0.0
        self._place([i for i, m in enumerate(self.nodes.partitions) if not m.num_pages])
        has_more = self._scheduler.kv.num_pages > num_pages
        is_better = has_more or len(self.nodes.missing) < num_missing
        self._settled_s = SETTLED_S if is_better else min(2 * self._settled_s, _MAX_SETTLED_S)

    @property
    def is_short(self) -> bool:
        """There is memory, but too little for a sequence of full length."""
        return self._short_at is not None

    def _end_too_long(self) -> None:
        """Ends sequences that do not fit into the memory that is left, after a wait for more."""
        kv, now_s = self._scheduler.kv, self._clock()
        if kv.fits_alone(kv.max_model_len):
            self._short_at = None
            return
        if self._short_at is None:
            self._short_at = now_s
        if now_s < max(self._short_at, self._changed_at) + _GIVE_UP_S:
            return
        is_settled = now_s >= self._changed_at + self._settled_s
        if not self._has_own and not self._scheduler.running and is_settled:
            self._place_again(self.nodes.partitions)
        due_s = self._changed_at + min(self._settled_s, 2 * SETTLED_S) + _RETRY_S
        if now_s < due_s and self._found(self.nodes.missing):  # it is taken back then
            return
        for sequence in list(self._scheduler.waiting):
            if now_s < sequence.request.arrival_s + _GIVE_UP_S:
                continue
            if kv.num_pages and not kv.fits_alone(sequence.max_tokens_total):
                self._end(sequence, FinishReason.ERROR, TOO_LITTLE_LEFT)

    def _give_up(self) -> None:
        """Ends all sequences when there has been no memory for too long."""
        now_s = self._clock()
        if self._lost_at is None:
            self._lost_at = now_s
        if now_s < self._lost_at + _GIVE_UP_S or self._num_tries < _MIN_TRIES:
            return
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            self._end(sequence, FinishReason.ERROR, NODES_LOST)

    def interrupt(self) -> None:
        """Ends a wait for a node that is alive but does not answer. Any thread may call it."""
        self.nodes.interrupt()

    def close(self) -> None:
        self._prober.stop()


class NodeProber:
    """A thread that asks missing nodes whether they can be reached and have memory."""

    def __init__(self, nodes: NodeSet) -> None:
        self._nodes = nodes
        self._lock = threading.Lock()  # guards the fields below
        self._back: frozenset[str] = frozenset()
        self._is_new = False  # whether a search has ended since the last take()
        self._search = 0
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def is_back(self, url: str) -> bool:
        return url in self._back

    def take(self) -> frozenset[str] | None:
        """Returns the nodes that a search found, once; None if none has ended since then."""
        with self._lock:
            is_new, self._is_new = self._is_new, False
            return self._back if is_new else None

    def invalidate(self) -> None:
        """Drops what was found, or is being found: it dates from before the last loss."""
        with self._lock:
            self._back = frozenset()
            self._is_new = False
            self._search += 1

    def start(self) -> None:
        """Starts the thread, which ends when no node is missing."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._back = frozenset()
                self._thread = threading.Thread(target=self._run, name="mergestep-probe")
                self._thread.daemon = True
                try:
                    self._thread.start()
                except (
                    RuntimeError
                ) as error:  # the system has no threads left; the next call tries again
                    logger.warning("no thread to look for missing memory nodes: %s", error)
                    self._thread = None

    def stop(self) -> None:
        self._stop.set()
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_PROBE_S):
            with self._lock:
                missing = self._nodes.missing
                if not missing:
                    self._thread = None
                    return
                search = self._search
            back = frozenset(self._nodes.find_returned(self._stop.is_set))
            with self._lock:
                if search == self._search:
                    self._back = back
                    self._is_new = True
