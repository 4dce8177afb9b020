"""Loading through the files of packed weights: from one that is there, or so that one will be."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from torch import Tensor

from serve import read_ahead
from serve.errors import reason
from serve.models.checkpoint import Checkpoint
from serve.models.loaded_tensors import LoadedTensors
from serve.models.packed_cache import folder as folders
from serve.models.packed_cache.identity import Identity, identity_of, shared_identity
from serve.models.packed_cache.in_memory import Found, PackedBytes
from serve.models.packed_cache.layout import PAGE, DamagedCache, read_header, read_index
from serve.models.packed_cache.region import open_region
from serve.models.packed_cache.sources import KeptTensors, NotedTensors
from serve.models.packed_cache.writer import Contents, Made, write_file
from serve.models.tensors import TensorSource
from serve.regular_file import open_trusted
from serve.units import format_memory

if TYPE_CHECKING:
    from serve.models.packed_cache.shared_memory import SharedMemory

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_BYTES = 64 << 30
MIN_BYTES = 64 << 20
_WRITER_NICENESS = 10
_WRITER_NAME = "packed-weights"


class Peers(Protocol):
    """Replicas that have the same packed weights in memory, or want them. identity: what they have
    in common, by name."""

    @property
    def wants_shared(self) -> bool:
        """Whether others can use memory of this process, so that the weights belong there."""

    def pull(self, identity: Mapping[str, str]) -> Found | None:
        """Returns the weights of a peer; None if they are to be loaded from the checkpoint."""

    def offer(
        self, identity: Mapping[str, str], checkpoint: Checkpoint, packed: PackedBytes
    ) -> None:
        """Tells what this process has."""


@dataclass(slots=True)
class PackedCache:
    """Where packed weights are kept, and the settings by which they are packed.

    folder: the only folder; None: beside the model, else the user's cache. max_bytes: of all files
    of a folder. min_bytes: of a file; less is packed as fast as it is mapped. records: the folder
    that notes for the next start which file it needs; None: none. has_files: whether there are
    files at all. peers: other replicas. writer: the thread that writes the file of the model that
    was loaded last.
    """

    settings: str
    folder: Path | None = None
    max_bytes: int = DEFAULT_BYTES
    min_bytes: int = MIN_BYTES
    records: Path | None = None
    has_files: bool = True
    peers: Peers | None = None
    writer: threading.Thread | None = None

    def build(
        self,
        checkpoint: Checkpoint,
        loaded: LoadedTensors,
        settings: str,
        build: Callable[[TensorSource], T],
    ) -> T:
        """Returns what `build` makes of the tensors, which come from a file if there is one, else
        from a peer. Else they are loaded, and a thread writes the file afterwards. settings:
        further ones by which they are packed."""
        identity = self.identity(checkpoint, settings) if self.has_files else None
        candidates = folders.folders(checkpoint.path, self.folder)
        for folder in candidates if identity is not None else ():
            assert identity is not None
            file = folder / identity.file_name
            try:
                found = _open(file, identity, self._wants_shared())
                if found is not None:
                    self._note(checkpoint, file)
                    result = build(KeptTensors(loaded, found.data, found.index.entries))
                    self._offer(checkpoint, settings, found)
                    return result
            except (DamagedCache, OSError) as error:
                problem = reason(error) if isinstance(error, OSError) else error
                logger.warning("packed weights: %s is not used and deleted: %s", file, problem)
                folders.remove(file)
        read_ahead.end()
        pulled = self._pull(checkpoint, settings)
        if pulled is not None:
            try:
                result = build(KeptTensors(loaded, pulled.data, pulled.index.entries))
                self._offer(checkpoint, settings, pulled)
                return result
            except DamagedCache as error:  # then a checkpoint without files raises its own error
                logger.warning("packed weights: those of a peer are not used: %s", error)
        if identity is None and self.peers is None:
            return build(loaded)
        result, made, shared = self._load(checkpoint, loaded, build)
        if made is None:
            return result
        if self.peers is not None:
            self._offer(checkpoint, settings, Contents(made), shared)
        if identity is not None:
            arguments = checkpoint, candidates, identity, made
            self.writer = threading.Thread(
                target=self._keep, args=arguments, name=_WRITER_NAME, daemon=True
            )
            self.writer.start()
        return result

    def identity(self, checkpoint: Checkpoint, settings: str) -> Identity | None:
        """Returns what names the file of a checkpoint, None if its files cannot be read."""
        try:
            return identity_of(checkpoint, f"{self.settings} {settings}")
        except OSError as error:  # the files may be elsewhere
            if self.peers is None:
                logger.warning("packed weights are not kept: %s", reason(error))
            return None

    def _load(
        self, checkpoint: Checkpoint, loaded: LoadedTensors, build: Callable[[TensorSource], T]
    ) -> tuple[T, list[Made] | None, SharedMemory | None]:
        """Returns what `build` makes, what a file of it has (None: no file can replace loading),
        and the memory of all of that if other processes can have it."""
        if not self._wants_shared():
            noted = NotedTensors(loaded)
            result = build(noted)
            return result, noted.made if noted.is_whole else None, None
        from serve.models.packed_cache.moved import MovedTensors  # only such replicas need it

        num_bytes = sum(entry.end - entry.start for entry in checkpoint.entries.values())
        moved = MovedTensors(loaded, num_bytes)
        try:
            result, shared = build(moved), moved.shared()
        finally:
            moved.close()
        return (result, moved.made, shared) if moved.is_whole else (result, None, None)

    def _wants_shared(self) -> bool:
        return self.peers is not None and self.peers.wants_shared

    def _pull(self, checkpoint: Checkpoint, settings: str) -> Found | None:
        if self.peers is None:
            return None
        return self.peers.pull(shared_identity(checkpoint.path, self.settings, settings))

    def _offer(
        self,
        checkpoint: Checkpoint,
        settings: str,
        source: Contents | Found,
        shared: SharedMemory | None = None,
    ) -> None:
        if self.peers is not None:
            identity = shared_identity(checkpoint.path, self.settings, settings)
            self.peers.offer(identity, checkpoint, PackedBytes(source, shared))

    def _note(self, checkpoint: Checkpoint, file: Path) -> None:
        """Notes the file for the directory and, since a GGUF file is one, for the weights."""
        if self.records is not None:
            weights = {entry.file for entry in checkpoint.entries.values()}
            for model in (checkpoint.path, *sorted(weights)[:1]):
                read_ahead.note_start(self.records, model, file)

    def _keep(
        self,
        checkpoint: Checkpoint,
        candidates: list[Path],
        identity: Identity,
        made: list[Made],
    ) -> None:
        """Writes a file; runs in a thread of its own, since a disk may be slow."""
        # Linux has a niceness for each thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _WRITER_NICENESS)
        contents = Contents(made)
        num_bytes = contents.data_end
        if num_bytes < self.min_bytes:
            return
        try:
            folder = folders.writable(candidates)
        except folders.NoRoom as error:
            logger.info("packed weights are not kept: %s", error)
            return
        logger.info("packed weights: writing %s for later starts", format_memory(num_bytes))
        began = time.monotonic()
        try:
            with folders.locked(folder):
                other = open_trusted(folder / identity.file_name)
                if other is not None:
                    os.close(other)
                    logger.info("packed weights: another process has kept them")
                    return
                folders.make_room(folder, identity, num_bytes, self.max_bytes)
                path = write_file(folder, identity, contents)
        except folders.NoRoom as error:
            logger.warning("packed weights are not kept in %s: %s", folder, error)
        except OSError as error:
            logger.warning("packed weights are not kept in %s: %s", folder, reason(error))
        else:
            seconds = time.monotonic() - began
            logger.info("packed weights: kept in %s, in %.1f s", path, seconds)
            self._note(checkpoint, path)


def _open(file: Path, identity: Identity, is_shared: bool) -> Found | None:
    """Returns the weights of a file, None if there is none to use. is_shared: with the memory that
    others can have. DamagedCache, OSError."""
    fd = open_trusted(file)
    if fd is None:
        return None
    began = time.monotonic()
    try:
        place, digest = read_header(os.pread(fd, PAGE, 0), identity.content, os.fstat(fd).st_size)
        index = read_index(os.pread(fd, place.num_bytes, place.start), digest, place)
        data, is_mapped = open_region(fd, index)
        folders.mark_used(fd)
        shared = _shared(fd, data) if is_shared and is_mapped else None
    finally:
        os.close(fd)
    logger.info(
        "packed weights: %s %s %s in %.2f s",
        format_memory(index.data_end),
        "mapped from" if is_mapped else "read from",
        file,
        time.monotonic() - began,
    )
    return Found(index, data, shared)


def _shared(fd: int, data: Tensor) -> SharedMemory:
    from serve.models.packed_cache.shared_memory import SharedMemory  # only such replicas need it

    return SharedMemory(os.dup(fd), data)


def wait_until_kept() -> None:
    """Returns when all packed weights of this process that are being written are on the disk. Until
    then their threads keep the weights in memory."""
    for thread in threading.enumerate():
        if thread.name == _WRITER_NAME:
            thread.join()
