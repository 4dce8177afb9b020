"""Shortest predicted remaining work first, with bounded preemption and aging (as SPRPT in TRAIL,
arXiv 2410.01035)."""

from __future__ import annotations

from bisect import insort
from heapq import heapify, heappop, heappush
from math import log2

from serve.request import Request
from serve.scheduler.sequence import Sequence
from serve.scheduler.waiting_queue import WaitingQueue


class _Job:
    """A sequence's level, which is constant while it waits, and its aging.

    earned: the level without the promotion of a starving sequence; it decides about preemption.
    until_s: the time at which it starves if it waits until then.
    """

    __slots__ = ("earned", "is_starving", "is_waiting", "level", "until_s")

    def __init__(self) -> None:
        self.level = self.earned = 0
        self.is_starving = self.is_waiting = False
        self.until_s = 0.0


class SrptQueue(WaitingQueue):
    """Level p has the sequences whose remaining work takes about 2^(p / PER_OCTAVE) decode steps.

    The work is the predicted remaining tokens by those of a step, of which drafts give a sequence
    several, and the time of the prompt in decode steps. A
    running sequence is preempted only for one with less than 2^-(margin / PER_OCTAVE) of its work,
    if it has at most MOST_DONE of its answer, was preempted fewer than MAX_PREEMPTIONS times, and
    if the time that this saves is SWAP_SHARE times the time that all running sequences lose when
    its tokens are computed again. At a high load even a few percent more to compute cost more than
    the order gains, hence the large share.

    A sequence that has waited, since its arrival or preemption, for STARVING_S and for
    STARVING_SHARE times its work starves: it goes before all that do not, by arrival among those
    that do, and is never again preempted for a more urgent one. So from then on it waits only for
    those that arrived earlier and starve, too.
    """

    preempts = True
    PER_OCTAVE = 4
    margin = 8
    MAX_PREEMPTIONS = 3
    MOST_DONE = 0.8
    STARVING_S = 3.0
    STARVING_SHARE = 10.0
    SWAP_SHARE = 10.0
    _STARVING_LEVEL = -1
    _SMOOTHING = 0.02

    def __init__(self) -> None:
        super().__init__()
        self.step_s = 0.0  # the usual time of a step, in which a running sequence gets a token
        self._jobs: dict[Sequence, _Job] = {}
        # (time, arrival number, sequence) of those that wait; some are out of date
        self._starving: list[tuple[float, int, Sequence]] = []

    # ---- levels

    def level(self, sequence: Sequence) -> int:
        job = self._jobs[sequence]
        if job.is_starving or job.is_waiting:
            return job.level
        return self._level_of(self._remaining_steps(sequence))

    def level_of_arrival(self, request: Request, num_rows: int) -> int:
        # its length is predicted when it is queued: until then it is one of the middle
        waiting = self._waiting.copy()
        return waiting[len(waiting) // 2][0] if waiting else 0

    def _level_of(self, work: float) -> int:
        return int(self.PER_OCTAVE * log2(max(1.0, work)))

    def _remaining(self, sequence: Sequence) -> int:
        """Returns the predicted remaining tokens of the answer, at least 1."""
        num_output = sequence.num_output_tokens
        if sequence.predicted_length <= num_output:
            sequence.predicted_length = self.expected_length(sequence)
        return max(1, sequence.predicted_length - num_output)

    def _remaining_steps(self, sequence: Sequence) -> float:
        """Returns the predicted steps in which the answer's remaining tokens come."""
        return self._remaining(sequence) / self.tokens_per_step(sequence)

    def _work(self, sequence: Sequence) -> float:
        """Returns the work of a sequence that waits, in decode steps."""
        work = self._remaining_steps(sequence)
        if self.step_s and not sequence.num_preemptions:  # else its pages are probably cached
            num_cached = sequence.num_tokens - sequence.num_expected_rows
            work += self.prefill_seconds(sequence.num_tokens, num_cached) / self.step_s
        return work

    # ---- the scheduler's calls

    def tick(self, now_s: float) -> None:
        passed_s = now_s - self.now_s
        if len(self._jobs) > len(self) and passed_s > 0.0:
            # a pause, in which nothing ran, must not count as a step
            passed_s = min(passed_s, 4.0 * self.step_s) if self.step_s else passed_s
            self.step_s += (self._SMOOTHING if self.step_s else 1.0) * (passed_s - self.step_s)
        self.now_s = now_s
        while self._starving and self._starving[0][0] <= now_s:
            until_s, _, sequence = heappop(self._starving)
            job = self._jobs.get(sequence)
            if job is not None and job.is_waiting and job.until_s == until_s:
                self._dequeue(sequence)
                job.is_starving, job.level = True, self._STARVING_LEVEL
                self._insert(sequence, job)

    def add(self, sequence: Sequence) -> None:
        self._jobs[sequence] = _Job()
        super().add(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        job = self._jobs[sequence]
        work = self._work(sequence)
        job.earned = self._level_of(work)
        if not job.is_starving:
            job.level = job.earned
            patience_s = self.STARVING_S + self.STARVING_SHARE * work * self.step_s
            # the last step may have begun long before the arrival
            is_new = not sequence.num_preemptions
            since_s = max(self.now_s, sequence.request.arrival_s) if is_new else self.now_s
            job.until_s = since_s + patience_s
            heappush(self._starving, (job.until_s, self._arrivals[sequence], sequence))
            self._drop_outdated()
        self._insert(sequence, job)

    def _insert(self, sequence: Sequence, job: _Job) -> None:
        job.is_waiting = True
        insort(self._waiting, (job.level, self._arrivals[sequence], sequence))

    def _dequeue(self, sequence: Sequence) -> None:
        super()._dequeue(sequence)
        self._jobs[sequence].is_waiting = False

    def _drop_outdated(self) -> None:
        if len(self._starving) > 2 * len(self._jobs) + 64:
            self._starving = [entry for entry in self._starving if self._is_current(entry)]
            heapify(self._starving)

    def _is_current(self, entry: tuple[float, int, Sequence]) -> bool:
        job = self._jobs.get(entry[2])
        return job is not None and job.is_waiting and job.until_s == entry[0]

    def victims_for(self, sequence: Sequence, running: list[Sequence]) -> list[Sequence]:
        level = self._jobs[sequence].earned + self.margin
        own = self._remaining_steps(sequence)
        victims = [
            s
            for s in running
            if self.level(s) > level and self._may_preempt(s) and self._saves(s, own, len(running))
        ]
        return sorted(victims, key=self.level)

    def _may_preempt(self, sequence: Sequence) -> bool:
        if sequence.num_preemptions >= self.MAX_PREEMPTIONS:
            return False
        return sequence.num_output_tokens <= self.MOST_DONE * sequence.predicted_length

    def _saves(self, victim: Sequence, remaining: float, num_running: int) -> bool:
        """Returns whether it pays to serve a sequence with `remaining` steps before the victim."""
        # of its pages only whole ones stay cached, and those perhaps not for long
        again_s = self.prefill_seconds(victim.num_tokens, 0)
        saved_s = (self._remaining_steps(victim) - remaining) * self.step_s
        return saved_s > self.SWAP_SHARE * num_running * again_s

    def ended(self, sequence: Sequence) -> None:
        super().ended(sequence)
        del self._jobs[sequence]
