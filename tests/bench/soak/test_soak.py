"""`serve bench soak`: its calls, its verdict on made-up samples, and a short run on a server."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from bench.common.tables import console
from bench.soak.calls import HOSTILE, Call, Calls
from bench.soak.report import document, show
from bench.soak.run import JUDGED, SERVER, WORKERS, Soak, SoakSettings
from bench.soak.server import ServerProcess
from bench.soak.streams import Outcomes, Streams
from bench.soak.usage import Usage, read_usage
from serve.errors import ConfigError

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


def test_a_valid_call_is_refused_for_its_own_reasons_only() -> None:
    calls = Calls("m", 1024, 1, 0.0)
    calls.note_response("resp_1")
    by_kind = {b"resp_1" in call.body: call for call in (calls.response() for _ in range(99))}
    fresh, continued = by_kind[False], by_kind[True]
    for call in (fresh, continued, calls.stored_response()):
        assert call.accepts(200, "") and call.accepts(429, "queue_full")
        assert not call.accepts(400, "invalid_value") and not call.accepts(500, "")
    assert continued.accepts(404, "previous_response_not_found")
    assert not fresh.accepts(404, "previous_response_not_found")
    assert calls.stored_response().accepts(404, "response_not_found")
    hostile = calls.deep()
    assert hostile.accepts(400, "invalid_value") and not hostile.accepts(500, "")


def usage(at_s: float, own: float, **kept: float) -> Usage:
    memory = dict.fromkeys(("anonymous", "file", "workers"), 0)
    memory |= {"rss": int(own) + 64 * MB, "shared": 64 * MB}
    return Usage(at_s, memory, 20, 10, dict(kept), {"requests_unfinished": 0.0})


def soak(samples: list[Usage], **changes: Any) -> Soak:
    outcomes = Outcomes()
    outcomes.add("chat", "ok")
    made: dict[str, Any] = {"before": samples[0], "after": samples[-1], "outcomes": outcomes}
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
    assert flat.faults() == flat.undecided() == []
    assert 500 < flat.filled_s["cache"] < 700 and flat.still_filling == []
    assert grows.faults() == [f"{SERVER}: memory grows by 2.00 MB/h, more than 1"]


def test_child_processes_are_judged_too() -> None:
    samples = [usage(float(at_s), 300 * MB) for at_s in range(0, 3600, 5)]
    for each in samples:
        each.memory["workers"] = int(50 * MB + 3 * MB * each.at_s / 3600)
    assert soak(samples).faults() == [f"{WORKERS}: memory grows by 3.00 MB/h, more than 1"]


def bursts(
    leak: float = 0.0,
    *,
    seed: int = 0,
    step: float = 0.0,
    minute: int = 45,
    share: float = 0.6,
    noise: float = 0.15,
) -> list[Usage]:
    """An hour of samples in MB with bursts of 50 MB (exponential, 5 to 25 s long) most of the
    time, which leaks so much an hour, and keeps `step` more from a minute on."""
    rng = random.Random(seed)
    samples, left, height = [], 0, 0.0
    for at_s in range(0, 3600, 5):
        if left <= 0 and rng.random() < share:
            left, height = rng.choice([1, 2, 3, 5]), rng.expovariate(1 / 50)
        left -= 1
        size = 400 + leak * at_s / 3600 + rng.gauss(0, noise) + (height if left > 0 else 0.0)
        size += step if at_s >= minute * 60 else 0.0
        samples.append(usage(float(at_s), size * MB))
    return samples


@pytest.mark.parametrize("seed", range(5))
def test_bursts_are_no_leak_and_hide_none(seed: int) -> None:
    """Beside bursts the floor is known better, and without them the median."""
    for leak in (0.0, 3.0, 6.0):
        found = soak(bursts(leak, seed=seed))
        slope = found.slope(JUDGED[SERVER])
        assert slope is not None and abs(slope.value / MB - leak) < 0.8
        assert slope.high - slope.low < 3 * MB
        assert found.undecided() == []
        assert len(found.faults()) == (leak > 1)
    calm = soak(bursts(0.5, seed=seed, share=0.02, noise=5.0)).slope(JUDGED[SERVER])
    assert calm is not None and calm.low < 0.5 * MB < calm.high < 9 * MB


def test_a_step_that_stays_shows() -> None:
    assert any("memory grows" in text for text in soak(bursts(step=20.0)).faults())


@pytest.mark.parametrize("minute", [34, 53, 56])
def test_a_step_that_the_slope_does_not_show_is_undecided(minute: int) -> None:
    found = soak(bursts(step=20.0, minute=minute))
    assert found.faults() == []
    assert f"{SERVER}: memory rose by " in found.undecided()[-1]


def test_a_wide_interval_is_undecided() -> None:
    found = soak(bursts(0.0, share=0.02, noise=30.0))
    slope = found.slope(JUDGED[SERVER])
    assert slope is not None and slope.low < 0 < 5 * MB < slope.high
    assert found.faults() == []
    text = f"{SERVER}: the interval reaches {slope.high / MB:.2f} MB/h: run longer"
    assert found.undecided() == [text]
    few = soak([usage(float(i), 300 * MB) for i in range(15)])
    assert few.faults() == [] and few.undecided() == ["too few samples for a slope: run longer"]


def test_a_cache_that_never_fills_is_named() -> None:
    samples = [usage(float(i), 300 * MB + 1e4 * i, big=1e4 * i) for i in range(0, 3600, 5)]
    found = soak(samples)
    assert found.still_filling == ["big"]
    assert any("memory grows" in fault for fault in found.faults())
    assert found.undecided() == ["big was not full when the fit began: run longer"]


def test_the_slopes_and_the_verdict_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    for samples, last in (
        (bursts(), "no fault"),
        (bursts(0.0, share=0.02, noise=30.0), "UNDECIDED"),
        (bursts(6.0), "FAULT"),
    ):
        show(soak(samples), console())
        lines = capsys.readouterr().out.splitlines()
        for name in JUDGED:
            assert any(line.startswith(f"{name}: ") and "MB/h (" in line for line in lines)
        assert lines[-1].startswith(last)
    made = document(soak(bursts(6.0)))
    assert made["faults"] and not made["undecided"]
    assert made["bytes_per_hour"][SERVER]["high"] > 5e6


def test_what_is_left_behind_is_a_fault() -> None:
    samples = [usage(float(i), 300 * MB) for i in range(0, 600, 5)]
    assert soak(samples).faults() == []
    last = samples[-1]
    left = replace(last, files=23, metrics={"requests_unfinished": 2.0, "charged_bytes": 3.0})
    outcomes = Outcomes()
    outcomes.fail("chat", "500 b'x'")
    for kind in ("chat", f"{HOSTILE}deep JSON"):
        outcomes.by_kind[kind, "ok"] += 2
        outcomes.by_kind[kind, "refused"] += 5
        outcomes.by_kind[kind, "aborted"] += 99
    faults = soak(samples, after=left, outcomes=outcomes, log="Traceback (most recent").faults()
    assert faults == [
        "a call failed: chat: 500 b'x'",
        "the server has 23 files, 20 before",
        "only 25 % of the valid calls were answered",
        "requests_unfinished is 2 in the idle server",
        "charged_bytes is 3 in the idle server",
        "the server's log has a traceback",
    ]


def test_a_traceback_anywhere_in_the_log_is_found(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("begin\nTraceback (most recent call last)\n" + "a warning\n" * 10_000)
    assert ServerProcess(0, "", log).log_text().startswith("Traceback (most")
    log.write_text("a warning\n" * 10_000 + "the last one\n")
    assert ServerProcess(0, "", log).log_text().endswith("a warning\nthe last one\n")


LONG = b"data: {}\n\n" * 2000
ANSWERS = {
    LONG + b"data: [DONE]\n\n": "ok",
    b'data: {"choices": [{"text": "\\ndata: {\\"error\\""}]}\n\ndata: [DONE]\n\n': "ok",
    LONG + b'data: {"error": {"code": "internal_error"}}\n\n': "failed",
    LONG + b'data: {"error": {"code": "memory_budget"}}\n\n': "refused",
    LONG + b"event: error\ndata: {}\n\n": "failed",
    b"event: response.failed\r\ndata: {}\r\n\r\n": "failed",
    b'{"choices": [{"finish_reason": "error"}]}': "failed",
}


@pytest.mark.parametrize("body", ANSWERS)
def test_an_error_in_the_middle_of_an_answer_is_a_failure(body: bytes) -> None:
    async def run() -> None:
        async def answer(request: web.BaseRequest) -> web.Response:
            return web.Response(body=body)

        async with RawTestServer(answer) as server, aiohttp.ClientSession() as session:
            await streams._send(session, Call("chat", str(server.make_url("/"))))

    streams = Streams("", Calls("m", 1024, 1, 0.0), num=1, abort_share=0.0, seed=1)
    asyncio.run(run())
    assert streams.outcomes.by_kind == {("chat", ANSWERS[body]): 1}


def test_the_pipes_of_workers_are_no_fault() -> None:
    """A worker that starts after the pause, or has not ended yet, adds two files."""
    samples = [usage(float(at_s), 300 * MB) for at_s in range(0, 3600, 5)]
    workers = {"worker_memory_bytes tokenizer": 86e6, "worker_memory_bytes grammar": 0.0}
    for files, expected in ((22, []), (23, ["the server has 21 files, 20 before"])):
        after = replace(samples[-1], files=files, metrics=workers)
        assert soak(samples, after=after).faults() == expected


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
    assert found.own_bytes == found.memory["rss"] - found.memory["shared"]
    assert found.files > 2 and found.threads >= 1


@pytest.mark.parametrize("field", ["minutes", "streams", "abort_share", "hostile_share"])
def test_bad_settings_are_refused(field: str) -> None:
    with pytest.raises(ConfigError):
        SoakSettings(**{field: -1})


@pytest.mark.process
def test_a_short_soak(tmp_path: Any) -> None:
    """Half a minute has no meaningful slope, but every kind of call, and an idle server after.
    Caches may still be filling, which is undecided."""
    file = tmp_path / "soak.json"
    options = ("--minutes", "0.5", "--streams", "16", "--max-slope", "1e9", "--json", str(file))
    command = [sys.executable, "-m", "serve", "bench", "soak", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    text, result = done.stdout, json.loads(file.read_text())
    assert done.returncode == (3 if result["undecided"] else 0), done.stderr
    assert "chat, structured" in text and "hostile: mutated bodies" in text
    assert result["faults"] == []
    assert len(result["samples"]) >= 5
    aborted = sum(n for name, n in result["calls"].items() if name.endswith("aborted"))
    assert aborted / sum(result["calls"].values()) > 0.2
    assert result["samples"][-1]["kept"]["kv_pages"] > 0
