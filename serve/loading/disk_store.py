"""The page stores of one model: its disk tier (folder, identity and secret of its page keys), and
its peers.

kv_cache_dir holds a private folder for each model and K/V layout, so that models can share it. A
folder holds the files of `memory.tiers.disk_tier` and a secret. Page keys derive from the secret,
so that they stay valid when the server restarts.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from memory.kv_manager import KVManager
from memory.pages.layer_groups import LayerGroup
from memory.pages.linux_vmm import LinuxMemory
from memory.policies.setting import OFF
from memory.prefix.page_store import PageStore
from memory.prefix.sequence_names import SequenceNames
from memory.tiers.disk_directory import DiskDirectoryError, check_parent, is_private
from memory.tiers.disk_index import page_bytes_of
from memory.tiers.disk_tier import DiskTier
from ops import Backend
from ops.cpu import native_library
from serve.config import EngineConfig
from serve.errors import ConfigError, reason
from serve.loading.precision import Precision
from serve.models.open_checkpoint import checkpoint_fingerprint

logger = logging.getLogger(__name__)

DEFAULT_BYTES = 16 << 30
_SECRET_BYTES = 32
_HASH_DIGITS = 16
_MAX_NAMED = 8
_FLAWS = {True: "damaged", False: "not a plain file that only this user can read"}
_FORMAT = "mergestep K/V 1"  # raise it when kernels or layouts produce other bytes


def open_kv_store(
    config: EngineConfig,
    precision: Precision,
    *,
    backend: str,
    groups: Sequence[LayerGroup] | Sequence[tuple[int | None, int]],
    page_bytes: int,
    subfolder: str = "",
) -> tuple[DiskTier, bytes]:
    """Opens the disk tier; returns it and the secret for PrefixHasher. The caller closes it.

    backend is part of the identity, because back ends compute different bytes. subfolder: of
    kv_cache_dir, of one rank of several. ConfigError names kv_cache_dir.
    """
    assert config.kv_cache_dir is not None, "only with a directory"
    layout = kv_identity(config, precision, backend, groups, page_bytes)
    checkpoint = checkpoint_fingerprint(config.model_path)
    identity = hashlib.sha256(f"{' '.join(layout.values())} {checkpoint}".encode())
    root = Path(config.kv_cache_dir)
    if root.exists() and not root.is_dir():
        raise ConfigError(f"kv_cache_dir {root} is a file, not a directory")
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        check_parent(root)
        if subfolder:
            root = root / subfolder
            root.mkdir(mode=0o700, exist_ok=True)
            check_parent(root)
        folder = (
            root
            / f"{config.model_name[:64].replace('/', '-')}-{identity.hexdigest()[:_HASH_DIGITS]}"
        )
        store = DiskTier(
            folder,
            page_bytes,
            max(config.kv_disk_bytes or DEFAULT_BYTES, page_bytes),
            identity.digest(),
            persistent=True,
        )
        try:
            secret = _secret(folder / "secret")
            _log_what_is_there(store, folder)
        except BaseException:
            store.close()
            raise
        return store, secret
    except DiskDirectoryError as error:
        raise ConfigError(f"kv_cache_dir: {error}") from error
    except OSError as error:
        raise ConfigError(f"kv_cache_dir {root}: {reason(error)}") from error


def kv_identity(
    config: EngineConfig,
    precision: Precision,
    backend: str,
    groups: Sequence[LayerGroup] | Sequence[tuple[int | None, int]],
    page_bytes: int,
) -> dict[str, str]:
    """Returns by name what the bytes of a page depend on, besides the checkpoint."""
    isa = native_library.instruction_set() if native_library.is_available() else "torch"
    found = {
        "format": _FORMAT,
        "precision": str(precision),
        "backend": backend,
        "instruction_set": isa,
        "weight_group": str(config.weight_group),
        "kv_group": str(config.kv_group),
        "token_bytes": " ".join(map(str, groups)),
        "page_bytes": str(page_bytes),
    }
    if config.kv_policy != OFF:  # what a token's layers compute depends on what they read
        found["kv_policy"] = config.kv_policy
    return found


def _log_what_is_there(store: DiskTier, folder: Path) -> None:
    stats = store.stats()
    logger.info(
        "K/V on disk: %d pages of %d KiB (%.3g MiB) found in %s, %.5g MiB at most",
        stats.entries,
        store.page_bytes >> 10,
        stats.bytes_used / (1 << 20),
        folder,
        store.capacity_bytes / (1 << 20),
    )
    model = folder.name[:-_HASH_DIGITS]
    others = [path for path in folder.parent.glob(f"{glob.escape(model)}*") if path != folder]
    others = [path for path in others if len(path.name) == len(folder.name)]
    if others:
        logger.info(
            "K/V on disk: %d other folders of this model are there, for another page size "
            "(which follows kv_cache_bytes unless kv_page_bytes is set), precision, backend or "
            "version of the weights; they are not used now, and nothing removes them: %s",
            len(others),
            ", ".join(map(_described, sorted(others)[:_MAX_NAMED])),
        )


def _described(folder: Path) -> str:
    page_bytes = page_bytes_of(folder)
    pages = "no index" if page_bytes is None else f"pages of {page_bytes >> 10} KiB"
    return f"{folder.name} ({pages})"


def _secret(path: Path) -> bytes:
    """Reads the secret, or makes one; with a new secret no stored page is found any more."""
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        is_ours = is_private(path.lstat())
        if is_ours:
            fd = os.open(path, os.O_RDONLY | flags)
            with os.fdopen(fd, "rb") as file:
                found = file.read(_SECRET_BYTES + 1)
            if len(found) == _SECRET_BYTES:
                return found
        logger.warning("K/V on disk: %s is %s; it is replaced", path, _FLAWS[is_ours])
        path.unlink()
    except FileNotFoundError:
        pass
    made = secrets.token_bytes(_SECRET_BYTES)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(made)
    return made


class Stores(TypedDict, total=False):
    """The fields of a Runtime that follow from its stores."""

    prefix_secret: bytes
    use_peer: Callable[[str], None]
    names: SequenceNames | None
    peer_ids: Mapping[str, str]


def use_stores(
    config: EngineConfig, precision: Precision, kv: KVManager, memory: LinuxMemory, backend: Backend
) -> Stores:
    """Attaches the disk tier and peers, as configured."""
    # a converted model's rotated keys may have another order
    name = f"converter {backend.name}" if config.converter else backend.name
    groups = [group.layers for group in kv.layout.groups]
    store: PageStore | None = None
    found: Stores = {}
    if config.kv_cache_dir is not None:
        store, found["prefix_secret"] = open_kv_store(
            config, precision, backend=name, groups=groups, page_bytes=kv.page_bytes
        )
    if config.kv_peers or config.kv_listen is not None:
        from serve.loading.kv_peers import open_peers  # only engines with peers need it

        identity = kv_identity(config, precision, name, groups, kv.page_bytes)
        peers = open_peers(config, identity, kv, memory.page_address, store)
        store, found["prefix_secret"] = peers.store, peers.secret
        found["use_peer"], found["names"] = peers.store.use_peer, peers.names
        found["peer_ids"] = peers.engine_ids
    if store is not None:
        writes = config.kv_cache_dir is not None
        kv.prefixes.use_store(store, memory.page_address, memory.keep_pages, writes=writes)
    return found
