"""The memory node process of `serve node`."""

from __future__ import annotations

import errno
import logging
import math
import signal
import threading

import torch
from rich.console import Console

from memory.nodes.server.node import MemoryNode
from ops import get_backend
from ops.cpu import native_library
from serve.config import EngineConfig
from serve.errors import ConfigError, MergestepError
from serve.loading.node_connection import error_with_url
from serve.loading.node_key import read_key
from serve.machine import available_memory, usable_processors
from transport import check_scheme, listen
from transport.base import TransportError

logger = logging.getLogger(__name__)

_SHARE_OF_FREE_MEMORY = 0.8
_LEAST_BYTES = 1 << 16
_WINDOW_BYTES = 64 << 20  # for each engine; its memory is taken on first use


def node_config(url: str, key_file: str | None, encryption: str) -> EngineConfig:
    """Returns the settings that a node shares with its engines. ConfigError names a wrong one."""
    if url.startswith("inproc:"):
        raise ConfigError(f"{url} can only be reached from this process")
    try:
        check_scheme(url)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return EngineConfig(
        memory_nodes=(url,), memory_node_key_file=key_file, memory_node_encryption=encryption
    )


def serve_node(
    config: EngineConfig,
    capacity_bytes: int | None,
    threads: int | None,
    drain_s: float,
    max_engines: int,
) -> None:
    """Runs a memory node at the first of the config's memory_nodes until a signal; ConfigError
    names a wrong setting.

    The first signal asks engines to leave and waits for them, a second one ends the node.
    """
    url = config.memory_nodes[0]
    _check(capacity_bytes, threads, drain_s, max_engines)
    key = read_key(config)
    capacity = capacity_bytes or int(available_memory() * _SHARE_OF_FREE_MEMORY)
    count = min(threads or usable_processors(), usable_processors())
    torch.set_num_threads(1)
    if native_library.is_available():
        native_library.set_num_threads(count)
    node = MemoryNode(capacity, get_backend("cpu"))
    try:
        listener = listen(
            url,
            key=key,
            info={"capacity_bytes": capacity},
            window_bytes=_WINDOW_BYTES,
            max_peers=max_engines,
            encryption=config.memory_node_encryption,
        )
    except (TransportError, OSError, ValueError, ImportError) as error:
        cause = error.__cause__
        is_in_use = isinstance(cause, OSError) and cause.errno == errno.EADDRINUSE
        wrong = MergestepError if is_in_use else ConfigError
        raise wrong(error_with_url(url, error)) from error
    signals = _Signals()
    server = threading.Thread(target=node.serve, args=(listener,), name="mergestep-accept")
    server.start()
    Console().print(
        f"memory node at {listener.url}: {capacity / 2**20:.5g} MiB of K/V, {count} threads",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    signals.wait()
    logger.info("asking %d engines to leave", node.stats().num_engines)
    done = threading.Thread(target=_drain, args=(node, drain_s, signals), daemon=True)
    done.start()
    signals.wait()
    listener.close()
    node.close()
    server.join()


def _check(
    capacity_bytes: int | None, threads: int | None, drain_s: float, max_engines: int
) -> None:
    free = available_memory()
    if capacity_bytes is not None and not _LEAST_BYTES <= capacity_bytes <= free:
        raise ConfigError(
            f"kv_cache_bytes {capacity_bytes} must be from {_LEAST_BYTES} to the {free} bytes of "
            "free memory"
        )
    for name, value, least in (("threads", threads, 1), ("max_engines", max_engines, 1)):
        if value is not None and value < least:
            raise ConfigError(f"{name} must be {least} or more, not {value}")
    if not 0 <= drain_s < math.inf:
        raise ConfigError(f"drain_s must be 0 or more seconds, not {drain_s}")


def _drain(node: MemoryNode, drain_s: float, signals: _Signals) -> None:
    node.drain(drain_s)
    signals.set()


class _Signals:
    """Waits for SIGTERM and SIGINT, one after the other."""

    def __init__(self) -> None:
        self._semaphore = threading.Semaphore(0)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.set())

    def set(self) -> None:
        self._semaphore.release()

    def wait(self) -> None:
        while not self._semaphore.acquire(timeout=0.5):  # so that handlers run
            pass
