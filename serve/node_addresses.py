"""Checks of settings that name memory nodes or peers, and of those that go with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from serve.errors import ConfigError

_SEGMENT_UNIT = 128  # tokens, as memory.pages.layer_groups.READ_BLOCK


class _Settings(Protocol):
    """The settings, of which these checks read more than they name."""

    @property
    def memory_nodes(self) -> tuple[str, ...]: ...
    @property
    def memory_node_encryption(self) -> str: ...
    @property
    def kvp(self) -> tuple[str, ...]: ...
    @property
    def kvp_segment_tokens(self) -> int: ...
    @property
    def borrow(self) -> tuple[str, ...]: ...
    @property
    def lend(self) -> str | None: ...
    @property
    def kv_cache_dir(self) -> object: ...
    @property
    def kv_peers(self) -> tuple[str, ...]: ...
    @property
    def kv_listen(self) -> str | None: ...
    @property
    def kv_replica_bytes(self) -> int | None: ...
    @property
    def prefix_cache(self) -> bool: ...


def check_nodes(config: _Settings) -> None:
    """Checks the settings of memory nodes, and makes their addresses tuples."""
    for setting in ("memory_nodes", "kvp", "borrow"):
        value, is_encrypted = getattr(config, setting), config.memory_node_encryption == "on"
        object.__setattr__(config, setting, checked_addresses(setting, value, is_encrypted))
    store = {"kv_cache_dir": config.kv_cache_dir}
    if config.memory_nodes:
        names = ("kv_page_bytes", "kvp", "borrow", "lend")
        others = {**store, **{name: getattr(config, name) for name in names}}
        check_beside_nodes("memory_nodes", others)
    if config.kvp:
        check_beside_nodes("kvp", {**store, "borrow": config.borrow})
    if config.borrow:
        check_beside_nodes("borrow", store)
    check_address("lend", config.lend)
    check_segments(config.kvp_segment_tokens)


def check_peers(config: _Settings) -> None:
    """Checks the settings of engines that pull K/V from one another."""
    urls = checked_addresses("kv_peers", config.kv_peers, False)
    object.__setattr__(config, "kv_peers", urls)
    check_address("kv_listen", config.kv_listen)
    for url in urls:
        check_address("kv_peers", url)
    used = "kv_peers" if urls else "kv_listen"
    if not urls and config.kv_listen is None:
        return
    if not config.prefix_cache:
        raise ConfigError(f"{used} needs prefix_cache")
    nodes = {name: getattr(config, name) for name in ("memory_nodes", "kvp", "borrow")}
    check_beside_nodes(used, nodes)
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if getattr(config, name) != 1:
            raise ConfigError(f"{used} needs a model in one process: leave out {name}")


def check_copies(config: _Settings) -> None:
    """Checks, when the model is loaded, that there are engines whose sequences are copied."""
    if config.kv_replica_bytes is not None and not config.kv_peers:
        raise ConfigError("kv_replica_bytes needs kv_peers, whose running sequences are copied")


def checked_addresses(setting: str, nodes: object, is_encrypted: bool) -> tuple[str, ...]:
    """Returns the addresses of nodes, from a list or a comma-separated text of the command line.
    ConfigError names the setting. is_encrypted: connections have to be encrypted."""
    if isinstance(nodes, str):
        nodes = [url.strip() for url in nodes.split(",") if url.strip()]
        if not nodes:
            raise ConfigError(f"{setting} has no address")
    if not isinstance(nodes, tuple | list) or not all(isinstance(url, str) for url in nodes):
        raise ConfigError(f"{setting} must be a list of addresses, not {nodes!r}")
    if len(set(nodes)) < len(nodes):
        raise ConfigError(f"{setting} has an address twice")
    for url in nodes if is_encrypted else ():
        if url.startswith("rdma:"):
            raise ConfigError(f"memory_node_encryption on: {url} cannot be encrypted; tcp can")
    return tuple(nodes)


def check_segments(segment_tokens: int) -> None:
    if segment_tokens % _SEGMENT_UNIT:
        raise ConfigError(
            f"kvp_segment_tokens must be a multiple of {_SEGMENT_UNIT}, not {segment_tokens}"
        )


def check_address(setting: str, url: object) -> None:
    if url is not None and (not isinstance(url, str) or "://" not in url):
        raise ConfigError(f"{setting} must be an address such as tcp://HOST:PORT, not {url!r}")


def check_beside_nodes(setting: str, others: Mapping[str, object]) -> None:
    """Raises ConfigError if one of these settings is set, which cannot be used with nodes that
    `setting` names."""
    for name, value in others.items():
        if value not in (None, ()):
            raise ConfigError(f"{name} cannot be used with {setting}")


def check_endpoint(name: str, endpoint: str | None) -> None:
    if endpoint is None:
        return
    scheme, _, rest = endpoint.partition("://")
    host, _, port = rest.rpartition(":")
    is_tcp = scheme == "tcp" and host and port.isdecimal() and int(port) <= 65535
    if not is_tcp and not (scheme in ("ipc", "inproc") and rest):
        raise ConfigError(f"{name} must be tcp://HOST:PORT or ipc://PATH, not {endpoint!r}")
