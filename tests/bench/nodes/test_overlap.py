"""Overlap through the real decoder and runner is exact where only injected costs take time."""

from __future__ import annotations

import pytest

from bench.nodes.injected import Costs, VirtualClock
from bench.nodes.overlap import EARLY_Q, TWO_BATCHES, measure_injected
from ops.cpu import native_library
from tests.support.engine.child import last_json, output_of

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)


@pytest.mark.exhaustive
def test_early_q_saves_what_the_formula_says() -> None:
    cases = [*EARLY_Q[2:], Costs(kv_s=0.02, prefix_s=0.003, delay_s=0.001)]
    found = measure_injected(VirtualClock(), 2, cases)
    assert [row.error for row in found] == pytest.approx([0.0] * len(cases), abs=1e-3)
    assert len({round(row.predicted_s, 4) for row in found}) >= 5


def test_two_batches_where_attention_takes_as_long_as_the_products() -> None:
    equal = next(c for c in TWO_BATCHES if c.prefix_s == c.model_s and not c.fixed_share)
    all_fixed = next(c for c in TWO_BATCHES if c.fixed_share == 1.0)
    free, bound = measure_injected(VirtualClock(), 5, [equal, all_fixed])
    assert 1.6 < free.speedup < 2.0
    assert free.learned_s == pytest.approx(free.two_s)
    # products that wait for the weights take twice as long for two halves
    assert bound.speedup < 1.0
    assert bound.learned_s == pytest.approx(bound.early_s)


@pytest.mark.exhaustive
def test_overlap_quick() -> None:
    """Bounds in real time hold on a busy machine."""
    early, two = last_json(output_of("-m", "bench.nodes.overlap", "--quick"))
    assert early["early_s"] < early["late_s"] and abs(early["error"]) < 0.8
    assert two["speedup"] > 1.2
