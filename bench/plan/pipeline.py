"""The time of steps that follow one another through the stages of a pipeline.

Step i is on stage s from max(f[i-1][s], f[i][s-1] + hop) on: as soon as the stage is free and the
step's hidden state is there. f are the ends. A prompt is dense if its next chunk is launched when
the first stage is free, and not when the chunk before it has passed all stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from bench.plan.grid import GridCost, GridWork
from serve.scheduler.step_time import GRANULARITY

Chunker = Callable[[int], int]
"""Returns the most rows of a chunk after this many tokens."""
_SAMPLES = 48


@runtime_checkable
class StageCost(Protocol):
    """A model of how long each stage is busy with a step, and how long a hop takes."""

    @property
    def num_stages(self) -> int: ...

    def stage_seconds(self, work: GridWork) -> Sequence[float]: ...

    def hop_seconds(self, rows: int) -> float: ...


class StagePipeline:
    """The ends of the steps so far; free_s are the times from which on each stage is free."""

    def __init__(self, num_stages: int) -> None:
        self.free_s = [0.0] * num_stages
        self.busy_s = [0.0] * num_stages

    def run(self, seconds: Sequence[float], hop_s: float = 0.0, earliest_s: float = 0.0) -> float:
        """Puts a step behind the others; returns its end on the last stage. Its first stage begins
        at earliest_s or, if it is not free then, as soon as it is."""
        arrived_s = earliest_s
        for stage, busy_s in enumerate(seconds):
            ended_s = max(self.free_s[stage], arrived_s) + busy_s
            self.free_s[stage] = ended_s
            self.busy_s[stage] += busy_s
            arrived_s = ended_s + hop_s
        return self.free_s[-1]


def fixed_chunks(rows: int) -> Chunker:
    """Returns chunks of equal size."""
    return lambda context: rows


def adapted_chunks(
    cost: GridCost, limit_s: float, most: int, decodes: tuple[int, ...] = (), least: int = 0
) -> Chunker:
    """Returns the largest chunks with which a step passes all stages within limit_s, as
    Mnemosyne's adaptive chunking and serve/scheduler/chunking.py choose them: multiples of
    GRANULARITY up to `most`, and at least `least` or GRANULARITY."""

    def fits(rows: int, context: int) -> bool:
        work = GridWork(((rows, context),), decodes, len(decodes))
        return cost.pass_seconds(work) <= limit_s

    def rows_at(context: int) -> int:
        low, high = max(least, GRANULARITY) // GRANULARITY, most // GRANULARITY + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle * GRANULARITY, context) else (low, middle)
        return low * GRANULARITY

    return rows_at


def chunks_of(prompt: int, chunker: Chunker) -> Iterator[tuple[int, int]]:
    """Yields the (rows, context) of a prompt's chunks."""
    done = 0
    while done < prompt:
        rows = min(chunker(done), prompt - done)
        yield rows, done
        done += rows


class Prefill(NamedTuple):
    """A prompt alone: seconds to its first token, the number of chunks, the longest that its first
    stage was busy with one, and the share of the time in which stages were busy."""

    seconds: float
    num_chunks: int
    longest_stage_s: float
    busy_share: float


def prefill(cost: GridCost, prompt: int, chunker: Chunker, *, is_dense: bool = True) -> Prefill:
    """Returns the times of a prompt alone, with every chunk on every stage."""
    pipeline = StagePipeline(cost.grid.spp)
    count, longest_s, ended_s = 0, 0.0, 0.0
    for rows, context in chunks_of(prompt, chunker):
        work = GridWork(((rows, context),), (), int(context + rows == prompt))
        seconds = cost.stage_seconds(work)
        earliest_s = 0.0 if is_dense else ended_s
        ended_s = pipeline.run(seconds, cost.hop_seconds(rows), earliest_s)
        longest_s = max(longest_s, seconds[0])
        count += 1
    busy = sum(pipeline.busy_s) / (ended_s * cost.grid.spp)
    return Prefill(ended_s, count, longest_s, busy)


def estimated_prefill_s(cost: GridCost, prompt: int, chunker: Chunker) -> float:
    """Returns about the seconds of `prefill` from a few chunks: the sum of the slowest stage's
    times and, once, the largest chunk's way through the other stages. It is exact if all stages
    take equally long and the time of a chunk is linear in its context between the samples."""
    count = min(_SAMPLES, -(-prompt // chunker(0)))
    width = prompt / count
    total_s, largest_s = 0.0, 0.0
    for index in range(count):
        context = int((index + 0.5) * width)
        rows = min(chunker(context), prompt)
        seconds = cost.stage_seconds(GridWork(((rows, max(0, context - rows // 2)),)))
        slowest_s = max(seconds)
        total_s += slowest_s * width / rows
        through_s = sum(seconds) - slowest_s
        largest_s = max(largest_s, through_s + (cost.grid.spp - 1) * cost.hop_seconds(rows))
    return total_s + largest_s
