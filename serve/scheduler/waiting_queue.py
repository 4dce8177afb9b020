"""Who waits, who is next, and who must go when memory runs out. Numbers only, clock passed in.

    fcfs      first come, first served; the youngest goes
    priority  the lowest number first, first come within; nothing ages, so a stream of urgent
              requests can keep others waiting for ever
    mlfq      skip-join multi-level feedback (FastServe, arXiv 2305.05920): whoever has run for
              long gives way to those who have not
    fair      virtual token counter (arXiv 2401.00588): the client that was served least is next

An order decides about sequences only; how much fits and what is preempted when is the
scheduler's business. What a sequence that gave way had computed stays in the prefix cache or
goes to its store, so swapping is closing its range and opening it again with a hit.
"""

from __future__ import annotations

import importlib
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from serve.request import Request
from serve.scheduler.sequence import Sequence

QueueEntry = tuple[int, int, Sequence]
"""(level, number of arrival, sequence): sorted, the first is next."""


class WaitingQueue:
    """First come, first served, and the base of the others: sorted by `level`, then by arrival.

    Iterating gives the waiting sequences, the next one first. preempts: somebody who waits may
    outrank somebody who runs. Only `seconds_before` may be called from another thread.
    """

    preempts = False
    margin = 0  # ranks by which somebody who runs must be behind to give way

    def __init__(self) -> None:
        # of so many tokens, the second number of them known; whoever can tell sets it
        self.prefill_seconds: Callable[[int, int], float] = lambda num_tokens, num_cached: 0.0
        self.now_s = 0.0
        self._waiting: list[QueueEntry] = []
        self._arrivals: dict[Sequence, int] = {}
        self._num_arrived = 0

    def level(self, sequence: Sequence) -> int:
        """A lower one goes first. It does not change while the sequence is in a queue."""
        return 0

    def level_of_arrival(self, request: Request, num_rows: int) -> int:
        """That of a request that arrives with num_rows to compute."""
        return 0

    # ---- the scheduler's calls

    def tick(self, now_s: float) -> None:
        """A step begins."""
        self.now_s = now_s

    def add(self, sequence: Sequence) -> None:
        """It has arrived."""
        self._num_arrived += 1
        self._arrivals[sequence] = self._num_arrived
        self._enqueue(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """It ran and was preempted. Its arrival counts, so it is before those who came later."""
        self._enqueue(sequence)

    def take(self, sequence: Sequence) -> None:
        """It is admitted: its range is open."""
        self._dequeue(sequence)

    def remove(self, sequence: Sequence) -> None:
        """It ended while it waited."""
        self._dequeue(sequence)

    def ended(self, sequence: Sequence) -> None:
        """It is finished and not waiting."""
        del self._arrivals[sequence]

    def victim(self, running: list[Sequence]) -> Sequence:
        """Who must go when memory runs out. running: in the order of their admission."""
        return max(reversed(running), key=self.level)

    def victims_for(self, sequence: Sequence, running: list[Sequence]) -> list[Sequence]:
        """Those of the running who give way to a waiting one, the first to go last."""
        if not self.preempts:
            return []
        level = self.level(sequence) + self.margin
        return sorted([s for s in running if self.level(s) > level], key=self.level)

    def is_worth_preempting(self, sequence: Sequence) -> bool:
        """Whether a running one may give way although its tokens must be computed again."""
        return True

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, _, sequence in self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def seconds_before(self, request: Request, num_rows: int) -> float:
        """To compute the prompts that wait and come before a request that arrives now with
        num_rows."""
        level = self.level_of_arrival(request, num_rows)
        return self._seconds([s for other, _, s in list(self._waiting) if other <= level])

    def num_before(self, request: Request, num_rows: int) -> int:
        """Of the waiting, those that come before a request that arrives now with num_rows."""
        level = self.level_of_arrival(request, num_rows)
        return sum([other <= level for other, _, _ in list(self._waiting)])

    def _seconds(self, sequences: list[Sequence]) -> float:
        """To compute their prompts; those that came before anything was known by their rows."""
        unknown = sum([s.num_expected_rows for s in sequences if not s.expected_s])
        known_s = sum([s.expected_s for s in sequences])
        return known_s + (self.prefill_seconds(unknown, 0) if unknown else 0.0)

    # ---- the queue

    def _enqueue(self, sequence: Sequence) -> None:
        insort(self._waiting, (self.level(sequence), self._arrivals[sequence], sequence))

    def _dequeue(self, sequence: Sequence) -> None:
        index = bisect_left(self._waiting, (self.level(sequence), self._arrivals[sequence]))
        assert self._waiting[index][2] is sequence, "not in the queue"
        del self._waiting[index]


class PriorityQueue(WaitingQueue):
    """SamplingParams.priority; a running sequence gives way only if there is no other way."""

    preempts = True

    def level(self, sequence: Sequence) -> int:
        return sequence.request.params.priority

    def level_of_arrival(self, request: Request, num_rows: int) -> int:
        return request.params.priority


QUEUES = {
    "fcfs": "serve.scheduler.waiting_queue:WaitingQueue",
    "priority": "serve.scheduler.waiting_queue:PriorityQueue",
    "mlfq": "serve.scheduler.mlfq_queue:MlfqQueue",
    "fair": "serve.scheduler.fair_queue:FairQueue",
}
"""The class of each queue policy in serve.config.QUEUE_POLICIES, imported when it is chosen."""


def make_queue(name: str) -> WaitingQueue:
    """Returns an empty queue of the policy `name`, one of serve.config.QUEUE_POLICIES."""
    module, _, attribute = QUEUES[name].partition(":")
    queue: WaitingQueue = getattr(importlib.import_module(module), attribute)()
    return queue
