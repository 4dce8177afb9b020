"""An open-loop load generator: `serve bench`.

Arrivals are a Poisson process computed beforehand on an absolute clock and scaled so that the
offered rate is exact. A slow server cannot slow the load down, and latency counts from the
scheduled time as well as from the send. report.py makes numbers of the records.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

import uvloop
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.corpus import mixed_requests
from bench.report import Record, print_summary, summarize, write_json
from serve import Engine, FinishReason, SamplingParams
from serve.errors import ConfigError, GenerationError, MergestepError, plain
from serve.http.client import ApiClient

DEFAULT_REQUESTS = 100
SPIN_S = 0.001
PROMPT_TOKENS = range(32, 256)  # for servers that do not say how large their vocabulary is


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to offer. qps may be infinite: then everything is sent at once.

    input_len: random token ids; None takes the natural mixture of conversations.
    output_len: with input_len the exact length (EOS ignored), else the longest answer.
    """

    qps: float
    num_requests: int
    input_len: int | None = None
    output_len: int | None = None
    seed: int = 0
    num_warmup: int = 4

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise ConfigError(f"requests must be at least 1, not {self.num_requests}")
        if self.num_warmup < 0:
            raise ConfigError(f"warmup must not be negative, not {self.num_warmup}")
        for name in ("input_len", "output_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be positive, not {value}")


@dataclass(frozen=True, slots=True)
class Work:
    """One request: a conversation, or token ids whose answer has an exact length."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    max_tokens: int | None = None


def parse_qps(text: str) -> float:
    try:
        qps = float(text)
    except ValueError:
        qps = math.nan
    if not qps > 0:
        raise ConfigError(f"qps must be a positive number or inf, not {text!r}")
    return qps


def count_requests(qps: float, requests: int | None, duration_s: float | None) -> int:
    if requests is not None and duration_s is not None:
        raise ConfigError("give either requests or duration, not both")
    if duration_s is None:
        return DEFAULT_REQUESTS if requests is None else requests
    if not 0 < duration_s < math.inf:
        raise ConfigError(f"duration must be a positive number of seconds, not {duration_s}")
    if math.isinf(qps):
        raise ConfigError("a duration needs a finite qps")
    return max(1, round(qps * duration_s))


def arrival_times(qps: float, count: int, seed: int) -> list[float]:
    """Seconds from the start, ascending; the last is exactly count / qps."""
    if math.isinf(qps):
        return [0.0] * count
    rng = random.Random(f"arrivals-{seed}")
    sums = list(itertools.accumulate(rng.expovariate(1.0) for _ in range(count)))
    scale = count / qps / sums[-1]
    return [value * scale for value in sums]


def make_work(plan: LoadPlan, count: int, seed: int, tokens: Sequence[int]) -> list[Work]:
    if plan.input_len is None:
        conversations = mixed_requests(seed, count)
        return [
            Work(messages=[dict(message) for message in messages], max_tokens=plan.output_len)
            for messages in conversations
        ]
    rng = random.Random(f"prompts-{seed}")
    return [
        Work(token_ids=rng.choices(tokens, k=plan.input_len), max_tokens=plan.output_len or 128)
        for _ in range(count)
    ]


class Target(Protocol):
    """What is measured. Used inside `async with`."""

    name: str
    prompt_tokens: Sequence[int]

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...

    async def send(self, work: Work, record: Record) -> None:
        """Fills in chunk times and token counts; raises what went wrong."""


class EngineTarget:
    """An engine in this process; no HTTP."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.name = f"{engine.model_name} in this process"
        self.prompt_tokens: Sequence[int] = PROMPT_TOKENS

    async def __aenter__(self) -> Self:
        await self._engine.start()
        tokenizer = self._engine.tokenizer
        vocab_size = min(tokenizer.vocab_size, self._engine.spec.vocab_size)
        self.prompt_tokens = [i for i in range(vocab_size) if i not in tokenizer.special_ids]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._engine.shutdown()

    async def send(self, work: Work, record: Record) -> None:
        engine = self._engine
        params = SamplingParams(
            max_tokens=work.max_tokens, temperature=0.0, ignore_eos=bool(work.token_ids)
        )
        if work.token_ids:
            stream = engine.submit({"prompt_token_ids": work.token_ids}, params)
        else:
            stream = engine.submit_chat(work.messages, params)
        try:
            record.prompt_tokens = len((await stream.accepted()).prompt_token_ids)
            async for delta in stream:
                if delta.token_ids:
                    record.chunks_s.append(time.perf_counter())
                    record.output_tokens += len(delta.token_ids)
                if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    raise GenerationError(delta.error or "the request was aborted")
        finally:
            stream.abort()


class ServerTarget:
    """A server with an OpenAI API; token counts are those of its `usage`."""

    def __init__(self, url: str) -> None:
        self.name = url
        self.prompt_tokens: Sequence[int] = PROMPT_TOKENS
        self._url = url
        self._model = ""

    async def __aenter__(self) -> Self:
        self._client = ApiClient(self._url)
        try:
            model = (await self._client.models())[0]
        except BaseException:
            await self._client.close()
            raise
        self._model = model["id"]
        self.prompt_tokens = range(32, min(int(model.get("vocab_size", 256)), 1 << 16))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def send(self, work: Work, record: Record) -> None:
        body: dict[str, Any] = {
            "model": self._model,
            "temperature": 0.0,
            "stream_options": {"include_usage": True},
        }
        if work.max_tokens is not None:
            body["max_tokens"] = work.max_tokens
        path = "/v1/chat/completions"
        if work.token_ids:
            path = "/v1/completions"
            body |= {"prompt": work.token_ids, "ignore_eos": True}
        else:
            body["messages"] = work.messages
        async with aclosing(self._client.stream(path, body)) as chunks:
            async for chunk in chunks:
                now_s = time.perf_counter()
                if any(_has_text(choice) for choice in chunk["choices"]):
                    record.chunks_s.append(now_s)
                if usage := chunk.get("usage"):
                    record.prompt_tokens = usage["prompt_tokens"]
                    record.output_tokens = usage["completion_tokens"]


def _describe(error: Exception) -> str:
    code = getattr(error, "code", "")
    return f"{code}: {error}" if code else plain(error)


def _has_text(choice: dict[str, Any]) -> bool:
    return bool(choice.get("text") or choice.get("delta", {}).get("content"))


async def run_load(
    target: Target, plan: LoadPlan, *, on_change: Callable[[int, int, int], None] | None = None
) -> list[Record]:
    """Offers the load and waits for every answer. on_change(sent, done, failed)."""
    works = make_work(plan, plan.num_requests, plan.seed, target.prompt_tokens)
    arrivals = arrival_times(plan.qps, plan.num_requests, plan.seed)
    await _warm_up(target, plan)
    gc.collect()
    gc.freeze()
    counts = {"sent": 0, "done": 0, "failed": 0}

    async def one(work: Work, record: Record) -> None:
        record.sent_s = time.perf_counter()
        counts["sent"] += 1
        try:
            await target.send(work, record)
        except (MergestepError, OSError, TimeoutError) as exc:
            record.error = _describe(exc)[:200]
            counts["failed"] += 1
        record.finished_s = time.perf_counter()
        counts["done"] += 1
        if on_change is not None:
            on_change(counts["sent"], counts["done"], counts["failed"])

    start_s = time.perf_counter() + 0.05
    records = [Record(index, start_s + at_s) for index, at_s in enumerate(arrivals)]
    async with asyncio.TaskGroup() as group:
        for work, record in zip(works, records, strict=True):
            await _sleep_until(record.scheduled_s)
            group.create_task(one(work, record))
    gc.unfreeze()
    return records


async def _warm_up(target: Target, plan: LoadPlan) -> None:
    """Other prompts than the measured ones, so that no prefix is found again."""
    if plan.num_warmup < 1:
        return
    works = make_work(plan, plan.num_warmup, plan.seed + 1_000_003, target.prompt_tokens)
    for work in works:
        await target.send(work, Record(-1, time.perf_counter()))


async def _sleep_until(at_s: float) -> None:
    """The loop's timers are about a millisecond coarse; the rest is spent yielding."""
    remaining_s = at_s - time.perf_counter()
    if remaining_s > SPIN_S:
        await asyncio.sleep(remaining_s - SPIN_S)
    while time.perf_counter() < at_s:  # an event would need the same timer
        await asyncio.sleep(0)


def run_and_report(
    plan: LoadPlan,
    *,
    url: str | None,
    model: str,
    engine: Engine | None,
    json_file: Path | None = None,
) -> bool:
    """The command: progress, table, file. False when the run is not valid."""
    assert (url is None) != (engine is None), "either a server or an engine"
    target: Target = ServerTarget(url) if engine is None else EngineTarget(engine)  # type: ignore[arg-type]
    console = Console()
    records = uvloop.run(_with_progress(target, plan, Console(stderr=True)))
    summary = summarize(records, qps=plan.qps)
    print_summary(console, summary, title=target.name)
    if json_file is not None:
        write_json(json_file, plan, target.name, summary, records)
    return summary.is_valid


async def _with_progress(target: Target, plan: LoadPlan, console: Console) -> list[Record]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("sent {task.fields[sent]}, failed {task.fields[failed]}"),
        TimeElapsedColumn(),
    )
    # Redrawn seldom: the generator shares its core with what draws.
    with Progress(
        *columns,
        console=console,
        refresh_per_second=2,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        bar = progress.add_task("loading", total=plan.num_requests, sent=0, failed=0)
        async with target:
            progress.update(bar, description=f"{plan.qps:g} requests/s")
            return await run_load(
                target,
                plan,
                on_change=lambda sent, done, failed: progress.update(
                    bar, completed=done, sent=sent, failed=failed
                ),
            )
