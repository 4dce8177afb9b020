"""When memory nodes are lost, want to go, or come back: what the loop does then.

K/V that cannot be reached any more is computed again from the tokens, which the engine has: its
sequences wait as preempted ones do, memory is placed anew (memory/nodes/node_set.py), and
everything
goes on. Nobody sees more than a pause. Only when no memory is found for a while do requests end
with an error.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from memory.kv_memory import KVPartition
from memory.nodes.node_set import Member, NodeSet, NoNodeError
from serve.request import FinishReason
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence as TokenSequence

logger = logging.getLogger(__name__)

NODES_LOST = "the memory nodes are lost; try again later"
TOO_LITTLE_LEFT = "memory nodes are lost, and what is left is too small for this request"
NO_MEMORY = (NODES_LOST, TOO_LITTLE_LEFT)

_RETRY_S = 0.25
_LOOK_S = 0.1
_GIVE_UP_S = 5.0
_LEAST_TRIES = 3
_PROBE_S = 1.0
# Computing everything again may take so long, so that a node that is back can take part.
_REJOIN_S = 2.0
SETTLED_S = 5.0
_MOST_SETTLED_S = 300.0
_POOR_S = 60.0  # with this machine's memory alone: then a node is taken whatever it costs


class NodeRecovery:
    """Used by the thread that computes."""

    def __init__(
        self,
        nodes: NodeSet,
        partitions: Sequence[KVPartition],
        scheduler: Scheduler,
        end: Callable[[TokenSequence, FinishReason, str], None],
        clock: Callable[[], float] = time.monotonic,
        prober: NodeProber | None = None,
    ) -> None:
        """partitions: the K/V accounting of each member of nodes. end: ends a sequence with an
        error. prober: looks for nodes that are missing; a thread of its own by default."""
        self.nodes = nodes
        self._partitions = list(partitions)
        self._scheduler = scheduler
        self._end = end
        self._clock = clock
        self._lost_at: float | None = None
        self._short_at: float | None = None  # since when there is not enough for everyone
        self._changed_at = clock()
        self._try_at = self._look_at = 0.0
        self._settled_s = SETTLED_S
        self._said = ""  # why there was no memory, the last time
        self._num_tries = 0  # since there was memory
        self.num_recomputed = 0  # sequences
        self._prober = NodeProber(nodes) if prober is None else prober

    def handle_loss(self, error: Exception) -> None:
        """A step has failed because of a node."""
        logger.warning("%s", error)
        self._prober.invalidate()
        self._lose()
        if self._lost_at is None:
            self._lost_at = self._clock()
        self._try_at = 0.0

    def _lose(self) -> None:
        numbers = set(self.nodes.lose())
        starts = [partition.ranges[0].start for partition in self._partitions]
        ends = [*starts[1:], 1 << 62]

        def is_lost(start: int) -> bool:
            return any(starts[i] <= start < ends[i] for i in numbers)

        num_lost = self._scheduler.preempt_lost(lambda target: is_lost(target.start))
        self.num_recomputed += num_lost
        for number in numbers:
            self._partitions[number].reset(0)
            self.nodes.members[number].edits.take()
        if num_lost:
            logger.info("K/V of %d sequences is computed again", num_lost)

    def poll(self) -> None:
        """In idle moments: nodes that want to go are left, those that are back are taken."""
        self.is_ready()

    def is_ready(self) -> bool:
        """Called before each step: whether there is memory to compute with. Places what is
        nowhere, and lets nodes go or come back."""
        now_s = self._clock()
        # Those to whom nothing is sent at present have something to say, too.
        is_due = now_s >= self._look_at
        if is_due:
            self._look_at = now_s + _LOOK_S
        if self.nodes.is_leaving or (is_due and self.nodes.look()):
            self._prober.invalidate()
            self._lose()
            self._try_at = 0.0
        empty = [i for i, member in enumerate(self.nodes.members) if not member.num_pages]
        if empty:
            self._place(empty)
        elif self.nodes.missing:
            self._rejoin()
        if self.nodes.missing:
            self._prober.start()
        if any(member.num_pages for member in self.nodes.members):
            self._lost_at = None
            self._num_tries = 0
            self._mind_the_long()
            return True
        self._give_up()
        return False

    def _place(self, numbers: Sequence[int]) -> None:
        now_s = self._clock()
        has_some = len(numbers) < len(self.nodes.members)
        if has_some:  # the others go on: nobody shall wait for one that does not answer
            numbers = [i for i in numbers if self._is_back(self.nodes.members[i])]
        if now_s < self._try_at or not numbers:
            return
        self._num_tries += 1
        for number in numbers:
            member = self.nodes.members[number]
            try:
                self.nodes.place(member)
            except NoNodeError as error:
                if str(error) != self._said:
                    logger.warning("no memory for K/V yet: %s", error)
                self._said = str(error)
                continue
            self._partitions[number].reset(member.num_pages, member.max_mappings)
            member.edits.take()
            self._changed_at = now_s
            self._said = ""
            where = ", ".join([link.url for link in member.links])
            logger.info("K/V has %d pages again, on %s", member.num_pages, where)
            if member.is_local:  # it is enough once
                break
        self._try_at = self._clock() + _RETRY_S

    def _is_back(self, member: Member) -> bool:
        return any(self._prober.is_back(url) for url in member.urls)

    def _rejoin(self) -> None:
        """A node is back: share the K/V with it when that is cheap."""
        waiting = [m for m in self.nodes.members if any(u in self.nodes.missing for u in m.urls)]
        back = [member for member in waiting if self._is_back(member)]
        now_s = self._clock()
        if not back or now_s < self._changed_at + self._settled_s:
            return
        running = self._scheduler.running
        num_tokens = sum([sequence.num_computed_tokens for sequence in running])
        seconds = self._scheduler.chunks.model.prefill_seconds(num_tokens, 0)
        is_poor = any(member.is_local for member in back)
        has_waited = is_poor and now_s >= self._changed_at + _POOR_S
        if running and seconds > _REJOIN_S and not has_waited:
            return
        urls = [url for url in self.nodes.missing if self._prober.is_back(url)]
        logger.info("memory nodes are back: %s", ", ".join(urls))
        self._place_again(back)

    def _place_again(self, members: Sequence[Member]) -> None:
        """Where that brings nothing, the next time is later."""
        num_missing, num_pages = len(self.nodes.missing), self._scheduler.kv.num_pages
        for member in members:
            member.close()
        self._lose()
        self._try_at = 0.0
        self._place([i for i, m in enumerate(self.nodes.members) if not m.num_pages])
        has_more = self._scheduler.kv.num_pages > num_pages
        is_better = has_more or len(self.nodes.missing) < num_missing
        self._settled_s = SETTLED_S if is_better else min(2 * self._settled_s, _MOST_SETTLED_S)

    @property
    def is_short(self) -> bool:
        """There is memory, but too little for a sequence of full length."""
        return self._short_at is not None

    def _mind_the_long(self) -> None:
        """Memory may be left that some sequences do not fit into. They wait a while for more."""
        kv, now_s = self._scheduler.kv, self._clock()
        if kv.max_sequence_pages >= self.nodes.min_pages:
            self._short_at = None
            return
        if self._short_at is None:
            self._short_at = now_s
        if now_s < max(self._short_at, self._changed_at) + _GIVE_UP_S:
            return
        if not self._scheduler.running and now_s >= self._changed_at + self._settled_s:
            self._place_again(self.nodes.members)
        for sequence in list(self._scheduler.waiting):
            if now_s < sequence.request.arrival_s + _GIVE_UP_S:
                continue
            if kv.num_pages and kv.pages_for(sequence.max_tokens_total) > kv.max_sequence_pages:
                self._end(sequence, FinishReason.ERROR, TOO_LITTLE_LEFT)

    def _give_up(self) -> None:
        now_s = self._clock()
        if self._lost_at is None:
            self._lost_at = now_s
        if now_s < self._lost_at + _GIVE_UP_S or self._num_tries < _LEAST_TRIES:
            return
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            self._end(sequence, FinishReason.ERROR, NODES_LOST)

    def close(self) -> None:
        self._prober.stop()


class NodeProber:
    """A thread that asks nodes that are missing whether they have memory for us."""

    def __init__(self, nodes: NodeSet) -> None:
        self._nodes = nodes
        self._lock = threading.Lock()  # of all below
        self._back: frozenset[str] = frozenset()
        self._search = 0
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def is_back(self, url: str) -> bool:
        return url in self._back

    def invalidate(self) -> None:
        """What was found, or is being found, before somebody was lost says nothing of now."""
        with self._lock:
            self._back = frozenset()
            self._search += 1

    def start(self) -> None:
        """Until nobody is missing."""
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._back = frozenset()
                self._thread = threading.Thread(target=self._run, name="mergestep-probe")
                self._thread.daemon = True
                try:
                    self._thread.start()
                except RuntimeError as error:  # the system has none left: later
                    logger.warning("nobody looks for missing memory nodes: %s", error)
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
            back = frozenset(self._nodes.back(self._stop.is_set))
            with self._lock:
                if search == self._search:
                    self._back = back
