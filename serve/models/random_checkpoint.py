"""Random weights for speed measurements, made on the device; no weight file is read."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from serve.models.checkpoint import Checkpoint, Cut, TensorEntry


class RandomCheckpoint(Checkpoint):
    """A checkpoint with every expected tensor in bf16.

    Matrices are normal with deviation 1 / sqrt(inputs), norms are one, biases zero. The values are
    the same at every start on one kind of device, and on every rank of a group.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path = path
        self.entries: dict[str, TensorEntry] = {}
        self._stored_names: dict[str, str] = {}
        self._device = device
        self._generator = torch.Generator(device)

    def find_prefix(self, prefixes: Sequence[str], name: str) -> str:
        return prefixes[0]

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        for name, shape in shapes.items():
            self.entries[name] = TensorEntry(self.path, shape, "BF16")

    def fetch(self, name: str, index: int | None = None, cut: Cut | None = None) -> Tensor:
        shape, kind = self.entries[name].shape, torch.bfloat16
        if index is not None:
            shape = shape[1:]
        if len(shape) == 1:
            make = torch.zeros if name.endswith(".bias") else torch.ones
            made = make(shape, dtype=kind, device=self._device)
            return made if cut is None else cut(made)
        # a tensor's values depend on its name alone, because ranks draw different tensors
        self._generator.manual_seed(zlib.crc32(f"{name} {index}".encode()))
        made = torch.empty(shape, dtype=kind, device=self._device)
        made.normal_(0, shape[-1] ** -0.5, generator=self._generator)
        return made if cut is None else cut(made)

    def is_zero(self, name: str) -> bool:
        return False

    def release(self) -> None:
        """Nothing is open."""
