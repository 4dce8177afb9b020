"""Small checkpoints with weights in the kinds of GGUF, and with the numbers they stand for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.gguf.quantize import dequantize, quantize

Packed = dict[str, tuple[Tensor, str]]
"""Names of a Hugging Face checkpoint -> rows of bytes, [.., bytes of a row], and their kind."""

Choose = Callable[[str], str | None]
"""A tensor's name -> its kind, None for a plain one."""


def packed(source: Path, choose: Choose) -> Packed:
    """Returns the weights of a checkpoint in a kind for each name; None: they stay plain. Routers
    always do, as in files of llama.cpp."""
    found: Packed = {}
    for name, tensor in read_tensors(source).items():
        is_router = name.endswith(("mlp.gate.weight", "router.weight"))
        kind = choose(name) if tensor.ndim > 1 and not is_router else None
        if kind is not None:
            found[name] = torch.from_numpy(quantize(kind, tensor)), kind
    return found


def plain_copy(source: Path, weights: Packed, target: Path) -> Path:
    """Writes the checkpoint with the numbers that its packed weights stand for."""
    shutil.copytree(source, target)
    tensors = read_tensors(source)
    for name, (rows, kind) in weights.items():
        tensors[name] = torch.from_numpy(dequantize(kind, rows.numpy()).copy())
    for file in target.glob("*.safetensors"):
        file.unlink()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def read_tensors(source: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors
