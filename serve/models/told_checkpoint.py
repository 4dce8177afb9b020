"""A checkpoint whose files are elsewhere: what a peer has told about its tensors.

A replica that gets its packed weights from a peer's memory reads none of the checkpoint's data, but
loading compares the tensors' names, shapes and types with config.json. Where the directory has no
weight files, the peer's table of tensors stands for their headers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from serve.errors import ModelLoadError
from serve.models.checkpoint import Checkpoint, TensorEntry

_MAX_DIMENSIONS, _MAX_NAME_CHARS, _MAX_TYPE_CHARS = 8, 1024, 16
_MAX_NUMBER = 1 << 62


@dataclass(frozen=True, slots=True)
class Told:
    """What a peer has told. fingerprint: of its checkpoint's files, without their times."""

    fingerprint: str
    tensors: Mapping[str, TensorEntry]


_told: dict[Path, Told] = {}


def tell(path: Path, told: Told | None) -> None:
    """Notes what stands for the weight files of a directory; None: its own files do."""
    if told is None:
        _told.pop(path.resolve(), None)
    else:
        _told[path.resolve()] = told


def told_about(path: Path) -> Told | None:
    return _told.get(path.resolve())


class ToldCheckpoint(Checkpoint):
    """The tensors that a peer has told of. Their data cannot be read."""

    def __init__(self, path: Path, told: Told) -> None:
        self._start(path)
        self.entries = dict(told.tensors)
        self._stays_cached = True

    def is_zero(self, name: str) -> bool:
        return True  # the peer has compared them

    def _read(self, name: str, index: int | None = None) -> Tensor:
        raise ModelLoadError(
            f"{self.path} has no weight files, and the tensor {name} comes from no peer"
        )


def pack_table(checkpoint: Checkpoint) -> bytes:
    """Returns the table of a checkpoint's tensors."""
    tensors = {
        name: [entry.file.name, list(entry.shape), entry.dtype, entry.start, entry.end]
        for name, entry in checkpoint.entries.items()
    }
    return json.dumps(tensors, separators=(",", ":")).encode()


def read_table(path: Path, content: bytes) -> dict[str, TensorEntry]:
    """Returns the tensors of a table. path: the directory that they belong to. ValueError if
    anything about it is wrong."""
    try:
        values = json.loads(content)
        return {_checked_name(name): _entry(path, value) for name, value in values.items()}
    except (TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ValueError(f"a table of tensors that is wrong: {error}") from error


def _checked_name(name: str) -> str:
    if len(name) > _MAX_NAME_CHARS or not name.isprintable():
        raise ValueError("a tensor's name")
    return name


def _entry(path: Path, value: Any) -> TensorEntry:
    file, shape, dtype, start, end = value
    is_file = isinstance(file, str) and file == Path(file).name and file.isprintable()
    numbers = [*shape, start, end]
    if not is_file or not all(type(n) is int and 0 <= n < _MAX_NUMBER for n in numbers):
        raise ValueError("a tensor's place")
    if len(shape) > _MAX_DIMENSIONS or not isinstance(dtype, str) or len(dtype) > _MAX_TYPE_CHARS:
        raise ValueError("a tensor's shape or type")
    return TensorEntry(path / file, tuple(shape), dtype, start, end)
