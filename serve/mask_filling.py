"""A step's masks, made in threads of their own while the model computes the step."""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from serve.plan import StepPlan
from serve.sequence import Sequence

# Above it the model's own threads are in the way.
_MAX_THREADS = 4


def has_masks(plan: StepPlan) -> bool:
    """Whether a sequence with a mask gets a token."""
    pairs = zip(plan.sequences, plan.samples, strict=True)
    return any(s.mask is not None and samples for s, samples in pairs)


class FillingMasks:
    """Of one step. The matchers belong to it until wait() has returned."""

    def __init__(self, jobs: list[Future[None]]) -> None:
        self._jobs = jobs

    def wait(self) -> None:
        """Until the masks are there."""
        for job in self._jobs:
            job.result()


_NOTHING = FillingMasks([])


class MaskFiller:
    """Its threads start with the first mask."""

    def __init__(self) -> None:
        self._num_threads = max(1, min(_MAX_THREADS, (os.cpu_count() or 2) // 2))
        self._pool: ThreadPoolExecutor | None = None

    def begin(self, plan: StepPlan) -> FillingMasks:
        """For those of the plan that get a token. All tokens are known."""
        pairs = zip(plan.sequences, plan.samples, strict=True)
        masked = [s for s, samples in pairs if s.mask is not None and samples]
        if not masked:
            return _NOTHING
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._num_threads, "mergestep-masks")
        shares = [masked[i :: self._num_threads] for i in range(self._num_threads)]
        return FillingMasks([self._pool.submit(_fill, share) for share in shares if share])

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _fill(sequences: Iterable[Sequence]) -> None:
    for sequence in sequences:
        assert sequence.mask is not None
        sequence.mask.fill(sequence.token_ids)
