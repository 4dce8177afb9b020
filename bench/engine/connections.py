"""Measures the cost of many and of hostile connections.

The server runs in a separate process with an engine whose steps take 10 ms and compute nothing, so
only HTTP is measured. There are four measurements:

idle       connections that send nothing: growth of resident memory, and latency of /health
storm      connections that are made at once: seconds until the last is made, and until the last is
           answered
readers    streams whose clients do not read, beside streams whose clients do: the time between
           tokens of the latter, alone and beside the former in turn, as medians over the rounds
catalogue  hostile requests of every kind: the lag of the server's event loop

Run: python -m bench.engine.connections [--smoke] [idle storm readers catalogue]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gzip
import json
import os
import re
import resource
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import uvloop
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

STEP_S = 0.01
LONG_NAME = "m" * 500  # is in every event, so that a stalled stream fills the buffers sooner
HOST = "127.0.0.1"
GET = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"
LAG = "mergestep:event_loop_lag_seconds_bucket"
TARGETS = {
    "idle_growth_mb": 60.0,
    "idle_health_p99_ms": 10.0,
    "storm_connected_s": 1.0,
    "readers_change_percent": 10.0,
    "catalogue_lag_p999_ms": 20.0,
}


class Sizes(NamedTuple):
    """Sizes of the measurements. The storm makes num_connected connections. In each of `rounds`
    rounds num_readers clients do not read and num_healthy clients do."""

    num_idle: int = 10_000
    num_connected: int = 3_000
    num_readers: int = 1_000
    num_healthy: int = 16
    rounds: int = 5
    catalogue_s: float = 30.0


SMOKE = Sizes(200, 100, 20, 4, 1, 1.0)


def serve() -> None:
    """Runs the server of the measurements until standard input ends."""
    from bench.common.instant import InstantRunner, load_instant
    from serve import Engine
    from serve.http import HttpServer, HttpSettings

    def runner(kv: Any) -> InstantRunner:
        instant = InstantRunner(kv, lambda sequence: 97 + len(sequence.token_ids) % 26)
        instant.reset(STEP_S)
        return instant

    load = functools.partial(load_instant, make_runner=runner, token_bytes=64)
    settings = HttpSettings(port=0, write_timeout_s=300, send_buffer_bytes=16 << 10)

    async def live() -> None:
        engine = Engine(
            load=load, max_num_seqs=1100, served_model_name=LONG_NAME, max_model_len=1024
        )
        async with HttpServer(engine, settings) as server:
            print(server.url, flush=True)
            await asyncio.to_thread(sys.stdin.read)

    _raise_file_limit()
    uvloop.run(live())


class Server(NamedTuple):
    """The port and the process id of a running server."""

    port: int
    pid: int

    @property
    def rss_mb(self) -> float:
        status = Path(f"/proc/{self.pid}/status").read_text()
        (kib,) = re.findall(r"^VmRSS:\s+(\d+) kB", status, re.M)
        return int(kib) / 1024


@contextmanager
def server() -> Iterator[Server]:
    """Runs the server of the measurements in a new process and yields its address."""
    command = [sys.executable, "-m", "bench.engine.connections", "--serve"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdin is not None and process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the server did not start")
        yield Server(int(line.strip().rpartition(":")[2]), process.pid)
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.communicate("", timeout=20)


def _raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connect_all(port: int, number: int) -> tuple[list[socket.socket], float]:
    """Opens connections at once. Returns them and the seconds until the last is made."""
    poll, waiting = select.epoll(), {}
    began_s = time.perf_counter()
    for _ in range(number):
        connection = socket.socket()
        connection.setblocking(False)
        connection.connect_ex((HOST, port))
        poll.register(connection, select.EPOLLOUT)
        waiting[connection.fileno()] = connection
    sockets = list(waiting.values())
    while waiting:
        for file, _ in poll.poll(10):
            poll.unregister(file)
            del waiting[file]
    seconds = time.perf_counter() - began_s
    poll.close()
    return sockets, seconds


async def ask(port: int, data: bytes) -> tuple[int, float]:
    """Sends a request. Returns its status, 0 if the server closes without one, and the seconds."""
    began_s = time.perf_counter()
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        writer.write(data)
        line = await reader.readline()
    except ConnectionError:
        line = b""
    finally:
        writer.close()
    return int(line.split()[1]) if line else 0, time.perf_counter() - began_s


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def idle(target: Server, sizes: Sizes) -> dict[str, float]:
    """Opens idle connections. Returns the growth of memory and the latency of /health."""
    for _ in range(50):
        await ask(target.port, GET % b"/health")
    before = target.rss_mb
    sockets: list[socket.socket] = []
    while len(sockets) < sizes.num_idle:
        more, _ = connect_all(target.port, min(1000, sizes.num_idle - len(sockets)))
        sockets += more
        await ask(target.port, GET % b"/health")
    seconds = []
    for _ in range(500):
        status, took_s = await ask(target.port, GET % b"/health")
        assert status == 200
        seconds.append(took_s)
    growth = target.rss_mb - before
    for connection in sockets:
        connection.close()
    return {
        "idle_growth_mb": growth,
        "idle_health_p50_ms": 1e3 * statistics.median(seconds),
        "idle_health_p99_ms": 1e3 * percentile(seconds, 0.99),
    }


async def storm(target: Server, sizes: Sizes) -> dict[str, float]:
    """Opens connections at once and sends a request on each. Returns the seconds of both."""
    began_s = time.perf_counter()
    sockets, connected_s = connect_all(target.port, sizes.num_connected)
    loop = asyncio.get_running_loop()

    async def answered(connection: socket.socket) -> None:
        await loop.sock_sendall(connection, GET % b"/health")
        assert (await loop.sock_recv(connection, 4096)).startswith(b"HTTP/1.1 200")

    await asyncio.gather(*map(answered, sockets))
    total_s = time.perf_counter() - began_s
    for connection in sockets:
        connection.close()
    return {"storm_connected_s": connected_s, "storm_answered_s": total_s}


def completion(max_tokens: int) -> bytes:
    body = {"model": LONG_NAME, "prompt": "Hi", "max_tokens": max_tokens, "stream": True}
    return post(b"/v1/completions", json.dumps(body | {"ignore_eos": True}).encode())


def post(path: bytes, body: bytes, *lines: bytes) -> bytes:
    head = [b"POST " + path + b" HTTP/1.1", b"Host: localhost", b"Content-Type: application/json"]
    head += [b"Content-Length: %d" % len(body), *lines, b"", b""]
    return b"\r\n".join(head) + body


async def gaps_of_stream(port: int, max_tokens: int) -> list[float]:
    """Returns the seconds between the pieces of a stream."""
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(completion(max_tokens))
    await reader.readuntil(b"\r\n\r\n")
    gaps, last_s = [], time.perf_counter()
    while data := await reader.read(65536):
        now_s = time.perf_counter()
        gaps.append(now_s - last_s)
        last_s = now_s
        if b"[DONE]" in data:
            break
    writer.close()
    return gaps


async def healthy_p99_ms(port: int, sizes: Sizes) -> float:
    streams = (gaps_of_stream(port, 200) for _ in range(sizes.num_healthy))
    return 1e3 * percentile([gap for gaps in await asyncio.gather(*streams) for gap in gaps], 0.99)


@asynccontextmanager
async def stalled_readers(port: int, number: int) -> AsyncIterator[None]:
    """Opens streams that nothing reads and waits until the server has computed their answers."""
    loop = asyncio.get_running_loop()
    sockets = []
    for _ in range(number):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.setblocking(False)
        await loop.sock_connect(connection, (HOST, port))
        await loop.sock_sendall(connection, completion(180))
        sockets.append(connection)
    while await gauge(port, "mergestep:requests_unfinished"):
        await asyncio.sleep(0.2)
    await asyncio.sleep(0.5)
    yield
    for connection in sockets:
        connection.close()
    await asyncio.sleep(1)


async def readers(target: Server, sizes: Sizes) -> dict[str, float]:
    """Returns the p99 of the time between tokens without and with stalled readers."""
    alone, beside = [], []
    await healthy_p99_ms(target.port, sizes)
    for _ in range(sizes.rounds):
        alone.append(await healthy_p99_ms(target.port, sizes))
        async with stalled_readers(target.port, sizes.num_readers):
            beside.append(await healthy_p99_ms(target.port, sizes))
    before, after = statistics.median(alone), statistics.median(beside)
    return {
        "readers_alone_p99_ms": before,
        "readers_beside_p99_ms": after,
        "readers_change_percent": 100 * (after / before - 1),
    }


def catalogue() -> dict[str, bytes]:
    """Returns hostile requests by name."""
    chat, completions = b"/v1/chat/completions", b"/v1/completions"
    name = json.dumps(LONG_NAME).encode()
    prompt = b"a b " * 1_800_000
    messages = b",".join([b'{"role":"user","content":"x"}'] * 8000)
    chunked = post(chat, b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    return {
        "100 MB body": post(chat, b"").replace(b"Length: 0", b"Length: 100000000") + b" " * 500_000,
        "1 MB JSON": post(chat, b'{"model": "x", "messages": [' + b"{}," * 350_000 + b"{}]}"),
        "7 MB of numbers": post(completions, b'{"prompt": [' + b"1," * 3_500_000 + b"1]}"),
        "7 MB prompt": post(completions, b'{"model": %s, "prompt": "%s"}' % (name, prompt)),
        "10 MB prompt": post(completions, b'{"prompt": "%s"}' % (b"ab" * 5_000_000)),
        "deep JSON": post(chat, b"[" * 200_000),
        "deep object": post(chat, b'{"a":' * 100_000),
        "many keys": post(chat, b"{%s}" % b",".join(b'"k%d":1' % i for i in range(100_000))),
        "many messages": post(chat, b'{"model": "x", "messages": [%s]}' % messages),
        "escapes": post(chat, b'{"a": "' + b"\\u0041" * 150_000 + b'"}'),
        "gzip bomb": post(chat, gzip.compress(bytes(20 << 20)), b"Content-Encoding: gzip"),
        "chunks of a byte": chunked + b"1\r\n \r\n" * 100_000 + b"0\r\n\r\n",
        "chunk extension": chunked + b"1;" + b"y" * 100_000,
        "1 000 headers": GET.replace(b"\r\n\r\n", b"\r\n" + b"X-A: b\r\n" * 1000 + b"\r\n"),
        "pipelined": GET % b"/nowhere" * 2000,
        "nonsense": bytes(range(256)) * 64,
        "bad key": post(chat, b"{}", b"Authorization: Bearer " + b"k" * 7000),
    }


async def hostile(target: Server, sizes: Sizes) -> dict[str, float]:
    """Sends all hostile requests for catalogue_s seconds. Returns the lag of the event loop and the
    worst latency of /health."""
    requests = catalogue()
    before, end_s = await lag_buckets(target.port), time.monotonic() + sizes.catalogue_s
    worst_ms: dict[str, float] = {}

    async def attack(names: list[str]) -> None:
        while time.monotonic() < end_s:
            for name in names:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(10):
                        status, _ = await ask(target.port, requests[name])
                        assert status in (0, 200) or 400 <= status < 500, (name, status)

    async def probe() -> None:
        while time.monotonic() < end_s:
            _, took_s = await ask(target.port, GET % b"/health")
            worst_ms["health"] = max(worst_ms.get("health", 0.0), 1e3 * took_s)
            await asyncio.sleep(0.02)

    names = list(requests)
    await asyncio.gather(attack(names[::2]), attack(names[1::2]), probe())
    after = await lag_buckets(target.port)
    counts = {bound: after[bound] - before.get(bound, 0.0) for bound in after}
    total = counts[float("inf")]
    p999_s = min(bound for bound, count in counts.items() if count >= 0.999 * total)
    return {
        "catalogue_lag_p999_ms": 1e3 * p999_s,
        "catalogue_lag_samples": total,
        "catalogue_late_20_ms": total - counts[0.02],
        "catalogue_health_worst_ms": worst_ms["health"],
    }


async def metrics(port: int) -> str:
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") % b"/metrics")
    text = (await reader.read()).partition(b"\r\n\r\n")[2].decode()
    writer.close()
    return text


async def lag_buckets(port: int) -> dict[float, float]:
    """Returns the cumulative counts of the event loop's lag by upper bound in seconds."""
    families = text_string_to_metric_families(await metrics(port))
    return {float(s.labels["le"]): s.value for f in families for s in f.samples if s.name == LAG}


async def gauge(port: int, name: str) -> float:
    families = text_string_to_metric_families(await metrics(port))
    return next(s.value for f in families for s in f.samples if s.name == name)


MEASUREMENTS: dict[str, Callable[[Server, Sizes], Any]] = {
    "idle": idle,
    "storm": storm,
    "readers": readers,
    "catalogue": hostile,
}


def report(results: dict[str, float]) -> None:
    table = Table("figure", "measured", "target")
    for name, value in results.items():
        target = TARGETS.get(name)
        table.add_row(name, f"{value:.2f}", "" if target is None else f"<= {target:g}")
    Console().print(table)
    print(json.dumps(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("which", nargs="*", choices=[*MEASUREMENTS, []], default=[])
    parser.add_argument("--smoke", action="store_true", help="small sizes, a few seconds")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    _raise_file_limit()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    results: dict[str, float] = {}
    for name in options.which or MEASUREMENTS:
        with server() as target:
            measurement = MEASUREMENTS[name](target, SMOKE if options.smoke else Sizes())
            results |= uvloop.run(measurement)
    report(results)


if __name__ == "__main__":
    main()
