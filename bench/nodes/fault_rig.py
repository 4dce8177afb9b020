"""Real processes and links for bench/nodes/node_faults.py: memory nodes, each in a network
namespace, a proxy that can corrupt or reset connections, and an engine that reports what its
clients receive."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.common.namespaces import Site

START_S = 30.0
_PORT = 7000


class Node:
    """A `serve node` process that listens over TCP in the namespace of its site, or over shm if
    site is None."""

    def __init__(self, number: int, folder: Path, key_file: Path, site: Site | None) -> None:
        self.number = number
        self.site = site
        self.url = (
            f"shm://{folder}/node{number}.sock" if site is None else f"tcp://{site.address}:{_PORT}"
        )
        self._key_file = key_file
        self._log = (folder / f"node{number}.log").open("a")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "serve", "node", self.url, "--threads", "1"]
        command += ["--kv-cache-bytes", "32MiB", "--drain-s", "3"]
        command += ["--memory-node-key-file", str(self._key_file)]
        # the ends see different addresses: a relay with a loopback address is between them
        command += ["--memory-node-encryption", "on"]
        if self.site is not None:
            command = ["ip", "netns", "exec", self.site.space, *command]
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL
        )

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self) -> None:
        assert self.process is not None
        self.process.wait(START_S)

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait(START_S)
        self._log.close()


class Proxy:
    """Forwards TCP to a node. It can reset all connections, or change a byte on one of them."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        self._flip: tuple[int, int] | None = None  # direction, position in the data
        threading.Thread(target=self._accept, daemon=True).start()

    def reset(self) -> None:
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for sock in pair:
                with contextlib.suppress(OSError):
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    sock.shutdown(socket.SHUT_RD)  # wakes the reader, which closes both ends

    def corrupt(self, direction: int, position: int) -> None:
        """Changes one byte of the next large piece of data. direction: 0 to the node, 1 from it.
        position: of the byte, modulo the length of the piece."""
        self._flip = direction, position

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection((self._target, _PORT), 1.0)
            except OSError:
                near.close()
                continue
            for sock in (near, far):
                sock.settimeout(None)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pairs.append((near, far))
            for ends in ((0, near, far), (1, far, near)):
                threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, direction: int, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                flip = self._flip
                if flip is not None and flip[0] == direction and len(data) > 200:
                    self._flip = None
                    changed = bytearray(data)
                    changed[flip[1] % len(data)] ^= random.randrange(1, 256)
                    data = bytes(changed)
                to.sendall(data)
        for sock in (source, to):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        source.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()


class EngineProcess:
    """A process of bench/nodes/fault_engine.py and the events that it prints."""

    def __init__(self, settings: dict[str, Any], log: Path) -> None:
        self._log = log.open("a")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.nodes.fault_engine", json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        self.events: list[dict[str, Any]] = []
        self.pages = 0
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            event = json.loads(line)
            if event["kind"] == "status":
                self.pages = event["pages"]
            else:
                self.events.append(event)

    def has_answered(self) -> bool:
        return self.pages > 0 and bool(self.events_of("request"))

    def events_of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in list(self.events) if event["kind"] == kind]

    def first_log_s(self, words: str, after_s: float) -> float | None:
        """Returns when a log line with these words first came at or after a time, or None."""
        found = [
            e["at"] for e in self.events_of("log") if e["at"] >= after_s and words in e["text"]
        ]
        return min(found, default=None)

    def wait_for(self, condition: Callable[[], object], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if self._process.poll() is not None or time.monotonic() > deadline:
                status = self._process.poll()
                if status is None:
                    self._process.send_signal(signal.SIGUSR1)  # writes its stacks to the log
                    time.sleep(0.5)
                raise RuntimeError(f"the engine had no {what} in {seconds:.3g} s, {status=}")
            time.sleep(0.01)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Ends the engine, which answers its unfinished requests first."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._thread.join(5)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._log.close()
