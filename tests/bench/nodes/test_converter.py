"""Early q in a converted model saves what the formula says, where only injected costs take time."""

from __future__ import annotations

import pytest

from bench.nodes.converter import measure
from bench.nodes.injected import Costs, VirtualClock
from bench.nodes.overlap import EARLY_Q
from ops.cpu import native_library
from tests.support.engine.child import last_json, output_of

pytestmark = pytest.mark.skipif(
    not native_library.is_available(), reason="native kernels not built"
)


@pytest.mark.exhaustive
def test_early_q_saves_what_the_formula_says() -> None:
    cases = [*EARLY_Q[2:5], Costs(kv_s=0.02, prefix_s=0.003, delay_s=0.001)]
    found = measure(VirtualClock(), 2, cases)
    assert [row.error for row in found] == pytest.approx([0.0] * len(cases), abs=1e-3)
    assert len({round(row.predicted_s, 4) for row in found}) == len(cases)


@pytest.mark.exhaustive
def test_quick() -> None:
    """Bounds in real time hold on a busy machine."""
    (row,) = last_json(output_of("-m", "bench.nodes.converter", "--quick"))
    assert row["early_s"] < row["late_s"] and abs(row["error"]) < 0.8
