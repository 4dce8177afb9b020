"""The shares of a device's peaks that software reaches, and the overheads that it adds.

BOUND is the time that no software can beat: every byte is read once and every operation runs at the
peak, while reading, multiplying and sending overlap. `expected` runs one stage after the other,
each at the share of the peak that kernels were measured to reach or, if is_measured is false, are
assumed to reach.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from bench.plan.shapes import Precision

Curve = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of the peaks, where 1.0 is the whole peak, and overheads in seconds.

    weights, kv     share of the bandwidth for reading weights, and K/V of decode rows
    products        share of the arithmetic for products, as (rows, share) with ascending rows; in
                    between, rows / share is interpolated linearly
    decode, prefill share of the arithmetic for attention
    rows            share of the bandwidth for moving rows between products; inf: rows stay in
                    caches
    network         share of the links' rate
    memory          part of the memory that weights and K/V may take
    step_s, layer_s, sequence_s
                    overhead of each step, of each of its layers and of each sequence in it
    is_overlapped   stages run at the same time, so the longest of memory, arithmetic and network
                    counts
    is_measured     the shares come from measured kernels and are not assumed
    """

    weights: float = 1.0
    kv: float = 1.0
    products: Curve = ((1, 1.0),)
    decode: float = 1.0
    prefill: float = 1.0
    rows: float = inf
    network: float = 1.0
    memory: float = 1.0
    step_s: float = 0.0
    layer_s: float = 0.0
    sequence_s: float = 0.0
    is_overlapped: bool = False
    is_measured: bool = True

    def product_rows(self, rows: float) -> float:
        """Returns how many rows take as long at the peak as `rows` take at their share of it."""
        return _rows_at_peak(self.products, rows)


def _rows_at_peak(curve: Curve, rows: float) -> float:
    for (low, low_share), (high, high_share) in pairwise(curve):
        if low <= rows < high:
            start, end = low / low_share, high / high_share
            return start + (end - start) * (rows - low) / (high - low)
    share = curve[0][1] if rows < curve[0][0] else curve[-1][1]
    return rows / share


BOUND = Efficiency(is_overlapped=True)

# Measured shares of our kernels on two Zen 5 cores (`serve bench ops`; docs/performance.md,
# docs/plan.md), and the time between their calls.
_CPU = Efficiency(
    weights=0.95,
    kv=0.72,
    prefill=0.6,
    rows=0.45,
    memory=0.9,
    step_s=0.5e-3,
    layer_s=30e-6,
    sequence_s=2e-6,
)
_CPU_PRODUCTS: dict[str, Curve] = {
    "int8": ((8, 0.55), (16, 0.64), (32, 0.83), (64, 0.85), (512, 0.87)),
    "bfloat16": ((16, 0.8), (32, 0.88)),
    "float32": ((64, 0.9),),
    "int4": ((16, 0.6), (64, 0.67), (512, 0.71)),
    "nf4": ((16, 0.6), (64, 0.67), (512, 0.71)),
}
_CPU_WEIGHTS = {"int4": 0.85, "nf4": 0.85}
_CPU_DECODE = {"int8": 1.0, "int4": 1.0, "bfloat16": 0.05, "float32": 0.08}  # by the type of K/V
# Assumed shares, the same as in bench/nodes/node_cost.py; they are not measured on a GPU.
_GPU = Efficiency(
    weights=0.8,
    kv=0.8,
    products=((1, 0.6),),
    decode=0.6,
    prefill=0.6,
    rows=0.8,
    memory=0.9,
    step_s=50e-6,
    layer_s=20e-6,
    sequence_s=1e-6,
    is_measured=False,
)


def expected(kind: str, precision: Precision) -> Efficiency:
    """Returns the efficiency that our kernels are expected to reach on a kind of device."""
    if kind == "gpu":
        return _GPU
    return replace(
        _CPU,
        weights=_CPU_WEIGHTS.get(precision.weights, _CPU.weights),
        products=_CPU_PRODUCTS.get(precision.weights, _CPU.products),
        decode=_CPU_DECODE[precision.kv],
    )
