"""A checkpoint's safetensors files: their headers, and one memory-mapped tensor at a time.

This module does not know what the tensors are for, and it never unpickles anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError
from torch import Tensor

from ops.cpu.finite import all_finite
from quant.formats.base import TensorRule
from serve.checkpoint_json import read_json
from serve.errors import ModelLoadError, reason
from serve.machine import available_memory
from serve.models.mapped_file import MappedFile, Place, drop_cached, read_places
from serve.regular_file import check_regular

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
FLOATS = ("F32", "BF16", "F16", "F64")


Cut = Callable[[Tensor], Tensor]
"""Takes a part of a tensor, as a view."""


class TensorEntry(NamedTuple):
    """A tensor's file, shape and safetensors type, and its first and last byte in the file."""

    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int = 0
    end: int = 0


class Checkpoint:
    """All tensors by name. The constructor reads headers, `fetch` reads data.

    Files stay open between fetches. `release` closes them, which unmaps everything that no tensor
    refers to; call it regularly, so that pages that were read leave memory. Files that memory
    cannot hold beside the weights leave the page cache, too: otherwise the kernel evicts their
    pages one by one for those of the weights, and finds few that make a huge page.
    """

    described_by = "config.json"
    is_strict = False  # a tensor that the model has no use for is an error

    def __init__(self, path: Path) -> None:
        self._start(path)
        for file in weight_files(path):
            self._read_header(file)
        num_bytes = sum(entry.end - entry.start for entry in self.entries.values())
        # weights take at most what the files take, but for a few formats
        self._stays_cached = 2 * num_bytes <= available_memory()

    def _start(self, path: Path) -> None:
        """Begins a checkpoint without tensors."""
        self.path = path
        self.entries: dict[str, TensorEntry] = {}
        self._stored_names: dict[str, str] = {}  # of tensors that were renamed
        self._mapped: dict[Path, MappedFile] = {}
        self._read_bytes: dict[Path, list[tuple[int, int]]] = {}

    def rename(self, parts: Sequence[tuple[str, str]]) -> None:
        """Gives the tensors whose names hold the first of a pair a name with the second in its
        place, unless there is one of that name."""
        for stored in list(self.entries):
            name = stored
            for before, after in parts:
                name = name.replace(before, after)
            if name not in self.entries:
                self.entries[name] = self.entries.pop(stored)
                self._stored_names[name] = stored

    def stored_name(self, name: str) -> str:
        """Returns a tensor's name in its file, for messages."""
        return self._stored_names.get(name, name)

    def find_prefix(self, prefixes: Sequence[str], name: str) -> str:
        """Returns the prefix with which the tensor exists. ModelLoadError if there is none."""
        for prefix in prefixes:
            if prefix + name in self.entries:
                return prefix
        stored = self.stored_name(prefixes[0] + name)
        raise ModelLoadError(f"{self.path}: tensor {stored} is missing")

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Announces the tensors that will be fetched; files ignore it."""

    def fetch(self, name: str, index: int | None = None, cut: Cut | None = None) -> Tensor:
        """Returns the tensor, mapped from the file, or the part [index] of its first dimension (if
        it has one), or what `cut` takes of that; only this is read. ModelLoadError if it is not
        finite."""
        tensor = self._read(name, index)
        if cut is not None:
            tensor = cut(tensor)
        if not all_finite(tensor):
            raise self._not_finite(name)
        return tensor

    def _not_finite(self, name: str) -> ModelLoadError:
        stored = self.stored_name(name)
        return ModelLoadError(f"{self.entries[name].file}: tensor {stored} holds NaN or infinity")

    def is_zero(self, name: str) -> bool:
        """Returns whether a tensor of any type is all zeros."""
        return not bool(self._read(name).float().any())

    def _read(self, name: str, index: int | None = None) -> Tensor:
        return self._read_place(self.entries[name].file, self._place(name), index)

    def _read_place(self, file: Path, place: Place, index: int | None = None) -> Tensor:
        with _naming(file):
            mapped = self._mapped.get(file)
            if mapped is None:
                mapped = self._mapped[file] = MappedFile(file)
            tensor = mapped.tensor(place)
        start, end = place.start, place.end
        if index is not None and tensor.ndim:
            tensor = tensor[index]
            start += index * tensor.nbytes
            end = start + tensor.nbytes
        self._read_bytes.setdefault(file, []).append((start, end))
        return tensor

    def _place(self, name: str) -> Place:
        """Returns the bytes of a tensor."""
        return Place(*self.entries[name][1:])

    def release(self) -> None:
        self._mapped.clear()
        if not self._stays_cached:
            for file, ranges in self._read_bytes.items():
                drop_cached(file, ranges)
        self._read_bytes.clear()

    def _read_header(self, file: Path) -> None:
        with _naming(file):
            places = read_places(file)
        for name, place in places.items():
            if name in self.entries:
                other = self.entries[name].file.name
                raise ModelLoadError(f"{file}: tensor {name} is also in {other}")
            self.entries[name] = TensorEntry(file, *place)


def check_rule(checkpoint: Checkpoint, name: str, rule: TensorRule) -> None:
    """Checks type and shape of a tensor of a quantized product. ModelLoadError."""
    entry, stored = checkpoint.entries.get(name), checkpoint.stored_name(name)
    if entry is None:
        if rule.is_optional:
            return
        raise ModelLoadError(f"{checkpoint.path}: tensor {stored} is missing")
    if not rule.allows(entry.shape):
        shapes = " or ".join(str(list(shape)) for shape in rule.shapes) or "[bytes]"
        raise ModelLoadError(
            f"{entry.file}: tensor {stored} has shape {list(entry.shape)}, but "
            f"{checkpoint.described_by} asks for {shapes}"
        )
    if entry.dtype not in rule.dtypes:
        raise ModelLoadError(
            f"{entry.file}: tensor {stored} has type {entry.dtype}; it must be "
            f"{' or '.join(rule.dtypes)}"
        )


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Turns errors of the safetensors library into ModelLoadError with the file's name."""
    try:
        yield
    except (SafetensorError, OSError, RuntimeError, ValueError) as error:
        kind = "GGUF" if file.suffix == ".gguf" else "safetensors"
        raise ModelLoadError(f"{file} cannot be read as {kind}: {error}") from error


def weight_files(path: Path) -> list[Path]:
    """Returns the index's files, or model.safetensors, or the only .safetensors file.
    ModelLoadError if one is missing."""
    if (path / INDEX).exists():
        return _indexed_files(path)
    if (path / SINGLE).exists():
        return [_inside(path, SINGLE, "it")]
    found = sorted(path.glob("*.safetensors"))
    if len(found) == 1:
        return [_inside(path, found[0].name, "it")]
    if found:
        raise ModelLoadError(f"{path} has several .safetensors files but no {INDEX}")
    pickled = [item.name for item in sorted(path.iterdir()) if item.suffix in PICKLED]
    if pickled:
        raise ModelLoadError(
            f"{path} has its weights only as {pickled[0]}, which can run code when it is opened; "
            "convert it to safetensors (save_pretrained does it)"
        )
    raise ModelLoadError(f"{path} has no weights: {SINGLE} or {INDEX} is needed")


def _indexed_files(path: Path) -> list[Path]:
    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{path / INDEX}: weight_map is missing or empty")
    for name in weight_map.values():
        if not isinstance(name, str):
            raise ModelLoadError(f"{path / INDEX}: weight_map names a file {name!r}")
    return [_inside(path, name, INDEX) for name in sorted(set(weight_map.values()))]


def _inside(path: Path, name: str, source: str) -> Path:
    """Returns path / name. ModelLoadError unless it is a file of this directory.

    Links may only point into the directory, or from a Hugging Face cache's snapshot to its blobs
    and to those that all models of the cache share.
    """
    if Path(name).name != name or "\\" in name or name in (".", ".."):
        raise ModelLoadError(f"{path}: {source} names {name!r}, which is not in the directory")
    file = path / name
    if not file.exists():
        raise ModelLoadError(f"{path}: {source} names {name}, which does not exist")
    try:
        check_regular(file)
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {reason(error)}") from error
    allowed = [path.resolve()]
    if path.parent.name == "snapshots":
        repository = path.parent.parent
        allowed.append((repository / "blobs").resolve())
        if repository.name.startswith("models--"):
            allowed.append((repository.parent / "blobs").resolve())
    target = file.resolve()
    if not any(target.is_relative_to(folder) for folder in allowed):
        raise ModelLoadError(f"{file} links to {target}, outside of the model directory")
    return file
