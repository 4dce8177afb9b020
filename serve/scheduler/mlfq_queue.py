"""Skip-join multi-level feedback (FastServe, arXiv 2305.05920)."""

from __future__ import annotations

from bisect import insort
from heapq import heapify, heappop, heappush

from serve.request import Request
from serve.scheduler.sequence import Sequence
from serve.scheduler.waiting_queue import WaitingQueue


class _Job:
    """A sequence's level, the time it may stay there, and when it began to wait or run.

    earned: the level without the promotion of a starving sequence; it decides about preemption.
    until_s: the time of its demotion while it runs, of its starvation while it waits.
    """

    __slots__ = ("earned", "left_s", "level", "since_s", "until_s")

    def __init__(self, level: int, left_s: float) -> None:
        self.level = self.earned = level
        self.left_s = left_s
        self.since_s = self.until_s = 0.0


class MlfqQueue(WaitingQueue):
    """Level p lasts BASE_S * 2^p seconds of running.

    A request joins the first level that lasts for its prompt. A preemption costs a swap, so the
    victim must have run for more than 2^margin times as long, and, if memory cannot keep its K/V,
    for SWAP_SHARE times what recomputing it takes. A sequence that has waited for STARVING_S plus
    STARVING_SHARE times what computing its tokens takes starves: it goes before all that do not,
    and keeps level 0 for as long as it has waited.
    """

    preempts = True
    margin = 2
    BASE_S = 0.01
    STARVING_S = 3.0
    STARVING_SHARE = 30.0
    SWAP_SHARE = 10.0
    MAX_LEVEL = 24  # two days: at this level a sequence runs to its end

    def __init__(self) -> None:
        super().__init__()
        self._jobs: dict[Sequence, _Job] = {}
        self._running: set[Sequence] = set()
        # (time, arrival number, sequence) of demotions and of starvation; some are out of date
        self._demotions: list[tuple[float, int, Sequence]] = []
        self._starving: list[tuple[float, int, Sequence]] = []

    def level(self, sequence: Sequence) -> int:
        return self._jobs[sequence].level

    def level_of_arrival(self, request: Request, num_rows: int) -> int:
        return self._join(len(request.prompt_token_ids), num_rows)

    def _join(self, num_tokens: int, num_rows: int) -> int:
        level, prefill_s = 0, self.prefill_seconds(num_tokens, num_tokens - num_rows)
        while level < self.MAX_LEVEL and self._quantum_s(level) < prefill_s:
            level += 1
        return level

    def _quantum_s(self, level: int) -> float:
        return self.BASE_S * (1 << level)

    def tick(self, now_s: float) -> None:
        self.now_s = now_s
        while self._demotions and self._demotions[0][0] <= now_s:
            until_s, _, sequence = heappop(self._demotions)
            if sequence in self._running and self._jobs[sequence].until_s == until_s:
                self._demote(sequence)
        while self._starving and self._starving[0][0] <= now_s:
            until_s, _, sequence = heappop(self._starving)
            job = self._jobs.get(sequence)
            if job is not None and sequence not in self._running and job.until_s == until_s:
                self._dequeue(sequence)
                job.level, job.left_s = 0, now_s - job.since_s
                insort(self._waiting, (0, self._arrivals[sequence], sequence))

    def _demote(self, sequence: Sequence) -> None:
        job = self._jobs[sequence]
        while job.until_s <= self.now_s and job.level < self.MAX_LEVEL:
            job.level += 1
            job.until_s += self._quantum_s(job.level)
        if job.level < self.MAX_LEVEL:
            heappush(self._demotions, (job.until_s, self._arrivals[sequence], sequence))

    def add(self, sequence: Sequence) -> None:
        level = self._join(sequence.num_tokens, sequence.num_expected_rows)
        self._jobs[sequence] = _Job(level, self._quantum_s(level))
        super().add(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        super()._enqueue(sequence)
        job = self._jobs[sequence]
        # the last step may have begun long before the arrival
        job.since_s = max(self.now_s, sequence.request.arrival_s)
        again_s = self.prefill_seconds(sequence.num_tokens, 0)
        job.until_s = job.since_s + self.STARVING_S + self.STARVING_SHARE * again_s
        heappush(self._starving, (job.until_s, self._arrivals[sequence], sequence))
        if len(self._starving) > 2 * len(self._jobs) + 64:
            self._starving = [
                entry
                for entry in self._starving
                if entry[2] in self._jobs and self._jobs[entry[2]].until_s == entry[0]
            ]
            heapify(self._starving)

    def put_back(self, sequence: Sequence) -> None:
        self._running.discard(sequence)
        job = self._jobs[sequence]
        job.earned = job.level
        job.left_s = max(0.0, job.until_s - self.now_s)
        super().put_back(sequence)

    def take(self, sequence: Sequence) -> None:
        super().take(sequence)
        self._running.add(sequence)
        job = self._jobs[sequence]
        # the time to recompute after a preemption is not counted
        if sequence.num_preemptions:
            num_known = sequence.num_computed_tokens
            job.left_s += self.prefill_seconds(sequence.num_tokens, num_known)
        job.since_s = self.now_s
        job.until_s = self.now_s + job.left_s
        if job.level < self.MAX_LEVEL:
            heappush(self._demotions, (job.until_s, self._arrivals[sequence], sequence))

    def victims_for(self, sequence: Sequence, running: list[Sequence]) -> list[Sequence]:
        # starving sequences do not preempt each other
        level = self._jobs[sequence].earned + self.margin
        return sorted([s for s in running if self.level(s) > level], key=self.level)

    def is_worth_preempting(self, sequence: Sequence) -> bool:
        ran_s = self.now_s - self._jobs[sequence].since_s
        return ran_s >= self.SWAP_SHARE * self.prefill_seconds(sequence.num_tokens, 0)

    def ended(self, sequence: Sequence) -> None:
        super().ended(sequence)
        del self._jobs[sequence]
        self._running.discard(sequence)
