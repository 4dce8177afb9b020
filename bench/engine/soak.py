"""Checks that server and client return to their baseline after a long load with cancellations.

`serve run` has its own process, and the load generator in this one makes one offer after another.
Some requests are cancelled early, others after a few tokens. The memory, open files and threads of
both processes are read every few seconds, and the K/V pages in use come from /metrics. The baseline
is taken after a minute of the same load; both processes are idle then and at the end.

Run: python -m bench.engine.soak [--minutes 20] [--qps 20]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import aiohttp
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from bench.load.client.record import Record
from bench.load.client.run import offer
from bench.load.client.targets import ServerSettings, ServerTarget
from bench.load.workload.datasets import DatasetSettings
from bench.load.workload.offered_load import LoadOptions
from bench.load.workload.schedule import ArrivalSettings, make_schedule

SAMPLE_S = 5.0
CANCEL_RATE = 0.2
IDLE_S = 3.0  # the server trims its memory after half a second without work
# a process may grow by this much, since its allocator keeps some of the freed memory
GROWTH_SHARE, GROWTH_BYTES = 0.05, 24 << 20
KEPT_PAGES = "mergestep:kv_pages in_use"
UNFINISHED = "mergestep:requests_unfinished"


@dataclass(frozen=True, slots=True)
class Usage:
    """The resident bytes, open files and threads of a process."""

    rss: int
    files: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        status = Path(f"/proc/{pid}/status").read_text()
        (rss,) = re.findall(r"^VmRSS:\s+(\d+) kB", status, re.M)
        threads = len(os.listdir(f"/proc/{pid}/task"))
        return cls(int(rss) << 10, len(os.listdir(f"/proc/{pid}/fd")), threads)


@dataclass(frozen=True, slots=True)
class Sample:
    """The usage of both processes at one time."""

    at_s: float
    server: Usage
    client: Usage


@dataclass(slots=True)
class Soak:
    """The results. before and after are samples with both processes idle. engine has the figures of
    /metrics at the end."""

    before: Sample
    after: Sample
    engine: dict[str, float]
    outcomes: dict[str, int]
    samples: list[Sample] = field(default_factory=list)

    def slope(self, which: str) -> float:
        """Returns the growth of a process in bytes per minute during the second half, as the median
        over all pairs of samples (Theil-Sen)."""
        later = self.samples[len(self.samples) // 2 :]
        points = [(sample.at_s, getattr(sample, which).rss) for sample in later]
        slopes = [
            (b - a) / (to_s - from_s)
            for i, (from_s, a) in enumerate(points)
            for to_s, b in points[i + 1 :]
        ]
        return 60 * statistics.median(slopes) if slopes else 0.0

    def faults(self) -> list[str]:
        """Returns a text for each figure that is not back at its baseline."""
        texts = []
        for which in ("server", "client"):
            before, after = getattr(self.before, which), getattr(self.after, which)
            for name in ("files", "threads"):
                if getattr(after, name) > getattr(before, name):
                    change = f"{getattr(before, name)} to {getattr(after, name)}"
                    texts.append(f"{name} of the {which} grew from {change}")
            if after.rss > before.rss * (1 + GROWTH_SHARE) + GROWTH_BYTES:
                texts.append(f"memory of the {which} grew")
        for name in (KEPT_PAGES, UNFINISHED):
            if self.engine[name]:
                texts.append(f"{name}: {self.engine[name]:g}, not 0")
        if failed := self.outcomes.get("failed", 0) + self.outcomes.get("incomplete", 0):
            texts.append(f"{failed} requests had no answer")
        return texts


@contextmanager
def _server() -> Iterator[tuple[int, str]]:
    """Starts a server; yields its process id and URL."""
    command = [sys.executable, "-m", "serve", "run", "--port", "0", "--log-level", "warning"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if url := re.search(r"http://[0-9.]+:\d+", line):
                yield process.pid, url[0]
                return
        raise RuntimeError("the server did not start")
    finally:
        process.terminate()
        process.wait()


async def _engine_figures(url: str) -> dict[str, float]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        text = await response.text()
    return {
        " ".join([s.name, *(v for k, v in s.labels.items() if k != "model_name")]): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


class _SoakTest:
    """Offers the load to a server and takes the samples."""

    def __init__(self, pid: int, url: str, qps: float) -> None:
        self._pid, self._url, self._qps = pid, url, qps
        self._began_s = time.monotonic()
        self.samples: list[Sample] = []
        self.outcomes: Counter[str] = Counter()

    def sample(self) -> Sample:
        at_s = time.monotonic() - self._began_s
        return Sample(at_s, Usage.of(self._pid), Usage.of(os.getpid()))

    async def load(self, duration_s: float, seed: int) -> None:
        """Makes one offer with a new client."""
        async with ServerTarget(ServerSettings(self._url)) as target:
            schedule, _ = make_schedule(
                DatasetSettings(max_model_len=target.max_model_len),
                ArrivalSettings(),
                qps=self._qps,
                duration_s=duration_s,
                seed=seed,
                tokens=target.prompt_tokens,
            )
            early = seed % 2 == 0
            options = LoadOptions(
                seed=seed,
                cancel_rate=CANCEL_RATE,
                cancel_after_s=0.01 if early else None,
                cancel_after_chunks=None if early else 3,
                probe_qps=1.0,
                processes=1,
            )
            result = await offer(schedule, target, options)
        records: list[Record] = [*result.records, *result.probes]
        self.outcomes.update(record.outcome.value for record in records)

    async def idle(self) -> Sample:
        await asyncio.sleep(IDLE_S)
        gc.collect()
        return self.sample()

    async def watch(self) -> None:
        while True:
            self.samples.append(self.sample())
            await asyncio.sleep(SAMPLE_S)

    async def run(self, minutes: float, offer_s: float) -> Soak:
        for seed in (0, 1):
            await self.load(offer_s / 2, seed)
        before = await self.idle()
        self.outcomes.clear()
        self.samples.clear()
        watch = asyncio.create_task(self.watch())
        end_s, seed = time.monotonic() + 60 * minutes, 2
        while (left_s := end_s - time.monotonic()) > 1:
            await self.load(min(offer_s, left_s), seed)
            seed += 1
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        after = await self.idle()
        figures = await _engine_figures(self._url)
        return Soak(before, after, figures, dict(self.outcomes), self.samples)


def run(minutes: float = 20.0, qps: float = 20.0, offer_s: float = 60.0) -> Soak:
    with _server() as (pid, url):
        return uvloop.run(_SoakTest(pid, url, qps).run(minutes, offer_s))


def show(soak: Soak, console: Console) -> None:
    table = Table("", "before", "after", "per minute, second half")
    for which in ("server", "client"):
        before, after = getattr(soak.before, which), getattr(soak.after, which)
        mib = [f"{usage.rss / 2**20:.1f} MiB" for usage in (before, after)]
        table.add_row(f"{which}: memory", *mib, f"{soak.slope(which) / 2**10:+.0f} KiB")
        for name in ("files", "threads"):
            table.add_row(f"{which}: {name}", str(getattr(before, name)), str(getattr(after, name)))
    for name in (KEPT_PAGES, UNFINISHED):
        table.add_row(f"server: {name}", "", f"{soak.engine[name]:g}")
    console.print(table)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(soak.outcomes.items()))
    console.print(f"requests: {counts}", highlight=False)
    for fault in soak.faults():
        console.print(f"[red]NOT AT THE BASELINE[/red]: {fault}", highlight=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--qps", type=float, default=20.0)
    parser.add_argument("--quick", action="store_true", help="seconds, for tests")
    args = parser.parse_args()
    soak = run(0.1, 10.0, 3.0) if args.quick else run(args.minutes, args.qps)
    show(soak, Console())
    print(json.dumps(asdict(soak) | {"faults": soak.faults()}))
    sys.exit(1 if soak.faults() else 0)


if __name__ == "__main__":
    main()
