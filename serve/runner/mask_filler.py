"""Fills a step's token masks in threads of its own while the model computes the step.

A computed step waits at most STEP_WAIT_S for its masks. A sequence whose mask is late gets no
token and is planned again; its mask is completed meanwhile. In a model with states it is preempted,
because its row has changed the state, so there a step waits for up to STATES_WAIT_S.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor, wait
from enum import Enum

from serve.machine import usable_processors
from serve.scheduler.sequence import Sequence
from serve.scheduler.step_plan import StepPlan

STEP_WAIT_S = 5e-3
STATES_WAIT_S = 0.1
NO_SEQUENCES: frozenset[Sequence] = frozenset()
# More threads would compete with the model's own.
_MAX_THREADS = 4


def _masked(plan: StepPlan) -> list[Sequence]:
    """Returns the sequences that are sampled with a mask, or whose drafts are."""
    pairs = zip(plan.sequences, plan.samples, strict=True)
    masked = [s for s, samples in pairs if s.mask is not None and samples]
    return [s for s in masked if s.next_mask or (s.draft_ids and _is_draft_masked(s))]


def _is_draft_masked(sequence: Sequence) -> bool:
    assert sequence.mask is not None
    return sequence.mask.is_needed(len(sequence.token_ids) + len(sequence.draft_ids))


def has_masks(plan: StepPlan) -> bool:
    """Returns whether the plan samples a sequence with a mask."""
    return bool(_masked(plan))


class _Stage(Enum):
    QUEUED = 0
    STARTED = 1
    FILLED = 2


class _Job:
    """A sequence's next mask. The sequence gets no token until the mask has been used."""

    __slots__ = ("draft", "num_late", "sequence", "stage")

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.draft = sequence.draft_ids
        self.stage = _Stage.QUEUED
        self.num_late = 0

    @property
    def sort_key(self) -> float:
        """The job's place in the queue: cheap masks and those that have been late come first."""
        assert self.sequence.mask is not None
        return self.sequence.mask.cost_s / (1 + self.num_late)

    def fill(self) -> None:
        sequence, mask = self.sequence, self.sequence.mask
        assert mask is not None
        try:
            mask.fill(sequence.token_ids)
            if self.draft:
                mask.fill_draft(sequence.token_ids, self.draft)
        finally:
            self.stage = _Stage.FILLED


def _job_of(sequence: Sequence) -> _Job:
    """Returns the job that an earlier step has left unfinished, or a new one."""
    assert sequence.mask is not None
    job = sequence.mask.job
    return job if isinstance(job, _Job) else _Job(sequence)


class FillingMasks:
    """The masks of one step. Their matchers must not be used until wait() has returned; a late
    sequence's matcher must not be used until a later step has waited for it."""

    def __init__(
        self, filler: MaskFiller | None, jobs: Collection[_Job], num_sequences: int
    ) -> None:
        self._filler = filler
        self._jobs = jobs
        self._num_sequences = num_sequences
        self._late: frozenset[Sequence] | None = None

    def wait(self) -> frozenset[Sequence]:
        """Blocks until the masks are ready, or for as long as a step waits. Returns the late sequences, never
        all of the step's. A second call returns the same."""
        if self._filler is None:
            return NO_SEQUENCES
        if self._late is None:
            all_masked = len(self._jobs) == self._num_sequences
            self._late = self._filler.end(self._jobs, all_masked=all_masked)
        return self._late


_NO_MASKS = FillingMasks(None, (), 0)


class MaskFiller:
    """Fills masks of one step at a time. Its threads start with the first mask."""

    def __init__(self, *, has_states: bool = False) -> None:
        """has_states: late masks are dear, because a row that changes states cannot be computed
        again."""
        self._wait_s = STATES_WAIT_S if has_states else STEP_WAIT_S
        self._num_threads = max(1, min(_MAX_THREADS, usable_processors() // 2))
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._queue: deque[_Job] = deque()
        self._workers: list[Future[None]] = []

    def begin(self, plan: StepPlan) -> FillingMasks:
        """Starts the masks of the plan's sampled sequences. Their tokens must be on the host."""
        masked = _masked(plan)
        if not masked:
            return _NO_MASKS
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads, "mergestep-masks")
        jobs = [_job_of(sequence) for sequence in masked]
        queue = [job for job in jobs if job.stage is _Stage.QUEUED]
        queue.sort(key=lambda job: job.sort_key)
        self._queue = deque(queue)
        for _ in range(min(self._num_threads, len(queue))):
            self._workers.append(self._pool.submit(self._work))
        return FillingMasks(self, jobs, len(plan.sequences))

    def end(self, jobs: Collection[_Job], *, all_masked: bool) -> frozenset[Sequence]:
        """Waits for the jobs and returns the late sequences. all_masked: every sequence of the step
        has a mask, so this waits until at least one is filled."""
        left = wait(self._workers, self._wait_s).not_done
        while all_masked and left and not any(job.stage is _Stage.FILLED for job in jobs):
            left = wait(left, STEP_WAIT_S).not_done
        with self._lock:
            self._queue.clear()
        for worker in self._workers:
            if worker not in left:
                worker.result()
        self._workers = list(left)
        late = []
        for job in jobs:
            assert job.sequence.mask is not None
            is_late = job.stage is not _Stage.FILLED
            job.sequence.mask.job = job if is_late else None
            if is_late:
                job.num_late += 1
                late.append(job.sequence)
        return frozenset(late) if late else NO_SEQUENCES

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    return
                job = self._queue.popleft()
                job.stage = _Stage.STARTED
            job.fill()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
