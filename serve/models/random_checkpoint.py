"""Weights that were never trained, for measuring speed: made on the device, nothing is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from serve.models.checkpoint import Checkpoint, Entry

_SEED = 0


class RandomCheckpoint(Checkpoint):
    """Has every tensor that is expected of it, in bf16: matrices normal with the deviation
    1 / sqrt(inputs), norms one, biases zero. The same at every start on one kind of device."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path = path
        self.entries: dict[str, Entry] = {}
        self._device = device
        self._generator = torch.Generator(device).manual_seed(_SEED)

    def find_prefix(self, prefixes: Sequence[str], name: str) -> str:
        return prefixes[0]

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        for name, shape in shapes.items():
            self.entries[name] = Entry(self.path, shape, "BF16")

    def fetch(self, name: str) -> Tensor:
        shape, kind = self.entries[name].shape, torch.bfloat16
        if len(shape) == 1:
            make = torch.zeros if name.endswith(".bias") else torch.ones
            return make(shape, dtype=kind, device=self._device)
        made = torch.empty(shape, dtype=kind, device=self._device)
        return made.normal_(0, shape[-1] ** -0.5, generator=self._generator)

    def is_zero(self, name: str) -> bool:
        return False

    def release(self) -> None:
        """Nothing is open."""
