"""Which shares of a device's peaks software reaches, and how many seconds it takes besides.

BOUND is what no software can beat: every byte once, every operation at the peak, and reading,
multiplying and sending at the same time. The others are expectations: one stage after the other,
each at the share of the peak that kernels were measured to reach or, where is_measured is false,
are assumed to reach.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from bench.plan.shapes import Precision

Curve = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of a peak, 1.0 being all of it.

    weights, kv: reading weights, and K/V for decode rows. products: multiplying, by the number of
    rows (ascending; rows over share rise along straight lines in between). decode, prefill:
    multiplying in attention. rows: moving rows between products; inf: they stay in caches.
    network: sending over links. memory: the part of memory for weights and K/V. step_s, layer_s,
    sequence_s: what each step, each of its layers and each sequence in it take besides.
    is_overlapped: stages run at the same time, and only the fullest of memory, arithmetic and
    network counts. is_measured: the shares come from measured kernels and are not assumed.
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
        """Returns how many rows take as long at the whole peak as these at their share of it."""
        return _rows_at_peak(self.products, rows)


def _rows_at_peak(curve: Curve, rows: float) -> float:
    for (low, low_share), (high, high_share) in pairwise(curve):
        if low <= rows < high:
            start, end = low / low_share, high / high_share
            return start + (end - start) * (rows - low) / (high - low)
    share = curve[0][1] if rows < curve[0][0] else curve[-1][1]
    return rows / share


BOUND = Efficiency(is_overlapped=True)

# Measured: our kernels on two cores of Zen 5 (`serve bench ops`; docs/performance.md,
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
_CPU_DECODE = {"int8": 1.0, "bfloat16": 0.05, "float32": 0.08}  # by the type of K/V
# Assumed, as in the model of memory devices (bench/nodes/node_cost.py): no kernel has run on a GPU.
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
    """Returns what our kernels are expected to reach on a kind of device."""
    if kind == "gpu":
        return _GPU
    return replace(
        _CPU,
        weights=_CPU_WEIGHTS.get(precision.weights, _CPU.weights),
        products=_CPU_PRODUCTS.get(precision.weights, _CPU.products),
        decode=_CPU_DECODE[precision.kv],
    )
