"""Checks of settings that name memory nodes, and of those that go with them."""

from __future__ import annotations

from collections.abc import Mapping

from serve.errors import ConfigError

_SEGMENT_UNIT = 128  # tokens, as memory.pages.layer_groups.READ_BLOCK


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


def check_lender(url: object) -> None:
    if url is not None and (not isinstance(url, str) or "://" not in url):
        raise ConfigError(f"lend must be an address such as tcp://HOST:PORT, not {url!r}")


def check_beside_nodes(setting: str, others: Mapping[str, object]) -> None:
    """Raises ConfigError if one of these settings is set, which cannot be used with nodes that
    `setting` names."""
    for name, value in others.items():
        if value not in (None, ()):
            raise ConfigError(f"{name} cannot be used with {setting}")
