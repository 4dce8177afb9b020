"""`serve bench engine --long-prompt`: a long prompt beside streams and short requests.

It compares chunks that follow an SLO with static chunk sizes, with one real engine per setting on a
random checkpoint. Short requests are sent alone, then beside 8 decoding streams, then beside the
streams while a prompt of 32k tokens is computed (every half second on average, at the same times in
every run). Times are taken where a client takes them, in the event loop of this process.

    streams          time between two tokens while the long prompt is computed
    short            time to first token of the short requests: alone, beside the streams, and
                     beside streams and long prompt. The bound is twice the time without load plus
                     one step (the 99th percentile of the streams), since a request that arrives
                     when a step has just begun waits for all of it
    long             time to first token of the long prompt, and its ratio to the fastest static
                     chunk size and to the fastest one that keeps the same SLO
    error            median relative error of the step-time model, as the engine reports it
    others           cores that other processes used meanwhile. Above 0.1 the setting runs again,
                     up to twice, and the least disturbed run counts

With a static chunk size every step has this number of prompt rows; the step-time model learns but
decides nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from bench.common import percentiles, tables
from bench.common.checkpoints import random_checkpoint
from bench.common.percentiles import tail
from serve import Engine, RequestStream, SamplingParams

SHAPE = "small-32k"
NUM_STREAMS = 8
MAX_NUM_SEQS = 32
BUDGET = 512  # most rows of a step whose chunk follows the SLO
EVERY_S = 0.5
SLOS_MS = [50.0, 100.0, 200.0]
STATIC_CHUNKS = [32, 64, 128, 256, 512]
DISTURBED_CORES = 0.1
MAX_RUNS = 3
VOCABULARY = range(300, 4000)


@dataclass(frozen=True, slots=True)
class Load:
    """Lengths in tokens. num_alone short requests run one after the other, without load and beside
    the streams."""

    long_tokens: int = 32_768
    short_tokens: int = 64
    stream_prompt: int = 128
    num_alone: int = 30


@dataclass(slots=True)
class Result:
    """The figures of one setting: an SLO or a static chunk size."""

    slo_ms: float | None
    chunk: int | None
    gaps_s: list[float] = field(default_factory=list)
    alone_s: list[float] = field(default_factory=list)
    beside_streams_s: list[float] = field(default_factory=list)
    beside_long_s: list[float] = field(default_factory=list)
    long_s: float = 0.0
    error: float | None = None
    other_cores: float = 0.0

    @property
    def name(self) -> str:
        return f"SLO {self.slo_ms:g} ms" if self.slo_ms is not None else f"static {self.chunk}"

    @property
    def gap_high_s(self) -> float:
        """The 99th percentile of the gaps, or the largest of fewer than 100."""
        return tail(self.gaps_s).value

    @property
    def gap_p50_s(self) -> float:
        return statistics.median(self.gaps_s)

    def short_ratio(self, unloaded_s: list[float]) -> float:
        """Returns the 99th percentile of the short requests over their bound; the maximum stands
        for it where there are fewer than 100."""
        bound_s = 2 * tail(unloaded_s).value + self.gap_high_s
        return tail(self.beside_long_s).value / bound_s


def other_cpu_s() -> float:
    """Returns the processor seconds that other processes have used; 0 without /proc."""
    try:
        fields = Path("/proc/stat").read_text().split()[1:9]
    except OSError:
        return 0.0
    user, nice, system, _, _, irq, softirq, steal = map(int, fields)
    own = time.process_time()
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK") - own


class Client:
    """Sends the load to one engine. Prompts are random, so they share no prefix."""

    def __init__(self, engine: Engine, load: Load, seed: int = 0) -> None:
        self._engine = engine
        self._load = load
        self._random = random.Random(seed)
        self._streams: list[RequestStream] = []
        self.token_times_s: list[list[float]] = []

    def _prompt(self, length: int) -> list[int]:
        return self._random.choices(VOCABULARY, k=length)

    async def ttft(self, length: int, num_tokens: int = 1) -> float:
        """Sends a random prompt of `length` tokens and returns the seconds to its first token."""
        began = time.perf_counter()
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        first = None
        async for _ in self._engine.submit(self._prompt(length), params):
            first = first or time.perf_counter()
        assert first is not None
        return first - began

    async def _read(self, stream: RequestStream, times: list[float]) -> None:
        async for _ in stream:
            times.append(time.perf_counter())

    async def start_streams(self) -> list[asyncio.Task[None]]:
        """Starts the streams and waits until each of them has more than 20 tokens."""
        params = SamplingParams(max_tokens=20_000, temperature=0.0, ignore_eos=True)
        tasks = []
        for _ in range(NUM_STREAMS):
            times: list[float] = []
            prompt = self._prompt(self._load.stream_prompt)
            self._streams.append(self._engine.submit(prompt, params))
            self.token_times_s.append(times)
            tasks.append(asyncio.create_task(self._read(self._streams[-1], times)))
        while not all(len(times) > 20 for times in self.token_times_s):
            await asyncio.sleep(0.01)
        return tasks

    async def shorts_until(self, done: asyncio.Event) -> list[float]:
        """Sends short requests at random times (Poisson) until the event."""
        rng = random.Random(1)
        tasks = []
        while not done.is_set():
            tasks.append(asyncio.create_task(self.ttft(self._load.short_tokens, 4)))
            await asyncio.sleep(rng.expovariate(1 / EVERY_S))
        return list(await asyncio.gather(*tasks))

    def stop(self) -> None:
        for stream in self._streams:
            stream.abort()


async def measure(path: Path, load: Load, slo_ms: float | None, chunk: int | None) -> Result:
    """Runs an engine with one setting under the whole load and returns its figures."""
    result = Result(slo_ms, chunk)
    async with Engine(
        str(path),
        max_num_seqs=MAX_NUM_SEQS,
        max_num_batched_tokens=BUDGET if chunk is None else chunk + NUM_STREAMS,
        max_chunk_tokens=chunk,
        inter_token_slo_ms=slo_ms,
        inter_token_factor=math.inf,
        prefix_cache=False,
        speculation="off",
        kv_cache_bytes=1 << 30,
    ) as engine:
        client = Client(engine, load)
        await client.ttft(4 * BUDGET, 64)  # touches memory and trains the step-time model
        for _ in range(load.num_alone):
            result.alone_s.append(await client.ttft(load.short_tokens, 4))
        tasks = await client.start_streams()
        for _ in range(load.num_alone):
            result.beside_streams_s.append(await client.ttft(load.short_tokens, 4))
        done = asyncio.Event()
        began, others_s = time.perf_counter(), other_cpu_s()
        shorts = asyncio.create_task(client.shorts_until(done))
        result.long_s = await client.ttft(load.long_tokens)
        ended = began + result.long_s
        result.other_cores = (other_cpu_s() - others_s) / result.long_s
        result.error = engine.stats().step_time_error
        done.set()
        result.beside_long_s = await shorts
        client.stop()
        await asyncio.gather(*tasks)
    for times in client.token_times_s:
        during = [at for at in times if began <= at <= ended]
        result.gaps_s += [b - a for a, b in itertools.pairwise(during)]
    return result


def undisturbed(path: Path, load: Load, slo_ms: float | None, chunk: int | None) -> Result:
    """Runs a setting, up to MAX_RUNS times, and returns the run in which other processes used the
    least processor time."""
    results: list[Result] = []
    while len(results) < MAX_RUNS and all(r.other_cores > DISTURBED_CORES for r in results):
        results.append(uvloop.run(measure(path, load, slo_ms, chunk)))
    return min(results, key=lambda result: result.other_cores)


def verdicts(result: Result, statics: list[Result]) -> dict[str, tuple[float | None, bool]]:
    """Returns {target: (figure, whether it reaches the target)} of a run with an SLO."""
    assert result.slo_ms is not None
    slo_s = result.slo_ms / 1e3
    kept = [static.long_s for static in statics if static.gap_high_s <= slo_s]
    alone = result.short_ratio(result.alone_s)
    beside = result.short_ratio(result.beside_streams_s)
    best = result.long_s / min(static.long_s for static in statics)
    reached: dict[str, tuple[float | None, bool]] = {
        "p99 between tokens over SLO <= 1": (result.gap_high_s / slo_s, result.gap_high_s <= slo_s),
        "short requests over 2x alone + a step <= 1": (alone, alone <= 1),
        "short requests over 2x beside the streams + a step <= 1": (beside, beside <= 1),
        "long over the best static <= 1.1": (best, best <= 1.1),
    }
    of_kept = result.long_s / min(kept) if kept else None
    reached["long over the best static that keeps the SLO <= 1.1"] = (
        of_kept,
        of_kept is None or of_kept <= 1.1,  # None: no static chunk keeps the SLO
    )
    error = result.error
    reached["error < 0.1"] = (error, error is not None and error < 0.1)
    return reached


def show(results: list[Result]) -> None:
    print("p99; of fewer than 100, the maximum (max) and their number (n)")
    rows: list[tuple[str, ...]] = []
    rows.append(
        ("", "streams p50", "p99", "short alone", "streams", "long", "long", "error", "others")
    )
    for r in results:
        shorts = [
            tail([1e3 * each for each in values]).text("{:.0f} ms".format)
            for values in (r.alone_s, r.beside_streams_s, r.beside_long_s)
        ]
        gaps = tail([1e3 * each for each in r.gaps_s]).text("{:.0f} ms".format)
        error = "" if r.error is None else f"{100 * r.error:.1f} %"
        first = (r.name, f"{1e3 * r.gap_p50_s:.1f} ms", gaps)
        rows.append((*first, *shorts, f"{r.long_s:.2f} s", error, f"{r.other_cores:.2f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [f"{text:>{width}}" for text, width in zip(row, widths, strict=True)]
        print(f"{row[0]:{widths[0]}}  {'  '.join(cells[1:])}")


def as_json(results: list[Result], statics: list[Result]) -> dict[str, Any]:
    """Returns the figures of the results by name; those with an SLO include their verdicts."""
    summaries: dict[str, Any] = {}
    for result in results:
        summary = {key: value for key, value in asdict(result).items() if not key.endswith("_s")}
        summary["gaps_s"] = percentiles.document(result.gaps_s)
        summary["long_s"] = result.long_s
        for name in ("alone", "beside_streams", "beside_long"):
            summary[f"{name}_s"] = percentiles.document(getattr(result, f"{name}_s"))
        if result.slo_ms is not None:
            summary["verdicts"] = verdicts(result, statics)
        summaries[result.name] = summary
    return summaries


def long_prompt(*, json_file: Path | None = None, quick: bool = False) -> dict[str, Any]:
    """Measures all settings, prints their figures, writes them to json_file and returns them by
    name. quick takes a shorter prompt, one static chunk size and one SLO. Raises ConfigError if
    json_file cannot be written."""
    tables.check_file(json_file)
    head = tables.Head.now("engine --long-prompt")
    load, slos, chunks = Load(), SLOS_MS, STATIC_CHUNKS
    if quick:
        load, slos, chunks = Load(long_tokens=3000, num_alone=5), slos[1:2], chunks[2:3]
    path = random_checkpoint(SHAPE)
    print(f"{head}; {SHAPE}, {load}")
    statics = [undisturbed(path, load, None, chunk) for chunk in chunks]
    adaptive = [undisturbed(path, load, slo, None) for slo in slos]
    show([*statics, *adaptive])
    for result in adaptive:
        print(result.name)
        for text, (figure, is_reached) in verdicts(result, statics).items():
            number = "none" if figure is None else f"{figure:.3f}"
            print(f"  {text}: {number}{'' if is_reached else ' NOT REACHED'}")
    summaries = as_json([*statics, *adaptive], statics)
    tables.write(json_file, head, summaries)
    return summaries
