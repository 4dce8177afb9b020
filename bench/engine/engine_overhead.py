"""`serve bench engine`: measures the engine's own work per step, with a device that takes no time.

Rows are scheduled, detokenized and delivered (bench/common/instant.py), and N asyncio consumers
each read one stream to its end. The report has rows per second and the time per step. In a last
wave the device takes 5 ms per step, during which the other pools can work; that wave shows how long
the device waits between two steps for update, schedule, commit and flatten.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import uvloop
from rich.table import Table

from bench.common import tables
from bench.common.checkpoints import model_directory
from bench.common.instant import InstantRunner, load_instant
from bench.common.percentiles import Tail, is_supported, tail
from serve import Engine, RequestStream, SamplingParams
from serve.errors import ConfigError

_DEVICE_S = 5e-3


async def _consume(stream: RequestStream) -> tuple[int, int]:
    tokens = deltas = 0
    async for delta in stream:
        tokens += len(delta.token_ids)
        deltas += 1
    return tokens, deltas


async def measure(num_seqs: int, num_tokens: int, model: str | None = None) -> dict[str, Any]:
    """Runs three waves of num_seqs streams of num_tokens tokens: into untouched memory, with pages
    mapped, and with a device that takes _DEVICE_S per step. Returns their figures by name."""
    runners: list[InstantRunner] = []

    def make(kv: Any) -> InstantRunner:
        runners.append(InstantRunner(kv, lambda s: 97 + len(s.token_ids) % 26))
        return runners[0]

    load = functools.partial(load_instant, make_runner=make, num_pages=16384)
    result: dict[str, Any] = {"num_seqs": num_seqs, "tokens": num_seqs * num_tokens}
    async with Engine(
        model, load=load, max_num_seqs=num_seqs, max_num_batched_tokens=8192
    ) as engine:
        for wave in ("cold", "warm", "paced"):
            runners[0].reset(device_s=_DEVICE_S if wave == "paced" else 0.0)
            result |= {
                f"{wave}_{key}": value
                for key, value in (await _wave(engine, runners[0], num_seqs, num_tokens)).items()
            }
    return result


async def _wave(
    engine: Engine, runner: InstantRunner, num_seqs: int, num_tokens: int
) -> dict[str, float]:
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    prompt = list(range(5, 21))
    runner.gate.clear()  # no step runs before all requests have arrived
    streams = [engine.submit(prompt, params) for _ in range(num_seqs)]
    for stream in streams:
        await stream.accepted()
    began = time.perf_counter()
    runner.gate.set()
    results = await asyncio.gather(*map(_consume, streams))
    elapsed = time.perf_counter() - began
    delivered = sum(tokens for tokens, _ in results)
    assert delivered == num_seqs * num_tokens, f"{delivered} tokens delivered"
    full = [i for i, rows in enumerate(runner.rows) if rows == num_seqs and i > 0]
    between = sorted(1e3 * (runner.gaps_s[i - 1] + runner.batch_s[i]) for i in full)
    return {
        "rows_per_s": delivered / elapsed,
        "python_ms_per_step": 1e3 * elapsed / len(runner.rows),
        "deltas": sum(deltas for _, deltas in results),
        "between_ms_p50": statistics.median(between),
        "between_ms_mean": statistics.fmean(between),
        "between_ms_high": tail(between).value,
        "between_n": len(between),
    }


def engine(
    model: str | None = None,
    *,
    seqs: int = 256,
    tokens: int | None = None,
    repeats: int | None = None,
    json_file: Path | None = None,
    quick: bool = False,
) -> dict[str, Any]:
    """Prints and returns medians over the repeats. Only the tokenizer of the model is used."""
    tables.check_file(json_file)
    num_tokens, num_repeats = tokens or (20 if quick else 400), repeats or (1 if quick else 5)
    if min(seqs, num_tokens, num_repeats) < 1:
        raise ConfigError("seqs, tokens and repeats must be positive")
    path = model_directory(model)
    head = tables.Head.now("engine")
    runs = [uvloop.run(measure(seqs, num_tokens, path)) for _ in range(num_repeats)]
    result = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    console = tables.console()
    console.print(str(head), highlight=False, soft_wrap=True)
    title = f"{seqs} running sequences, {num_tokens} tokens each, medians of {num_repeats} runs"
    table = Table("", "rows/s delivered", "ms per step in all", title=title)
    for wave, what in (("cold", "maps and zeroes every page"), ("warm", "pages are mapped")):
        rows_per_s, step_ms = result[f"{wave}_rows_per_s"], result[f"{wave}_python_ms_per_step"]
        table.add_row(f"{wave}: {what}", f"{rows_per_s:,.0f}", f"{step_ms:.2f}")
    console.print(table)
    p50, mean, high = (result[f"paced_between_ms_{name}"] for name in ("p50", "mean", "high"))
    label = Tail(high, 99.0, int(result["paced_between_n"])).label
    console.print(
        f"a device with steps of {1e3 * _DEVICE_S:.0f} ms waits {p50:.3f} ms p50, {mean:.3f} mean,"
        f" {high:.3f} {label} between two steps",
        highlight=False,
    )
    result = _with_percentile(result)
    tables.write(json_file, head, result)
    return result


def _with_percentile(result: dict[str, float]) -> dict[str, Any]:
    """Returns the result with a p99 of each wave, null where it had too few steps, and a maximum
    there."""
    document: dict[str, Any] = {}
    for key, value in result.items():
        wave, found, _ = key.partition("_between_ms_high")
        if not found:
            document[key] = value
            continue
        is_known = is_supported(99.0, result[f"{wave}_between_n"])
        document[f"{wave}_between_ms_p99"] = value if is_known else None
        document[f"{wave}_between_ms_max"] = None if is_known else value
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--smoke", action="store_true", help="a second or so, for tests")
    args = parser.parse_args()
    print(json.dumps(engine(args.model, quick=args.smoke)))


if __name__ == "__main__":
    main()
