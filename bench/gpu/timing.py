"""Times work on a GPU by events, with graphs for short work and operands that no cache holds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Work = Callable[[], object]

# A call from Python may take 100 us longer than its kernels, so short work is timed in a graph.
_SHORT_S = 0.8e-3
_GRAPH_S = 1e-3
_MAX_GRAPH_CALLS = 2000
# This is several times the L2 cache of any GPU (60 MB on an H200).
_ROTATED_BYTES = 192 << 20
_MAX_SETS = 64


@dataclass(frozen=True)
class Timing:
    """The median seconds of one call. spread: (90th - 10th percentile) / median. how: the method
    of timing."""

    seconds: float
    spread: float
    how: str

    def figures(self, **more: Any) -> dict[str, Any]:
        return {"seconds": self.seconds, "spread": round(self.spread, 4), "how": self.how, **more}


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def num_sets(num_bytes: int) -> int:
    """Returns how many sets of operands of this size must take turns to be in no cache."""
    if not torch.cuda.is_available():
        return 1
    return max(1, min(_MAX_SETS, -(-_ROTATED_BYTES // max(1, num_bytes))))


def time_works(works: Sequence[Work], target_s: float = 0.15) -> Timing:
    """Times calls of the same work on different operands, in turn, for about target_s seconds."""
    if not torch.cuda.is_available():
        return _time_on_host(works)
    for work in works:  # the first calls compile and allocate
        work()
    torch.cuda.synchronize()
    estimate = _estimate_s(works)
    if estimate < _SHORT_S:
        timing = _time_in_graph(works, estimate, target_s)
        if timing is not None:
            return timing
    return _time_by_events(works, estimate, target_s)


def _time_on_host(works: Sequence[Work]) -> Timing:
    began = time.perf_counter()
    for work in works:
        work()
    return Timing((time.perf_counter() - began) / len(works), 0.0, "host clock")


def _elapsed_s(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    return float(begin.elapsed_time(end)) * 1e-3


def make_events(count: int) -> list[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]  # type: ignore[no-untyped-call]


def _estimate_s(works: Sequence[Work]) -> float:
    calls = max(4, len(works))
    begin, end = make_events(2)
    begin.record()
    for i in range(calls):
        works[i % len(works)]()
    end.record()
    end.synchronize()
    return max(_elapsed_s(begin, end) / calls, 1e-7)


def _time_by_events(works: Sequence[Work], estimate: float, target_s: float) -> Timing:
    count = int(min(200, max(5, target_s / estimate)))
    marks = make_events(count + 1)
    marks[0].record()
    for i in range(count):
        works[i % len(works)]()
        marks[i + 1].record()
    marks[-1].synchronize()
    return _summary([_elapsed_s(marks[i], marks[i + 1]) for i in range(count)], "events")


def _time_in_graph(works: Sequence[Work], estimate: float, target_s: float) -> Timing | None:
    """Returns None if the work cannot be captured in a graph."""
    calls = int(min(_MAX_GRAPH_CALLS, max(len(works), _GRAPH_S / estimate)))
    calls = max(1, calls // len(works)) * len(works)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for i in range(calls):
                works[i % len(works)]()
    except Exception:
        # A fault of the device raises again here; any other error came from capturing.
        torch.cuda.synchronize()
        return None
    graph.replay()
    count = int(min(100, max(5, target_s / (calls * estimate))))
    marks = make_events(count + 1)
    marks[0].record()
    for i in range(count):
        graph.replay()
        marks[i + 1].record()
    marks[-1].synchronize()
    seconds = [_elapsed_s(marks[i], marks[i + 1]) / calls for i in range(count)]
    return _summary(seconds, f"graph of {calls}")


def _summary(seconds: list[float], how: str) -> Timing:
    ordered = sorted(seconds)
    middle = statistics.median(ordered)
    last = len(ordered) - 1
    spread = (ordered[round(0.9 * last)] - ordered[round(0.1 * last)]) / middle
    return Timing(middle, spread, how)


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Returns ||out - expected|| / ||expected|| in fp64, or infinity if out is not finite."""
    out, expected = out.double().cpu(), expected.double().cpu()
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    scale = float(expected.norm())
    return float((out - expected).norm()) / (scale if scale > 0 else 1.0)
