"""The machine's ceilings, read between measurements; model_cost.py has what steps must do.

At best reading and multiplying overlap, so a step cannot take less than `Work.bound_s`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, TypeVar

import torch

from ops.cpu import native_library
from ops.cpu.native_ceilings import Ceilings
from serve.config import EngineConfig
from serve.loading.precision import choose_backend
from serve.models import ModelSpec

MAX_DRIFT, MAX_REPEATS = 0.15, 3
_READ = 256 << 20
_PROBES = 5
_MULTIPLIED = 500_000

T = TypeVar("T")


class Ceiling(NamedTuple):
    """Bytes read, int8 operations and bf16 operations, each per second. bf16 is 0 on processors
    without the instruction."""

    read: float
    i8: float
    bf16: float

    @classmethod
    def now(cls, buffer: torch.Tensor) -> Ceiling:
        """Returns the medians of short readings."""
        readings = [_read_ceilings(buffer) for _ in range(_PROBES)]
        return cls(*map(statistics.median, zip(*readings, strict=True)))

    def mean(self, other: Ceiling) -> Ceiling:
        return Ceiling(*map(statistics.mean, zip(self, other, strict=True)))

    def drift(self, other: Ceiling) -> float:
        """Returns the largest relative difference; 0.15 is 15 %."""
        pairs = zip(self, other, strict=True)
        return max((max(pair) / min(pair) - 1 for pair in pairs if min(pair)), default=0.0)

    def __str__(self) -> str:
        if not self.read:
            return "unknown"
        bf16 = f", {self.bf16 / 1e12:.2f} TFLOP/s bf16" if self.bf16 else ""
        return f"{self.read / 1e9:.0f} GB/s read, {self.i8 / 1e12:.2f} TOP/s int8{bf16}"


class Probe:
    """Reads the ceilings, and holds the memory that is read. All are 0 where they cannot be read:
    without the native kernels, and on a GPU (bench/gpu/report.py measures those)."""

    def __init__(self, backend: str) -> None:
        """backend: the name in ops.BACKENDS on which the model runs."""
        can_read = native_library.is_available() and backend == "cpu"
        self._buffer = torch.ones(_READ, dtype=torch.uint8) if can_read else None

    def __call__(self) -> Ceiling:
        return Ceiling(0.0, 0.0, 0.0) if self._buffer is None else Ceiling.now(self._buffer)


def _read_ceilings(buffer: torch.Tensor) -> Ceiling:
    began = time.perf_counter()
    Ceilings.read(buffer)
    middle = time.perf_counter()
    i8 = Ceilings.multiply_i8(_MULTIPLIED)
    later = time.perf_counter()
    bf16 = Ceilings.multiply_bf16(_MULTIPLIED)
    end = time.perf_counter()
    return Ceiling(buffer.numel() / (middle - began), i8 / (later - middle), bf16 / (end - later))


class Measured(NamedTuple, Generic[T]):
    """A value with the mean of the ceilings before and after it, and their relative drift."""

    value: T
    ceiling: Ceiling
    drift: float


async def steady(run: Callable[[], Awaitable[T]], probe: Callable[[], Ceiling]) -> Measured[T]:
    """Runs between two readings of the ceilings until they agree (MAX_DRIFT). After MAX_REPEATS
    repetitions it returns the run whose readings differ least."""
    tries: list[Measured[T]] = []
    for _ in range(1 + MAX_REPEATS):
        before = probe()
        value = await run()
        after = probe()
        tries.append(Measured(value, before.mean(after), before.drift(after)))
        if tries[-1].drift <= MAX_DRIFT:
            break
    return min(tries, key=lambda found: found.drift)


def probe_for(config: EngineConfig, spec: ModelSpec) -> Probe:
    return Probe(choose_backend(config, spec))
