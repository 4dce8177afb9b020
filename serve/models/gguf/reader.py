"""Reads the keys and the places of the tensors of a GGUF file, or of all files of a split model.

A file is a magic number, a version, keys with values, the tensors' names, shapes, types and
offsets, and then their data. Every count, length and offset is compared with a limit and with the
file's size before memory is reserved for what it announces, so the limits below bound the memory.
Errors are ModelLoadErrors that name the file.
"""

from __future__ import annotations

import os
import re
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from quant.formats.gguf.kinds import KINDS
from serve.errors import ModelLoadError, reason
from serve.regular_file import open_regular

MAX_HEADER_BYTES = 64 << 20  # of one file: everything before the tensors' data
MAX_KEYS = 1 << 14
MAX_KEY_BYTES = (1 << 16) - 1  # of the specification
MAX_ITEMS = 1 << 22  # of all arrays of a file together
MAX_TENSORS = 1 << 17  # of all files of a model together
MAX_NAME_BYTES = 512  # of a tensor
MAX_DIMENSIONS = 4
MAX_ALIGNMENT = 1 << 20
MAX_SPLITS = 1 << 10

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # if no key says another
_LEAST_ALIGNMENT = 8
_CHUNK_BYTES = 1 << 18
_SPLIT_NAME = re.compile(r"-(\d{5})-of-(\d{5})\.gguf")
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
# The numbers of the types of values, with the letters of `struct` for those of one size.
_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY, _BOOL = 8, 9, 7
_LEAST_KEY_BYTES = 8 + 4 + 1  # a length, a type, and a value
_LEAST_TENSOR_BYTES = 8 + 4 + 4 + 8  # a length, dimensions, a type, and an offset


class GGUFTensor(NamedTuple):
    """A tensor's file, shape with the rows first, type, and its first and last byte in the file.

    dtype is the name in quant/formats/gguf/kinds.py, which for plain types is that of safetensors.
    The shape counts weights, also of quantized tensors. The fields are those of
    `serve.models.checkpoint.TensorEntry`.
    """

    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A model's keys and tensors. metadata: of the first file; integers, floats (which may be NaN),
    bools, strings and lists of one of them. files: all files of the model, in their order."""

    path: Path
    metadata: dict[str, Any]
    entries: dict[str, GGUFTensor]
    files: tuple[Path, ...]


def read_gguf(path: Path) -> GGUFFile:
    """Reads the headers of a file, and of the others if it is the first of a split model.

    ModelLoadError says what is wrong with a file.
    """
    metadata, entries = _read_file(path)
    count = metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= MAX_SPLITS:
        raise ModelLoadError(
            f"{path}: split.count is {_short(count)}; models of at most {MAX_SPLITS} files are read"
        )
    files = _split_files(path, metadata, count) if count > 1 else (path,)
    for number, file in enumerate(files[1:], 1):
        own, more = _read_file(file)
        if (own.get("split.no"), own.get("split.count")) != (number, len(files)):
            raise ModelLoadError(
                f"{file}: split.no and split.count must be {number} and {len(files)}, as its name "
                f"says, not {_short(own.get('split.no'))} and {_short(own.get('split.count'))}"
            )
        twice = entries.keys() & more.keys()
        if twice:
            name = min(twice)
            raise ModelLoadError(f"{file}: tensor {name} is also in {entries[name].file.name}")
        entries |= more
        if len(entries) > MAX_TENSORS:
            raise ModelLoadError(f"{path}: its files have more than {MAX_TENSORS} tensors")
    expected = metadata.get("split.tensors.count", len(entries))
    if len(files) > 1 and expected != len(entries):
        raise ModelLoadError(
            f"{path}: split.tensors.count is {_short(expected)}, but its files have "
            f"{len(entries)} tensors"
        )
    return GGUFFile(path, metadata, entries, files)


def _split_files(path: Path, metadata: dict[str, Any], count: int) -> tuple[Path, ...]:
    match = _SPLIT_NAME.search(path.name)
    if match is None or match.end() != len(path.name) or int(match[2]) != count:
        raise ModelLoadError(
            f"{path}: it is one of {count} files of a model, whose names must end in "
            f"-00001-of-{count:05}.gguf and so on"
        )
    start = path.name[: match.start()]
    files = [path.with_name(f"{start}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    if metadata.get("split.no") != 0 or int(match[1]) != 1:
        raise ModelLoadError(f"{path}: it is not the first file of its model; {files[0].name} is")
    missing = next((file.name for file in files if not file.exists()), None)
    if missing is not None:
        raise ModelLoadError(f"{path}: its model has {count} files, but {missing} is missing")
    return tuple(files)


def _read_file(file: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    try:
        with open_regular(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            return _Header(opened, size).read(file)
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {reason(error)}") from error
    except ValueError as error:
        raise ModelLoadError(f"{file} cannot be read as GGUF: {error}") from error


class _Tensor(NamedTuple):
    """What a file says about a tensor. offset: of the first byte, from that of all data."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    num_bytes: int


class _Header:
    """The bytes of a file's header, which are read as they are needed, and their meaning.

    ValueError says what is wrong with them.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size
        self._data = bytearray()
        self._at = 0
        self._num_items = 0

    def read(self, file: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        self._check_version()
        num_tensors, num_keys = self._integer(_U64), self._integer(_U64)
        self._check_count("tensors", num_tensors, MAX_TENSORS, _LEAST_TENSOR_BYTES)
        self._check_count("keys", num_keys, MAX_KEYS, _LEAST_KEY_BYTES)
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("a key", MAX_KEY_BYTES)
            if key in metadata:
                raise ValueError(f"key {_short(key)} is there twice")
            metadata[key] = self._value(key)
        tensors = [self._tensor() for _ in range(num_tensors)]
        alignment = _alignment(metadata)
        base = -(-self._at // alignment) * alignment
        entries: dict[str, GGUFTensor] = {}
        for name, shape, dtype, offset, num_bytes in tensors:
            if name in entries:
                raise ValueError(f"tensor {_short(name)} is there twice")
            if offset % alignment:
                raise ValueError(
                    f"tensor {_short(name)} begins at {offset}, which is no multiple of the "
                    f"alignment {alignment}"
                )
            start = base + offset
            entries[name] = GGUFTensor(file, shape, dtype, start, start + num_bytes)
        _check_places(entries, self._size)
        return metadata, entries

    def _check_version(self) -> None:
        magic = bytes(self._take(4, "its first four bytes"))
        if magic != _MAGIC:
            raise ValueError(f"it begins with {magic!r} instead of {_MAGIC!r}")
        version = self._integer(_U32)
        if version and version % (1 << 16) == 0:
            raise ValueError("its numbers are big-endian, which is not supported")
        if version not in _VERSIONS:
            raise ValueError(
                f"it has version {version}; versions {' and '.join(map(str, _VERSIONS))} are read"
            )

    def _check_count(self, what: str, count: int, most: int, least_bytes: int) -> None:
        """Checks a count before anything is reserved for it."""
        if count > most:
            raise ValueError(f"it has {count:,} {what}; at most {most:,} are read")
        if count * least_bytes > self._size - self._at:
            raise ValueError(f"it has {self._size:,} bytes, too few for its {count:,} {what}")

    def _tensor(self) -> _Tensor:
        name = self._string("a tensor's name", MAX_NAME_BYTES)
        num_dimensions = self._integer(_U32)
        if num_dimensions > MAX_DIMENSIONS:
            raise ValueError(
                f"tensor {_short(name)} has {num_dimensions} dimensions; {MAX_DIMENSIONS} are the "
                "most"
            )
        # the file has the dimension of a row's weights first
        shape = tuple(self._integer(_U64) for _ in range(num_dimensions))[::-1]
        number, offset = self._integer(_U32), self._integer(_U64)
        kind = KINDS.get(number)
        if kind is None:
            raise ValueError(f"tensor {_short(name)} has a type of unknown number {number}")
        if 0 in shape:
            raise ValueError(f"tensor {_short(name)} has the empty shape {list(shape)}")
        if (shape[-1] if shape else 1) % kind.weights:
            raise ValueError(
                f"tensor {_short(name)} has shape {list(shape)}, but rows of {kind.name} are "
                f"multiples of {kind.weights}"
            )
        num_bytes = prod(shape) // kind.weights * kind.num_bytes
        if num_bytes > self._size or offset > self._size:
            raise ValueError(
                f"tensor {_short(name)} of shape {list(shape)} and type {kind.name} has "
                f"{num_bytes:,} bytes from {offset:,} on, but the file has {self._size:,}: it is "
                "cut off or wrong"
            )
        return _Tensor(name, shape, kind.name, offset, num_bytes)

    def _value(self, key: str) -> Any:
        number = self._integer(_U32)
        if number == _STRING:
            return self._string(f"key {_short(key)}", MAX_HEADER_BYTES)
        if number in _NUMBERS:
            return self._numbers(key, number, 1)[0]
        if number != _ARRAY:
            raise ValueError(f"key {_short(key)} has a value of unknown type {number}")
        number, count = self._integer(_U32), self._integer(_U64)
        if number == _ARRAY:
            raise ValueError(f"key {_short(key)} is an array of arrays, which is not supported")
        if number not in _NUMBERS and number != _STRING:
            raise ValueError(f"key {_short(key)} has values of unknown type {number}")
        self._num_items += count
        if self._num_items > MAX_ITEMS:
            raise ValueError(
                f"key {_short(key)} has {count:,} values; all keys together may have {MAX_ITEMS:,}"
            )
        if number in _NUMBERS:
            return list(self._numbers(key, number, count))
        what = f"key {_short(key)}"
        self._check_count(f"strings of {what}", count, MAX_ITEMS, _U64.size)
        return self._strings(count, what)

    def _strings(self, count: int, what: str) -> list[str]:
        """Reads an array of strings, which are most of a vocabulary's time: without calls."""
        data, at, strings = self._data, self._at, []
        try:
            for _ in range(count):
                if at + 8 > len(data):
                    self._read_up_to(at + 8, what)
                end = at + 8 + _U64.unpack_from(data, at)[0]
                if end > len(data):
                    self._read_up_to(end, what)
                strings.append(data[at + 8 : end].decode())
                at = end
        except UnicodeDecodeError as error:
            raise ValueError(f"{what} is not UTF-8: {error.reason}") from error
        self._at = at
        return strings

    def _numbers(self, key: str, number: int, count: int) -> tuple[Any, ...]:
        kind = struct.Struct(f"<{count}{_NUMBERS[number]}")
        taken = self._take(kind.size, f"key {_short(key)}")
        if number == _BOOL and taken.strip(b"\0\1"):
            raise ValueError(f"key {_short(key)} holds a bool that is neither 0 nor 1")
        return kind.unpack(taken)

    def _integer(self, kind: struct.Struct) -> int:
        return int(kind.unpack(self._take(kind.size, "a number"))[0])

    def _string(self, what: str, most: int) -> str:
        (length,) = _U64.unpack(self._take(8, what))
        if length > most:
            raise ValueError(f"{what} has {length:,} bytes; {most:,} are the most")
        try:
            return self._take(length, what).decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{what} is not UTF-8: {error.reason}") from error

    def _take(self, count: int, what: str) -> bytearray:
        """Returns the next bytes."""
        at = self._at
        self._at = end = at + count
        if end > len(self._data):
            self._read_up_to(end, what)
        return self._data[at:end]

    def _read_up_to(self, end: int, what: str) -> None:
        if end > self._size:
            raise ValueError(f"it has {self._size:,} bytes and ends within {what}: it is cut off")
        if end > MAX_HEADER_BYTES:
            raise ValueError(f"its header is longer than {MAX_HEADER_BYTES:,} bytes")
        wanted = min(max(end, len(self._data) + _CHUNK_BYTES), self._size)
        self._data += self._file.read(wanted - len(self._data))
        if len(self._data) < end:
            raise ValueError("it became shorter while it was read")


def _alignment(metadata: dict[str, Any]) -> int:
    value = metadata.get("general.alignment", _ALIGNMENT)
    if type(value) is not int or not _LEAST_ALIGNMENT <= value <= MAX_ALIGNMENT:
        value = 0
    if value == 0 or value & (value - 1):
        raise ValueError(
            f"general.alignment is {_short(metadata['general.alignment'])}; it must be a power of "
            f"two from {_LEAST_ALIGNMENT} to {MAX_ALIGNMENT}"
        )
    return value


def _check_places(entries: dict[str, GGUFTensor], size: int) -> None:
    """Checks that the file holds all tensors, and that none of them begins within another."""
    end, before = 0, ""
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start < end:
            raise ValueError(f"tensors {_short(before)} and {_short(name)} overlap")
        end, before = entry.end, name
    if end > size:
        raise ValueError(f"it has {size:,} bytes, but its header describes {end:,}: it is cut off")


def _short(value: object) -> str:
    """Returns a value of the file for a message."""
    text = value if isinstance(value, str) and value.isprintable() else repr(value)
    return text if len(text) <= 80 else text[:80] + "..."
