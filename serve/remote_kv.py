"""An engine whose K/V is on memory nodes: from its settings to books, links and the seam."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from memory.attach import AttachRequest
from memory.attention import AttentionLayer
from memory.direct import direct_pair
from memory.edit_log import EditLog
from memory.grouped_attention import group_layers
from memory.int8_attention import Int8KVLayout
from memory.kv_cache import KVLayout
from memory.kv_manager import KVManager
from memory.new_part import Int8NewPart, NewPart, PlainNewPart
from memory.node import MemoryNode
from memory.node_set import FIRST_CONNECT_S, Connect, Member, NodeSet, NoNodeError
from memory.placement import (
    MAX_PAGES,
    PageGeometry,
    PlacementError,
    page_geometry,
    resolve_partition,
)
from memory.prompt_tails import PromptTails
from memory.remote_attention import RemoteAttention
from memory.split_kv import Books, SplitKV
from memory.wire import WireType
from memory.wire_rows import fits_int8, largest_message
from ops.backend import Backend
from serve.config import EngineConfig
from serve.errors import ConfigError, reason
from serve.models import ModelSpec
from serve.precision import Precision
from transport import connect
from transport.base import Endpoint, TransportError

logger = logging.getLogger(__name__)

LOCAL_KEY = b"mergestep: only this user"
_OPEN_KEY_SCHEMES = ("inproc", "shm")  # only this user can reach them
_MIN_WINDOW_BYTES, _MAX_WINDOW_BYTES = 4 << 20, 256 << 20
_MESSAGES_IN_WINDOW = 12
_LEAST_IN_WINDOW = 4  # a message is a quarter of a window at most
_SYSTEM_PAGE_BYTES = 4096
_WIRE_TYPES = {torch.float32: WireType.FLOAT32, torch.bfloat16: WireType.BFLOAT16}


@dataclass(slots=True)
class RemoteKV:
    """What takes the place of local K/V: books, the seam, and the nodes (closed last)."""

    kv: Books
    attention: RemoteAttention
    nodes: NodeSet

    def close(self) -> None:
        self.nodes.close()
        if self.attention.tails is not None:
            self.attention.tails.close()


def read_key(config: EngineConfig) -> bytes:
    """The shared secret. ConfigError where one is needed and there is none."""
    path = config.memory_node_key_file
    if path is None:
        for url in config.memory_nodes:
            if url.partition("://")[0] not in _OPEN_KEY_SCHEMES:
                raise ConfigError(f"memory_nodes: {url} needs a memory_node_key_file")
        return LOCAL_KEY
    try:
        key = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"memory_node_key_file {path}: {reason(error)}") from error
    if len(key) < 16:
        raise ConfigError(f"memory_node_key_file {path} has less than 16 bytes")
    return key


def open_remote(
    config: EngineConfig,
    precision: Precision,
    spec: ModelSpec,
    layers: Sequence[AttentionLayer],
    backend: Backend,
    local_bytes: int,
) -> RemoteKV:
    """Connect to the nodes and share the K/V among them. local_bytes: of this machine's memory,
    for when no node is left. ConfigError names the setting."""
    key, urls = read_key(config), config.memory_nodes
    max_len = config.max_model_len or spec.max_model_len
    if max_len > spec.max_model_len:
        raise ConfigError(f"max_model_len {max_len} is above the model's {spec.max_model_len}")
    try:
        partition = resolve_partition(config.memory_partition, layers, len(urls))
    except PlacementError as error:
        raise ConfigError(str(error)) from error
    wire = _wire_type(config, precision, layers)
    groups = group_layers(layers, max_len)
    window_bytes = _window_bytes(largest_message(layers, config.batched_tokens, wire))

    def connect_to(url: str, timeout_s: float) -> Endpoint:
        try:
            return connect(url, key=key, window_bytes=window_bytes, timeout_s=timeout_s)
        except (ValueError, ImportError) as error:  # an address, or what its transport needs
            raise TransportError(str(error)) from error

    node_bytes = config.memory_node_bytes or _smallest_node(urls, connect_to)
    geometry = _geometry(config, precision, layers, groups, partition, node_bytes)
    num_members = len(urls) if partition == "request" else 1
    max_rows = config.batched_tokens
    range_places = geometry.range_places(max_len)
    edits = [
        EditLog(geometry.page_bytes, config.max_num_seqs, range_places) for _ in range(num_members)
    ]
    template = AttachRequest(
        engine=secrets.token_hex(16),
        epoch=1,
        kv_dtype=precision.kv,
        kv_group=config.kv_group,
        layers=list(layers),
        group_layers=[ids for _, ids in groups],
        page_tokens=geometry.page_tokens,
        num_places=range_places,
        num_ranges=config.max_num_seqs,
        num_pages=MAX_PAGES,
        min_pages=1,
        max_rows=max_rows,
    )
    members = [
        Member([url] if partition == "request" else list(urls), log)
        for url, log in zip(urls, edits, strict=False)
    ]
    nodes = NodeSet(
        members,
        template,
        partition,
        connect_to,
        wire=wire,
        local=_local(local_bytes, backend),
        bytes_per_node=config.memory_node_bytes,
    )
    try:
        _place_first(nodes)
        kv = _books(config, geometry, nodes, max_len, range_places)
    except BaseException:
        nodes.close()
        raise
    tails = None
    if config.memory_prefill == "local":
        tails = PromptTails(template, max_len, local_bytes)
        for book in [kv] if isinstance(kv, KVManager) else kv.members:
            book.on_close = lambda target: tails.drop(target.start)
    attention = RemoteAttention(
        layers,
        _new_part(config, precision, layers, backend, tails),
        backend,
        nodes,
        kv.range_tokens,
        config.max_num_seqs,
        wire,
        tails,
    )
    logger.info(
        "K/V on %s (%s partition): %d pages of %d tokens",
        ", ".join(urls),
        partition,
        kv.num_pages,
        geometry.page_tokens[0],
    )
    return RemoteKV(kv, attention, nodes)


def _smallest_node(urls: Sequence[str], connect_to: Connect) -> int:
    """K/V bytes of the node with the least. ConfigError if one cannot be reached."""
    sizes: list[int] = []
    for url in urls:
        try:
            endpoint = connect_to(url, FIRST_CONNECT_S)
        except (TransportError, OSError) as error:
            raise ConfigError(f"memory_nodes: {what_is_wrong(url, error)}") from error
        size = endpoint.peer.info.get("capacity_bytes")
        endpoint.close()
        if not isinstance(size, int):
            raise ConfigError(f"memory_nodes: {url} is no memory node")
        sizes.append(size)
    return min(sizes)


def what_is_wrong(url: str, error: Exception) -> str:
    """Most errors say which address they are about."""
    text = reason(error) if isinstance(error, OSError) else str(error)
    return text if url in text else f"{url}: {text}"


def _geometry(
    config: EngineConfig,
    precision: Precision,
    layers: Sequence[AttentionLayer],
    groups: Sequence[tuple[int | None, list[int]]],
    partition: str,
    node_bytes: int,
) -> PageGeometry:
    token_bytes = []
    for _, ids in groups:
        chosen = [layers[i] for i in ids]
        layout: Int8KVLayout | KVLayout
        if precision.kv == "int8":
            layout = Int8KVLayout(chosen, config.kv_group)
        else:
            layout = KVLayout(chosen, getattr(torch, precision.kv))
        token_bytes.append(layout.token_bytes)
    windows = [window for window, _ in groups]
    return page_geometry(token_bytes, windows, partition, len(config.memory_nodes), node_bytes)


def _place_first(nodes: NodeSet) -> None:
    """At start-up every node has to be there."""
    for member in nodes.members:
        try:
            nodes.place(member, FIRST_CONNECT_S, needs_all=True)
        except NoNodeError as error:
            raise ConfigError(f"memory_nodes: {error}") from error


def _books(
    config: EngineConfig,
    geometry: PageGeometry,
    nodes: NodeSet,
    max_len: int,
    range_places: Sequence[int],
) -> Books:
    member_tokens = config.max_num_seqs * range_places[0] * geometry.page_tokens[0]
    books = [
        KVManager(
            member.edits,
            num_pages=member.num_pages,
            num_ranges=config.max_num_seqs,
            max_model_len=max_len,
            groups=geometry.groups,
            max_rows=config.chunk_tokens,
            in_background=False,
            first_start=number * member_tokens,
        )
        for number, member in enumerate(nodes.members)
    ]
    fewest = min(book.num_pages for book in books)
    if books[0].pages_for(max_len) > fewest:
        raise ConfigError(
            f"memory_nodes: {fewest} pages of {geometry.page_tokens[0]} tokens are less than one "
            f"sequence of max_model_len {max_len}; lower it or raise memory_node_bytes"
        )
    nodes.min_pages = books[0].pages_for(max_len)
    return books[0] if len(books) == 1 else SplitKV(books)


def _new_part(
    config: EngineConfig,
    precision: Precision,
    layers: Sequence[AttentionLayer],
    backend: Backend,
    tails: PromptTails | None,
) -> NewPart:
    if precision.kv == "int8":
        rows, sequences = config.batched_tokens, config.max_num_seqs
        return Int8NewPart(layers, config.kv_group, rows, sequences, tails)
    return PlainNewPart(layers, getattr(torch, precision.kv), backend, tails)


def _wire_type(
    config: EngineConfig, precision: Precision, layers: Sequence[AttentionLayer]
) -> WireType:
    if config.memory_wire == "auto":
        return _WIRE_TYPES.get(precision.compute, WireType.FLOAT32)
    if config.memory_wire == "int8" and not all(fits_int8(layer.head_dim) for layer in layers):
        raise ConfigError("memory_wire int8: head_dim of the model is no multiple of 16")
    return WireType[config.memory_wire.upper()]


def _window_bytes(largest: int) -> int:
    wanted = max(_MESSAGES_IN_WINDOW * largest, _MIN_WINDOW_BYTES)
    bounded = min(wanted, max(_MAX_WINDOW_BYTES, _LEAST_IN_WINDOW * largest))
    return -(-bounded // _SYSTEM_PAGE_BYTES) * _SYSTEM_PAGE_BYTES


def _local(num_bytes: int, backend: Backend) -> Callable[[], Endpoint]:
    """This machine's memory as a memory node."""
    node = MemoryNode(num_bytes, backend)

    def attach() -> Endpoint:
        engine_end, node_end = direct_pair()
        node.adopt(node_end)
        return engine_end

    return attach
