"""What decides the bytes of packed weights: checkpoint, settings, code and processor.

No weight is read. A weight file counts as another one when its path, size, time of change, first
bytes or tensors differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch

import ops
import quant
from ops.cpu import native_library
from serve.models.checkpoint import Checkpoint
from serve.regular_file import open_regular

_HEAD_BYTES = 1 << 20  # of each weight file
_CONFIGS = ("config.json", "quantize_config.json")
_NAME_DIGITS = 16


class Identity(NamedTuple):
    """place: of which model, with which settings, on which kind of processor; a newer version of
    the same takes its place. content: all that decides the bytes."""

    place: bytes
    content: bytes

    @property
    def file_prefix(self) -> str:
        return f"{self.place.hex()[:_NAME_DIGITS]}-"

    @property
    def file_name(self) -> str:
        return f"{self.file_prefix}{self.content.hex()[:_NAME_DIGITS]}.packed"


def identity_of(checkpoint: Checkpoint, settings: str) -> Identity:
    """settings: all that decides how this rank's part of the checkpoint is packed. OSError if a
    file cannot be read."""
    kernels = native_library.instruction_set()
    place = hashlib.sha256(f"{checkpoint.path.resolve()}\n{settings}\n{kernels}".encode())
    content = place.copy()
    content.update(_code())
    for name in _CONFIGS:
        file = checkpoint.path / name
        content.update(file.read_bytes() if file.is_file() else b"-")
    for file in sorted({entry.file for entry in checkpoint.entries.values()}):
        content.update(_described(file))
    for name, entry in checkpoint.entries.items():
        content.update(f"{name} {entry[1:]}\n".encode())
    return Identity(place.digest(), content.digest())


def shared_identity(path: Path, precision: str, packing: str) -> dict[str, str]:
    """Returns by name what decides the bytes of packed weights on any machine, besides the weight
    files. path: the model's directory. precision, packing: the settings."""
    configs = hashlib.sha256()
    for name in _CONFIGS:
        file = path / name
        configs.update(file.read_bytes() if file.is_file() else b"-")
    return {
        "config": configs.hexdigest()[:_NAME_DIGITS],
        "code": _code().hex()[:_NAME_DIGITS],
        "instruction_set": native_library.instruction_set(),
        "precision": precision,
        "packing": packing,
    }


def _described(file: Path) -> bytes:
    status = file.stat()
    with open_regular(file) as data:
        head = hashlib.sha256(data.read(_HEAD_BYTES))
    times = f"{status.st_size} {status.st_mtime_ns}"
    return f"{file.resolve()} {times} {head.hexdigest()}\n".encode()


@cache
def _code() -> bytes:
    """Returns a hash of the code between a checkpoint and its packed weights."""
    digest = hashlib.sha256(f"{torch.__version__}\n".encode())
    for file in sorted(_code_files()):
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return digest.digest()


def _code_files() -> Iterable[Path]:
    yield Path(str(native_library.library().__file__))
    yield from Path(__file__).parents[1].rglob("*.py")
    for package in (ops, quant):
        assert package.__file__ is not None, "a package of this project"
        yield from Path(package.__file__).parent.rglob("*.py")
