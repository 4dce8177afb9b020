"""The whole engine on random weights: decoding at several batch sizes, prompts, and mixed requests.

The engine is complete, with threads, scheduler, sampling and text. A decode case lasts from the
moment when every request has its first token until the first request ends.
"""

from __future__ import annotations

import itertools
import logging
import random
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from bench.common.checkpoint_shapes import SHAPES
from bench.common.checkpoints import random_checkpoint
from bench.gpu.record import Figures, Record
from bench.gpu.steps import (
    ModelSizes,
    StepClock,
    gap_share,
    late_periods,
    periods,
    with_growth,
)
from serve import SamplingParams
from serve.config import EngineConfig
from serve.engine.core import EngineCore
from serve.engine.loader import LoadedEngine, load_engine
from serve.request import FinishReason, Request, TokenDelta

_MAX_LOG_LINES = 60


@dataclass
class EnginePlan:
    """The measurements of one shape. decodes: batch, context, and tokens of each request that are
    timed. prefills: tokens of prompts."""

    shape: str
    decodes: tuple[tuple[int, int, int], ...]
    prefills: tuple[int, ...]
    streams: tuple[int, int, int] = (64, 1024, 100)
    """Requests, tokens of a prompt, tokens of an answer."""
    mixed: tuple[int, int, int] = (64, 2048, 256)
    """Requests, tokens of the longest prompt and of the longest answer."""
    settings: dict[str, Any] = field(default_factory=dict)


EIGHT_B = EnginePlan(
    "llama-8b",
    ((64, 1024, 96), (1, 1024, 96), (16, 1024, 64), (256, 1024, 48)),
    (8192,),
    settings={"max_num_seqs": 256, "max_model_len": 10240},
)
ONE_B = EnginePlan(
    "llama-1b",
    ((64, 1024, 96), (1, 1024, 96), (16, 1024, 64), (256, 1024, 48)),
    (4096,),
    settings={"max_num_seqs": 256, "max_model_len": 8192},
)
TINY = EnginePlan(
    "one-layer",
    ((2, 4, 2),),
    (17,),
    (2, 4, 1),
    (2, 4, 2),
    {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 16},
)


def run_8b(record: Record) -> None:
    measure(record, TINY if record.is_dry else EIGHT_B)


def run_1b(record: Record) -> None:
    measure(record, TINY if record.is_dry else ONE_B)


def measure(record: Record, plan: EnginePlan, **more: Any) -> None:
    """Measures a plan. more: settings of the engine beside the plan's."""
    clock = StepClock()
    clock.watch()
    path = random_checkpoint(plan.shape, has_weights=False)
    config = EngineConfig.from_settings(
        str(path), load_format="random", dtype="int8", kv_dtype="int8", backend="cuda",
        prefix_cache=False, seed=0, **plan.settings, **more,
    )  # fmt: skip
    lines = _Lines()
    logging.getLogger().addHandler(lines)
    logging.getLogger().setLevel(logging.INFO)
    began = time.perf_counter()
    loaded = load_engine(config)
    start_s = time.perf_counter() - began
    loaded.core.start()
    try:
        bench = _Bench(record, plan, loaded, clock)
        record.run("first token", lambda: {"seconds": bench.time_prompt(8)})
        record.put("start-up", seconds=start_s, log=lines.lines[:_MAX_LOG_LINES])
        for batch, context, count in plan.decodes[:2]:
            record.run(f"decode {batch}", partial(bench.decode, batch, context, count))
        for length in plan.prefills:
            record.run(f"prefill {length}", partial(bench.prefill, length))
        record.run(f"streams {plan.streams[0]}", bench.streams)
        for batch, context, count in plan.decodes[2:]:
            record.run(f"decode {batch}", partial(bench.decode, batch, context, count))
        record.run("mixed", bench.mixed)
        if torch.cuda.is_available():
            record.run("idle device, decode 64", partial(bench.profile, *plan.decodes[0]))
            record.put("memory", allocated_gib=torch.cuda.memory_allocated() / 2**30)
    finally:
        loaded.core.shutdown()


class _Lines(logging.Handler):
    """Keeps the engine's log lines with the seconds since the start."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._began = time.perf_counter()

    def emit(self, record: logging.LogRecord) -> None:
        elapsed = time.perf_counter() - self._began
        self.lines.append(f"{elapsed:6.2f} s {record.name}: {record.getMessage()[:200]}")


class _Client:
    """The sink of one request, which notes when its tokens came."""

    def __init__(self, ended: threading.Semaphore) -> None:
        self.times: list[tuple[float, int]] = []
        self.error: str | None = None
        self._ended = ended

    def accept(self, request: Request) -> None:
        """Does nothing."""

    def push(self, delta: TokenDelta) -> None:
        if delta.token_ids:
            self.times.append((time.perf_counter(), len(delta.token_ids)))
        if delta.finish_reason is not None:
            if delta.finish_reason is not FinishReason.LENGTH:
                self.error = f"ended with {delta.finish_reason}"
            self._ended.release()

    def fail(self, error: Exception) -> None:
        self.error = repr(error)
        self._ended.release()

    def wake(self) -> None:
        """Does nothing, since no thread waits for tokens."""


@dataclass
class _Run:
    """Requests that were submitted together, and the times of their tokens."""

    began: float
    clients: list[_Client]

    @property
    def firsts(self) -> list[float]:
        return [client.times[0][0] for client in self.clients]

    @property
    def ends(self) -> list[float]:
        return [client.times[-1][0] for client in self.clients]

    def num_tokens(self, first: float = 0.0, last: float = float("inf")) -> int:
        """Returns the number of tokens that came after `first` and not after `last`."""
        return sum(n for c in self.clients for at, n in c.times if first < at <= last)


class _Bench:
    def __init__(
        self, record: Record, plan: EnginePlan, loaded: LoadedEngine, clock: StepClock
    ) -> None:
        self._record, self._plan, self._clock = record, plan, clock
        self._core: EngineCore = loaded.core
        self._sizes = ModelSizes.of(SHAPES[plan.shape])
        self._vocab = loaded.spec.vocab_size
        self._rng = random.Random(0)
        self._rows = EngineConfig.from_settings(backend="cuda", **plan.settings).batched_tokens

    def _prompt(self, length: int) -> list[int]:
        return [self._rng.randrange(2, self._vocab) for _ in range(length)]

    def _requests(self, lengths: Sequence[int], answers: Sequence[int]) -> _Run:
        ended = threading.Semaphore(0)
        prompts = [self._prompt(length) for length in lengths]
        run = _Run(time.perf_counter(), [_Client(ended) for _ in prompts])
        for prompt, answer, client in zip(prompts, answers, run.clients, strict=True):
            params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
            self._core.submit(prompt, params, client)
        ends_s = time.monotonic() + self._record.left_s()
        for _ in prompts:
            if not ended.acquire(timeout=max(0.1, ends_s - time.monotonic())):
                raise TimeoutError("requests did not end in the section's time")
        errors = [client.error for client in run.clients if client.error]
        if errors:
            raise RuntimeError(f"{len(errors)} of {len(prompts)} requests: {errors[0]}")
        return run

    def time_prompt(self, length: int) -> float:
        run = self._requests([length], [1])
        return run.firsts[0] - run.began

    def _decode_window(self, batch: int, context: int, count: int) -> tuple[_Run, float, float]:
        """Returns a run and the times between which all its requests decode. Answers are longer
        than `count`, since the first sequences decode while later prompts are computed."""
        lead = -(-batch * context // self._rows) + 2
        self._clock.clear()
        run = self._requests([context] * batch, [count + lead] * batch)
        first, last = max(run.firsts), min(run.ends)
        if first >= last:
            raise RuntimeError("the first request ended before the last one began")
        return run, first, last

    def decode(self, batch: int, context: int, count: int) -> Figures:
        """Measures decode steps. seconds: the median period of a step on the device."""
        run, first, last = self._decode_window(batch, context, count)
        steps = self._clock.steps(first, last)
        times = periods(steps)
        late = late_periods(times)
        grown = with_growth(late, steps, self._clock.maps)
        middle = context + statistics.mean(
            sum(n for at, n in client.times if at <= (first + last) / 2) for client in run.clients
        )
        kv_bytes = self._core.stats().kv_bytes_per_token
        seconds = statistics.median(times)
        return {
            "seconds": seconds,
            **self._sizes.decode(batch, middle, kv_bytes),
            "unit": "int8",
            "tokens_per_s": run.num_tokens(first, last) / (last - first),
            "steps": len(times),
            "context": middle,
            "spread": (_quantile(times, 0.9) - _quantile(times, 0.1)) / seconds,
            "gap_share": gap_share(steps),
            "late_host_steps": sum(step.was_late for step in steps),
            "late_steps": len(late),
            "late_growth_steps": len(grown),
            "maps": len(self._clock.maps),
            "prompts_s": first - run.began,
            "step_ms": [round(1e3 * each, 4) for each in times],
        }

    def prefill(self, length: int) -> Figures:
        """Measures prompts. seconds: until the first token, the median of three prompts."""
        waits, busy = [], []
        for _ in range(1 if self._record.is_dry else 3):
            self._clock.clear()
            run = self._requests([length], [1])
            waits.append(run.firsts[0] - run.began)
            steps = self._clock.steps(run.began, time.perf_counter())
            busy.append(steps[-1].end - steps[0].begin)
        seconds = statistics.median(waits)
        work = self._sizes.prefill(length)
        return {
            "seconds": seconds,
            **work,
            "unit": "int8",
            "device_s": statistics.median(busy),
            "tokens_per_s": length / seconds,
        }

    def streams(self) -> Figures:
        """Sends all requests at once and waits for the last answer, as with Transformers."""
        count, prompt, answer = self._plan.streams
        times, decodes = [], []
        for _ in range(1 if self._record.is_dry else 2):
            run = self._requests([prompt] * count, [answer] * count)
            times.append(max(run.ends) - run.began)
            decodes.append(max(run.ends) - max(run.firsts))
        best = min(times)
        return {
            "total_s": best,
            "tokens_per_s": count * answer / best,
            "after_last_first_token_s": min(decodes),
        }

    def mixed(self) -> Figures:
        """Measures requests of random lengths, and the gaps between tokens of a request."""
        count, longest, most = self._plan.mixed
        lengths = [self._rng.randint(2, longest) for _ in range(count)]
        answers = [self._rng.randint(2, most) for _ in range(count)]
        run = self._requests(lengths, answers)
        total = max(run.ends) - run.began
        gaps = [
            after[0] - before[0]
            for client in run.clients
            for before, after in itertools.pairwise(client.times)
        ]
        waits = [at - run.began for at in run.firsts]
        return {
            "total_s": total,
            "tokens_per_s": sum(answers) / total,
            "rows_per_s": (sum(answers) + sum(lengths)) / total,
            "gap_p50_ms": 1e3 * _quantile(gaps, 0.5),
            "gap_p99_ms": 1e3 * _quantile(gaps, 0.99),
            "first_token_p50_ms": 1e3 * _quantile(waits, 0.5),
        }

    def profile(self, batch: int, context: int, count: int) -> Figures:
        """Returns the share of time in which the device was idle, from the profiler's events: all
        gaps between kernels, and those above 5 us, which are not inside a graph."""
        from torch.profiler import ProfilerActivity, profile

        figures: Figures = {}
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            self._decode_window(batch, context, count // 4)
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in found.events()
            if "CUDA" in str(event.device_type)
        )
        # Only in the last third do all requests decode.
        spans = spans[2 * len(spans) // 3 : -50]
        idle = idle_times(spans)
        whole = spans[-1][1] - spans[0][0]
        figures["kernels"] = len(spans)
        figures["idle_share"] = sum(idle) / whole
        figures["idle_above_5us_share"] = sum(gap for gap in idle if gap > 5) / whole
        return figures


def idle_times(spans: Sequence[tuple[float, float]]) -> list[float]:
    """Returns the gaps between spans (begin, end), which are in the order of their begin and may
    overlap."""
    found, end = [], spans[0][1]
    for begin, until in spans[1:]:
        if begin > end:
            found.append(begin - end)
        end = max(end, until)
    return found


def _quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[round(share * (len(ordered) - 1))] if ordered else 0.0
