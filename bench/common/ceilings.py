"""The machine's ceilings, read between measurements, and the least that a model's steps must do.

A step reads every weight and the K/V of its decode rows once, and multiplies every row by every
weight; at best the two overlap. So a step cannot take less than `Work.bound_s`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch

from ops.cpu import native_library
from ops.cpu.native_ceilings import Ceilings
from serve.config import EngineConfig
from serve.engine.step_trace import TracedStep
from serve.loading.precision import choose_backend, resolve_precision
from serve.models import ModelSpec, count_parameters
from serve.scheduler.step_time import StepWork

MAX_DRIFT, MAX_REPEATS = 0.15, 3
_READ = 256 << 20
_PROBES = 5
_MULTIPLIED = 500_000
# The scales of 4-bit weights (two bytes for every group of 64) are left out.
_WEIGHT_BYTES = {"int8": 1.0, "fp8": 1.0, "int4": 0.5, "nf4": 0.5}

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


@dataclass(frozen=True, slots=True)
class Work:
    """The least that must be read and multiplied. products counts operations on weights, in int8 if
    is_int8; attention counts operations in bf16."""

    read_bytes: float
    products: float
    attention: float
    is_int8: bool

    def bound_s(self, ceiling: Ceiling) -> float:
        """Returns the least seconds; a ceiling of 0 is unknown and bounds nothing."""
        rate = ceiling.i8 if self.is_int8 else ceiling.bf16
        compute = self.products / rate if rate else 0.0
        compute += self.attention / ceiling.bf16 if ceiling.bf16 else 0.0
        read = self.read_bytes / ceiling.read if ceiling.read else 0.0
        return max(read, compute)


class ModelCost:
    """Sizes of a model's products and of its K/V, as an engine computes them.

    block_weights and head_weights are numbers of weights, weight_bytes the bytes of one, and
    kv_bytes the bytes of one token's K/V.
    """

    def __init__(self, spec: ModelSpec, weights: str, compute: torch.dtype, kv_bytes: int) -> None:
        counts = count_parameters(spec)
        self.block_weights = counts.blocks
        self.head_weights = counts.head
        self.is_int8 = weights != "plain"
        # The last product of 4-bit models is in int8.
        self.weight_bytes = _WEIGHT_BYTES.get(weights, compute.itemsize)
        self.head_bytes = max(1.0, self.weight_bytes)
        self.kv_bytes = kv_bytes
        # operations per query row and key
        self._attention_width = sum(
            4 * layer.num_heads * layer.head_dim for layer in spec.attention_layers
        )

    @classmethod
    def of(cls, config: EngineConfig, spec: ModelSpec, kv_bytes: int) -> ModelCost:
        precision = resolve_precision(config, spec)
        return cls(spec, precision.weights, precision.compute, kv_bytes)

    def step(self, work: StepWork) -> Work:
        """Returns the work of a traced step, in which every decode row and every chunk samples one
        token at most."""
        num_sampled = work.num_decodes + work.num_chunks if work.samples else 0
        products = 2.0 * (self.block_weights * work.num_rows + self.head_weights * num_sampled)
        read = self.block_weights * self.weight_bytes + self.head_weights * self.head_bytes
        pairs = work.num_context + work.num_decodes + work.num_pairs
        return Work(
            read + work.num_context * self.kv_bytes,
            products,
            float(self._attention_width * pairs),
            self.is_int8,
        )

    def bound_s(self, steps: Iterable[TracedStep], ceiling: Ceiling) -> float:
        """Returns the least seconds of all steps, one after the other."""
        return sum(self.step(step.work).bound_s(ceiling) for step in steps)


def probe_for(config: EngineConfig, spec: ModelSpec) -> Probe:
    return Probe(choose_backend(config, spec))
