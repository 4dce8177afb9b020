"""Loads a model whose weights do not all fit into memory: it is packed into a file, if there is
none yet, and what does not fit stays there."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from memory.tiers.direct_io import choose_read_io, open_block_file, open_direct
from ops.cpu.heap import return_freed_memory
from serve import read_ahead
from serve.errors import ConfigError, ModelLoadError, reason
from serve.loading.streaming.build import StreamedModel
from serve.loading.streaming.division import Division
from serve.loading.streaming.packing import pack_to_file
from serve.loading.streaming.placement import (
    Needs,
    Placement,
    Speeds,
    bytes_of_step,
    expected_step_s,
    place,
    too_little,
)
from serve.loading.streaming.speeds import measure_speeds
from serve.loading.streaming.units import UnitNotes
from serve.models.checkpoint import Checkpoint
from serve.models.decoder import DecoderWeights
from serve.models.loaded_tensors import LoadedTensors
from serve.models.packed_cache import folder as folders
from serve.models.packed_cache.cache import PackedCache
from serve.models.packed_cache.identity import Identity
from serve.models.packed_cache.layout import PAGE, DamagedCache, Index, read_header, read_index
from serve.models.tensors import TensorSource
from serve.regular_file import open_trusted
from serve.units import format_memory

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEPTH = 64  # reads in flight
_NOT_OF_THE_FILE = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # packing it again would not help


@dataclass(slots=True)
class StreamingCache:
    """A TensorCache that keeps at most budget bytes of weights in memory. files: where they are
    packed. about_bytes: of the packed weights, before they are; least_bytes: with less, none of
    them are packed. speeds: None: they are measured."""

    files: PackedCache
    budget: int
    about_bytes: int
    speeds: Speeds | None = None
    least_bytes: int = 0

    def build(
        self,
        checkpoint: Checkpoint,
        loaded: LoadedTensors,
        settings: str,
        build: Callable[[TensorSource], T],
    ) -> T:
        """Returns a DecoderWeights whose `stream` reads what is not in memory."""
        read_ahead.end()  # it would fill the page cache with what is read past it
        identity = self.files.identity(checkpoint, settings)
        if identity is None:
            raise ConfigError("weight_memory_bytes: the checkpoint's files cannot be read")
        candidates = folders.folders(checkpoint.path, self.files.folder)
        for file in [folder / identity.file_name for folder in candidates]:
            try:
                fd = open_trusted(file)
                if fd is not None:
                    os.close(fd)
                    return self._load(file, identity, loaded, build)
            except (DamagedCache, OSError) as error:
                if isinstance(error, OSError) and error.errno in _NOT_OF_THE_FILE:
                    raise _load_error(file, error) from error
                problem = _problem(error)
                logger.warning("packed weights: %s is not used and deleted: %s", file, problem)
                folders.remove(file)
        if self.budget < self.least_bytes:
            raise too_little(self.budget, f"at least {format_memory(self.least_bytes)}")
        file = pack_to_file(
            candidates, identity, loaded, build, self.about_bytes, self.files.max_bytes
        )
        return_freed_memory()
        try:
            return self._load(file, identity, loaded, build)
        except (DamagedCache, OSError) as error:
            raise _load_error(file, error) from error

    def _load(
        self,
        file: Path,
        identity: Identity,
        loaded: LoadedTensors,
        build: Callable[[TensorSource], T],
    ) -> T:
        index = _read_index(file, identity)
        notes = UnitNotes(loaded, index.entries, index.data_end)
        shape = build(notes)
        assert isinstance(shape, DecoderWeights)
        division = Division(notes.found, shape)
        placement = place(division.needs, self.budget)
        self._announce(file, division.needs, placement)
        model = StreamedModel(division, placement, index, loaded)
        fd, is_direct = open_direct(file, os.O_RDONLY)
        try:
            folders.mark_used(fd)
            io = choose_read_io(file.parent)
            source = model.read(fd)
            block_file = open_block_file(fd, is_direct=is_direct, depth=DEPTH, io=io)
        except BaseException:
            os.close(fd)
            raise
        reader = model.open(file, block_file)
        try:
            weights = build(source)
            assert isinstance(weights, DecoderWeights)
            weights.stream = model.begin(weights, reader)
        except BaseException:
            reader.close()
            raise
        return weights

    def _announce(self, file: Path, needs: Needs, placement: Placement) -> None:
        """Says what to expect before anything is loaded."""
        speeds = self.speeds or measure_speeds(file)
        step_s = expected_step_s(needs, placement, speeds)
        many_s = expected_step_s(needs, placement, speeds, rows=8)
        logger.info(
            "weights: %s of %s in memory, a step of one row reads %s from the disk at %s/s: about"
            " %.2f tokens a second for one request, %.1f for 8 at once",
            format_memory(placement.num_bytes),
            format_memory(needs.total),
            format_memory(int(bytes_of_step(needs, placement)[0])),
            format_memory(int(speeds.disk)),
            1 / step_s,
            8 / many_s,
        )


def _load_error(file: Path, error: DamagedCache | OSError) -> ModelLoadError:
    return ModelLoadError(f"packed weights: {file}: {_problem(error)}")


def _problem(error: DamagedCache | OSError) -> str:
    return reason(error) if isinstance(error, OSError) else str(error)


def _read_index(file: Path, identity: Identity) -> Index:
    fd = open_trusted(file)
    if fd is None:
        raise DamagedCache("it is gone")
    try:
        place, digest = read_header(os.pread(fd, PAGE, 0), identity.content, os.fstat(fd).st_size)
        return read_index(os.pread(fd, place.num_bytes, place.start), digest, place)
    finally:
        os.close(fd)
