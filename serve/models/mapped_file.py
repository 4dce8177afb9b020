"""One safetensors file, mapped into memory: tensors without parsing its header again.

A checkpoint with many experts has a header of megabytes. The safetensors library checks it once;
opening the file again after its pages were released then costs no parsing.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from serve.regular_file import open_regular

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # of the safetensors library
_MAP_NORESERVE = 0x4000  # Linux; Python names it since 3.13


class Place(NamedTuple):
    """A tensor's shape, its type in safetensors' words, and its bytes in the file."""

    shape: tuple[int, ...]
    dtype: str
    start: int
    end: int


def read_places(file: Path) -> dict[str, Place]:
    """Returns all tensors of a file. An exception of the safetensors library or a ValueError says
    what is wrong with it."""
    try:
        # for torch, the library would map the file so that all of it counts as memory
        with safe_open(file, framework="numpy") as checked:
            names = set(checked.keys())
    except SafetensorError as error:
        problem = _cut_off(file)
        if problem:
            raise ValueError(problem) from error
        raise
    with open_regular(file) as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        header: dict[str, Any] = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    if header.keys() != names:
        raise ValueError("its header has changed while it was read")
    base = _LENGTH_BYTES + length
    return {
        name: Place(
            tuple(entry["shape"]), entry["dtype"], *(base + at for at in entry["data_offsets"])
        )
        for name, entry in header.items()
    }


def _cut_off(file: Path) -> str:
    """Returns in words that a file ends too early, or "" if something else is wrong with it."""
    size = file.stat().st_size
    with open_regular(file) as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > _MAX_HEADER_BYTES:
            return ""
        text = opened.read(length)
    base = _LENGTH_BYTES + length
    if size < base:
        return f"it has {size:,} bytes, but its header alone takes {base:,}: it is cut off"
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        described = base + max(int(entry["data_offsets"][1]) for entry in header.values())
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return ""  # the library has checked nothing of this header
    if size < described:
        return f"it has {size:,} bytes, but its header describes {described:,}: it is cut off"
    return ""


def drop_cached(file: Path, ranges: list[tuple[int, int]]) -> None:
    """Takes bytes of a file, given as (start, end), that nothing maps any more out of the page
    cache, if the file is still there and its file system does that."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        # the kernel keeps a page of which only a part is named
        if joined and start < joined[-1][1] + mmap.PAGESIZE:
            start, end = joined[-1][0], max(end, joined.pop()[1])
        joined.append((start, end))
    with contextlib.suppress(OSError), open_regular(file) as opened:
        for start, end in joined:
            if start < end:  # a length of 0 would mean all that follows
                os.posix_fadvise(opened.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)


class MappedFile:
    """A file's pages. They leave memory when no tensor of them is left, and this object is gone."""

    def __init__(self, file: Path) -> None:
        with open_regular(file) as opened:
            # private and writable, as torch wants it; nothing writes to it, so no memory is set
            # aside for copies of a file that may be larger than all memory
            self._pages = mmap.mmap(
                opened.fileno(),
                0,
                flags=mmap.MAP_PRIVATE | _MAP_NORESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )

    def tensor(self, place: Place) -> Tensor:
        """Returns a tensor over the file's pages. ValueError if the file does not hold it."""
        kind = _TYPES.get(place.dtype)
        if kind is None:
            raise ValueError(f"type {place.dtype} is not supported")
        size = prod(place.shape) * kind.itemsize
        if place.end - place.start != size or place.end > len(self._pages):
            raise ValueError("the file has changed since its header was read")
        if not size:
            return torch.empty(place.shape, dtype=kind)
        whole = torch.frombuffer(self._pages, dtype=torch.uint8, count=size, offset=place.start)
        return whole.view(kind).view(place.shape)
