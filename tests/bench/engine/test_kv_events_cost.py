"""The measurement of what K/V events cost runs, and counts pages that come and go."""

from __future__ import annotations

import pytest

from bench.engine.kv_events import measure


@pytest.mark.exhaustive
def test_it_measures_both_threads():
    found = measure(count=16, repeats=1)
    assert found["steps"] > 50 and found["evicted_pages"] > 0
    assert 0 < found["recorder_us_per_step"] < found["step_us"]
    assert found["recorder_percent"] < 20, "a coarse bound: the machine may be busy"
    assert 0 < found["publisher_percent"] < 100
    assert found["with_over_without"] > 0
