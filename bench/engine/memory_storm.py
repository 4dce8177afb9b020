"""`python -m bench.engine.memory_storm`: calls whose answers are far larger than their bodies.

It starts a server process and sends each kind of call from many clients at once. Meanwhile another
process asks /health every 20 ms and samples the resident memory of the server and of its child
processes, of which one encodes large texts. A kind fails if the server's memory is more than 100 MB
above where it began once the storm has ended, or that of the child processes more than 64 MB after
their idle time; if /health took more than 50 ms, if an answer is cut off or has an unexpected
status, or if memory is still charged at the end. The model is the embedded one. Texts that are far
too long for it are refused before they are tokenized, so that some kinds go to a second server,
whose copy of the model has a context of 700,000 tokens.

A line has the server's memory before, at the peak and after, and the peak of the child processes'.
The clients share the machine with the server; "late" is the worst delay of the wake-ups of the
process that asks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from http.client import HTTPException
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import tables
from bench.common.checkpoints import with_context
from bench.common.child_processes import children_bytes
from bench.engine.storm_calls import JSON_TYPE, KINDS, Server
from serve.errors import ConfigError, MergestepError
from serve.machine import process_bytes
from serve.text.large_texts import IDLE_S

MAX_GROWTH_BYTES, MAX_HEALTH_S = 100e6, 0.05
# the one for chat templates keeps 45 MB of its heap; one that has encoded a large text has more
MAX_CHILD_GROWTH_BYTES = 64e6
CLIENTS = 32
_SAMPLE_S = 0.02
LONG_CONTEXT = 700_000  # tokens; the longest piece has 13 bytes: room for texts of 8 MB
_SETTLE_S, _SETTLE_TRIES = 0.25, 20
_CHILD_SETTLE_S = IDLE_S + 2.0
_TRIM_S = 1.0  # the server gives memory back half a second after large work
_READ_BYTES = 1 << 16
_URL = re.compile(r"http://([0-9.]+):(\d+)")
_CHARGED = re.compile(rb"^mergestep:charged_bytes\{[^}]*\} ([0-9.e+]+)$", re.M)


@dataclass(slots=True)
class Storm:
    """The figures of one kind of call. began: bytes of the server before the first storm. before,
    peak, after: its bytes before, during and after this one; child_*: those of its child processes.
    statuses: answers by status; 0 is no answer, or one that was cut off. charged: bytes that the
    server still counts as in use after the storm."""

    kind: str
    began: int = 0
    before: int = 0
    peak: int = 0
    after: int = 0
    child_before: int = 0
    child_peak: int = 0
    child_after: int = 0
    health_s: float = 0.0
    late_s: float = 0.0
    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    charged: float = 0.0

    def text(self) -> str:
        sizes = [f"{size / 1e6:.0f}" for size in (self.before, self.peak, self.after)]
        answers = ", ".join(f"{count} x {status}" for status, count in self.statuses.items())
        return (
            f"{self.kind}: {' -> '.join(sizes)} MB, child processes at most"
            f" {self.child_peak / 1e6:.0f} MB, /health {1e3 * self.health_s:.0f} ms (asked"
            f" {1e3 * self.late_s:.0f} ms late), {answers} in {self.seconds:.1f} s"
        )

    def figures(self) -> dict[str, Any]:
        """Returns the figures by name, for JSON."""
        return asdict(self) | {"statuses": dict(self.statuses)}  # asdict counts a Counter's items

    def faults(self) -> list[str]:
        found = []
        growth = self.after - min(self.began, self.before)
        if growth > MAX_GROWTH_BYTES:
            found.append(f"memory is {growth / 1e6:.0f} MB above where it began")
        growth = self.child_after - self.child_before
        if growth > MAX_CHILD_GROWTH_BYTES:
            found.append(f"child processes are {growth / 1e6:.0f} MB above where they began")
        if self.health_s > MAX_HEALTH_S:
            found.append(f"/health took {1e3 * self.health_s:.0f} ms")
        expected = KINDS[self.kind].status
        if others := set(self.statuses) - {expected, 429}:
            found.append(f"answers have the status {', '.join(map(str, sorted(others)))}")
        if not self.statuses[expected]:
            found.append(f"no answer has the status {expected}")
        if self.charged:
            found.append(f"{self.charged:.0f} bytes are still charged")
        return found


@contextmanager
def server_process(options: Sequence[str], context: int | None = None) -> Iterator[Server]:
    """Starts `serve run`; options are more of its own. context: tokens, if not the model's. Raises
    MergestepError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        model = [str(with_context(Path(folder), context))] if context else []
        with _process([*model, *options]) as server:
            yield server


@contextmanager
def _process(options: Sequence[str]) -> Iterator[Server]:
    command = [sys.executable, "-m", "serve", "run", "--port", "0", "--log-level", "warning"]
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := _URL.search(line):
                server = Server(process.pid, found[1], int(found[2]), "", 0)
                (model,) = json.loads(server.get("/v1/models"))["data"]
                name, length = model["id"], model["max_model_len"]
                yield Server(process.pid, found[1], int(found[2]), name, length)
                return
        raise MergestepError("the server did not start")
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextmanager
def _watcher(server: Server) -> Iterator[Connection]:
    """Starts the process that watches a server."""
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_watch_storms, args=(server, theirs))
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join()


class _Watched(NamedTuple):
    """The peaks of the server and of its child processes, the worst latency, and the worst delay of
    the watcher's own wake-ups."""

    peak: int
    child_peak: int
    health_s: float
    late_s: float


def _watch_storms(server: Server, pipe: Connection) -> None:
    """Watches from each message to the next one, and sends the figures, or the error if the server
    does not answer. It sends a message when it begins, too."""
    with contextlib.suppress(EOFError):
        while True:
            pipe.recv()
            pipe.send("begin")
            found: _Watched | Exception
            try:
                found = _watch(server, pipe)
            except (OSError, HTTPException) as error:
                found = error
            pipe.recv()
            pipe.send(found)


def _watch(server: Server, pipe: Connection) -> _Watched:
    """Asks /health and samples memory until the pipe has a message. Raises OSError or HTTPException
    if the server does not answer."""
    connection = server.connect()
    peak, child_peak, health_s, late_s = 0, 0, 0.0, 0.0
    due_s = time.perf_counter()
    while not pipe.poll():
        peak = max(peak, process_bytes(server.pid))
        child_peak = max(child_peak, children_bytes(server.pid))
        began_s = time.perf_counter()
        connection.request("GET", "/health")
        answer = connection.getresponse()
        answer.read()
        if answer.status != 200:
            raise HTTPException(f"/health was answered with {answer.status}")
        health_s = max(health_s, time.perf_counter() - began_s)
        due_s = max(due_s + _SAMPLE_S, time.perf_counter())
        time.sleep(max(0.0, due_s - time.perf_counter()))
        late_s = max(late_s, time.perf_counter() - due_s)
    connection.close()
    return _Watched(peak, child_peak, health_s, late_s)


def _post(server: Server, path: str, body: bytes) -> int:
    """Returns the answer's status; 0 if there is none, or if it is cut off."""
    connection = server.connect()
    try:
        connection.request("POST", path, body, JSON_TYPE)
        answer = connection.getresponse()
        while answer.read(_READ_BYTES):
            pass
        return 0 if answer.length else answer.status  # length: bytes that did not come
    except (OSError, HTTPException):
        return 0
    finally:
        connection.close()


@contextmanager
def _answering(server: Server) -> Iterator[None]:
    """Raises MergestepError where the server does not answer."""
    try:
        yield
    except (OSError, HTTPException) as error:
        problem = "no longer answers" if process_bytes(server.pid) else "has ended"
        raise MergestepError(f"the server {problem}: {error}") from error


def run_storms(server: Server, kinds: Sequence[str], clients: int, scale: float) -> Iterator[Storm]:
    """Yields the storms of the kinds, each of one body from all clients at once. scale: of its
    size. Each begins where the one before has ended. Raises MergestepError if the server ends."""
    with _answering(server), _watcher(server) as pipe:
        bodies = {
            kind: json.dumps(KINDS[kind].body(server, scale) | (KINDS[kind].more or {})).encode()
            for kind in dict.fromkeys(kinds)
        }
        began, child_size = _settled(server)
        size = began
        for kind in kinds:
            storm = Storm(kind, began=began, before=size, child_before=child_size)
            _run(storm, server, bodies[kind], clients, pipe)
            size, child_size = _settled(
                server,
                min(began, size) + MAX_GROWTH_BYTES,
                child_size + MAX_CHILD_GROWTH_BYTES,
            )
            storm.after, storm.child_after = size, child_size
            charged = _CHARGED.search(server.get("/metrics"))
            storm.charged = float(charged[1]) if charged else 0.0
            yield storm


def _run(storm: Storm, server: Server, body: bytes, clients: int, pipe: Connection) -> None:
    pipe.send("begin")
    pipe.recv()
    path = KINDS[storm.kind].path
    began_s = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        storm.statuses.update(pool.map(lambda _: _post(server, path, body), range(clients)))
    storm.seconds = time.perf_counter() - began_s
    pipe.send("end")
    found = pipe.recv()
    if isinstance(found, Exception):
        raise found
    storm.peak, storm.child_peak, storm.health_s, storm.late_s = found


def _settled(server: Server, aim: float = math.inf, child_aim: float = math.inf) -> tuple[int, int]:
    """Returns the resident memory of the server once it no longer falls, and of its child
    processes. Waits longer while they exceed their aims."""
    until_s = time.monotonic() + _CHILD_SETTLE_S
    time.sleep(_TRIM_S)
    size = process_bytes(server.pid)
    for _ in range(_SETTLE_TRIES):
        time.sleep(_SETTLE_S)
        before, size = size, process_bytes(server.pid)
        if before <= size <= aim:
            break
    while (child_size := children_bytes(server.pid)) > child_aim and time.monotonic() < until_s:
        time.sleep(_SETTLE_S)
    return size, child_size


def memory_storm(
    kinds: Sequence[str] = (),
    *,
    clients: int = CLIENTS,
    scale: float = 1.0,
    options: Sequence[str] = (),
    json_file: Path | None = None,
) -> list[Storm]:
    """Runs storms of the kinds (by default all), prints their figures and returns them."""
    unknown = set(kinds) - set(KINDS)
    if unknown:
        raise ConfigError(f"unknown kinds: {', '.join(unknown)}; there are {', '.join(KINDS)}")
    tables.check_file(json_file)
    head = tables.Head.now("memory storms")
    console = tables.console()
    console.print(str(head), highlight=False, soft_wrap=True)
    storms = []
    for is_long in (False, True):
        chosen = [kind for kind in kinds or KINDS if KINDS[kind].is_long is is_long]
        if not chosen:
            continue
        context = int(LONG_CONTEXT * scale) if is_long else None
        with server_process(options, context) as server:
            for storm in run_storms(server, chosen, clients, scale):
                storms.append(storm)
                console.print(storm.text(), highlight=False, soft_wrap=True)
                for fault in storm.faults():
                    console.print(f"  {fault}", style="red")
                # after each, so that those before a crash are kept
                tables.write(json_file, head, {"storms": [each.figures() for each in storms]})
    return storms


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"some of: {', '.join(KINDS)}")
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--scale", type=float, default=1.0, help="the share of the bodies' sizes")
    parser.add_argument("--json", type=Path, help="a file for the figures")
    parser.add_argument("--option", action="append", default=[], help="an option of `serve run`")
    args = parser.parse_args()
    try:
        storms = memory_storm(
            args.kinds,
            clients=args.clients,
            scale=args.scale,
            options=args.option,
            json_file=args.json,
        )
    except MergestepError as error:
        sys.exit(f"error: {error}")
    sys.exit(1 if any(storm.faults() for storm in storms) else 0)


if __name__ == "__main__":
    main()
