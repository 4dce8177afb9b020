"""Replicas that serve and pull packed weights, within a test."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from serve.models.packed_cache.in_memory import Found, PackedBytes
from serve.models.packed_cache.layout import CHUNK_BYTES, DATA_START, Index
from serve.weight_peers.link import WeightLink
from serve.weight_peers.pull import Pull
from serve.weight_peers.server import WINDOW_BYTES, OfferedWeights, WeightServer
from transport import listen

KEY = b"a secret of the replicas"
END = DATA_START + 2 * CHUNK_BYTES + 4096


@contextlib.contextmanager
def serving(
    url: str, index: Index, data: torch.Tensor, rate: int | None = None
) -> Iterator[WeightServer]:
    listener = listen(url, key=KEY, window_bytes=WINDOW_BYTES)
    server = WeightServer(
        listener, OfferedWeights(PackedBytes(Found(index, data)), "x", b"{}"), rate
    )
    try:
        yield server
    finally:
        server.close()


def connected(url: str) -> WeightLink:
    link = WeightLink(url, KEY)
    link.connect()
    return link


def pull(index: Index, *urls: str) -> Pull:
    made = Pull(index)
    made.run([connected(url) for url in urls], object)
    return made


def end_of(run: Callable[[], object], timeout_s: float = 20.0) -> BaseException | None:
    """Runs it in a thread, and returns what it raised; it fails when the time is over."""
    raised: list[BaseException] = []

    def catch() -> None:
        try:
            run()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=catch, daemon=True)
    thread.start()
    thread.join(timeout_s)
    assert not thread.is_alive(), "it hangs"
    return raised[0] if raised else None
