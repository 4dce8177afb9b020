"""The tensors of a checkpoint with random weights, in the format that its config.json names.

The names and shapes are those that the loader expects of the model. A tensor's values follow from
its name: products are normal with deviation 1 / sqrt(inputs), or uniform codes of that deviation,
norms are one and biases zero.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from functools import partial
from math import floor, log2
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.common.safetensors_writer import StoredTensor
from serve.models import expect_tensors, read_spec
from serve.models.families import FAMILIES
from serve.models.spec import ModelSpec

Make = Callable[[str, tuple[int, ...]], Tensor]

_MXFP4_GROUP = 32
# root mean squares of random codes: 4 bits minus 8, of which 0 has become 8, and FP4 (e2m1)
_RMS_INT4, _RMS_FP4 = 4.183, 2.926
_ZERO_OF_GPTQ = 0x77777777  # eight zero points of 8, stored minus one


def random_tensors(path: Path) -> list[StoredTensor]:
    """Returns the tensors of the directory's config.json: plain ones in bf16, and those of GPTQ or
    of gpt-oss' MXFP4."""
    spec = read_spec(path)
    names = FAMILIES[spec.model_type].names
    expected, head = expect_tensors(spec), names.heads[0]
    method = None if spec.packed is None else spec.packed.method
    tensors: list[StoredTensor] = []
    for name, shape in expected.shapes.items():
        module = name.removesuffix(".weight")
        if method == "gptq" and module in expected.products and module != head:
            tensors += _gptq(spec, module, *shape)
        elif method == "mxfp4" and len(shape) == 3:
            tensors += _mxfp4(name, shape, is_transposed=names.experts[0].is_transposed)
        else:
            tensors.append(StoredTensor(name, "BF16", shape, partial(_plain, name, shape)))
    return tensors


def _plain(name: str, shape: tuple[int, ...]) -> Tensor:
    if len(shape) == 1 or "bias" in name.rpartition(".")[2]:
        made = torch.zeros if "bias" in name else torch.ones
        return made(shape, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(_seed(name))
    values = torch.empty(shape, dtype=torch.bfloat16)
    return values.normal_(0, shape[-1] ** -0.5, generator=generator)


def _gptq(spec: ModelSpec, module: str, num_out: int, num_in: int) -> Iterator[StoredTensor]:
    """Yields 4-bit codes with symmetric groups."""
    assert spec.packed is not None
    form = spec.packed.formats[0]
    group = form.group_size  # type: ignore[attr-defined]
    groups = num_in // group
    scale = num_in**-0.5 / _RMS_INT4
    makers: dict[str, tuple[str, tuple[int, ...], Make]] = {
        "qweight": ("I32", (num_in // 8, num_out), _gptq_codes),
        "qzeros": ("I32", (groups, num_out // 8), _gptq_zeros),
        "scales": ("F16", (groups, num_out), partial(_scales, scale)),
        "g_idx": ("I32", (num_in,), partial(_group_numbers, group)),
    }
    for ending, (dtype, shape, make) in makers.items():
        name = f"{module}.{ending}"
        yield StoredTensor(name, dtype, shape, partial(make, name, shape))


def _mxfp4(name: str, shape: tuple[int, ...], *, is_transposed: bool) -> Iterator[StoredTensor]:
    """Yields FP4 codes of all experts, and for each 32 inputs a power of two."""
    num_experts, num_out, num_in = shape
    if is_transposed:
        num_out, num_in = num_in, num_out
    groups = (num_experts, num_out, num_in // _MXFP4_GROUP)
    codes = (*groups, _MXFP4_GROUP // 2)
    make = partial(_random, torch.uint8, f"{name}_blocks", codes)
    yield StoredTensor(f"{name}_blocks", "U8", codes, make)
    make = partial(_powers, num_in**-0.5 / _RMS_FP4, f"{name}_scales", groups)
    yield StoredTensor(f"{name}_scales", "U8", groups, make)


def _random(dtype: torch.dtype, name: str, shape: tuple[int, ...]) -> Tensor:
    """Returns random bits."""
    size = int(np.prod(shape)) * dtype.itemsize
    drawn = _rng(name).integers(0, 1 << 64, size=-(-size // 8), dtype=np.uint64)
    return torch.from_numpy(drawn.view(np.uint8)[:size]).view(dtype).view(shape)


def _gptq_codes(name: str, shape: tuple[int, ...]) -> Tensor:
    """Returns eight codes a word, from 1 to 15 about their zero point of 8. A mean other than zero
    would be common to all rows, grow from product to product, and send them to the same experts."""
    codes = _random(torch.uint8, name, (*shape[:-1], 4 * shape[-1])).numpy()
    # in NumPy: for arrays of this size torch spends most of the time waiting for its threads
    for nibble, bit in ((0x0F, 3), (0xF0, 7)):
        codes |= ((codes & nibble) == 0).view(np.uint8) << bit
    return torch.from_numpy(codes).view(torch.int32)


def _gptq_zeros(name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.full(shape, _ZERO_OF_GPTQ, dtype=torch.int32)


def _scales(scale: float, name: str, shape: tuple[int, ...]) -> Tensor:
    drawn = _rng(name).uniform(0.9 * scale, 1.1 * scale, size=shape)
    return torch.from_numpy(drawn).half()


def _group_numbers(group: int, name: str, shape: tuple[int, ...]) -> Tensor:
    return torch.arange(shape[0], dtype=torch.int32) // group


def _powers(scale: float, name: str, shape: tuple[int, ...]) -> Tensor:
    """Returns the powers of two next to scale, with its root mean square, as exponents + 127."""
    power = floor(log2(scale))
    share = (scale**2 / 4.0**power - 1) / 3  # of the larger one
    drawn = _rng(name).random(shape, dtype=np.float32) < share
    return torch.from_numpy(drawn.astype(np.uint8) + np.uint8(127 + power))


def _rng(name: str) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(_seed(name)))


def _seed(name: str) -> int:
    return zlib.crc32(name.encode())
