"""Several batches in flight over several replicas of the model (Lamina, arXiv 2405.01814).

A forward pass is a row of slices: products on a replica for t_model seconds, then attention on
the memory devices, which together take t_attention. n batches rotate over n - 1 replicas that are
staggered by t_model / (n - 1). If t_attention is just that, replicas and memory devices are never
idle. n = 2 is one replica with two batches in turn, as serve/runner/runner.py does it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass


def replica_of(batch: int, slice_number: int, num_batches: int) -> int:
    """Which of num_batches - 1 replicas, all counted from 0, computes a slice of a batch."""
    return (batch + slice_number) % (num_batches - 1)


def start_of(batch: int, slice_number: int, num_batches: int, t_model: float) -> float:
    """When a slice starts if nothing ever waits, in seconds from the first batch's first one."""
    return (batch + slice_number * num_batches) * t_model / (num_batches - 1)


@dataclass(frozen=True, slots=True)
class Utilization:
    """Busy shares of each replica and of the memory devices. slice_s: seconds from one slice of a
    batch to its next one."""

    replicas: tuple[float, ...]
    memory: float
    slice_s: float


class _Server:
    """One job at a time, in order of arrival."""

    def __init__(self) -> None:
        self._free_s = 0.0
        self._jobs: list[tuple[float, float]] = []

    def end_of(self, ready_s: float, seconds: float) -> float:
        """When a job that is ready now ends."""
        start_s = max(ready_s, self._free_s)
        self._free_s = start_s + seconds
        self._jobs.append((start_s, self._free_s))
        return self._free_s

    def busy_share(self, from_s: float, to_s: float) -> float:
        busy_s = sum(max(0.0, min(end, to_s) - max(start, from_s)) for start, end in self._jobs)
        return busy_s / (to_s - from_s)


def simulate(
    num_batches: int, t_model: float, t_attention: float, num_slices: int = 200
) -> Utilization:
    """Event by event, each device in order of arrival; measured over the second half."""
    assert num_batches >= 2 and num_slices >= 4, "a rotation, and enough of it"
    replicas = [_Server() for _ in range(num_batches - 1)]
    memory = _Server()
    ends: list[list[float]] = [[] for _ in range(num_batches)]  # of the attention of each slice
    # (since when it waits, batch, whether for attention)
    waiting = [
        (start_of(batch, 0, num_batches, t_model), batch, False) for batch in range(num_batches)
    ]
    while waiting:
        ready_s, batch, for_attention = heapq.heappop(waiting)
        done = ends[batch]
        if not for_attention:
            replica = replicas[replica_of(batch, len(done), num_batches)]
            heapq.heappush(waiting, (replica.end_of(ready_s, t_model), batch, True))
            continue
        done.append(memory.end_of(ready_s, t_attention))
        if len(done) < num_slices:
            heapq.heappush(waiting, (done[-1], batch, False))
    middle = num_slices // 2
    from_s, to_s = max(done[middle] for done in ends), min(done[-1] for done in ends)
    return Utilization(
        tuple(replica.busy_share(from_s, to_s) for replica in replicas),
        memory.busy_share(from_s, to_s),
        (ends[0][-1] - ends[0][middle]) / (num_slices - 1 - middle),
    )
