"""A second engine in a process of its own, from which the first one pulls K/V."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from memory.prefix.peer_stats import PeersStats

_CONNECT_S = 30.0


@contextmanager
def second_engine(
    run: Callable[..., None],
    settings: Mapping[str, Any],
    *more: object,
    transport: str = "tcp",
) -> Iterator[tuple[Connection, Path]]:
    """Runs run(settings, *more, pipe) in a process and yields this end of the pipe and the file of
    the key. The settings that `run` gets have the key and an address where it is pulled from, by
    this transport, tcp or shm."""
    with tempfile.TemporaryDirectory(prefix="mergestep-peers-") as folder:
        key = Path(folder) / "key"
        key.write_text("a key for a measurement")
        key.chmod(0o600)
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        listen = {
            "tcp": "tcp://127.0.0.1:0",
            "shm": f"shm://{folder}/kv.sock",
        }[transport]
        shared = {**settings, "kv_peer_key_file": key, "kv_listen": listen}
        process = context.Process(target=run, args=(shared, *more, theirs), daemon=True)
        process.start()
        theirs.close()  # so that its end is noticed here
        try:
            yield ours, key
        finally:
            ours.close()  # which ends it, if it has not been told to end
            process.join()


def wait_until_connected(stats: Callable[[], PeersStats | None]) -> None:
    """Waits until an engine is connected to all its peers. stats: EngineStats.kv_peers now."""
    end_s = time.monotonic() + _CONNECT_S
    while True:
        peers = stats()
        if peers is not None and all(pull.is_connected for pull in peers.pulls.values()):
            return
        assert time.monotonic() < end_s, "the engines do not connect"
        time.sleep(0.01)
