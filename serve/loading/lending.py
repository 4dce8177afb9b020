"""A replica that lends K/V memory: from the settings to a listener over its own pages."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from memory.kv_manager import KVManager
from memory.kv_memory import KVMemory
from memory.nodes.server.lending import LendingNode
from memory.segmented_kv import SegmentedKV
from ops import get_backend
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.loading.node_connection import error_with_url
from serve.loading.node_key import read_key
from transport import listen
from transport.base import Listener, TransportError

logger = logging.getLogger(__name__)

_WINDOW_BYTES = 64 << 20  # for each borrower; its memory is taken on first use
_DRAIN_S = 1.0  # the longest wait for borrowers to leave at the end


class Lender:
    """Lends until `close`."""

    def __init__(self, node: LendingNode, listener: Listener) -> None:
        self.node, self.listener = node, listener
        self._thread = threading.Thread(
            target=node.serve, args=(listener,), name="mergestep-lend", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Asks borrowers to leave, waits a moment and ends their sessions. Idempotent."""
        self.node.drain(_DRAIN_S)
        self.listener.close()
        self.node.close()
        self._thread.join()


def open_lender(
    config: EngineConfig, kv: KVMemory, run_in_loop: Callable[[Callable[[], None]], None]
) -> Lender:
    """Listens at the setting `lend`. run_in_loop: runs a job in the thread that owns kv.
    ConfigError names the setting. The caller closes the result before that thread ends."""
    own = kv.own if isinstance(kv, SegmentedKV) else kv
    assert isinstance(own, KVManager), "memory of another kind is refused before"
    assert config.lend is not None
    whole = own.num_pages * own.page_bytes
    if config.lend_bytes is not None and not own.page_bytes <= config.lend_bytes <= whole:
        raise ConfigError(
            f"lend_bytes {config.lend_bytes} must be from {own.page_bytes} to the {whole} bytes of"
            " K/V memory"
        )
    most = config.lend_bytes or whole // 2
    try:
        listener = listen(
            config.lend,
            key=read_key(config),
            info={"capacity_bytes": most},
            window_bytes=_WINDOW_BYTES,
            encryption=config.memory_node_encryption,
        )
    except (TransportError, OSError, ValueError, ImportError) as error:
        raise ConfigError(f"lend: {error_with_url(config.lend, error)}") from error
    node = LendingNode(own, most, get_backend("cpu"), run_in_loop)
    logger.info("lending up to %.5g MiB of K/V at %s", most / 2**20, listener.url)
    return Lender(node, listener)
