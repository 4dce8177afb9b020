"""Peers from which an engine pulls cached K/V: from the settings to a page store over them."""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from memory.kv_manager import KVManager
from memory.peers.page_copies import PageCopies
from memory.peers.page_server import PageServer
from memory.peers.page_source import PageSource
from memory.peers.peer_link import Connect, PeerLink
from memory.peers.peer_store import ANY_PEER, PeerStore
from memory.peers.wire import (
    ID_CHARS,
    NAMES_WINDOW_BYTES,
    PAGE_HEADER_BYTES,
    PROTOCOL,
    PageChecksums,
)
from memory.prefix.page_store import PageStore
from memory.prefix.sequence_names import SequenceNames
from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.loading.disk_store import checkpoint_fingerprint
from serve.loading.kv_sizing import reserving
from serve.loading.node_connection import error_with_url
from serve.loading.node_key import read_key_file
from transport import check_scheme, connect, listen
from transport.base import Endpoint, Listener, TransportError

logger = logging.getLogger(__name__)

_MAX_PEERS = 16
_CONNECT_S = 2.0
_PAGES_IN_WINDOW = 8  # a message is at most a quarter of a window
_MIN_WINDOW_BYTES, _SYSTEM_PAGE_BYTES = 4 << 20, 4096
_DIGITS = 32  # of the checkpoint's fingerprint, which peers compare


@dataclass(frozen=True, slots=True)
class Peers:
    """store: pulls pages. secret: that of page keys, which all engines of this key, model and
    layout have. names: those of this engine's sequences, if peers can ask for them. engine_ids:
    by the address in kv_peers, of the engines that have answered there."""

    store: PeerStore
    secret: bytes
    names: SequenceNames | None
    engine_ids: Mapping[str, str]


def open_peers(
    config: EngineConfig,
    layout: Mapping[str, str],
    kv: KVManager,
    address_of: Callable[[int], int],
    below: PageStore | None,
) -> Peers:
    """Listens at kv_listen and begins to connect to kv_peers. layout: what the bytes of a page
    depend on, besides the checkpoint. below: the store of this machine; that of the result closes
    it, as does a failure. ConfigError names the setting."""
    try:
        return _open(config, layout, kv, address_of, below)
    except BaseException:
        if below is not None:
            below.close(1.0)
        raise


def _open(
    config: EngineConfig,
    layout: Mapping[str, str],
    kv: KVManager,
    address_of: Callable[[int], int],
    below: PageStore | None,
) -> Peers:
    if config.kv_peer_key_file is None:
        used = "kv_peers" if config.kv_peers else "kv_listen"
        raise ConfigError(
            f"{used} needs a kv_peer_key_file, a secret that the engines of this model share"
        )
    key = read_key_file(config.kv_peer_key_file, "kv_peer_key_file")
    identity = _identity(config, layout)
    text = " ".join(identity.values()).encode()
    secret = hashlib.blake2b(b"page names " + text, key=_folded(key), digest_size=32).digest()
    checksums = PageChecksums(secret)
    engine_id = secrets.token_hex(8)
    info = {**identity, "engine": engine_id}
    for url in config.kv_peers:
        try:
            check_scheme(url)
        except ValueError as error:
            raise ConfigError(f"kv_peers: {error}") from error
    copies = _copies(config, kv.page_bytes)
    server = names = None
    if config.kv_listen is not None:
        source = PageSource(kv.prefixes.index, address_of, below, copies)
        names = SequenceNames(kv.page_end)
        listener = _listen(config.kv_listen, key, info)
        server = PageServer(listener, identity, source, checksums, kv.page_bytes, names)
    engine_ids: dict[str, str] = {}
    connect_to = _noting_ids(_connector(key, info, kv.page_bytes), config.kv_peers, engine_ids)
    page_bytes = kv.page_bytes

    def make_link(url: str, copies: PageCopies | None = None) -> PeerLink:
        return PeerLink(url, connect_to, identity, checksums, page_bytes, engine_id, copies=copies)

    links = [make_link(url, copies) for url in config.kv_peers if url != ANY_PEER]
    named = make_link if ANY_PEER in config.kv_peers else None
    store = PeerStore(links, below, server, make_link=named, engine_id=engine_id, copies=copies)
    kv.prefixes.question.ask_store = store.ask
    kv.prefixes.question.is_coming = store.is_coming
    return Peers(store, secret, names, engine_ids)


def _copies(config: EngineConfig, page_bytes: int) -> PageCopies | None:
    """Returns where copies of pages of the peers' running sequences are kept, if anywhere."""
    if not config.kv_replica_bytes:
        return None
    if config.kv_replica_bytes < page_bytes:
        raise ConfigError(
            f"kv_replica_bytes is {config.kv_replica_bytes}, less than a page of {page_bytes} bytes"
        )
    with reserving(config.kv_replica_bytes, "kv_replica_bytes"):
        return PageCopies(page_bytes, config.kv_replica_bytes)


def _identity(config: EngineConfig, layout: Mapping[str, str]) -> dict[str, str]:
    """Returns by name what peers must have in common."""
    fingerprint = checkpoint_fingerprint(config.model_path, with_times=False)
    return {
        "protocol": PROTOCOL,
        "checkpoint": fingerprint[:_DIGITS],
        "load_format": config.load_format,
        **layout,
        "share": "rank 0 of 1",
    }


def _folded(key: bytes) -> bytes:
    """Returns the key in a length that the hash takes."""
    return hashlib.sha256(key).digest()


def _noting_ids(connect_to: Connect, urls: Collection[str], engine_ids: dict[str, str]) -> Connect:
    """Returns what connects and notes the ids that the engines at these addresses say they have.
    Addresses that requests name are not noted: there is no end of them."""

    def connect_and_note(url: str) -> Endpoint:
        endpoint = connect_to(url)
        if url in urls:
            engine_ids[url] = str(endpoint.peer.info.get("engine", ""))[:ID_CHARS]
        return endpoint

    return connect_and_note


def _connector(key: bytes, info: Mapping[str, object], page_bytes: int) -> Connect:
    largest = _PAGES_IN_WINDOW * (page_bytes + PAGE_HEADER_BYTES)
    window_bytes = max(_MIN_WINDOW_BYTES, -(-largest // _SYSTEM_PAGE_BYTES) * _SYSTEM_PAGE_BYTES)

    def connect_to(url: str) -> Endpoint:
        try:
            return connect(url, key=key, info=info, window_bytes=window_bytes, timeout_s=_CONNECT_S)
        except (ValueError, ImportError) as error:  # a bad address, or a missing package
            raise TransportError(str(error)) from error

    return connect_to


def _listen(url: str, key: bytes, info: Mapping[str, object]) -> Listener:
    try:
        listener = listen(
            url, key=key, info=info, window_bytes=NAMES_WINDOW_BYTES, max_peers=_MAX_PEERS
        )
    except (TransportError, OSError, ValueError, ImportError) as error:
        raise ConfigError(f"kv_listen: {error_with_url(url, error)}") from error
    logger.info("other engines pull cached K/V at %s", listener.url)
    return listener
