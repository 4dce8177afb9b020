"""Connections of an engine to memory nodes, whichever setting names them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from memory.nodes.errors import NoNodeError
from memory.nodes.node_set import FIRST_CONNECT_S, Connect, NodeSet
from serve.config import EngineConfig
from serve.errors import ConfigError, reason
from serve.loading.node_key import read_key
from transport import connect
from transport.base import Endpoint, TransportError

logger = logging.getLogger(__name__)

_MIN_WINDOW_BYTES, _MAX_WINDOW_BYTES = 4 << 20, 256 << 20
_MESSAGES_IN_WINDOW = 12
_LEAST_IN_WINDOW = 4  # a message is at most a quarter of a window
_SYSTEM_PAGE_BYTES = 4096
PRESENT_S = 1.0  # the wait for a node that may be absent


def connect_with(config: EngineConfig, largest_message: int) -> Connect:
    """Returns a function that connects to a node with the key and the encryption of the config, and
    a window for messages of so many bytes. ConfigError for a key that cannot be used."""
    key, window_bytes = read_key(config), _window_bytes(largest_message)

    def connect_to(url: str, timeout_s: float) -> Endpoint:
        try:
            return connect(
                url,
                key=key,
                window_bytes=window_bytes,
                timeout_s=timeout_s,
                encryption=config.memory_node_encryption,
            )
        except (ValueError, ImportError) as error:  # a bad address, or a missing package
            raise TransportError(str(error)) from error

    return connect_to


class NodeSizes(NamedTuple):
    """Bytes of K/V of the smallest and of the largest node, as far as they may be used; the
    smallest's whole capacity; and the largest message that all of them take."""

    smallest: int
    largest: int
    capacity: int
    max_message: int


def node_sizes(
    setting: str, urls: Sequence[str], connect_to: Connect, most: int | None
) -> NodeSizes:
    """Asks the nodes for their sizes. `most`, if given, bounds the K/V to use of each. ConfigError
    for a node that cannot be reached."""
    sizes: list[int] = []
    messages: list[int] = []
    for url in urls:
        try:
            endpoint = connect_to(url, FIRST_CONNECT_S)
        except (TransportError, OSError) as error:
            raise ConfigError(f"{setting}: {error_with_url(url, error)}") from error
        size = endpoint.peer.info.get("capacity_bytes")
        messages.append(endpoint.max_message_bytes)
        endpoint.close()
        if not isinstance(size, int):
            raise ConfigError(f"{setting}: {url} is not a memory node")
        if most is not None and size < most:
            logger.warning("memory_node_bytes %d: %s has only %d", most, url, size)
        sizes.append(size)
    smallest, largest = min(sizes), max(sizes)
    most = largest if most is None else most
    return NodeSizes(min(smallest, most), min(largest, most), smallest, min(messages))


def error_with_url(url: str, error: Exception) -> str:
    """Returns the error's text with the URL, unless the text already has it."""
    text = reason(error) if isinstance(error, OSError) else str(error)
    return text if url in text else f"{url}: {text}"


def connect_all(setting: str, nodes: NodeSet) -> None:
    """Connects to every node; at start-up all have to be there."""
    for partition in nodes.partitions:
        try:
            nodes.place(partition, FIRST_CONNECT_S, needs_all=True)
        except NoNodeError as error:
            raise ConfigError(f"{setting}: {error}") from error


def connect_present(setting: str, nodes: NodeSet) -> None:
    """Connects to the nodes that can be reached and have room; the engine looks for the others
    while it runs."""
    for partition in nodes.partitions:
        try:
            nodes.place(partition, PRESENT_S, needs_all=True)
        except NoNodeError as error:
            logger.info("%s: not yet: %s", setting, error)


def _window_bytes(largest: int) -> int:
    wanted = max(_MESSAGES_IN_WINDOW * largest, _MIN_WINDOW_BYTES)
    bounded = min(wanted, max(_MAX_WINDOW_BYTES, _LEAST_IN_WINDOW * largest))
    return -(-bounded // _SYSTEM_PAGE_BYTES) * _SYSTEM_PAGE_BYTES
