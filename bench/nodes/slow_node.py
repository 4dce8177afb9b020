"""A memory node that is short of processor time: python -m bench.nodes.slow_node

Two `serve node` processes hold the K/V of one engine. One of them is stopped and continued at
random times, as on a machine that is overcommitted. Meanwhile a client sends long prompts, one
after the other. The table shows how often the node was lost and taken back, and how long the
requests took.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.table import Table

from bench.common import tables
from bench.common.checkpoints import random_checkpoint
from bench.common.node_processes import node_processes
from serve import Engine, SamplingParams


class _Log(logging.Handler):
    """Keeps what the engine logs of its nodes, and prints it with the time."""

    def __init__(self) -> None:
        super().__init__()
        self.began = time.monotonic()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        seconds = time.monotonic() - self.began
        print(f"{seconds:7.1f} s  {record.getMessage()}", file=sys.stderr, flush=True)

    def count(self, words: str) -> int:
        return sum([words in text for text in self.texts])


@contextmanager
def _short_of_time(
    process: subprocess.Popen[str], stopped_s: list[float], running_s: list[float]
) -> Iterator[None]:
    """Stops and continues a process at random times, each for between two numbers of seconds."""
    source, is_over = random.Random(1), threading.Event()

    def work() -> None:
        while not is_over.wait(source.uniform(*running_s)):
            process.send_signal(signal.SIGSTOP)
            is_over.wait(source.uniform(*stopped_s))
            process.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


async def _requests(
    engine: Engine, seconds: float, num_prompt: int, num_tokens: int
) -> list[list[float]]:
    """Sends requests one after the other for so long. Returns for each the times of its begin and
    of its tokens."""
    source, found = random.Random(2), []
    end = time.monotonic() + seconds
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    while time.monotonic() < end:
        prompt = [source.randrange(300, 1000) for _ in range(num_prompt)]
        times = [time.monotonic()]
        async for delta in engine.stream(prompt, params):
            times += [time.monotonic()] * len(delta.token_ids)
        found.append(times)
        print(f"         request: {times[-1] - times[0]:.1f} s", file=sys.stderr, flush=True)
    return found


async def _measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    log = _Log()
    for name in ("serve.engine.node_recovery", "memory"):
        logging.getLogger(name).setLevel(logging.INFO)
        logging.getLogger(name).addHandler(log)
    model = str(random_checkpoint(args.model))
    with node_processes(2, folder, scheme="tcp") as nodes:
        async with Engine(
            model=model,
            seed=0,
            max_num_seqs=4,
            compute_threads=1,
            memory_nodes=tuple(nodes),
            memory_node_key_file=str(folder / "key"),
            memory_partition=args.partition,
            kv_cache_bytes=1 << 30,
            max_model_len=args.prompt + args.tokens,
        ) as engine:
            [calm] = await _requests(engine, 0.01, args.prompt, args.tokens)
            log.began = time.monotonic()
            with _short_of_time(next(iter(nodes.values())), args.stopped, args.running):
                times = await _requests(engine, args.seconds, args.prompt, args.tokens)
            stats = engine.stats()
    gaps = [later - earlier for one in times for earlier, later in pairwise(one)]
    return {
        "seconds": time.monotonic() - log.began,
        "losses": stats.memory_nodes_lost,
        "taken_back": log.count("memory nodes are back"),
        "recomputed": stats.recomputed_sequences,
        "requests": len(times),
        "calm_request_s": calm[-1] - calm[0],
        "longest_request_s": max([one[-1] - one[0] for one in times]),
        "longest_gap_s": max(gaps),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", default="small-32k", help="a shape of bench/common/checkpoints.py")
    add("--partition", default="head", choices=["head", "request", "sequence"])
    add("--seconds", type=float, default=80.0, help="requests begin in this time")
    add("--prompt", type=int, default=8000, help="tokens of each prompt")
    add("--tokens", type=int, default=400, help="tokens of each answer")
    pair: dict[str, Any] = {"type": float, "nargs": 2, "metavar": ("LEAST", "MOST")}
    add("--stopped", default=[1.0, 2.5], help="seconds without a processor", **pair)
    add("--running", default=[5.0, 8.0], help="seconds with a processor", **pair)
    args = parser.parse_args()
    head = tables.Head.now("slow node")
    console = tables.console()
    console.print(str(head), highlight=False, soft_wrap=True)
    with tempfile.TemporaryDirectory(prefix="mergestep-nodes-") as folder:
        result = asyncio.run(_measure(args, Path(folder)))
    table = Table("what", "figure", title="A memory node short of processor time")
    for name, value in result.items():
        table.add_row(name.replace("_", " "), f"{value:.4g}")
    console.print(table)
    tables.write(None, head, result)


if __name__ == "__main__":
    main()
