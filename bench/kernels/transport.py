"""How fast messages travel: python -m bench.kernels.transport [--quick] [--url URL ...].

It measures round trips of small messages and the one-way bandwidth of large ones between two
processes (two threads for inproc), for tcp without encryption and with it. For comparison it
measures copies within one process, and iperf3 over loopback if it is installed. Each round measures
all of them in turn.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.load.results.metrics import percentile
from transport import connect, listen
from transport.base import Endpoint, PeerLostError, Segment

KEY = b"bench.kernels.transport: between two ends on this machine"
ROUND_TRIPS = (64, 64 << 10)
MESSAGES = (64 << 10, 256 << 10, 1 << 20, 4 << 20)
IPERF_PORT = 5271
ENCRYPTED = "tcp encrypted"
# The first byte of a message says whether the peer sends it back, sends nothing, or sends an empty
# message.
_ECHO, DISCARD, CONFIRM = range(3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a few seconds, as a smoke test")
    parser.add_argument("--url", action="append", help="URL to listen on; may be repeated")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        url, encryption = options.serve
        answer(connect(url, key=KEY, encryption=encryption))
        return
    with tempfile.TemporaryDirectory() as folder:
        urls = options.url or ["inproc://bench", f"shm://{folder}/socket", "tcp://127.0.0.1:0"]
        readings = measure(urls, 1 if options.quick else options.rounds, options.quick)
    console = Console()
    console.print(trip_table(readings))
    console.print(bandwidth_table(readings))
    if any(name == ENCRYPTED for name, _ in readings):
        console.print(cost_table(readings))
    median = {f"{name} {what}": statistics.median(v) for (name, what), v in readings.items()}
    print(json.dumps({key: round(value, 3) for key, value in median.items()}))


Readings = dict[tuple[str, str], list[float]]


def measure(urls: list[str], rounds: int, quick: bool) -> Readings:
    """Returns one figure of each round, by (transport, measurement): microseconds of round trips
    and GB/s of messages."""
    readings: Readings = defaultdict(list)
    budget_s = 0.03 if quick else 0.4
    for _ in range(rounds):
        for name, url, encryption in kinds_of(urls):
            with answering(url, encryption) as endpoint:
                for size in ROUND_TRIPS:
                    times = round_trips(endpoint, size, budget_s)
                    readings[name, f"{size} B median"].append(percentile(times, 50))
                    readings[name, f"{size} B p99"].append(percentile(times, 99))
                for size in MESSAGES:
                    if size <= endpoint.max_message_bytes:
                        rate = bandwidth(endpoint, size, budget_s)
                        readings[name, f"{size} B one way"].append(rate)
        for size in MESSAGES:
            readings["copy", f"{size} B one way"].append(copies(size, budget_s))
        if not quick and (reference := iperf()) is not None:
            readings["iperf3", "stream"].append(reference)
    return readings


def kinds_of(urls: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yields each url with a name and its encryption, and tcp with both kinds."""
    for url in urls:
        name = url.partition(":")[0]
        yield name, url, "off"
        if name == "tcp":
            yield ENCRYPTED, url, "on"


# ---- two ends


@contextmanager
def answering(url: str, encryption: str) -> Iterator[Endpoint]:
    """Yields an endpoint whose peer runs answer(), and ends the peer."""
    listener = listen(url, key=KEY, encryption=encryption)
    if url.startswith("inproc:"):
        peer = threading.Thread(target=lambda: answer(connect(listener.url, key=KEY)))
        peer.start()
        wait: Callable[[], object] = peer.join
    else:
        command = [sys.executable, "-m", "bench.kernels.transport", "--serve"]
        command += [listener.url, encryption]
        wait = subprocess.Popen(command).wait
    try:
        endpoint = listener.accept(60.0)
        assert endpoint is not None, "the other process did not connect"
        yield endpoint
        endpoint.close()
    finally:
        listener.close()
        wait()


def answer(endpoint: Endpoint) -> None:
    """Answers messages until the peer closes."""
    with suppress(PeerLostError):
        while True:
            frame = endpoint.poll(10.0)
            if frame is None:
                continue
            kind = ctypes.c_uint8.from_address(frame.address).value
            if kind == _ECHO:
                endpoint.post([Segment(frame.address, 1, frame.num_bytes, 0)])
            elif kind == CONFIRM:
                endpoint.post([])
            endpoint.release(frame)
    endpoint.close()


def message(size: int, kind: int) -> tuple[np.ndarray, list[Segment]]:
    data = np.full(size, 7, np.uint8)
    data[0] = kind
    return data, [Segment(data.ctypes.data, 1, size, size)]


def receive(endpoint: Endpoint) -> None:
    frame = endpoint.poll(60.0)
    assert frame is not None, "no answer"
    endpoint.release(frame)


def round_trips(endpoint: Endpoint, size: int, budget_s: float) -> list[float]:
    """Returns the microseconds of each round trip but the first ones, which warm up."""
    _data, segments = message(size, _ECHO)
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while (began := time.perf_counter()) < end or len(times) < 20:
        endpoint.post(segments)
        receive(endpoint)
        times.append(1e6 * (time.perf_counter() - began))
    return times[len(times) // 10 :]


def bandwidth(endpoint: Endpoint, size: int, budget_s: float) -> float:
    """Returns the GB/s of messages in one direction, until the peer has confirmed the last one."""
    _data, segments = message(size, DISCARD)
    _last, final = message(size, CONFIRM)
    for _ in range(4):
        endpoint.post(segments)
    num_sent = 1
    began = time.perf_counter()
    while time.perf_counter() - began < budget_s:
        endpoint.post(segments, 60.0)
        num_sent += 1
    endpoint.post(final, 60.0)
    receive(endpoint)
    return 1e-9 * num_sent * size / (time.perf_counter() - began)


# ---- comparisons


def copies(size: int, budget_s: float) -> float:
    """Returns the GB/s of one core's copies into a buffer that is as large as a window."""
    source = np.full(size, 7, np.uint8)
    target = np.zeros((max(1, (4 << 20) // size), size), np.uint8)
    num_copied = 0
    began = time.perf_counter()
    while time.perf_counter() - began < budget_s / 4:
        target[num_copied % len(target)] = source
        num_copied += 1
    return 1e-9 * num_copied * size / (time.perf_counter() - began)


def iperf(seconds: int = 1) -> float | None:
    """Returns the GB/s of one stream over loopback, None where iperf3 is not installed."""
    if shutil.which("iperf3") is None:
        return None
    server = subprocess.Popen(
        ["iperf3", "-s", "-1", "-p", str(IPERF_PORT)], stdout=subprocess.DEVNULL
    )
    try:
        time.sleep(0.2)
        done = subprocess.run(
            ["iperf3", "-c", "127.0.0.1", "-p", str(IPERF_PORT), "-t", str(seconds), "-J"],
            capture_output=True,
            text=True,
            check=True,
        )
        return float(json.loads(done.stdout)["end"]["sum_received"]["bits_per_second"]) / 8e9
    finally:
        server.kill()
        server.wait()


# ---- tables


def trip_table(readings: Readings) -> Table:
    table = Table(title="round trip, us: median and p99", title_justify="left")
    table.add_column("transport")
    for size in ROUND_TRIPS:
        table.add_column(_bytes(size), justify="right")
    for name in dict.fromkeys(name for name, what in readings if what.endswith("median")):
        table.add_row(
            name,
            *(
                f"{statistics.median(readings[name, f'{size} B median']):.1f}"
                f" / {statistics.median(readings[name, f'{size} B p99']):.1f}"
                for size in ROUND_TRIPS
            ),
        )
    return table


def bandwidth_table(readings: Readings) -> Table:
    table = Table(title="one way, GB/s (lowest to highest round)", title_justify="left")
    table.add_column("")
    for size in MESSAGES:
        table.add_column(_bytes(size), justify="right")
    for name in dict.fromkeys(name for name, what in readings if what.endswith("one way")):
        rows = [readings.get((name, f"{size} B one way")) for size in MESSAGES]
        table.add_row(name, *(_spread(values) for values in rows))
    if ("iperf3", "stream") in readings:
        table.add_row("iperf3", _spread(readings["iperf3", "stream"]))
    return table


def cost_table(readings: Readings) -> Table:
    """What encryption costs tcp: the median ratio of two readings of one round."""
    table = Table(title="tcp: encrypted / plain, median (lowest to highest round)")
    table.add_column("")
    table.add_column("ratio", justify="right")
    for what in dict.fromkeys(what for name, what in readings if name == ENCRYPTED):
        plain, encrypted = readings["tcp", what], readings[ENCRYPTED, what]
        ratios = [there / here for here, there in zip(plain, encrypted, strict=True)]
        unit = "GB/s" if what.endswith("one way") else "time"
        table.add_row(f"{what}, {unit}", _spread(ratios))
    return table


def _spread(values: list[float] | None) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def _bytes(size: int) -> str:
    for unit, factor in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size // factor} {unit}"
    return f"{size} B"


if __name__ == "__main__":
    main()
