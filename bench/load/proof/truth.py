"""Proves the load generator's figures by comparing them with the script of a scripted server.

    python -m bench.load.proof.truth [--quick] [--qps 10,200,1000] [--no-stall]

A figure must be within 2 ms or 1 % of the truth, the rate within 0.5 %, and the number of requests
of each outcome exact. The server logs when it really read and wrote, which shows where a wrong
figure comes from. In a further run the server stalls for 2 s: an open loop must show the stall, and
latencies from schedule must show it even in a closed loop.
"""

from __future__ import annotations

import argparse
import contextlib
import heapq
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
import uvloop
from rich.console import Console
from rich.table import Table

from bench.common.percentiles import is_supported
from bench.load.client.answer import Document
from bench.load.client.http_client import Address, HttpClient
from bench.load.client.record import Outcome, Record, RunResult
from bench.load.client.run import offer
from bench.load.client.targets import ServerSettings, ServerTarget
from bench.load.proof.fake_script import Fault, Profile, after_stall, prompt_of, script_of
from bench.load.results.metrics import LABELS
from bench.load.results.summary import RunSummary, summarize
from bench.load.workload.arrivals import arrival_times
from bench.load.workload.offered_load import LoadOptions
from bench.load.workload.work import Schedule, Work

PERCENTILES = (50, 90, 99)
MAX_LOG = 1 << 30
MAX_ERROR_MS = 2.0
MAX_ERROR = 0.01
MAX_RATE_ERROR = 0.005


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. is_ok means that it is close enough to the truth."""

    name: str
    measured: float
    truth: float
    unit: str
    is_ok: bool


@dataclass(slots=True)
class Check:
    """One run compared with the truth."""

    title: str
    rows: list[Row]
    notes: list[str]
    is_valid: bool
    server: dict[str, float] = field(default_factory=dict)

    @property
    def is_ok(self) -> bool:
        return self.is_valid and all(row.is_ok for row in self.rows)


@contextlib.contextmanager
def scripted_server(profile: Profile) -> Iterator[str]:
    """Runs the server in its own process, and yields its URL."""
    command = [sys.executable, "-m", "bench.load.proof.fake_server", "--port", "0"]
    command += ["--profile", orjson.dumps(asdict(profile)).decode()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def schedule_of(qps: float, count: int, seed: int) -> Schedule:
    works = [Work(prompt=prompt_of(index), max_tokens=8) for index in range(count)]
    return Schedule(qps, works, arrival_times("poisson", qps, count, seed))


def true_records(profile: Profile, schedule: Schedule, slots: int | None = None) -> list[Record]:
    """Returns the records of a perfect client without network delay. A closed loop has `slots`
    concurrent requests, which start in order."""
    zero_s = schedule.arrivals_s[0]
    free_s: list[float] = [-1.0] * (slots or 0)
    records = []
    for index, due_s in enumerate(schedule.arrivals_s):
        script = script_of(profile, index)
        sent_s = max(due_s, heapq.heappop(free_s)) if slots else due_s
        chunks_s = [
            zero_s + after_stall(profile, sent_s - zero_s + at_s) for at_s in script.chunks_s
        ]
        record = Record(index, due_s, sent_s, finished_s=chunks_s[-1], outcome=Outcome.FAILED)
        if script.fault is Fault.NONE:
            record.outcome = Outcome.OK
            record.chunks_s = chunks_s
            record.prompt_tokens = script.prompt_tokens
            record.output_tokens = sum(script.chunk_tokens)
        elif script.fault is Fault.REFUSED:
            record.finished_s = sent_s
        else:
            record.chunks_s = chunks_s[:-1]
        if slots:
            heapq.heappush(free_s, record.finished_s)
        records.append(record)
    return records


def true_latencies_s(records: Sequence[Record]) -> dict[str, list[float]]:
    """Computes the figures by their definitions, without the report's code."""
    good = [record for record in records if record.outcome is Outcome.OK]
    tokens = [record.output_tokens or 0 for record in good]
    return {
        "ttft_send": [r.chunks_s[0] - r.sent_s for r in good],
        "ttft_schedule": [r.chunks_s[0] - r.scheduled_s for r in good],
        "tpot": [
            (r.chunks_s[-1] - r.chunks_s[0]) / (n - 1)
            for r, n in zip(good, tokens, strict=True)
            if n > 1
        ],
        "icl": [b - a for r in good for a, b in pairwise(r.chunks_s)],
        "e2e_send": [r.chunks_s[-1] - r.sent_s for r in good],
        "e2e_schedule": [r.chunks_s[-1] - r.scheduled_s for r in good],
    }


def compare(result: RunResult, measured: RunSummary, truth: Sequence[Record]) -> list[Row]:
    rows = []
    for name, values in true_latencies_s(truth).items():
        for percent in PERCENTILES:
            if not is_supported(percent, len(values)):
                continue  # the report shows the maximum instead
            true_ms = 1000 * float(np.percentile(values, percent))
            found_ms = measured.latencies_ms[name][f"p{percent}"]
            allowed_ms = max(MAX_ERROR_MS, MAX_ERROR * true_ms)
            is_ok = abs(found_ms - true_ms) <= allowed_ms
            rows.append(Row(f"{LABELS[name]} p{percent}", found_ms, true_ms, "ms", is_ok))
    good = [record for record in truth if record.outcome is Outcome.OK]
    true_counts = {
        "answered": len(good),
        "failed": len(truth) - len(good),
        "output_tokens": sum(r.output_tokens or 0 for r in good),
        "input_tokens": sum(r.prompt_tokens or 0 for r in good),
    }
    for name, true in true_counts.items():
        found = measured.counts[name]
        rows.append(Row(name.replace("_", " "), found, true, "", found == true))
    return rows + _rates(result, measured, truth)


def _rates(result: RunResult, measured: RunSummary, truth: Sequence[Record]) -> list[Row]:
    """Returns sends per second in which they were due, and answers per second in which they
    ended."""
    sent = [record.sent_s for record in result.records]
    due = [record.scheduled_s for record in truth]
    ended = [r.finished_s for r in result.records if r.outcome is Outcome.OK]
    true_ended = [r.finished_s for r in truth if r.outcome is Outcome.OK]
    rows = []
    for name, found_s, true_s in (("sent", sent, due), ("answers", ended, true_ended)):
        if len(found_s) < 2 or len(true_s) < 2:
            continue
        found = (len(found_s) - 1) / (max(found_s) - min(found_s))
        true = (len(true_s) - 1) / (max(true_s) - min(true_s))
        rows.append(Row(name, found, true, "/s", abs(found / true - 1) <= MAX_RATE_ERROR))
    # Chunks of a failed answer count as one token each, as it has no `usage`.
    low, high = measured.window
    tokens = (
        (r.output_tokens or len(r.chunks_s)) / len(r.chunks_s)
        for r in truth
        for at_s in r.chunks_s
        if low <= at_s <= high
    )
    true = sum(tokens) / (high - low)
    found = measured.rates["output_tokens_per_s"]
    rows.append(Row("output tokens", found, true, "/s", abs(found / true - 1) <= MAX_ERROR))
    return rows


async def _log(url: str) -> list[dict[str, Any]]:
    client = HttpClient(Address.of(url, {}))
    document = Document(limit=MAX_LOG)
    await client.exchange(client.render("GET", "/fake/log"), document)
    client.close()
    log: list[dict[str, Any]] = orjson.loads(document.body_bytes)
    return log


def blame(log: list[dict[str, Any]], result: RunResult, zero_s: float) -> dict[str, float]:
    """Returns p50 and p99 in milliseconds of three delays: from sending to the server's read, from
    the due time of a chunk to the server's write, and from there to the client's read. zero_s is
    the run's start on the clock."""
    served = {entry["index"]: entry for entry in log if entry["index"] is not None}
    ways: dict[str, list[float]] = {
        "client to server": [],
        "server late": [],
        "server to client": [],
    }
    for record in result.records:
        entry = served.get(record.index)
        if entry is None:
            continue
        ways["client to server"].append(entry["arrived_s"] - zero_s - record.sent_s)
        written_s = entry["written_s"]
        ways["server late"] += [a - b for a, b in zip(written_s, entry["due_s"], strict=False)]
        ways["server to client"] += [
            a - (b - zero_s) for a, b in zip(record.chunks_s, written_s, strict=False)
        ]
    return {
        f"{name} p{percent}": 1000 * float(np.percentile(values, percent))
        for name, values in ways.items()
        if values
        for percent in (50, 99)
    }


async def check(
    title: str,
    profile: Profile,
    schedule: Schedule,
    *,
    slots: int | None = None,
    processes: int | None = None,
) -> Check:
    """Compares a run with the truth. A closed loop has `slots` concurrent requests."""
    truth = true_records(profile, schedule, slots)
    warmup = [Work(prompt="Hi", max_tokens=1)] * 20
    options = LoadOptions(warmup=warmup, max_concurrency=slots, processes=processes)
    with scripted_server(profile) as url:
        async with ServerTarget(ServerSettings(url)) as target:
            result = await offer(schedule, target, options)
        log = await _log(url)
    # The run's start on the clock, as if the fastest request had reached the server in no time.
    arrived = {entry["index"]: entry["arrived_s"] for entry in log}
    zero_s = min(arrived[r.index] - r.sent_s for r in result.records if r.index in arrived)
    lags = sorted(r.dispatched_s - r.scheduled_s for r in result.records)
    measured = summarize(result)
    verdict = measured.verdict
    notes = [*measured.notes, *verdict.warnings, *verdict.reasons]
    checked = Check(title, compare(result, measured, truth), notes, verdict.is_valid)
    checked.server = blame(log, result, zero_s)
    checked.server["dispatch lag p50"] = 1000 * lags[len(lags) // 2]
    checked.server["dispatch lag p99"] = 1000 * lags[int(0.99 * len(lags))]
    for health in result.health:
        checked.server[f"process {health.process}: % of a core"] = 100 * health.cpu
        checked.server[f"process {health.process}: % waiting for one"] = 100 * health.core_wait
    return checked


def show(console: Console, checked: Check) -> None:
    table = Table(title=checked.title, title_justify="left")
    for name in ("", "measured", "truth", "difference", ""):
        table.add_column(name, justify="left" if not name else "right")
    for row in checked.rows:
        mark = "ok" if row.is_ok else "[bold red]WRONG[/bold red]"
        table.add_row(
            f"{row.name} {row.unit}",
            f"{row.measured:.2f}",
            f"{row.truth:.2f}",
            f"{row.measured - row.truth:+.2f}",
            mark,
        )
    console.print(table)
    parts = ", ".join(f"{name} {value:.2f}" for name, value in checked.server.items())
    console.print(f"milliseconds: {parts}", soft_wrap=True, highlight=False)
    for note in checked.notes:
        console.print(note, soft_wrap=True, markup=False, highlight=False)
    if not checked.is_valid:
        console.print("[bold red]INVALID[/bold red]")


async def prove_rates(
    rates: Sequence[float], seconds: float, console: Console, processes: int | None = None
) -> list[Check]:
    profile = Profile(fault_rate=0.005)
    checks = []
    for qps in rates:
        schedule = schedule_of(qps, max(20, round(qps * seconds)), seed=1)
        title = f"{qps:g} requests/s for {seconds:g} s"
        checks.append(await check(title, profile, schedule, processes=processes))
        show(console, checks[-1])
    return checks


async def prove_stalls(seconds: float, console: Console) -> list[Check]:
    """Runs an open and a closed loop with a stall. The stall is short compared with the run, so
    that no percentile lies on the edge between requests with and without it."""
    stall_s = seconds / 20
    profile = Profile(fault_rate=0.005, stall_at_s=seconds / 4, stall_s=stall_s)
    schedule = schedule_of(50, round(50 * seconds), seed=1)
    checks = []
    for slots, name in ((None, "open loop"), (16, "closed loop of 16")):
        title = f"50 requests/s for {seconds:g} s, the server stalls for {stall_s:g} s, {name}"
        checks.append(await check(title, profile, schedule, slots=slots))
        show(console, checks[-1])
    return checks


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare the load generator with the truth.")
    parser.add_argument("--qps", default="10,200,1000", help="none: only the stall")
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="duration of each rate; a stall's run takes twice as long",
    )
    parser.add_argument("--processes", type=int, help="number of client processes")
    parser.add_argument("--no-stall", action="store_true")
    parser.add_argument("--quick", action="store_true", help="3 s for each rate, 10 s for a stall")
    arguments = parser.parse_args()
    rates = [] if arguments.qps == "none" else [float(text) for text in arguments.qps.split(",")]
    seconds = 3.0 if arguments.quick else arguments.seconds
    console = Console(width=100)
    checks = uvloop.run(prove_rates(rates, seconds, console, arguments.processes))
    if not arguments.no_stall:
        checks += uvloop.run(prove_stalls(10.0 if arguments.quick else 2 * seconds, console))
    if not all(checked.is_ok for checked in checks):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
