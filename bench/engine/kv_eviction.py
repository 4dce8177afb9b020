"""What policies that drop K/V hold and cost in an engine: python -m bench.engine.kv_eviction.

Sequences of one length decode together on the built-in model, policy after policy. Pages and tokens
are read while all of them decode; steps are those of decoding alone. Prompts are random, so answers
mean nothing here: `serve eval --kv-policy` measures them.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from bench.common import tables
from serve import Engine, SamplingParams
from serve.config import DEFAULT_MODEL

_POLICIES = ("off", "window", "h2o", "keyformer", "snapkv", "pyramid")
_ANSWER, _TIMED = 200, 100


@dataclass(frozen=True, slots=True)
class Figures:
    """prompt_s: until every sequence has a token. step_ms: the median step behind that. num_bytes,
    pages, held: of K/V in use then, and the tokens of which a layer holds K/V, if some is dropped.
    Pages of layer groups are smaller."""

    prompt_s: float
    step_ms: float
    num_bytes: int
    pages: int
    held: int


async def _measure(policy: str, num_sequences: int, num_prompt: int) -> Figures:
    engine = Engine(
        DEFAULT_MODEL,
        dtype="int8",
        kv_policy=policy,
        max_num_seqs=num_sequences,
        prefix_cache=False,
        speculation="off",
        seed=0,
    )
    await engine.start()
    found = None
    while found is None:
        found = await _round(engine, num_sequences, num_prompt)
    await engine.shutdown()
    return found


async def _round(engine: Engine, num_sequences: int, num_prompt: int) -> Figures | None:
    """Returns None if the engine was so far ahead that sequences had ended before all were seen to
    decode, as it may be where other programs run."""
    rng = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=_ANSWER, ignore_eos=True)
    began = time.perf_counter()
    prompts = [[rng.randrange(300, 4000) for _ in range(num_prompt)] for _ in range(num_sequences)]
    streams = [engine.submit({"prompt_token_ids": ids}, params) for ids in prompts]
    started: dict[int, float] = {}
    seen: list[tuple[int, int, int]] = []
    times: list[float] = []

    async def consume(number: int) -> None:
        count, last, is_last = 0, 0.0, False
        async for delta in streams[number]:
            now = time.perf_counter()
            if not count:
                started[number] = now - began
                is_last = len(started) == num_sequences
            elif is_last and len(times) < _TIMED:
                times.append((now - last) / max(1, len(delta.token_ids)))
            count += len(delta.token_ids)
            if is_last and count > 4 and not seen:
                stats = engine.stats()
                if stats.num_running == num_sequences:
                    pages = stats.pages_in_use
                    seen.append((pages * stats.kv_page_bytes, pages, stats.held_tokens))
            last = now

    await asyncio.gather(*map(consume, range(num_sequences)))
    if not seen or not times:
        return None
    return Figures(max(started.values()), statistics.median(times) * 1e3, *seen[0])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=800)
    parser.add_argument("--budget", default="25%")
    given = parser.parse_args(arguments)
    title = f"{given.sequences} sequences, {given.prompt} prompt tokens each, budget {given.budget}"
    table = Table(title=title)
    for name in ("policy", "prompts, s", "step, ms", "MiB", "pages", "tokens held"):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for name in _POLICIES:
        policy = name if name == "off" else f"{name}:budget={given.budget}"
        found = asyncio.run(_measure(policy, given.sequences, given.prompt))
        shown = [f"{found.prompt_s:.2f}", f"{found.step_ms:.2f}", f"{found.num_bytes / 2**20:.1f}"]
        held = f"{found.held:,}" if found.held else "all"
        table.add_row(name, *shown, f"{found.pages:,}", held)
    tables.console().print(table)


if __name__ == "__main__":
    main()
