"""What our own machinery costs: rows scheduled, detokenized and delivered per second.

The device takes no time (bench/instant.py); N asyncio consumers each read one stream to its
end. Reported: rows/s, Python time per step, and the gap between two steps: the only part that a
real device would wait for. Run: python -m bench.engine_overhead
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import platform
import statistics
import time
from typing import Any

import uvloop

from bench.instant import InstantRunner, load_instant
from serve import Engine, SamplingParams


async def _consume(engine: Engine, params: SamplingParams, prompt: list[int]) -> tuple[int, int]:
    tokens = deltas = 0
    async for delta in engine.submit(prompt, params):
        tokens += len(delta.token_ids)
        deltas += 1
    return tokens, deltas


async def measure(num_seqs: int, num_tokens: int, model: str | None = None) -> dict[str, Any]:
    """One run: num_seqs streams of num_tokens tokens each."""
    runners: list[InstantRunner] = []

    def make(kv: Any) -> InstantRunner:
        runners.append(InstantRunner(kv, lambda s: 97 + len(s.token_ids) % 26))
        return runners[0]

    load = functools.partial(load_instant, make_runner=make, num_pages=16384)
    engine = Engine(model, load=load, max_num_seqs=num_seqs, max_num_batched_tokens=8192)
    await engine.start()
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    prompt = list(range(5, 21))
    began = time.perf_counter()
    results = await asyncio.gather(*(_consume(engine, params, prompt) for _ in range(num_seqs)))
    elapsed = time.perf_counter() - began
    await engine.shutdown()
    delivered = sum(tokens for tokens, _ in results)
    assert delivered == num_seqs * num_tokens, f"{delivered} tokens delivered"
    runner = runners[0]
    full = [i for i, rows in enumerate(runner.rows) if rows == num_seqs and i > 0]
    return {
        "num_seqs": num_seqs,
        "tokens": delivered,
        "deltas": sum(deltas for _, deltas in results),
        "rows_per_s": delivered / elapsed,
        "python_ms_per_step": 1e3 * elapsed / len(runner.rows),
        "gap_ms_p50": 1e3 * statistics.median(runner.gaps_s[i - 1] for i in full),
        "batch_ms_p50": 1e3 * statistics.median(runner.batch_s[i] for i in full),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default=None)
    parser.add_argument("--smoke", action="store_true", help="a second or so, for tests")
    args = parser.parse_args()
    tokens, repeats = (20, 1) if args.smoke else (args.tokens, args.repeats)
    runs = [uvloop.run(measure(args.seqs, tokens, args.model)) for _ in range(repeats)]
    best = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    print(f"machine: {platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print(f"{args.seqs} running sequences, {tokens} tokens each, median of {repeats} runs")
    print(f"  delivered             {best['rows_per_s']:12,.0f} rows/s")
    print(f"  all Python, per step  {best['python_ms_per_step']:12.2f} ms")
    print(f"  between two steps     {best['gap_ms_p50']:12.3f} ms")
    print(f"  flattening the batch  {best['batch_ms_p50']:12.3f} ms")
    print(json.dumps(best))


if __name__ == "__main__":
    main()
