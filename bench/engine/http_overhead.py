"""`serve bench http`: compares streamed completions over HTTP with the same streams in process.

It sends the same load (32 streams at once, greedy, fixed lengths) to `serve run` in a separate
process and to an Engine in this one, in interleaved rounds, and reports medians of tokens per
second. The client shares the machine with the server, so its work counts against HTTP.
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
from rich.table import Table

from bench.common import tables
from bench.common.checkpoints import model_directory
from serve import Engine, SamplingParams
from serve.config import EngineConfig
from serve.errors import ConfigError


class Shape(NamedTuple):
    """A load of num_streams concurrent streams, with prompts of num_prompt tokens and answers of
    num_tokens."""

    num_streams: int
    num_prompt: int
    num_tokens: int


@contextmanager
def server(model: str | None, dtype: str) -> Iterator[str]:
    """Runs `serve run` on a free port and yields its URL when it is ready."""
    command = [sys.executable, "-m", "serve", "run", *([model] if model else [])]
    command += ["--port", "0", "--dtype", dtype, "--speculation", "off"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if url := re.search(r"http://[0-9.]+:\d+", line):
                yield url[0]
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
    """Returns the seconds until the last of the streams has ended."""

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
    """Returns the seconds until the last of the streams has ended."""
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
    """Returns the median tokens per second over HTTP and in process, and their ratios."""
    tokens = shape.num_streams * shape.num_tokens
    rates: dict[str, list[float]] = {"http": [], "in_process": []}
    with server(model, dtype) as url:
        async with (
            Engine(model, dtype=dtype, speculation="off") as engine,
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


def http(
    model: str | None = None,
    *,
    streams: int = 32,
    input_len: int = 32,
    output_len: int | None = None,
    rounds: int | None = None,
    dtype: str = "auto",
    json_file: Path | None = None,
    quick: bool = False,
) -> dict[str, Any]:
    """Prints and returns medians over the rounds. model is a directory, "random:SHAPE", or None for
    the embedded model. output_len is by default 256 for the embedded model and 32 for others."""
    tables.check_file(json_file)
    path = model_directory(model)
    num_tokens = output_len or (4 if quick else 256 if path is None else 32)
    num_rounds = rounds or (1 if quick else 5)
    if min(streams, input_len, num_tokens, num_rounds) < 1:
        raise ConfigError("streams, lengths and rounds must be positive")
    head = tables.Head.now(f"http, {EngineConfig.from_settings(path).model_name}")
    shape = Shape(streams, input_len, num_tokens)
    result = uvloop.run(measure(path, dtype, shape, num_rounds))
    console = tables.console()
    console.print(str(head), highlight=False, soft_wrap=True)
    title = f"{streams} streams of {num_tokens} tokens at once, medians of {num_rounds} rounds"
    table = Table("", "tokens/s", title=title, title_justify="left")
    table.add_row("in this process", tables.number(result["in_process"]))
    table.add_row("over HTTP", tables.number(result["http"]))
    table.add_row("ratio", tables.spread(result["ratios"], "{:.3f}".format))
    console.print(table)
    tables.write(json_file, head, result)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=None)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--smoke", action="store_true", help="seconds, for tests")
    args = parser.parse_args()
    result = http(args.model, dtype=args.dtype, rounds=args.rounds, quick=args.smoke)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
