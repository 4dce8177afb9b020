"""Queue policies: which waiting sequence is next, and which running one is preempted.

    fcfs      first come, first served; the latest arrival is preempted first
    priority  the lowest number first, then by arrival; nothing ages, so a stream of urgent
              requests can starve the others
    mlfq      skip-join multi-level feedback (FastServe, arXiv 2305.05920): a sequence that has
              run for long is preempted for those that have not
    fair      virtual token counter (arXiv 2401.00588): the client that was served least is next
    srpt      the sequence with the shortest predicted remaining work (TRAIL, arXiv 2410.01035)

A queue policy only orders sequences; the scheduler decides what fits and when it preempts. What a
preempted sequence has computed stays in the prefix cache or goes to its page store, so that
swapping is closing a range and opening it again with a prefix hit. Numbers only; the clock is
passed in.
"""

from __future__ import annotations

import importlib
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from serve.request import Request
from serve.scheduler.sequence import Sequence

QueueEntry = tuple[int, int, Sequence]
"""(priority level, arrival number, sequence); the smallest entry is next."""


class WaitingQueue:
    """First come, first served, and the base of the other policies: by level, then by arrival.

    The lowest level is the most urgent. Iteration yields the waiting sequences, the next one
    first. preempts: a waiting sequence may be more urgent than a running one. Only
    `seconds_before` and `num_before` may be called from another thread.
    """

    preempts = False
    margin = 0  # a victim's level is less urgent by more than this many

    def __init__(self) -> None:
        # seconds to compute num_tokens of which num_cached are cached; the scheduler sets it
        self.prefill_seconds: Callable[[int, int], float] = lambda num_tokens, num_cached: 0.0
        # the predicted length of a sequence's answer; the scheduler sets it
        self.expected_length: Callable[[Sequence], int] = lambda sequence: (
            sequence.max_tokens_total - sequence.num_prompt_tokens
        )
        # the tokens that a step gives a sequence; those that give it drafts set it
        self.tokens_per_step: Callable[[Sequence], float] = lambda sequence: 1.0
        self.now_s = 0.0
        self._waiting: list[QueueEntry] = []
        self._arrivals: dict[Sequence, int] = {}
        self._num_arrived = 0

    def level(self, sequence: Sequence) -> int:
        """Returns the priority level, constant while the sequence waits; the lowest is the
        most urgent and is next."""
        return 0

    def level_of_arrival(self, request: Request, num_rows: int) -> int:
        """Returns the level of a request that arrives with num_rows to compute."""
        return 0

    # ---- the scheduler's calls

    def tick(self, now_s: float) -> None:
        """Advances the clock at the beginning of a step."""
        self.now_s = now_s

    def add(self, sequence: Sequence) -> None:
        """Queues a new sequence."""
        self._num_arrived += 1
        self._arrivals[sequence] = self._num_arrived
        self._enqueue(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Queues a preempted sequence again, at its place by arrival."""
        self._enqueue(sequence)

    def take(self, sequence: Sequence) -> None:
        """Removes an admitted sequence, whose range is open."""
        self._dequeue(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence that ended while it waited."""
        self._dequeue(sequence)

    def ended(self, sequence: Sequence) -> None:
        """Forgets a finished sequence that is not waiting."""
        del self._arrivals[sequence]

    def victim(self, running: list[Sequence]) -> Sequence:
        """Returns the sequence to preempt when memory runs out. running: in order of admission."""
        return max(reversed(running), key=self.level)

    def victims_for(self, sequence: Sequence, running: list[Sequence]) -> list[Sequence]:
        """Returns the running sequences to preempt for a waiting one, the first one last."""
        if not self.preempts:
            return []
        level = self.level(sequence) + self.margin
        return sorted([s for s in running if self.level(s) > level], key=self.level)

    def is_worth_preempting(self, sequence: Sequence) -> bool:
        """Returns whether to preempt a running sequence although its tokens must be recomputed."""
        return True

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, _, sequence in self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    def seconds_before(self, request: Request, num_rows: int) -> float:
        """Returns the seconds of prompts that wait before a request that arrives now with num_rows
        to compute."""
        level = self.level_of_arrival(request, num_rows)
        return self._seconds([s for other, _, s in list(self._waiting) if other <= level])

    def num_before(self, request: Request, num_rows: int) -> int:
        """Returns how many sequences wait before a request that arrives now with num_rows."""
        level = self.level_of_arrival(request, num_rows)
        return sum([other <= level for other, _, _ in list(self._waiting)])

    def _seconds(self, sequences: list[Sequence]) -> float:
        """Returns the predicted seconds of their prompts, by rows where no prediction was made."""
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
    """Levels are SamplingParams.priority; a preemption happens only if nothing else makes room."""

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
    "srpt": "serve.scheduler.srpt_queue:SrptQueue",
}
"""The class of each queue policy in serve.config.QUEUE_POLICIES, imported when it is chosen."""


def make_queue(name: str) -> WaitingQueue:
    """Returns an empty queue of the policy `name`, one of serve.config.QUEUE_POLICIES."""
    module, _, attribute = QUEUES[name].partition(":")
    queue: WaitingQueue = getattr(importlib.import_module(module), attribute)()
    return queue
