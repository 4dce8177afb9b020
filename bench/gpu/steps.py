"""Times of a device's steps (periods, gaps, late steps) and the bounds of steps.

A decode step must at least read all weights and the K/V of its contexts, and multiply every weight
with every row:

    bytes       weights + batch x context x K/V of a token
    operations  2 x weights x batch
    bound       max(bytes / read bandwidth, operations / int8 peak)

A prompt of n tokens multiplies every weight of the layers with n rows (the head's with one) and
needs 4 x heads x head_dim operations a layer for each pair of a row and a key that it sees:

    operations  2 x (layers' weights x n + head) + 2 x layers x heads x head_dim x n (n + 1)

Norms, activations and sampling do not count, since at best other work hides them.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from bench.gpu.timing import make_events

LATE = 1.03
_WINDOW = 15  # neighbouring steps whose median is usual, as steps grow slowly with contexts


@dataclass(frozen=True)
class ModelSizes:
    """The numbers of weights in the layers and in the head, 1 byte each in int8. attention_width:
    operations of a row and a key in all layers."""

    layer_weights: int
    head_weights: int
    attention_width: int

    @classmethod
    def of(cls, shape: dict[str, Any]) -> ModelSizes:
        """Returns the sizes of one of bench.common.checkpoint_shapes.SHAPES."""
        hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
        q = shape["num_attention_heads"] * shape["head_dim"]
        kv = shape["num_key_value_heads"] * shape["head_dim"]
        one = hidden * (2 * q + 2 * kv) + 3 * hidden * shape["intermediate_size"]
        return cls(layers * one, shape["vocab_size"] * hidden, 4 * q * layers)

    def decode(self, batch: int, context: float, kv_token_bytes: int) -> dict[str, float]:
        weights = self.layer_weights + self.head_weights
        return {
            "bytes": weights + batch * context * kv_token_bytes,
            "operations": 2.0 * weights * batch,
        }

    def prefill(self, length: int) -> dict[str, float]:
        products = 2.0 * (self.layer_weights * length + self.head_weights)
        attention = self.attention_width * length * (length + 1) / 2
        return {
            "bytes": float(self.layer_weights + self.head_weights),
            "operations": products + attention,
            "product_operations": products,
        }


@dataclass(frozen=True)
class Step:
    """The times of a step in seconds: submitted by the host's clock, begin and end by the device's.
    was_late: the device was idle when the host submitted the step."""

    submitted: float
    begin: float
    end: float
    was_late: bool = False


def periods(steps: Sequence[Step]) -> list[float]:
    """Returns the seconds from the begin of each step to the begin of the next."""
    return [b.begin - a.begin for a, b in itertools.pairwise(steps)]


def gap_share(steps: Sequence[Step]) -> float:
    """Returns the share of the time from the first begin to the last that lies between the end of a
    step and the begin of the next."""
    gaps = sum(b.begin - a.end for a, b in itertools.pairwise(steps))
    return gaps / (steps[-1].begin - steps[0].begin)


def late_periods(times: Sequence[float]) -> list[int]:
    """Returns the indices of periods above LATE times the median of the periods around them."""
    half = _WINDOW // 2
    found = []
    for i, seconds in enumerate(times):
        first = max(0, min(i - half, len(times) - _WINDOW))
        usual = statistics.median(times[first : first + _WINDOW])
        if seconds > LATE * usual:
            found.append(i)
    return found


def with_growth(
    late: Sequence[int], steps: Sequence[Step], maps: Sequence[tuple[float, float]]
) -> list[int]:
    """Returns the late periods during which pages were mapped, between the submissions of the step
    before and of the step that begins late. late: indices of periods. maps: (begin, end) of calls
    that mapped pages, by the host's clock."""
    found = []
    for i in late:
        first = steps[max(0, i - 1)].submitted
        last = steps[i + 1].submitted
        if any(begin < last and end > first for begin, end in maps):
            found.append(i)
    return found


@dataclass
class StepClock:
    """Notes every step that a step device of this process gets, and when pages are mapped."""

    maps: list[tuple[float, float]] = field(default_factory=list)
    _marks: list[tuple[float, Any, Any, bool]] = field(default_factory=list)

    def watch(self) -> None:
        """Notes steps from now on. Call it before an engine is made; it lasts until the process
        ends."""
        from memory.pages.cuda_vmm import CudaMemory
        from memory.pages.linux_vmm import LinuxMemory
        from serve.runner.step_device import CudaStepDevice, HostStepDevice

        for kind in (CudaStepDevice, HostStepDevice):
            kind.submit = self._timed(kind.submit)  # type: ignore[method-assign]
        for memory in (CudaMemory, LinuxMemory):
            memory.map = self._noted(memory.map)  # type: ignore[method-assign]

    def _timed(self, submit: Callable[..., Any]) -> Callable[..., Any]:
        def timed(device: Any, work: Callable[[], None]) -> Any:
            begin = _mark(device)
            found = submit(device, work)
            before = self._marks[-1][2] if self._marks else None
            was_late = isinstance(before, torch.cuda.Event) and bool(before.query())  # type: ignore[no-untyped-call]
            self._marks.append((time.perf_counter(), begin, _mark(device), was_late))
            return found

        return timed

    def _noted(self, mapped: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            try:
                return mapped(*arguments, **options)
            finally:
                self.maps.append((began, time.perf_counter()))

        return noted

    def steps(self, first: float, last: float) -> list[Step]:
        """Returns the steps that were submitted between two times of the host's clock, when the
        device has completed them."""
        marks = [mark for mark in list(self._marks) if first <= mark[0] <= last]
        if not marks:
            return []
        if not isinstance(marks[0][1], torch.cuda.Event):
            return [Step(*mark) for mark in marks]
        marks[-1][2].synchronize()
        origin = marks[0][1]

        def seconds(event: Any) -> float:
            return float(origin.elapsed_time(event)) * 1e-3

        return [
            Step(at, seconds(begin), seconds(end), was_late) for at, begin, end, was_late in marks
        ]

    def clear(self) -> None:
        self.maps.clear()
        self._marks.clear()


def _mark(device: Any) -> Any:
    """Returns an event that it records in the device's stream, or the host's time on a CPU."""
    if device.device.type != "cuda":
        return time.perf_counter()
    (event,) = make_events(1)
    event.record(torch.cuda.current_stream(device.device))
    return event
