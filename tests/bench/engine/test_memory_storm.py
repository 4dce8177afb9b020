"""The storms of large answers: their verdict on made-up figures, and a small one on a server."""

from __future__ import annotations

from collections import Counter

import pytest

from bench.engine.memory_storm import KINDS, Storm, memory_storm
from serve.errors import ConfigError

MB = 1_000_000


def storm(**changes: object) -> Storm:
    made = {"before": 600 * MB, "peak": 900 * MB, "after": 650 * MB, "health_s": 0.01}
    return Storm("tokenize", **{**made, "statuses": Counter({200: 2, 429: 30}), **changes})


def test_faults() -> None:
    assert storm().faults() == []
    assert storm(after=701 * MB).faults() == ["memory is 101 MB above where it began"]
    assert storm(health_s=0.06).faults() == ["/health took 60 ms"]
    assert storm(charged=5.0).faults() == ["5 bytes are still charged"]
    odd = storm(statuses=Counter({500: 1, 0: 1}))
    assert odd.faults() == ["answers have the status 0, 500", "no answer has the status 200"]


def test_unknown_kinds_are_refused() -> None:
    with pytest.raises(ConfigError, match="no such kind"):
        memory_storm(["no such kind"])


@pytest.mark.process
def test_small_storms() -> None:
    """Each is answered, leaves no charge, and gives its memory back. How long /health takes is
    measured by the command on a quiet machine."""
    kinds = ("token strings", "detokenize", "embeddings", "n with logprobs")
    assert set(kinds) <= set(KINDS)
    storms = memory_storm(kinds, clients=8, scale=0.1, options=("--max-work-bytes", "64MiB"))
    for found in storms:
        assert [fault for fault in found.faults() if "/health" not in fault] == [], found
    assert storms[0].statuses[429] > 0
