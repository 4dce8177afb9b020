"""The sending half of the load generator, against a scripted server."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import orjson
import pytest
import uvloop

from bench.load.client.answer import CallError
from bench.load.client.health import health_notes, stolen_notes
from bench.load.client.processes import num_processes
from bench.load.client.record import Outcome, ProcessHealth, Progress, Record, RunResult
from bench.load.client.run import offer
from bench.load.client.sender import Sender
from bench.load.client.targets import ServerSettings, ServerTarget
from bench.load.client.timer import Sleeper
from bench.load.proof.fake_script import Fault, Profile, prompt_of, script_of
from bench.load.proof.fake_server import FakeServer
from bench.load.proof.truth import scripted_server
from bench.load.workload.offered_load import LoadOptions, items_of
from bench.load.workload.work import Schedule, Work
from serve.errors import ConfigError

pytestmark = pytest.mark.timing

QUICK = Profile(first_s=(0.005, 0.01), gap_s=(0.001, 0.002), chunks=(2, 5))
SLOW = Profile(first_s=(0.02, 0.02), gap_s=(0.4, 0.4), chunks=(20, 20))


def schedule_of(count: int, qps: float) -> Schedule:
    works = [Work(prompt=prompt_of(i), max_tokens=8, group=str(i % 2)) for i in range(count)]
    return Schedule(qps, works, [i / qps for i in range(count)])


def against(
    profile: Profile,
    schedule: Schedule,
    options: LoadOptions | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> tuple[RunResult, FakeServer]:
    async def run() -> tuple[RunResult, FakeServer]:
        async with (
            FakeServer(profile) as server,
            ServerTarget(ServerSettings(server.url)) as target,
        ):
            result = await offer(schedule, target, options, on_progress)
        return result, server

    return uvloop.run(run())


def outcomes(result: RunResult) -> set[Outcome]:
    return {record.outcome for record in result.records}


def test_records_say_what_the_script_says() -> None:
    schedule = schedule_of(40, 200)
    result, _ = against(QUICK, schedule, LoadOptions(warmup=[Work(prompt="Hi", max_tokens=1)]))
    assert outcomes(result) == {Outcome.OK}
    for record in result.records:
        script = script_of(QUICK, record.index)
        assert record.output_tokens == sum(script.chunk_tokens)
        assert record.prompt_tokens == script.prompt_tokens
        assert len(record.chunks_s) == len(script.chunks_s)
        assert record.scheduled_s == pytest.approx(record.index / 200)
        assert record.scheduled_s <= record.dispatched_s <= record.sent_s < record.chunks_s[0]
        for at_s, due_s in zip(record.chunks_s, script.chunks_s, strict=True):
            assert 0 < at_s - record.sent_s - due_s < 0.25
        assert record.finished_s >= record.chunks_s[-1]
        assert record.finish_reason == "length"
        assert record.group == str(record.index % 2)
    assert result.window[0] == 0 and result.window[1] >= result.records[-1].finished_s
    assert result.health[0].max_connections >= 1
    assert 0 < result.health[0].cpu < 1.5


def test_the_loop_is_open() -> None:
    """Requests are sent on time although none has been answered."""
    profile = Profile(first_s=(0.5, 0.5), gap_s=(0.01, 0.01), chunks=(2, 2))
    result, _ = against(profile, schedule_of(40, 200))
    assert max(r.sent_s for r in result.records) < min(r.chunks_s[0] for r in result.records)
    assert not result.is_closed_loop


def test_everything_at_once() -> None:
    schedule = Schedule(math.inf, schedule_of(50, 1).works, [0.0] * 50)
    result, _ = against(QUICK, schedule)
    assert outcomes(result) == {Outcome.OK}


def test_a_closed_loop_is_said_and_waits() -> None:
    profile = Profile(first_s=(0.05, 0.05), gap_s=(0.01, 0.01), chunks=(2, 2))
    result, _ = against(profile, schedule_of(12, 1000), LoadOptions(max_concurrency=2))
    edges = sorted(
        [(r.sent_s, 1) for r in result.records] + [(r.finished_s, -1) for r in result.records]
    )
    running = peak = 0
    for _, change in edges:
        running += change
        peak = max(peak, running)
    assert peak == 2
    assert result.is_closed_loop and any("max_concurrency 2" in note for note in result.notes)
    last = result.records[-1]
    assert last.chunks_s[0] - last.scheduled_s > 0.25  # five before it, two at a time
    assert last.chunks_s[0] - last.sent_s < 0.25


def test_failures_are_records() -> None:
    profile = Profile(seed=3, first_s=(0.005, 0.01), gap_s=(0.001, 0.002), fault_rate=0.2)
    result, _ = against(profile, schedule_of(60, 500))
    codes = {Fault.REFUSED: "rate_limit_exceeded", Fault.ERROR: "internal_error"}
    seen = set()
    for record in result.records:
        fault = script_of(profile, record.index).fault
        seen.add(fault)
        assert (record.outcome is Outcome.OK) is (fault is Fault.NONE)
        if fault is not Fault.NONE:
            assert record.error is not None
            assert codes.get(fault, "connection_lost") in record.error
    assert seen == set(Fault)


def test_requests_leave_no_cycles() -> None:
    """No garbage is collected while a load runs, so a request must leave no cycles."""
    profile = Profile(first_s=(0.002, 0.004), gap_s=(0.001, 0.002), fault_rate=0.1)

    async def unreachable(url: str) -> int:
        async with ServerTarget(ServerSettings(url)) as target:
            start_s = time.perf_counter()
            items = items_of(schedule_of(200, 400), LoadOptions())
            sender = Sender(target, items, start_s=start_s, grace_s=None, max_concurrency=None)
            gc.collect()
            gc.disable()
            await sender.run()
            try:
                return gc.collect()
            finally:
                gc.enable()

    with scripted_server(profile) as url:
        assert uvloop.run(unreachable(url)) < 150  # a failure's traceback would be 18 for each


def test_grace_makes_the_rest_incomplete() -> None:
    result, server = against(SLOW, schedule_of(6, 100), LoadOptions(grace_s=0.3))
    assert outcomes(result) == {Outcome.INCOMPLETE}
    assert all(record.chunks_s and record.finished_s < 5 for record in result.records)
    assert any("6 requests had not ended" in note for note in result.notes)
    assert all(served.is_closed for served in server.log if served.index is not None)


@pytest.mark.parametrize("how", [{"cancel_after_s": 0.1}, {"cancel_after_chunks": 1}])
def test_cancellation_closes_connections(how: dict[str, Any]) -> None:
    options = LoadOptions(seed=1, cancel_rate=0.5, grace_s=0.8, **how)
    result, server = against(SLOW, schedule_of(20, 200), options)
    chosen = [
        i.index
        for i in items_of(schedule_of(20, 200), options)
        if i.cancel_after_s or i.cancel_after_chunks
    ]
    assert 3 < len(chosen) < 17
    cancelled = [r for r in result.records if r.outcome is Outcome.CANCELLED]
    assert [record.index for record in cancelled] == chosen
    assert all(record.finished_s - record.sent_s < 0.35 for record in cancelled)
    if "cancel_after_chunks" in how:
        assert all(len(record.chunks_s) == 1 for record in cancelled)
    assert all(served.is_closed for served in server.log if served.index in chosen)


def test_cancelled_requests_follow_from_the_seed() -> None:
    def chosen(seed: int) -> list[int]:
        options = LoadOptions(seed=seed, cancel_rate=0.3, cancel_after_s=1)
        items = items_of(schedule_of(100, 100), options)
        return [item.index for item in items if item.cancel_after_s is not None]

    assert chosen(1) == chosen(1) != chosen(2)
    assert 15 < len(chosen(1)) < 45


def test_an_answer_that_ends_before_its_cancellation_is_ok() -> None:
    options = LoadOptions(cancel_rate=1.0, cancel_after_s=10.0)
    result, _ = against(QUICK, schedule_of(5, 100), options)
    assert outcomes(result) == {Outcome.OK}


def test_probes_have_records_of_their_own() -> None:
    result, server = against(QUICK, schedule_of(50, 100), LoadOptions(probe_qps=20))
    assert len(result.records) == 50
    assert len(result.probes) == 10
    assert {probe.outcome for probe in result.probes} == {Outcome.OK}
    assert all(probe.output_tokens == 1 for probe in result.probes)
    assert [r.scheduled_s for r in result.probes] == pytest.approx(
        [(i + 0.5) / 20 for i in range(10)]
    )
    assert len(server.log) == 61  # with the one that checks


def test_probes_are_not_held_by_a_closed_loop() -> None:
    options = LoadOptions(probe_qps=50, max_concurrency=1, grace_s=0.3)
    result, _ = against(SLOW, schedule_of(20, 100), options)
    assert (
        sum(probe.outcome is Outcome.OK for probe in result.probes) == 9 or len(result.probes) >= 9
    )
    assert {probe.outcome for probe in result.probes} == {Outcome.OK}


def test_progress_comes_while_it_runs() -> None:
    seen: list[Progress] = []
    result, _ = against(QUICK, schedule_of(60, 100), None, seen.append)
    assert len(seen) >= 3
    assert seen[0].num_sent < seen[-1].num_sent == 60
    assert seen[-1].num_done == 60 and seen[-1].num_running == 0 and seen[-1].num_failed == 0
    assert seen[-1].num_tokens == sum(r.output_tokens or 0 for r in result.records)
    ttfts = sorted(ttft_s for progress in seen for ttft_s in progress.ttfts_s)
    assert ttfts == pytest.approx(sorted(r.chunks_s[0] - r.scheduled_s for r in result.records))


def test_several_processes_send_one_load() -> None:
    seen: list[Progress] = []
    profile = Profile(first_s=(0.02, 0.05), gap_s=(0.001, 0.002), fault_rate=0.05)
    options = LoadOptions(processes=2, probe_qps=10)
    result, server = against(profile, schedule_of(101, 200), options, seen.append)
    assert [record.index for record in result.records] == list(range(101))
    assert {record.process for record in result.records} == {0, 1}
    for record in result.records:
        script = script_of(profile, record.index)
        assert (record.outcome is Outcome.OK) is (script.fault is Fault.NONE)
        if record.outcome is Outcome.OK:
            assert record.output_tokens == sum(script.chunk_tokens)
            assert record.scheduled_s <= record.sent_s < record.chunks_s[0] < record.sent_s + 0.5
    assert len(result.probes) == 5
    assert [health.process for health in result.health] == [0, 1]
    assert sum(health.num_requests for health in result.health) == 106
    assert seen[-1].num_done == 101
    assert not server.connections


def test_a_client_process_that_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from serve.errors import MergestepError

    monkeypatch.setattr("bench.load.client.processes.sys.executable", "/bin/false")
    with pytest.raises(MergestepError, match="client process 0 ended early"):
        against(QUICK, schedule_of(4, 100), LoadOptions(processes=2))


@pytest.mark.parametrize("processes", [1, 2])
def test_interrupted_runs_still_have_a_result(processes: int) -> None:
    before = signal.getsignal(signal.SIGINT)

    sent: list[int] = []

    def interrupt(progress: Progress) -> None:
        if progress.num_done >= 20 and not sent:
            sent.append(1)
            os.kill(os.getpid(), signal.SIGINT)

    options = LoadOptions(processes=processes)
    began_s = time.monotonic()
    result, _ = against(QUICK, schedule_of(4000, 100), options, interrupt)
    assert time.monotonic() - began_s < 20
    assert 20 <= len(result.records) < 2000
    assert Outcome.OK in outcomes(result)
    assert result.was_interrupted
    assert any("stopped by the user" in note for note in result.notes)
    assert signal.getsignal(signal.SIGINT) == before


def test_how_many_processes() -> None:
    target = ServerTarget(ServerSettings("http://localhost:1"))

    def chosen(qps: float, max_tokens: int, **options: Any) -> tuple[int, list[str]]:
        works = [Work(prompt="x", max_tokens=max_tokens)] * 1000
        schedule = Schedule(qps, works, [i / qps for i in range(1000)])
        return num_processes(schedule, target, LoadOptions(**options))

    assert chosen(10, 10) == (1, [])
    assert chosen(10, 10, processes=3) == (3, [])
    assert chosen(10, 10, processes=5, max_concurrency=2) == (2, [])
    count, notes = chosen(100_000, 1000)
    assert count == min(os.cpu_count() or 1, 16)
    assert len(notes) == 1


@pytest.mark.parametrize(
    "options",
    [
        {"max_concurrency": 0},
        {"processes": 0},
        {"grace_s": -1},
        {"probe_qps": math.inf},
        {"cancel_rate": 1.5, "cancel_after_s": 1},
        {"cancel_rate": 0.5},
        {"cancel_rate": 0.5, "cancel_after_s": 1, "cancel_after_chunks": 1},
    ],
)
def test_bad_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        LoadOptions(**options)


def test_an_empty_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match="no request"):
        against(QUICK, Schedule(1, [], []))


def test_a_server_that_is_not_there() -> None:
    async def run() -> None:
        async with ServerTarget(ServerSettings("127.0.0.1:9")):
            raise AssertionError("it opened")

    with pytest.raises(CallError, match=r"cannot reach http://127.0.0.1:9: Connection refused"):
        asyncio.run(run())


def test_results_are_json() -> None:
    from bench.load.client.processes import record_from

    record = Record(3, 1.0, chunks_s=[1.5], outcome=Outcome.FAILED, error="x")
    copy = record_from(orjson.loads(orjson.dumps(record)))
    assert repr(copy) == repr(record)
    assert copy.outcome is Outcome.FAILED


def test_health_in_words() -> None:
    well = ProcessHealth(0, 10, 0.5, 0.0, 0.001, 0.002, 0, 90, core_wait=0.05)
    assert health_notes(well, 100) == []
    assert health_notes(replace(well, core_wait=math.nan), None) == []
    (note,) = health_notes(replace(well, core_wait=0.3), 100)
    assert "waited for a core during 30%" in note
    (note,) = health_notes(replace(well, max_connections=100), 100)
    assert "as many connections as the limit of open files allows (100)" in note
    assert stolen_notes(0.05, 10) == [] == stolen_notes(math.nan, 10)
    assert "host withheld 0.5 s" in stolen_notes(0.5, 10)[0]


def test_timers_are_never_early() -> None:
    async def run() -> list[float]:
        sleeper = Sleeper()
        late = []
        for number in range(50):
            due_s = time.perf_counter() + 0.0003 * (number % 7)
            await sleeper.until(due_s)
            late.append(time.perf_counter() - due_s)
        sleeper.close()
        return late

    late = uvloop.run(run())
    assert min(late) >= 0
    assert statistics.median(late) < 0.002
