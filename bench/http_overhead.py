"""What HTTP costs: tokens/s of streamed completions over the server, against in-process.

The same load (32 streams at once, greedy, fixed lengths) goes to `serve run` in a process of
its own and to an Engine in this one, in interleaved rounds; medians are reported. The client
shares the machine with the server, so its own work counts against HTTP.
Run: python -m bench.http_overhead [--model DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import uvloop

from bench.checkpoints import random_checkpoint
from serve import Engine, SamplingParams


class Shape(NamedTuple):
    """num_streams at once, each num_prompt tokens in and num_tokens out."""

    num_streams: int
    num_prompt: int
    num_tokens: int


@contextmanager
def server(model: str | None, dtype: str) -> Iterator[str]:
    """`serve run` on a free port; yields its URL when it is ready."""
    command = [sys.executable, "-m", "serve", "run", *([model] if model else [])]
    command += ["--port", "0", "--dtype", dtype]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://[0-9.]+:\d+", line):
                yield found[0]
                return
        raise RuntimeError("the server did not start")
    finally:
        process.terminate()
        process.wait()


def prompts_of(shape: Shape) -> list[list[int]]:
    return [
        [300 + (7 * i + j) % 500 for j in range(shape.num_prompt)] for i in range(shape.num_streams)
    ]


async def over_http(session: aiohttp.ClientSession, url: str, name: str, shape: Shape) -> float:
    """Seconds until the last of the streams has ended."""

    async def one(prompt: list[int]) -> None:
        body = {
            "model": name,
            "prompt": prompt,
            "max_tokens": shape.num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        tail = b""
        async with session.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            async for chunk in response.content.iter_any():
                tail = (tail + chunk)[-600:]
        usage = re.search(rb'"completion_tokens":\s*(\d+)', tail)
        assert usage is not None, tail
        assert int(usage[1]) == shape.num_tokens, tail

    began = time.perf_counter()
    await asyncio.gather(*map(one, prompts_of(shape)))
    return time.perf_counter() - began


async def in_process(engine: Engine, shape: Shape) -> float:
    params = SamplingParams(temperature=0, max_tokens=shape.num_tokens, ignore_eos=True)

    async def one(prompt: list[int]) -> None:
        count = 0
        async for delta in engine.submit(prompt, params):
            count += len(delta.token_ids)
        assert count == shape.num_tokens

    began = time.perf_counter()
    await asyncio.gather(*map(one, prompts_of(shape)))
    return time.perf_counter() - began


async def measure(model: str | None, dtype: str, shape: Shape, rounds: int) -> dict[str, Any]:
    tokens = shape.num_streams * shape.num_tokens
    rates: dict[str, list[float]] = {"http": [], "in_process": []}
    with server(model, dtype) as url:
        async with (
            Engine(model, dtype=dtype) as engine,
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
            ) as session,
        ):
            warm_up = shape._replace(num_tokens=2)
            await over_http(session, url, engine.model_name, warm_up)
            await in_process(engine, warm_up)
            for _ in range(rounds):
                http_s = await over_http(session, url, engine.model_name, shape)
                rates["http"].append(tokens / http_s)
                rates["in_process"].append(tokens / await in_process(engine, shape))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratios = [h / p for h, p in zip(rates["http"], rates["in_process"], strict=True)]
    return medians | {"ratio": statistics.median(ratios), "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None, help="only this directory")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="seconds, for tests")
    args = parser.parse_args()
    rounds = 1 if args.smoke else args.rounds
    cases: list[tuple[str, str | None, int]]
    if args.smoke:
        cases = [("tiny random model", str(random_checkpoint("tiny")), 4)]
    elif args.model:
        cases = [(Path(args.model).name, args.model, 64)]
    else:
        cases = [
            ("Llama-3.2-1B shape", str(random_checkpoint("llama-1b")), 32),
            ("embedded default model", None, 256),
        ]
    results = {}
    for title, model, num_tokens in cases:
        shape = Shape(args.streams, args.prompt, num_tokens)
        results[title] = result = uvloop.run(measure(model, args.dtype, shape, rounds))
        spread = " ".join(f"{value:.3f}" for value in result["ratios"])
        print(f"{title}, {args.dtype}: {shape.num_streams} streams, {shape.num_tokens} tokens each")
        print(f"  in process  {result['in_process']:10.1f} tok/s")
        print(
            f"  over HTTP   {result['http']:10.1f} tok/s   ratio {result['ratio']:.3f}  ({spread})"
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
