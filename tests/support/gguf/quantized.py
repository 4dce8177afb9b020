"""Weights in the kinds of GGUF: rounded by the package `gguf`, or random blocks where it only
unpacks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Kind = gguf.GGMLQuantizationType
Packed = dict[str, tuple[Tensor, Kind]]
"""Names of a Hugging Face checkpoint -> rows of bytes, [.., bytes of a row], and their kind."""

# bytes of fp16 factors in a block, and what of a random block's deviation is the factor
_FACTORS = {
    Kind.Q4_K: ({0: 1.0, 2: 7.5}, 1 / 145),
    Kind.Q5_K: ({0: 1.0, 2: 15.5}, 1 / 290),
    Kind.Q6_K: ({208: 1.0}, 1 / 1370),
    Kind.Q2_K: ({80: 1.0, 82: 1.5}, 1 / 8.4),
    Kind.Q3_K: ({108: 1.0}, 1 / 42),
    Kind.IQ4_XS: ({0: 1.0}, 1 / 1200),
}


def packed(source: Path, choose: Callable[[str], Kind | None]) -> Packed:
    """Returns the weights of a checkpoint in a kind for each name; None: they stay plain."""
    generator = np.random.default_rng(0)
    found: Packed = {}
    for name, tensor in read_tensors(source).items():
        kind = choose(name) if tensor.ndim > 1 and "router" not in name else None
        if kind is None or name.endswith("mlp.gate.weight"):
            continue
        data = tensor.float().contiguous().numpy()
        if kind in _FACTORS:
            rows = _random_rows(data.shape, kind, float(data.std()), generator)
        else:
            rows = gguf.quants.quantize(data, kind)
        found[name] = torch.from_numpy(rows.view(np.uint8)), kind
    return found


def plain_copy(source: Path, weights: Packed, target: Path) -> Path:
    """Writes the checkpoint with the numbers that its packed weights stand for."""
    shutil.copytree(source, target)
    tensors = read_tensors(source)
    for name, (rows, kind) in weights.items():
        tensors[name] = torch.from_numpy(gguf.quants.dequantize(rows.numpy(), kind).copy())
    for file in target.glob("*.safetensors"):
        file.unlink()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _random_rows(
    shape: tuple[int, ...], kind: Kind, deviation: float, generator: np.random.Generator
) -> np.ndarray:
    """Returns random blocks whose weights have about the deviation and the mean 0."""
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    factors, scale = _FACTORS[kind]
    blocks = generator.integers(0, 256, (*shape[:-1], shape[-1] // weights, size), np.uint8)
    for at, factor in factors.items():
        half = np.array([factor * scale * deviation], np.float16)
        blocks[..., at : at + 2] = half.view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)


def read_tensors(source: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors
