"""The target for quantized checkpoints: config.json's settings, and tensors of one product.

What a format accepts unpacks to finite numbers of the product's shape.
"""

from __future__ import annotations

import contextlib
import json
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from ops.cpu import native_library
from ops.cpu.finite import all_finite
from quant.formats.read import read_format
from tests.support.engine.published_formats import PUBLISHED

NAME = "p"
SIZES = (8, 32)
TYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
MAX_VALUES = 1 << 14


class Stored(NamedTuple):
    shape: tuple[int, ...]
    dtype: str


def _seed(case: str) -> bytes:
    config, quantize = PUBLISHED[case]
    weight = torch.randn(SIZES, generator=torch.Generator().manual_seed(1))
    names = {kind: name for name, kind in TYPES.items()}
    tensors = {
        name.removeprefix(f"{NAME}."): {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "bytes": bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()).hex(),
        }
        for name, tensor in quantize(NAME, weight)[0].items()
    }
    return json.dumps({"config": config, "sizes": SIZES, "tensors": tensors}).encode()


SEEDS = tuple(_seed(case) for case in PUBLISHED)


def run(data: bytes) -> None:
    """Raises what a hostile checkpoint raises but ValueError, and AssertionError for a result that
    is not finite or has another shape."""
    try:
        values = json.loads(data)
        config, sizes, listed = values["config"], values["sizes"], values["tensors"]
        tensors = {f"{NAME}.{ending}": _tensor(**each) for ending, each in listed.items()}
        num_out, num_in = (max(1, min(256, int(size))) for size in sizes)
    except (ValueError, TypeError, KeyError, RecursionError, AttributeError, OverflowError):
        return  # not an input of this target
    if isinstance(config, dict):
        with contextlib.suppress(ValueError):
            _load(config, tensors, num_out, num_in)


def _tensor(dtype: str, shape: list[int], bytes: str) -> Tensor:
    kind, sizes = TYPES[dtype], [int(size) for size in shape]
    count = prod(sizes)
    if not all(0 <= size <= MAX_VALUES for size in sizes) or count > MAX_VALUES:
        raise ValueError("too large for this target")
    try:
        data = bytearray.fromhex(bytes)
    except ValueError:
        data = bytearray(bytes.encode("utf-8", "replace"))
    size = count * kind.itemsize
    raw = torch.tensor(list((data or bytearray(1)) * (size // max(1, len(data)) + 1))[:size])
    return raw.to(torch.uint8).view(kind).reshape(sizes)


def _load(config: dict[str, object], tensors: dict[str, Tensor], num_out: int, num_in: int) -> None:
    names = {kind: name for name, kind in TYPES.items()}
    header = {name: Stored(tuple(t.shape), names[t.dtype]) for name, t in tensors.items()}
    product = read_format(config).of(header, NAME, num_in, num_out)
    if product is None:
        return
    rules = product.tensors(num_in, num_out)
    if not all(rule.fits(header.get(f"{NAME}.{ending}")) for ending, rule in rules.items()):
        return  # the loader names the tensor

    def fetch(name: str, index: int | None = None) -> Tensor:
        tensor = tensors[name] if index is None else tensors[name][index]
        if not all_finite(tensor):  # as serve/models/checkpoint.py does
            raise ValueError(f"tensor {name} holds NaN or infinity")
        return tensor

    weight = product.load(fetch, [NAME])
    if weight.shape != (num_out, num_in):
        return  # the loader says so
    plain = weight.plain()
    assert plain.shape == weight.shape and bool(plain.isfinite().all())
    assert isinstance(product.loss, str | None)
    if native_library.is_available():
        assert weight.linear(None)(torch.ones(1, num_in)).shape == (1, num_out)
