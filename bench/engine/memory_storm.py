"""`python -m bench.engine.memory_storm`: calls whose answers are far larger than their bodies.

It starts a server process and sends each kind of call from many clients at once. Meanwhile another
process asks /health every 20 ms and samples the server's resident memory. A kind fails if memory
is more than 100 MB above where it began once the storm has ended, if /health took more than 50 ms,
if an answer has an unexpected status, or if memory is still charged at the end.

A line has the memory before, at the peak and after. The clients share the machine with the server;
"late" is the worst delay of the wake-ups of the process that asks.
"""

from __future__ import annotations

import argparse
import http.client
import json
import multiprocessing
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from bench.common import tables
from serve.errors import ConfigError, MergestepError
from serve.machine import process_bytes

MAX_GROWTH_BYTES, MAX_HEALTH_S = 100e6, 0.05
CLIENTS = 32
_SAMPLE_S = 0.02
_SETTLE_S, _SETTLE_TRIES = 0.5, 10
_TRIM_S = 1.5  # the server gives memory back half a second after large work
_ANSWER_S = 300.0
_READ_BYTES = 1 << 16
_URL = re.compile(r"http://([0-9.]+):(\d+)")
_CHARGED = re.compile(rb"^mergestep:charged_bytes\{[^}]*\} ([0-9.e+]+)$", re.M)


@dataclass(frozen=True, slots=True)
class Server:
    pid: int
    host: str
    port: int
    model: str
    max_model_len: int

    def connect(self, timeout_s: float = _ANSWER_S) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=timeout_s)

    def get(self, path: str) -> bytes:
        connection = self.connect()
        try:
            connection.request("GET", path)
            return connection.getresponse().read()
        finally:
            connection.close()


@dataclass(slots=True)
class Storm:
    """The figures of one kind of call. statuses: answers by status. charged: bytes that the server
    still counts as in use after the storm."""

    kind: str
    before: int = 0
    peak: int = 0
    after: int = 0
    health_s: float = 0.0
    late_s: float = 0.0
    seconds: float = 0.0
    statuses: Counter[int] = field(default_factory=Counter)
    charged: float = 0.0

    def text(self) -> str:
        sizes = [f"{size / 1e6:.0f}" for size in (self.before, self.peak, self.after)]
        answers = ", ".join(f"{count} x {status}" for status, count in self.statuses.items())
        return (
            f"{self.kind}: {' -> '.join(sizes)} MB, /health {1e3 * self.health_s:.0f} ms (asked"
            f" {1e3 * self.late_s:.0f} ms late), {answers} in {self.seconds:.1f} s"
        )

    def faults(self) -> list[str]:
        found = []
        growth = self.after - self.before
        if growth > MAX_GROWTH_BYTES:
            found.append(f"memory is {growth / 1e6:.0f} MB above where it began")
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


Body = dict[str, Any]
DIGITS = "0123456789"


def _tokenize(server: Server, scale: float) -> Body:
    return {"prompt": DIGITS * int(1e5 * scale)}


def _detokenize(server: Server, scale: float) -> Body:
    return {"tokens": [300 + i % 500 for i in range(int(262_144 * scale))]}


def _chat(server: Server, scale: float) -> Body:
    """It fills half of the context, at one token for each digit."""
    text = DIGITS * (server.max_model_len // 20)
    return {"model": server.model, "messages": [{"role": "user", "content": text}]}


def _messages(server: Server, scale: float) -> Body:
    """They are too long for the context, which only their text shows."""
    roles = "user", "assistant"
    messages = [{"role": roles[i % 2], "content": DIGITS} for i in range(int(8000 * scale) | 1)]
    return {"model": server.model, "messages": messages}


def _items(server: Server, scale: float) -> Body:
    items = [{"role": "user", "content": DIGITS} for _ in range(int(8000 * scale))]
    return {"model": server.model, "input": items}


def _long_prompt(server: Server, scale: float) -> Body:
    """It has as many characters as a prompt may have, and far too many tokens."""
    return {"model": server.model, "prompt": DIGITS * int(8e5 * scale), "max_tokens": 1}


def _embeddings(server: Server, scale: float) -> Body:
    return {"model": server.model, "input": [f"text {i}" for i in range(int(120 * scale))]}


def _prompt_logprobs(server: Server, scale: float) -> Body:
    size = min(256, server.max_model_len // 2)
    count = max(1, int(250_000 * scale) // (size * 6))
    prompts = [[300 + i % 500 for i in range(size)]] * count
    body = {"prompt": prompts, "max_tokens": 1, "logprobs": 5, "echo": True}
    return {"model": server.model, **body}


def _logprobs(server: Server, scale: float) -> Body:
    body = {"n": max(1, int(128 * scale)), "logprobs": True, "top_logprobs": 20, "max_tokens": 64}
    messages = [{"role": "user", "content": "hello"}]
    return {"model": server.model, "messages": messages, **body}


class Kind(NamedTuple):
    """A kind of call. status: that of an answer that is not refused for lack of memory."""

    path: str
    body: Callable[[Server, float], Body]
    more: Body | None = None
    status: int = 200


_STRINGS = {"return_token_strs": True}
KINDS = {
    "tokenize": Kind("/tokenize", _tokenize),
    "token strings": Kind("/tokenize", _tokenize, _STRINGS),
    "tokenize a chat": Kind("/tokenize", _chat, _STRINGS),
    "detokenize": Kind("/detokenize", _detokenize),
    "count tokens": Kind("/v1/messages/count_tokens", _chat),
    "count messages": Kind("/v1/messages/count_tokens", _messages, status=400),
    "count items": Kind("/v1/responses/input_tokens", _items, status=400),
    "long prompts": Kind("/v1/completions", _long_prompt, status=400),
    "embeddings": Kind("/v1/embeddings", _embeddings),
    "echo with logprobs": Kind("/v1/completions", _prompt_logprobs),
    "n with logprobs": Kind("/v1/chat/completions", _logprobs),
}


@contextmanager
def server_process(options: Sequence[str]) -> Iterator[Server]:
    """Starts `serve run`; options are more of its own. Raises MergestepError if it fails."""
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


def _watch(server: Server, pipe: Connection) -> None:
    """Asks /health and samples memory until the pipe has a message, then sends the peak, the worst
    latency and the worst delay of its own wake-ups. It sends a message when it begins, too."""
    connection = server.connect()
    pipe.send("begin")
    peak, health_s, late_s = 0, 0.0, 0.0
    due_s = time.perf_counter()
    while not pipe.poll():
        peak = max(peak, process_bytes(server.pid))
        began_s = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        health_s = max(health_s, time.perf_counter() - began_s)
        due_s = max(due_s + _SAMPLE_S, time.perf_counter())
        time.sleep(max(0.0, due_s - time.perf_counter()))
        late_s = max(late_s, time.perf_counter() - due_s)
    pipe.send((peak, health_s, late_s))


def _post(server: Server, path: str, body: bytes, statuses: Counter[int]) -> None:
    connection = server.connect()
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        while answer.read(_READ_BYTES):
            pass
        statuses[answer.status] += 1
    except OSError:
        statuses[0] += 1
    finally:
        connection.close()


def run_storm(server: Server, kind: str, clients: int, scale: float) -> Storm:
    """Sends one body from all clients at once. scale: of its size."""
    path, make, more, _ = KINDS[kind]
    body = json.dumps(make(server, scale) | (more or {})).encode()
    storm = Storm(kind)
    _post(server, path, body, Counter())  # threads and caches that stay are there before
    storm.before = _settled(server)
    ours, theirs = multiprocessing.Pipe()
    watcher = multiprocessing.get_context("spawn").Process(target=_watch, args=(server, theirs))
    watcher.start()
    ours.recv()
    threads = [
        threading.Thread(target=_post, args=(server, path, body, storm.statuses))
        for _ in range(clients)
    ]
    began_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    storm.seconds = time.perf_counter() - began_s
    ours.send("end")
    storm.peak, storm.health_s, storm.late_s = ours.recv()
    watcher.join()
    storm.after = _settled(server)
    charged = _CHARGED.search(server.get("/metrics"))
    storm.charged = float(charged[1]) if charged else 0.0
    return storm


def _settled(server: Server) -> int:
    """Returns the resident memory once it no longer falls."""
    time.sleep(_TRIM_S)
    size = process_bytes(server.pid)
    for _ in range(_SETTLE_TRIES):
        time.sleep(_SETTLE_S)
        before, size = size, process_bytes(server.pid)
        if size >= before:
            break
    return size


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
    with server_process(options) as server:
        for kind in kinds or KINDS:
            storm = run_storm(server, kind, clients, scale)
            storms.append(storm)
            console.print(storm.text(), highlight=False, soft_wrap=True)
            for fault in storm.faults():
                console.print(f"  {fault}", style="red")
    tables.write(json_file, head, {"storms": [asdict(storm) for storm in storms]})
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
