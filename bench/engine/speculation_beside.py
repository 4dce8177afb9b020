"""What drafts gain where prompts arrive all the time: streams decode beside them.

One engine computes the same streams again and again while two prompts of 512 to 2,000 tokens, which
get one token, always wait or are computed. Counted is the time from when all streams decode to when
the last one ends.
"""

from __future__ import annotations

import asyncio
import random
import statistics
from collections import defaultdict
from typing import Any, NamedTuple

from rich.table import Table

from bench.common.scripted_drafts import ScriptedDrafter, speculation_of
from serve import Engine, SamplingParams

_ANSWER = 96
_PROMPTS = 2
RATES = (0.0, 0.6, 0.9)


class Speeds(NamedTuple):
    """Of the streams: tokens a second, and the mean and the 99th percentile of the time between two
    steps with tokens. Of the prompts: rows a second. drafted: draft tokens beside prompts."""

    tokens: float
    rows: float
    mean_ms: float
    late_ms: float
    drafted: int


async def _prompts(engine: Engine, vocab: int, rng: random.Random) -> None:
    """Submits one prompt after another."""
    while True:
        size = rng.randint(512, 2000)
        tokens = [rng.randrange(5, vocab - 5) for _ in range(size)]
        stream = engine.submit(tokens, SamplingParams(max_tokens=1, seed=0))
        try:
            async for _ in stream:
                pass
        finally:
            stream.abort()


def _stream_prompts(batch: int, vocab: int, number: int) -> list[list[int]]:
    rng = random.Random(number)
    return [[rng.randrange(5, vocab - 5) for _ in range(32)] for _ in range(batch)]


async def _run(
    engine: Engine, prompts: list[list[int]], vocab: int, number: int
) -> tuple[Speeds, list[list[int]]]:
    """Computes the streams beside prompts; returns their speed and their answers."""
    core = engine.loaded.core
    trace = core.view.traces.measure(1 << 20)
    answers: dict[int, list[int]] = defaultdict(list)
    begun = asyncio.Event()

    async def decode(index: int) -> None:
        params = SamplingParams(max_tokens=_ANSWER, temperature=0.8, seed=index, ignore_eos=True)
        async for delta in engine.submit(prompts[index], params):
            answers[index] += delta.token_ids
            if len(answers) == len(prompts):
                begun.set()

    streams = [asyncio.create_task(decode(i)) for i in range(len(prompts))]
    await begun.wait()
    rng = random.Random(number)
    beside = [asyncio.create_task(_prompts(engine, vocab, rng)) for _ in range(_PROMPTS)]
    await asyncio.sleep(0)
    first, before = len(trace.steps), sum(map(len, answers.values()))
    await asyncio.gather(*streams)
    steps = [step for step in list(trace.steps)[first:] if step.work.num_decodes]
    for task in beside:
        task.cancel()
    await asyncio.gather(*beside, return_exceptions=True)
    seconds = steps[-1].ended_s - steps[0].began_s
    rows = sum([step.work.num_rows - step.work.num_decodes for step in steps])
    tokens = sum(map(len, answers.values())) - before
    mixed = [step for step in steps if step.work.num_chunks]
    drafted = sum([max(0, step.work.num_decodes - len(prompts)) for step in mixed])
    times = sorted([step.ended_s - step.began_s for step in steps])
    late_s = times[int(0.99 * (len(times) - 1))]
    speeds = Speeds(
        tokens / seconds,
        rows / seconds,
        1e3 * seconds * len(prompts) / tokens,
        1e3 * late_s,
        drafted,
    )
    return speeds, [answers[i] for i in range(len(prompts))]


async def _measure(
    model: str | None, settings: dict[str, Any], batches: list[int], vocab: int, rounds: int
) -> Table:
    table = Table(
        "streams", "drafts", "tokens/s", "prompt rows/s", "ms a token", "p99 ms a step", "drafted"
    )
    async with Engine(model, **settings) as engine:
        core = engine.loaded.core
        scheduler = core._scheduler
        for batch in batches:
            found: dict[str, list[Speeds]] = defaultdict(list)
            arms = {f"{rate:.0%} right": ScriptedDrafter({}, rate) for rate in RATES}
            made = {name: speculation_of(core, drafter) for name, drafter in arms.items()}
            for number in range(rounds + 1):
                prompts = _stream_prompts(batch, vocab, number)
                scheduler.drafting = None
                speeds, answers = await _run(engine, prompts, vocab, number)
                pairs = zip(prompts, answers, strict=True)
                known = {tuple(prompt): [answer] for prompt, answer in pairs}
                results = {"none": speeds}
                for name, drafter in arms.items():
                    drafter.answers, scheduler.drafting = known, made[name]
                    results[name], again = await _run(engine, prompts, vocab, number)
                    assert again == answers, f"{name} changes tokens"
                for name, speeds in results.items():
                    if number:  # the first round warms up
                        found[name].append(speeds)
            _add_rows(table, batch, found)
    return table


def _add_rows(table: Table, batch: int, found: dict[str, list[Speeds]]) -> None:
    medians = {
        name: Speeds(*map(statistics.median, zip(*each, strict=True)))
        for name, each in found.items()
    }
    base = medians["none"]
    for name, speeds in medians.items():
        table.add_row(
            str(batch),
            name,
            f"{speeds.tokens:.1f} ({speeds.tokens / base.tokens:.2f}x)",
            f"{speeds.rows:.0f} ({speeds.rows / base.rows:.2f}x)",
            f"{speeds.mean_ms:.1f}",
            f"{speeds.late_ms:.1f}",
            str(round(speeds.drafted)),
        )


def beside(
    model: str | None, settings: dict[str, Any], batches: list[int], vocab: int, rounds: int
) -> Table:
    """Measures streams beside prompts, with and without drafts."""
    settings = settings | {"max_num_seqs": max(batches) + _PROMPTS}
    return asyncio.run(_measure(model, settings, batches, vocab, rounds))
