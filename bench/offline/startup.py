"""`serve bench startup`: times `serve run` in fresh processes from the spawn to the first token.

The first start packs the weights, unless an earlier one has kept them, and is given the time to
keep them. Before a warm start the model's files are in the page cache. Before a cold start the
system is asked to drop them (posix_fadvise), and the result is checked; files of Python and torch
are not touched. One more process measures the time of imports.
"""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import mmap
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from serve.errors import MergestepError
from serve.machine import free_port

_POLL_S = 0.002
_MAX_LINE_BYTES = 1 << 16
_PAGE = 4096
_MARKS = ("listening", "/health", "/ready", "first token")
_STAMP = re.compile(r"^\d{4}-\d\d-\d\d [\d:,.]+ (?:INFO|WARNING|DEBUG) +")
_PACKED, _WRITING, _KEPT = "packed weights", ": writing", " kept"  # in lines of the log
_FROM_FILE = re.compile(r"packed weights: .* (?:mapped|read) from (.*) in [\d.]+ s$")
_READ_BYTES, _NUM_READERS = 8 << 20, 4
_IMPORT = re.compile(r"import time:\s+(\d+) \|\s+\d+ \|\s+([\w.]+)")


@dataclass(slots=True)
class Start:
    """One start. at_s has the seconds since the spawn by mark; at "listening" the imports before it
    are done. rss_bytes is the resident memory when the server is ready. lines are those of the log
    with their seconds."""

    at_s: dict[str, float] = field(default_factory=dict)
    rss_bytes: int = 0
    lines: list[tuple[float, str]] = field(default_factory=list)

    @property
    def is_writing(self) -> bool:
        """Whether the log has the begin of the writing of packed weights, and not its end."""
        found = [line for _, line in self.lines if _PACKED in line]
        return any(_WRITING in line for line in found) and not any(_KEPT in line for line in found)

    @property
    def packed_file(self) -> Path | None:
        """The file of packed weights from which the server was started, as the log says."""
        found = [_FROM_FILE.search(line) for _, line in self.lines]
        return next((Path(match[1]) for match in found if match), None)


def start_once(
    model: str | None, options: list[str], *, limit_s: float, lets_write: bool = False
) -> Start:
    """Starts a server once. Raises MergestepError with its last lines if it exits or is not ready
    within limit_s. lets_write: lets it write its packed weights before it ends."""
    port = free_port()
    command = [sys.executable, "-m", "serve", "run", *([model] if model else [])]
    command += ["--port", str(port), "--log-level", "info", *options]
    start = Start()
    began = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    listener = threading.Thread(target=_listen, args=(process, began, start), daemon=True)
    listener.start()
    try:
        for mark, path in (("/health", "/health"), ("/ready", "/ready")):
            while _status(port, path) != 200:
                if process.poll() is not None or time.perf_counter() - began > limit_s:
                    listener.join(1.0)
                    last_lines = "\n".join(line for _, line in start.lines[-5:])
                    raise MergestepError(f"the server did not answer {path}:\n{last_lines}")
                time.sleep(_POLL_S)
            start.at_s[mark] = time.perf_counter() - began
        start.rss_bytes = _rss_bytes(process.pid)
        _first_token(port)
        start.at_s["first token"] = time.perf_counter() - began
        while lets_write and start.is_writing and time.perf_counter() - began < limit_s:
            time.sleep(_POLL_S)
    finally:
        process.terminate()
        process.wait()
        listener.join()
    listening = [at_s for at_s, line in start.lines if "listening on" in line]
    start.at_s["listening"] = listening[0] if listening else start.at_s["/health"]
    start.at_s = {mark: start.at_s[mark] for mark in _MARKS}
    return start


def _listen(process: subprocess.Popen[str], began: float, start: Start) -> None:
    assert process.stderr is not None
    with process.stderr as lines:
        for line in lines:
            text = _STAMP.sub("", line.rstrip())
            start.lines.append((time.perf_counter() - began, text))


def _status(port: int, path: str) -> int | None:
    """Returns the status of a GET, None if no server listens."""
    with _connection(port) as connection:
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except OSError:
            return None


def _first_token(port: int) -> None:
    with _connection(port, timeout_s=600.0) as connection:
        connection.request("GET", "/v1/models")
        name = json.loads(connection.getresponse().read())["data"][0]["id"]
        body = {"model": name, "prompt": [5, 6, 7], "max_tokens": 2, "ignore_eos": True}
        connection.request(
            "POST",
            "/v1/completions",
            json.dumps(body | {"stream": True}),
            {"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        line = response.readline(_MAX_LINE_BYTES)
        if response.status != 200 or not line.startswith(b"data: {"):
            raise MergestepError(f"no first token: {line[:200]!r}")


@contextmanager
def _connection(port: int, timeout_s: float = 5.0) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    try:
        yield connection
    finally:
        connection.close()


def _rss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


def disk_rate(file: Path) -> float:
    """Returns the bytes per second at which several threads read a file past the page cache."""
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_DIRECT", 0))
    size = os.fstat(descriptor).st_size // _READ_BYTES * _READ_BYTES
    buffers = [mmap.mmap(-1, _READ_BYTES) for _ in range(_NUM_READERS)]  # pages, as O_DIRECT wants
    for buffer in buffers:
        with contextlib.suppress(OSError):  # huge pages make few, large requests
            buffer.madvise(mmap.MADV_HUGEPAGE)
        buffer.write(bytes(_READ_BYTES))

    def read(reader: int) -> None:
        for at in range(reader * _READ_BYTES, size, _NUM_READERS * _READ_BYTES):
            os.preadv(descriptor, [buffers[reader]], at)

    began = time.perf_counter()
    try:
        with ThreadPoolExecutor(_NUM_READERS) as threads:
            list(threads.map(read, range(_NUM_READERS)))
    finally:
        os.close(descriptor)
    return size / (time.perf_counter() - began)


def drop_from_memory(folder: Path) -> bool:
    """Asks the system to drop a model's files, or one file, from the page cache. Returns False if
    they are still there or the system cannot tell."""
    files = [path for path in folder.rglob("*") if path.is_file()] or [folder]
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # dirty pages cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    largest = max(files, key=lambda path: path.stat().st_size)
    return not _is_in_memory(largest)


def _is_in_memory(path: Path) -> bool:
    """Returns whether the middle of the file is in memory; True if the system cannot tell."""
    descriptor = os.open(path, os.O_RDONLY)
    middle = path.stat().st_size // 2 // _PAGE * _PAGE
    try:
        os.preadv(descriptor, [bytearray(1)], middle, os.RWF_NOWAIT)
    except OSError as error:
        return error.errno != errno.EAGAIN
    finally:
        os.close(descriptor)
    return True


def import_seconds(most: int = 8) -> dict[str, float]:
    """Returns the import seconds of `serve run` by package, longest first; the packages after the
    first `most` are one entry. -X importtime measures them and adds some time itself."""
    code = "import gc; gc.disable(); import serve.cli.main, serve.cli.server_process"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], capture_output=True, text=True
    )
    taken: Counter[str] = Counter()
    for line in done.stderr.splitlines():
        if match := _IMPORT.match(line):
            taken[match[2].partition(".")[0]] += int(match[1])
    longest = taken.most_common(most)
    rest = sum(taken.values()) - sum(micros for _, micros in longest)
    return {name: micros / 1e6 for name, micros in longest} | {"the rest": rest / 1e6}


def measure(
    model: str | None,
    folder: Path,
    *,
    repeats: int,
    is_cold: bool,
    options: list[str],
    limit_s: float,
    advance: Callable[[str], None],
) -> tuple[dict[str, list[Start]], bool, list[float]]:
    """Returns the first start, and warm and cold ones, which alternate, by name; whether the
    model's files were dropped before all cold ones; and the disk's rates of reading the packed
    weights, in bytes per second, measured before cold starts, since a disk may have a cache."""
    # brings all files into memory
    first = start_once(model, options, limit_s=limit_s, lets_write=True)
    starts: dict[str, list[Start]] = {"first": [first], "warm": []}
    if is_cold:
        starts["cold"] = []
    was_dropped, rates = True, []
    for _ in range(repeats):
        for name, timed in list(starts.items())[1:]:
            advance(name)
            if name == "cold":
                was_dropped = drop_from_memory(folder) and was_dropped
                packed = starts["warm"][-1].packed_file
                if packed is not None:  # it may be elsewhere
                    was_dropped = drop_from_memory(packed) and was_dropped
                    rates.append(disk_rate(packed))
            timed.append(start_once(model, options, limit_s=limit_s))
    return starts, was_dropped, rates
