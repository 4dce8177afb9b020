"""`serve bench soak`: its calls, its verdict on made-up samples, and a short run on a server."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from bench.soak.calls import Call, Calls
from bench.soak.run import Soak, SoakSettings
from bench.soak.streams import Outcomes
from bench.soak.usage import Usage, read_usage
from serve.errors import ConfigError
from tests.support.engine.child import output_of

MB = 1_000_000
SETTINGS = SoakSettings(minutes=60)


def drawn(hostile_share: float, count: int = 2000, seed: int = 1) -> list[Call]:
    calls = Calls("m", 1024, seed, hostile_share)
    return [calls.draw() for _ in range(count)]


def test_calls_reach_every_api_and_repeat_with_their_seed() -> None:
    calls = drawn(0.0)
    assert [call.body for call in calls] == [call.body for call in drawn(0.0)]
    paths = Counter(call.path.partition("/resp_")[0] for call in calls)
    assert {
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/tokenize",
        "/detokenize",
        "/metrics",
    } <= set(paths)
    bodies: list[dict[str, Any]] = [json.loads(call.body) for call in calls if call.body]
    for field in ("tools", "response_format", "stop", "logprobs", "logit_bias", "stream"):
        assert any(body.get(field) for body in bodies), field
    assert any(body.get("n", 1) > 1 for body in bodies)
    keys = {call.headers["Authorization"] for call in calls}
    assert len(keys) == 8


def test_the_share_of_hostile_calls() -> None:
    calls = drawn(0.25)
    hostile = [call for call in calls if call.kind.startswith("hostile")]
    assert 0.2 < len(hostile) / len(calls) < 0.3
    assert len({call.kind for call in hostile}) == 8
    assert all(call.is_hostile for call in hostile)


def usage(at_s: float, own: float, **kept: float) -> Usage:
    memory = dict.fromkeys(("anonymous", "file", "workers", "pss"), 0)
    memory |= {"rss": int(own) + 64 * MB, "shared": 64 * MB}
    return Usage(at_s, memory, 20, 10, dict(kept), {"requests_unfinished": 0.0})


def soak(samples: list[Usage], **changes: Any) -> Soak:
    made: dict[str, Any] = {"before": samples[0], "after": samples[-1], "outcomes": Outcomes()}
    return Soak(SETTINGS, samples=samples, **{**made, **changes})


def test_growth_is_a_fault_and_a_full_cache_is_not() -> None:
    """A cache of 40 MB fills in ten minutes; afterwards memory is flat, or grows by 2 MB/h."""

    def samples(per_hour: float) -> list[Usage]:
        sizes = [(at_s, min(40.0, at_s / 15) * MB) for at_s in range(0, 3600, 5)]
        return [
            usage(float(at_s), 300 * MB + size + per_hour * MB * at_s / 3600, cache=size)
            for at_s, size in sizes
        ]

    flat, grows = soak(samples(0.0)), soak(samples(2.0))
    assert flat.faults() == []
    assert 500 < flat.fit_from_s < 700 and flat.still_filling == []
    (fault,) = grows.faults()
    assert fault == "memory grows by 2.00 MB/h, more than 1"


def test_a_cache_that_never_fills_is_named() -> None:
    samples = [usage(float(i), 300 * MB + 1e4 * i, big=1e4 * i) for i in range(0, 3600, 5)]
    found = soak(samples)
    assert found.still_filling == ["big"]
    assert found.fit_from_s == pytest.approx(1800, abs=5)
    assert any("memory grows" in fault for fault in found.faults())


def test_what_is_left_behind_is_a_fault() -> None:
    samples = [usage(float(i), 300 * MB) for i in range(0, 600, 5)]
    assert soak(samples).faults() == []
    last = samples[-1]
    left = replace(last, files=23, metrics={"requests_unfinished": 2.0})
    outcomes = Outcomes()
    outcomes.fail("chat", "500 b'x'")
    faults = soak(samples, after=left, outcomes=outcomes, log="Traceback (most recent").faults()
    assert faults == [
        "a call failed: chat: 500 b'x'",
        "the server has 23 files, 20 before",
        "requests_unfinished is 2 in the idle server",
        "the server's log has a traceback",
    ]


def test_the_usage_of_this_process() -> None:
    import os

    text = (
        "# TYPE mergestep:kept_bytes gauge\n"
        'mergestep:kept_bytes{model_name="m",what="responses"} 5.0\n'
        "# TYPE mergestep:kv_pages gauge\n"
        'mergestep:kv_pages{model_name="m",state="in_use"} 3.0\n'
    )
    found = read_usage(os.getpid(), 1.0, text)
    assert found.kept == {"responses": 5.0} and found.metrics == {"kv_pages in_use": 3.0}
    assert found.memory["rss"] >= found.memory["anonymous"] > 1 << 20
    assert found.own_bytes == found.memory["rss"] - found.memory["shared"] + found.memory["workers"]
    assert found.files > 2 and found.threads >= 1


@pytest.mark.parametrize("field", ["minutes", "streams", "abort_share", "hostile_share"])
def test_bad_settings_are_refused(field: str) -> None:
    with pytest.raises(ConfigError):
        SoakSettings(**{field: -1})


@pytest.mark.process
def test_a_short_soak(tmp_path: Any) -> None:
    """Half a minute has no meaningful slope, but every kind of call, and an idle server after."""
    file = tmp_path / "soak.json"
    options = ("--minutes", "0.5", "--streams", "16", "--max-slope", "1e9", "--json", str(file))
    text = output_of("-m", "serve", "bench", "soak", *options)
    assert "chat, structured" in text and "hostile: mutated bodies" in text
    result = json.loads(file.read_text())
    assert result["faults"] == []
    assert len(result["samples"]) >= 5
    aborted = sum(n for name, n in result["calls"].items() if name.endswith("aborted"))
    assert aborted / sum(result["calls"].values()) > 0.2
    assert result["samples"][-1]["kept"]["kv_pages"] > 0
