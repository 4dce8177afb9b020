"""Writes a checkpoint's safetensors files tensor by tensor, so that one tensor is in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "U8": 1}
_ALIGNMENT = 8
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint. dtype: a key of _BYTES; make: returns its values in that type."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * _BYTES[self.dtype]


def write_checkpoint(
    folder: Path,
    tensors: Sequence[StoredTensor],
    *,
    max_file_bytes: int = 4 << 30,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Writes model.safetensors, or several files of at most max_file_bytes (or one tensor) with
    their index. advance is called with the bytes of each tensor that is written."""
    files = _divided(tensors, max_file_bytes)
    if len(files) == 1:
        _write(folder / SINGLE, files[0], advance)
        return
    names = [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    for name, part in zip(names, files, strict=True):
        _write(folder / name, part, advance)
    index = {
        "metadata": {"total_size": sum(tensor.size_bytes for tensor in tensors)},
        "weight_map": {
            tensor.name: name for name, part in zip(names, files, strict=True) for tensor in part
        },
    }
    (folder / INDEX).write_text(json.dumps(index))


def _divided(tensors: Sequence[StoredTensor], max_bytes: int) -> list[list[StoredTensor]]:
    files: list[list[StoredTensor]] = [[]]
    used = 0
    for tensor in tensors:
        if files[-1] and used + tensor.size_bytes > max_bytes:
            files.append([])
            used = 0
        files[-1].append(tensor)
        used += tensor.size_bytes
    return files


def _write(path: Path, tensors: Sequence[StoredTensor], advance: Callable[[int], None]) -> None:
    """Writes one file: the length of its header in 8 bytes, the header as JSON, then the values."""
    # values are aligned if the largest types come first
    tensors = sorted(tensors, key=lambda tensor: -_BYTES[tensor.dtype])
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.size_bytes
        entry = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
        header[tensor.name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors:
            values = tensor.make()
            assert values.shape == tensor.shape, f"{tensor.name}: {values.shape}"
            assert values.nbytes == tensor.size_bytes, f"{tensor.name}: {values.dtype}"
            file.write(values.contiguous().view(-1).view(torch.uint8).numpy().data)
            advance(tensor.size_bytes)
