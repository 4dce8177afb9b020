"""Starts memory nodes as processes on this machine, for measurements."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serve.machine import free_port

KEY = b"of no use to anybody else"


@contextmanager
def memory_nodes(
    count: int,
    folder: Path,
    *,
    scheme: str = "shm",
    capacity: str = "1G",
    threads: int = 1,
) -> Iterator[list[str]]:
    """Yields the URLs of nodes that are ready, and kills their processes when the block ends. The
    nodes' key is in folder/key."""
    with node_processes(count, folder, scheme=scheme, capacity=capacity, threads=threads) as found:
        yield list(found)


@contextmanager
def node_processes(
    count: int,
    folder: Path,
    *,
    scheme: str = "shm",
    capacity: str = "1G",
    threads: int = 1,
) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """As memory_nodes, but yields the nodes' processes by URL."""
    key = folder / "key"
    key.write_bytes(KEY)
    key.chmod(0o600)
    urls = [_url(scheme, folder, number) for number in range(count)]
    processes = [_start(url, key, capacity, threads) for url in urls]
    try:
        for process in processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "memory node at" in line, line
        yield dict(zip(urls, processes, strict=True))
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _url(scheme: str, folder: Path, number: int) -> str:
    if scheme == "shm":
        return f"shm://{folder}/node{number}.sock"
    return f"{scheme}://127.0.0.1:{free_port()}"


def _start(url: str, key: Path, capacity: str, threads: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "serve", "node", url, "--kv-cache-bytes", capacity]
    command += ["--memory-node-key-file", str(key), "--threads", str(threads)]
    command += ["--log-level", "warning"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ})
