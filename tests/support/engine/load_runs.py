"""Load runs without a server: a small merged-step engine in virtual time, and a plain queue."""

from __future__ import annotations

import itertools
import math
import random
from collections import deque

from bench.load.client.record import (
    Outcome,
    ProcessHealth,
    Record,
    RunResult,
    ServerSample,
    StepRow,
)

BUDGET = 256  # rows of a step
MAX_RUNNING = 24
PAGES = 400


def arrivals(qps: float, count: int, seed: int) -> list[float]:
    rng = random.Random(f"{qps} {seed}")
    sums = list(itertools.accumulate(rng.expovariate(qps) for _ in range(count)))
    return [at * (count / qps) / sums[-1] for at in sums]


def queue_run(qps: float, seed: int, *, service_s: float = 0.1, count: int = 4000) -> RunResult:
    """Simulates M/D/1: one server, first come first served, one chunk at the end of each answer."""
    free_s = 0.0
    records = []
    for index, due_s in enumerate(arrivals(qps, count, seed)):
        free_s = max(free_s, due_s) + service_s
        records.append(
            Record(
                index,
                due_s,
                due_s,
                free_s,
                [free_s],
                [1],
                prompt_tokens=1,
                output_tokens=1,
                outcome=Outcome.OK,
            )
        )
    return RunResult(qps, seed, "a queue", records, (0.0, count / qps))


def engine_run(
    qps: float, *, count: int = 200, seed: int = 0, lag_s: float = 0.0002, tokens_known: bool = True
) -> RunResult:
    """Simulates merged steps: every running sequence gets a token, and prefill gets the rest of
    the budget. A few requests are cancelled, a few fail."""
    rng = random.Random(seed)
    due = arrivals(qps, count, seed)
    records = [
        Record(
            i, at, at + rng.expovariate(1 / lag_s), prompt_tokens=int(rng.lognormvariate(5, 0.7))
        )
        for i, at in enumerate(due)
    ]
    answers = [1 + int(rng.lognormvariate(3.6, 0.6)) for _ in records]
    left = [record.prompt_tokens or 0 for record in records]
    waiting: deque[int] = deque()
    running: list[int] = []
    steps, samples = [], []
    now_s, upcoming, next_sample_s = 0.0, 0, 0.0
    while upcoming < count or waiting or running:
        while upcoming < count and records[upcoming].sent_s <= now_s:
            waiting.append(upcoming)
            upcoming += 1
        while waiting and len(running) < MAX_RUNNING:
            index = waiting.popleft()
            records[index].queue_s = now_s - records[index].sent_s
            running.append(index)
        if now_s >= next_sample_s:
            samples.append(ServerSample(now_s, len(running), len(waiting), len(running) / 30))
            next_sample_s = now_s + 0.333
        if not running:
            now_s = max(now_s, records[upcoming].sent_s)
            continue
        decodes = [index for index in running if not left[index]]
        rows, chunks, first = _prefill(running, left, BUDGET - len(decodes))
        began_s = now_s
        now_s += 0.008 + 0.0003 * len(decodes) + 0.00012 * rows
        for index in decodes + first:
            _token(records[index], now_s, answers[index], rng, tokens_known)
            if not math.isnan(records[index].finished_s):
                running.remove(index)
        after = (len(running), len(waiting), len(running) * PAGES // 30)
        steps.append(StepRow(began_s, now_s, len(decodes), rows, chunks, 0, 0, *after))
    health = [ProcessHealth(0, count, 0.31, 0.0001, 0.0011, 0.004, 0, 40)]
    return RunResult(
        qps,
        seed,
        "http://127.0.0.1:8000",
        records,
        (due[-1] * 0.05, due[-1]),
        started="2026-11-22T06:00:00+00:00",
        steps=steps,
        samples=samples,
        health=health,
    )


def _prefill(running: list[int], left: list[int], budget: int) -> tuple[int, int, list[int]]:
    """Takes prompt tokens off `left`, up to the budget. Returns the number of tokens, the number
    of chunks, and the requests whose prompts end here."""
    rows, chunks, ended = 0, 0, []
    for index in running:
        if left[index] and rows < budget:
            part = min(left[index], budget - rows)
            left[index] -= part
            rows += part
            chunks += 1
            if not left[index]:
                ended.append(index)
    return rows, chunks, ended


def _token(
    record: Record, now_s: float, answer: int, rng: random.Random, tokens_known: bool
) -> None:
    record.chunks_s.append(now_s)
    if tokens_known:
        record.chunk_tokens.append(1)
    if rng.random() < 0.0006:
        record.outcome, record.finished_s = Outcome.CANCELLED, now_s
    elif rng.random() < 0.0003:
        record.outcome, record.finished_s = Outcome.FAILED, now_s
        record.error = "503: <b>no memory</b> & more"
    elif len(record.chunks_s) >= answer:
        record.outcome, record.finished_s = Outcome.OK, now_s + 0.0005
        record.output_tokens = len(record.chunks_s) if tokens_known else None
        record.finish_reason = "stop"
