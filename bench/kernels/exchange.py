"""How long ranks need to exchange their columns: python -m bench.kernels.exchange [--quick].

Processes of this machine each write their part of a result's columns, and wait until all columns
are there: in a shared arena, over connections (shm), and with gloo's all-gather. Each round
measures all of them in turn. The barrier alone is measured as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from datetime import timedelta

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor

from serve.group.exchange.arena import ArenaExchange
from serve.group.exchange.base import Exchange
from serve.group.exchange.cuda import CudaExchange
from serve.group.exchange.slots import NUM_SLOTS, ring_bytes
from serve.group.exchange.windows import WindowExchange
from transport import connect, listen
from transport.arena import Arena
from transport.base import Endpoint, TransportError

KEY = b"bench.kernels.exchange: between ranks of this machine"
ROWS = (1, 16, 512)
COLUMNS = 2048
DTYPE = torch.float32
ROW_BYTES = COLUMNS * DTYPE.itemsize
WINDOW_BYTES = 16 << 20
PATIENCE_S = 60.0

Readings = dict[tuple[str, str], list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a second, as a smoke test")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--arena", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ranks < 2:
        parser.error("--ranks: there is nothing to exchange with less than 2")
    torch.set_num_threads(1)
    calls, rounds = (20, 1) if options.quick else (300, options.rounds)
    if options.rank:
        arena = Arena.open(options.arena, options.rank)
        measure(arena, options.folder, rounds, calls)
        return
    size = options.ranks
    with tempfile.TemporaryDirectory() as folder:
        arena = Arena.create(ring_bytes(max(ROWS), ROW_BYTES), size, rank=0)
        command = [sys.executable, "-m", "bench.kernels.exchange", "--arena", arena.path]
        command += ["--folder", folder, "--ranks", str(size), "--rounds", str(options.rounds)]
        command += ["--quick"] * options.quick
        others = [subprocess.Popen([*command, "--rank", str(rank)]) for rank in range(1, size)]
        try:
            readings = measure(arena, folder, rounds, calls)
        finally:
            arena.abort()
            for process in others:
                process.wait(PATIENCE_S)
    Console().print(table(readings, size))
    medians = {f"{name} {what}": statistics.median(v) for (name, what), v in readings.items()}
    print(json.dumps({key: round(value, 2) for key, value in medians.items()}))


def measure(arena: Arena, folder: str, rounds: int, calls: int) -> Readings:
    """Returns a median of each round in microseconds, by (exchange, measurement); every rank runs
    it."""
    rank, size = arena.rank, arena.num_ranks
    readings: Readings = defaultdict(list)
    with ExitStack() as undo:
        exchanges: dict[str, Exchange] = {
            "arena": ArenaExchange(arena, max(ROWS), ROW_BYTES, PATIENCE_S),
            "shm": WindowExchange(rank, connections(folder, rank, size), max(ROWS), ROW_BYTES),
            "gloo": gloo(folder, rank, size),
        }
        undo.callback(dist.destroy_process_group)
        for exchange in exchanges.values():
            undo.callback(exchange.close)
        bounds = [COLUMNS * r // size for r in range(size + 1)]
        for _ in range(rounds):
            readings["arena", "barrier"].append(timed(lambda: arena.barrier(PATIENCE_S), calls))
            readings["gloo", "barrier"].append(timed(dist.barrier, calls))
            for rows in ROWS:
                for name, exchange in exchanges.items():
                    time_us = timed(gathering(exchange, rows, bounds), calls)
                    readings[name, f"{rows} rows"].append(time_us)
        # A rank closes its connections when all ranks have read what they need.
        arena.barrier(PATIENCE_S)
    return readings


def gathering(exchange: Exchange, rows: int, bounds: list[int]) -> Callable[[], Tensor]:
    """Returns a call that writes own columns and gathers all, after it has been checked."""
    ranks = torch.arange(exchange.size, dtype=DTYPE) + rows
    widths = torch.tensor(bounds).diff()
    full = ranks.repeat_interleave(widths).expand(rows, COLUMNS)
    begin, end = bounds[exchange.rank], bounds[exchange.rank + 1]
    own = full[:, begin:end].contiguous()

    def gather() -> Tensor:
        buffer = exchange.begin(rows, COLUMNS, DTYPE)
        buffer[:, begin:end].copy_(own)
        exchange.complete(buffer, bounds)
        return buffer

    for _ in range(NUM_SLOTS):
        assert torch.equal(gather(), full), "wrong columns"
    return gather


def timed(call: Callable[[], object], calls: int) -> float:
    """Returns the median time of a call in microseconds, without the first ones."""
    times = []
    for _ in range(calls + calls // 10):
        began = time.perf_counter()
        call()
        times.append(1e6 * (time.perf_counter() - began))
    return statistics.median(times[calls // 10 :])


# ---- set-up


def connections(folder: str, rank: int, size: int) -> dict[int, Endpoint]:
    """Connects this rank to every other one: each listens for those above it."""
    found = {below: connected(f"shm://{folder}/{below}", rank) for below in range(rank)}
    if rank == size - 1:
        return found
    url = f"shm://{folder}/{rank}"
    with closing(listen(url, key=KEY, window_bytes=WINDOW_BYTES)) as listener:
        for _ in range(size - 1 - rank):
            endpoint = listener.accept(PATIENCE_S)
            assert endpoint is not None, "another rank did not connect"
            found[int(str(endpoint.peer.info["rank"]))] = endpoint
    return found


def connected(url: str, rank: int) -> Endpoint:
    for _ in retries():
        try:
            return connect(url, key=KEY, info={"rank": rank}, window_bytes=WINDOW_BYTES)
        except TransportError:
            continue
    raise AssertionError(f"no rank listens at {url}")


def retries() -> Iterator[None]:
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        yield
        time.sleep(0.02)


def gloo(folder: str, rank: int, size: int) -> CudaExchange:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    assert dist.group.WORLD is not None
    return CudaExchange(dist.group.WORLD, torch.device("cpu"), max(ROWS), ROW_BYTES)


def table(readings: Readings, size: int) -> Table:
    title = f"us, median (lowest to highest round): {size} ranks, {COLUMNS} columns of fp32"
    made = Table(title=title, title_justify="left")
    names = ("arena", "shm", "gloo")
    for name in ("", *names, "gloo / arena"):
        made.add_column(name, justify="right" if name else "left")
    for what in ("barrier", *(f"{rows} rows" for rows in ROWS)):
        pairs = zip(readings["gloo", what], readings["arena", what], strict=True)
        ratio = statistics.median(one / other for one, other in pairs)
        cells = [_spread(readings.get((name, what))) for name in names]
        made.add_row(what, *cells, f"{ratio:.1f}x")
    return made


def _spread(values: list[float] | None) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):.1f} ({min(values):.1f}-{max(values):.1f})"


if __name__ == "__main__":
    main()
