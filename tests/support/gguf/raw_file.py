"""Bytes of GGUF files, right or wrong, written field by field.

Shares no code with what reads them (serve/models/gguf).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
LETTERS = {
    U8: "B",
    I8: "b",
    U16: "H",
    I16: "h",
    U32: "I",
    I32: "i",
    F32: "f",
    BOOL: "?",
    U64: "Q",
    I64: "q",
    F64: "d",
}
Key = tuple[str, bytes]
Info = tuple[str, Sequence[int], int, int]


def text(value: str | bytes, length: int | None = None) -> bytes:
    """length: what is written as the length, if that is wrong."""
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data) if length is None else length) + data


def value_bytes(kind: int, value: Any) -> bytes:
    return text(value) if kind == STRING else struct.pack(f"<{LETTERS[kind]}", value)


def scalar(kind: int, value: Any) -> bytes:
    """Returns a value with its type."""
    return struct.pack("<I", kind) + value_bytes(kind, value)


def array(kind: int, values: Sequence[Any], count: int | None = None) -> bytes:
    """count: what is written as the number of values, if that is wrong."""
    head = struct.pack("<IIQ", ARRAY, kind, len(values) if count is None else count)
    return head + b"".join(value_bytes(kind, value) for value in values)


def gguf_bytes(
    keys: Sequence[Key] = (),
    tensors: Sequence[Info] = (),
    *,
    data: int = 0,
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
    alignment: int = 32,
    magic: bytes = b"GGUF",
) -> bytes:
    """Returns a file of keys with their values, tensors (name, dimensions with those of a row
    first, type, offset), and some bytes of data."""
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    out = magic + struct.pack("<IQQ", version, *counts)
    out += b"".join(text(key) + value for key, value in keys)
    for name, dimensions, kind, offset in tensors:
        out += text(name) + struct.pack("<I", len(dimensions))
        out += struct.pack(f"<{len(dimensions)}Q", *dimensions) + struct.pack("<IQ", kind, offset)
    out += bytes(-len(out) % alignment)
    return out + bytes(range(256)) * (data // 256) + bytes(data % 256)
