"""The storms of large answers: their verdict on made-up figures, and a small one on a server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from bench.engine import memory_storm as module
from bench.engine.memory_storm import MAX_HEALTH_S, Storm, memory_storm
from bench.engine.storm_calls import KINDS
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


def small_storms(
    kinds: Sequence[str], scale: float, monkeypatch: pytest.MonkeyPatch
) -> list[Storm]:
    """Runs small storms with little to be charged. Memory that has grown no more than allowed is
    not waited for."""
    monkeypatch.setattr(module, "_TRIM_S", 0.0)
    return memory_storm(kinds, clients=8, scale=scale, options=("--max-work-bytes", "64MiB"))


@pytest.mark.process
@pytest.mark.parametrize(("is_long", "scale"), [(False, 0.1), (True, 0.01)])
def test_small_storms(is_long: bool, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind is answered, leaves no charge, and gives its memory back."""
    kinds = [kind for kind, of in KINDS.items() if of.is_long is is_long]
    storms = {storm.kind: storm for storm in small_storms(kinds, scale, monkeypatch)}
    assert set(storms) == set(kinds)
    for found in storms.values():
        assert [fault for fault in found.faults() if "/health" not in fault] == [], found
    assert is_long or storms["token strings"].statuses[429] > 0


@pytest.mark.timing
@pytest.mark.process
def test_health_is_answered_during_small_storms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of three counts, since the clients share the machine with the server."""
    kinds = ("token strings", "detokenize", "count messages", "long prompts")
    best = dict.fromkeys(kinds, 1.0)
    for storm in small_storms(3 * kinds, 0.1, monkeypatch):
        best[storm.kind] = min(best[storm.kind], storm.health_s)
    assert max(best.values()) <= MAX_HEALTH_S, best
