"""A percentile is shown only if the sample is large enough for it."""

from __future__ import annotations

import math

import pytest

from bench.common.percentiles import cells, document, is_supported, least_samples, tail


@pytest.mark.parametrize(
    ("percent", "count"), [(50, 1), (90, 10), (95, 20), (99, 100), (99.9, 1000), (75, 4)]
)
def test_a_percentile_needs_a_sample_beyond_it(percent: float, count: int) -> None:
    assert least_samples(percent) == count
    assert is_supported(percent, count)
    assert count == 1 or not is_supported(percent, count - 1)


def test_eighteen_requests_make_no_p99() -> None:
    found = tail([float(i) for i in range(18)])
    assert found.is_maximum and found.value == 17.0 and found.percentile is None
    assert found.label == "max of 18"
    assert found.text("{:.1f}".format) == "max 17.0 (n 18)"


def test_a_hundred_do() -> None:
    found = tail([float(i) for i in range(100)])
    assert not found.is_maximum and found.value == found.percentile
    assert found.value == pytest.approx(98.01) and found.label == "p99"
    assert found.text("{:.1f}".format) == "98.0"


def test_documents_and_cells() -> None:
    few, many, none = document([0.2, 0.1], 1e3), document([0.1] * 100, 1e3), document([])
    assert few == {"p50": pytest.approx(150), "p99": None, "max": 200.0, "n": 2}
    assert cells(few) == ("150.0", "max 200.0 (n 2)")
    assert many["p99"] == pytest.approx(100) and cells(many) == ("100.0", "100.0")
    assert none["n"] == 0 and cells(none) == ("", "")
    assert math.isnan(tail([]).value) and tail([]).count == 0
