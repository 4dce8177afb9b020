"""The format of a file of packed weights: a header, the data, and an index behind the data.

The first page has the header: a magic number, the version, the identity of what was packed, the
place and the checksum of the index, and a checksum of the header itself. The data begin a huge
page, and so does every chunk, so that the page cache can have huge pages of them. The index, JSON,
has the checksums of all chunks and an entry for each thing that loading made. Everything that a
file says is checked against its size before it is used.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from ops.cpu.native_stored import NUM_BUFFERS, LayerKind

PAGE = 4096
DATA_START = 2 << 20
LINE = 64  # buffers begin at multiples
CHUNK_BYTES = 32 << 20  # with one checksum; the last chunk of a file may be shorter
MAX_INDEX_BYTES = 256 << 20
_MAGIC = b"mergestep packed"
_VERSION = 2
_HEADER = struct.Struct("<16sI4x32sQQ32s")  # version, identity, index at, index bytes, its digest
_MAX_DIMENSIONS = 8
_MAX_NUMBER = 1 << 62
_SHOWN_CHARS = 120

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}


class DamagedCache(Exception):
    """A file of packed weights that cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes of a file."""

    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LayerEntry:
    """A linear layer."""

    kind: LayerKind
    buffers: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A dense tensor. dtype: one of DTYPES."""

    dtype: str
    shape: tuple[int, ...]
    data: Span


@dataclass(frozen=True, slots=True)
class Entry:
    """What one call of a TensorSource gave. call: names the call. parts: its layers, or a tensor;
    none: it is not in the file."""

    call: str
    parts: tuple[LayerEntry | TensorEntry, ...]


@dataclass(frozen=True, slots=True)
class Index:
    """entries: in the order of the calls. checksums: of the chunks of all bytes from
    DATA_START to data_end, a multiple of PAGE."""

    data_end: int
    entries: list[Entry]
    checksums: list[int]

    def to_bytes(self) -> bytes:
        entries = [[entry.call, [_plain(part) for part in entry.parts]] for entry in self.entries]
        content = {"data_end": self.data_end, "entries": entries, "checksums": self.checksums}
        return json.dumps(content, separators=(",", ":")).encode()


def chunks_of(data_end: int) -> list[Span]:
    """Returns the chunks of the data that ends at data_end."""
    starts = range(DATA_START, data_end, CHUNK_BYTES)
    return [Span(start, min(CHUNK_BYTES, data_end - start)) for start in starts]


def shown(value: object) -> str:
    """Returns what a file or a peer says as it may stand in a message: short and printable."""
    text = "unknown" if value is None else str(value)
    return "".join([c if c.isprintable() else "?" for c in text[:_SHOWN_CHARS]])


def header(identity: bytes, index_at: int, index: bytes) -> bytes:
    """Returns the first page of a file."""
    content = _HEADER.pack(_MAGIC, _VERSION, identity, index_at, len(index), _digest(index))
    return (content + _digest(content)).ljust(PAGE, b"\0")


def read_header(page: bytes, identity: bytes, file_bytes: int) -> tuple[Span, bytes]:
    """Returns the place and the digest of the index. DamagedCache if the header is not that of a
    whole file of this identity."""
    content = page[: _HEADER.size]
    if len(page) < PAGE or page[_HEADER.size : _HEADER.size + 32] != _digest(content):
        raise DamagedCache("its header is damaged")
    magic, version, found, at, num_bytes, digest = _HEADER.unpack(content)
    if magic != _MAGIC or version != _VERSION:
        raise DamagedCache("it has another format")
    if found != identity:
        raise DamagedCache("it was made of another checkpoint, by other settings or other code")
    if num_bytes > MAX_INDEX_BYTES or at % PAGE or at < DATA_START or at + num_bytes != file_bytes:
        raise DamagedCache("it is cut off")
    return Span(at, num_bytes), digest


def read_index(content: bytes, digest: bytes, place: Span) -> Index:
    """Returns the checked index. DamagedCache if anything about it is wrong."""
    if _digest(content) != digest:
        raise DamagedCache("its index is damaged")
    try:
        values = json.loads(content)
        index = Index(
            values["data_end"],
            [_entry(call, parts, place.start) for call, parts in values["entries"]],
            values["checksums"],
        )
        wanted = len(chunks_of(place.start))
        if type(index.checksums) is not list or not all(map(_is_number, index.checksums)):
            raise ValueError("checksums that are none")
        if not _is_number(index.data_end) or index.data_end != place.start:
            raise ValueError("another size of the data")
        if len(index.checksums) != wanted:
            raise ValueError("another number of checksums")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise DamagedCache(f"its index is wrong: {shown(error)}") from error
    return index


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 64


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=32).digest()


def _plain(part: LayerEntry | TensorEntry) -> list[Any]:
    if isinstance(part, TensorEntry):
        return ["tensor", part.dtype, part.shape, part.data.start, part.data.num_bytes]
    spans = [n for span in part.buffers for n in (span.start, span.num_bytes)]
    return ["layer", *part.kind, *spans]


def _entry(call: Any, parts: Any, data_end: int) -> Entry:
    if not isinstance(call, str):
        raise ValueError("a call without a name")
    return Entry(call, tuple(_part(values, data_end) for values in parts))


def _part(values: Any, data_end: int) -> LayerEntry | TensorEntry:
    if values[0] == "tensor":
        _, dtype, shape, start, num_bytes = values
        if len(shape) > _MAX_DIMENSIONS or not all(map(_is_number, shape)):
            raise ValueError("a tensor's shape")
        if DTYPES[dtype].itemsize * prod(shape) != num_bytes:
            raise ValueError("a tensor of another size")
        return TensorEntry(dtype, tuple(shape), _span(start, num_bytes, data_end))
    _, name, *numbers = values
    if not isinstance(name, str) or len(numbers) != 4 + 2 * NUM_BUFFERS:
        raise ValueError("a layer of another form")
    if not all(type(n) is int and abs(n) < _MAX_NUMBER for n in numbers):
        raise ValueError("a layer's numbers")
    spans = [_span(numbers[i], numbers[i + 1], data_end) for i in range(4, len(numbers), 2)]
    return LayerEntry(LayerKind(name, *numbers[:4]), tuple(spans))


def _span(start: Any, num_bytes: Any, data_end: int) -> Span:
    if not _is_number(start) or not _is_number(num_bytes):
        raise ValueError("a place that is none")
    if start % LINE or not DATA_START <= start <= data_end - num_bytes:
        raise ValueError("a place outside of the data")
    return Span(start, num_bytes)
