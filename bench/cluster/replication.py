"""Long streams behind `serve front` whose server is killed, with copies of their K/V at a peer and
without.

    python -m bench.cluster.replication --model random:llama-1b --repeats 3

Two servers have half of the streams each. In the middle of the answers one is killed, and the other
one goes on with all. Prints the prompt rows that it computes from then on, the longest time in
which a client got nothing, whether the tokens are those of a run in which nothing breaks, and what
copying costs: tokens a second of all streams before the kill, in the first half of that time, when
prompts are copied, and in the second; the kinds of runs take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import statistics
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp

from bench.cluster.servers import Server, start_front, until_ready
from bench.common.checkpoints import model_directory
from serve.config import DEFAULT_MODEL
from serve.machine import free_port

KINDS = ("whole", "without copies", "with copies")


@dataclass
class Stream:
    """What a client has got. times_s: of its parts."""

    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    @property
    def gap_s(self) -> float:
        return max([after - before for before, after in pairwise(self.times_s)], default=0.0)


@dataclass
class Run:
    """rates: tokens a second of all streams, in the first and the second half of the time before
    the kill. rows: computed of prompts after it. pages: copied before it."""

    tokens: list[list[int]]
    gap_s: float
    rates: tuple[float, float]
    rows: float
    pages: float


async def _ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], it: Stream) -> None:
    loop = asyncio.get_running_loop()
    async with session.post(url + "/v1/completions", json=body) as response:
        assert response.status == 200, f"status {response.status}"
        async for line in response.content:
            data = line.removeprefix(b"data: ").strip()
            if line.startswith(b"data: ") and data != b"[DONE]":
                event = json.loads(data)
                assert "choices" in event, event
                it.tokens += event["choices"][0].get("token_ids") or []
                it.times_s.append(loop.time())


async def _metric(session: aiohttp.ClientSession, url: str, pattern: str) -> float:
    async with session.get(url + "/metrics") as response:
        found = re.search(pattern + r"\S* (\S+)$", await response.text(), re.MULTILINE)
    return 0.0 if found is None else float(found[1])


_ROWS = r'mergestep:step_rows_total\{kind="prefill"'
_COPIED = r'mergestep:kv_copy_pages_total\{event="copied"'


async def _until(least: int, streams: list[Stream], asked: list[asyncio.Task[None]]) -> int:
    """Waits until each stream has so many tokens; returns those of all."""
    while not all(len(it.tokens) >= least for it in streams):
        for task in asked:
            if task.done():
                task.result()
        assert not all(task.done() for task in asked), "answers have ended before their time"
        await asyncio.sleep(0.01)
    return sum(len(it.tokens) for it in streams)


async def run(kind: str, options: tuple[str, ...], bodies: list[dict[str, Any]], key: Path) -> Run:
    """Starts the servers and runs all streams."""
    num_tokens = bodies[0]["max_tokens"]
    loop = asyncio.get_running_loop()
    async with AsyncExitStack() as stack:
        addresses = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        servers = []
        for address in addresses:
            shared = ("--kv-listen", address, "--kv-peers", ",".join(addresses))
            copies = ("--kv-replica-bytes", "1GiB") if kind == "with copies" else ()
            more = (*shared, "--kv-peer-key-file", str(key), *copies)
            servers.append(Server(free_port(), (*options, *more)))
        for server in servers:
            await server.start()
            stack.callback(server.kill)
        for server in servers:
            await until_ready(server.url)
        front, url = await start_front([server.url for server in servers])
        stack.callback(front.kill)
        timeout = aiohttp.ClientTimeout(total=None)
        session = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        streams = [Stream() for _ in bodies]
        pairs = zip(bodies, streams, strict=True)
        asked = [asyncio.create_task(_ask(session, url, body, it)) for body, it in pairs]
        marks = []
        for least in (1, num_tokens // 4, num_tokens // 2):
            marks.append((await _until(least, streams, asked), loop.time()))
        rates = [
            (after - before) / (ended_s - began_s)
            for (before, began_s), (after, ended_s) in pairwise(marks)
        ]
        rows = await _metric(session, servers[1].url, _ROWS)
        pages = await _metric(session, servers[1].url, _COPIED)
        if kind != "whole":
            await servers[0].end(signal.SIGKILL)
        await asyncio.gather(*asked)
        rows = await _metric(session, servers[1].url, _ROWS) - rows
        gap_s = max(it.gap_s for it in streams)
        return Run([it.tokens for it in streams], gap_s, (rates[0], rates[1]), rows, pages)


async def measure(args: argparse.Namespace) -> None:
    rng = random.Random(1)
    path = model_directory(args.model) or DEFAULT_MODEL
    limit = str(args.prompt + args.tokens + 64)
    options = (path, "--served-model-name", "m", "--dtype", "int8", "--compute-threads", "1")
    options += ("--max-model-len", limit, "--speculation", "off", "--max-num-seqs", "8")
    bodies = [
        {
            "model": "m",
            "prompt": [rng.randrange(10, 1000) for _ in range(args.prompt)],
            "max_tokens": args.tokens,
            "temperature": 1.0,
            "seed": number,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        for number in range(args.streams)
    ]
    with tempfile.TemporaryDirectory(prefix="mergestep-copies-") as folder:
        key = Path(folder) / "key"
        key.write_text("a key for a measurement")
        key.chmod(0o600)
        runs: dict[str, list[Run]] = {kind: [] for kind in KINDS}
        for _ in range(args.repeats):
            for kind in KINDS:
                runs[kind].append(await run(kind, options, bodies, key))
                _print(kind, runs[kind][-1], runs["whole"][0])
    for kind, found in runs.items():
        first, second = (statistics.median(one.rates[half] for one in found) for half in (0, 1))
        rows = statistics.median(one.rows for one in found)
        gap_s = statistics.median(one.gap_s for one in found)
        rates = f"{first:.1f}, {second:.1f} tokens/s"
        print(f"{kind}, median: {rows:.0f} rows, gap {gap_s:.2f} s, {rates}")


def _print(kind: str, found: Run, whole: Run) -> None:
    changed = sum(one != other for one, other in zip(found.tokens, whole.tokens, strict=True))
    print(
        f"{kind}: {found.rows:.0f} prompt rows after the kill, {found.pages:.0f} pages copied,"
        f" longest gap {found.gap_s:.2f} s, {found.rates[0]:.1f} and then {found.rates[1]:.1f}"
        f" tokens/s before it,"
        f" {changed} answers changed",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="random:llama-1b")
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
