"""compressed-tensors (llm-compressor, RedHat): a format for each group of config_groups.

    pack-quantized          weight_packed int32 [out, in x bits / 32], from the lowest bits on,
                            offset by half of the range, weight_scale [out, groups], weight_shape;
                            perhaps weight_zero_point, packed alike along the outputs, and
                            weight_g_idx [in], the group of each input
    int-quantized           weight int8 [out, in], weight_scale [out, groups]
    float-quantized         weight e4m3, weight_scale [1], [out, 1] or of blocks
    mxfp8-quantized         weight e4m3, weight_scale uint8 [out, in / 32], powers of two
    nvfp4-pack-quantized    nvfp4.py
    mxfp4-pack-quantized    mxfp4.py

Activations are always rounded to int8 per token at run time, or to fp8 where the device has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quant.formats.base import (
    FLOATS,
    RUN_TIME_SCALES,
    CheckpointFormat,
    Config,
    Fetch,
    ProductFormat,
    TensorRule,
    checked_scales,
    expect,
    expect_object,
    optional,
    rows_of,
    several,
    words_of,
    wrong,
    zero_points_of,
)
from quant.formats.fp8 import Fp8, read_block
from quant.formats.gptq_awq import (
    group_order,
    grouped_int4,
    grouped_int8,
    in_one_order,
    nibbles,
)
from quant.formats.mxfp4 import MxFp4
from quant.formats.nvfp4 import NvFp4
from quant.formats.weights import ROUNDED, Weight4, Weight8, joined_8, joined_int4

METHOD = "compressed-tensors"
MAX_GROUP = 1 << 16
_INTEGERS = ("int-quantized", "naive-quantized")
_FLOATS = ("float-quantized", "naive-quantized")
_FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "mxfp8-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)


@dataclass(frozen=True, slots=True)
class PackedInt:
    """pack-quantized of 4 or 8 bits. group_size: inputs that share a scale, -1 for all."""

    bits: int
    group_size: int
    is_symmetric: bool = True
    has_order: bool = False
    markers: tuple[str, ...] = ("weight_packed",)
    ignored: tuple[str, ...] = RUN_TIME_SCALES

    @property
    def loss(self) -> str | None:
        is_exact = self.bits == 4 or (self.group_size == -1 and self.is_symmetric)
        return None if is_exact else f"8-bit weights in groups {ROUNDED}"

    def tensors(self, num_in: int, num_out: int) -> dict[str, TensorRule]:
        size = _size(self.group_size, num_in)
        groups, to_word = num_in // size, 32 // self.bits
        scales = [(num_out, groups), *([(num_out,), (1,), (1, 1)] if groups == 1 else [])]
        rules = {
            "weight_packed": TensorRule(((num_out, -(-num_in // to_word)),), ("I32",)),
            "weight_scale": TensorRule(tuple(scales), FLOATS),
            "weight_shape": TensorRule(((2,),), ("I64", "I32")),
        }
        if not self.is_symmetric:
            packed = (-(-num_out // to_word), groups)
            rules["weight_zero_point"] = TensorRule((packed,), ("I32",))
        if self.has_order:
            rules["weight_g_idx"] = TensorRule(((num_in,),), ("I32", "I64"), groups == 1)
        return rules

    def load(self, fetch: Fetch, parts: Sequence[str]) -> Weight4 | Weight8:
        if self.bits == 8:
            read8 = [grouped_int8(*self._read(fetch, part)) for part in parts]
            return joined_8(in_one_order(read8, parts, "weight_g_idx"))
        read = [grouped_int4(*self._read(fetch, part)) for part in parts]
        in_one_order(read, parts, "weight_g_idx")
        return Weight4(joined_int4([each.weight for each in read]), read[0].order)

    @property
    def unit(self) -> int:
        return 1 if self.is_symmetric else 32 // self.bits

    def cut(self, ending: str, stored: Tensor, outputs: slice) -> Tensor:
        if ending == "weight_zero_point":
            return zero_points_of(stored, stored[words_of(outputs, self.unit)])
        if ending == "weight_shape":
            return stored.new_tensor([outputs.stop - outputs.start, int(stored[1])])
        return stored if ending == "weight_g_idx" else rows_of(stored, outputs)

    def _read(
        self, fetch: Fetch, part: str
    ) -> tuple[Tensor, Tensor, Tensor | None, int, Tensor | None]:
        """Returns codes, scales, zero points, the group's size, and the order of inputs."""
        words = fetch(f"{part}.weight_packed")
        num_out, num_in = self._shape(fetch, part, words)
        size = _size(self.group_size, num_in)
        groups = num_in // size
        codes = self._unpacked(words)[:, :num_in]
        scales = _scales(fetch, f"{part}.weight_scale", num_out, groups)
        zeros = order = None
        if not self.is_symmetric:
            packed = fetch(f"{part}.weight_zero_point")
            zeros = self._unpacked(packed.t().contiguous())[:, :num_out].t()
        if self.has_order:
            name = f"{part}.weight_g_idx"
            order = group_order(name, optional(fetch, name), num_in, size)
        return codes, scales, zeros, size, order

    def _unpacked(self, words: Tensor) -> Tensor:
        if self.bits == 4:
            return nibbles(words)
        return words.contiguous().view(torch.uint8)

    def _shape(self, fetch: Fetch, part: str, words: Tensor) -> tuple[int, int]:
        num_out, num_in = (int(size) for size in fetch(f"{part}.weight_shape"))
        num_words = -(-num_in * self.bits // 32)
        if words.shape != (num_out, num_words) or num_in % _size(self.group_size, num_in):
            raise ValueError(
                f"tensor {part}.weight_shape says {[num_out, num_in]}, which does not fit "
                f"weight_packed of {list(words.shape)}"
            )
        return num_out, num_in


@dataclass(frozen=True, slots=True)
class PlainInt:
    """int-quantized: a byte a weight. group_size: inputs that share a scale, -1 for all."""

    group_size: int = -1
    is_symmetric: bool = True
    markers: tuple[str, ...] = ("weight_scale",)
    ignored: tuple[str, ...] = ()
    bits: int = 8

    @property
    def loss(self) -> str | None:
        is_exact = self.group_size == -1 and self.is_symmetric
        return None if is_exact else f"8-bit weights in groups {ROUNDED}"

    def tensors(self, num_in: int, num_out: int) -> dict[str, TensorRule]:
        groups = num_in // _size(self.group_size, num_in)
        shapes = ((num_out, groups), *(((num_out,), (1,), ()) if groups == 1 else ()))
        rules = {
            "weight": TensorRule(((num_out, num_in),), ("I8",)),
            "weight_scale": TensorRule(shapes, FLOATS),
        }
        if not self.is_symmetric:
            rules["weight_zero_point"] = TensorRule(shapes, ("I8",))
        return rules

    def load(self, fetch: Fetch, parts: Sequence[str]) -> Weight8:
        return joined_8([self._read(fetch, part) for part in parts])

    @property
    def unit(self) -> int:
        return 1

    def cut(self, ending: str, stored: Tensor, outputs: slice) -> Tensor:
        return rows_of(stored, outputs)

    def _read(self, fetch: Fetch, part: str) -> Weight8:
        weight = fetch(f"{part}.weight")
        num_out, num_in = weight.shape
        size = _size(self.group_size, num_in)
        groups, zeros = num_in // size, None
        scales = _scales(fetch, f"{part}.weight_scale", num_out, groups)
        if not self.is_symmetric:
            stored = fetch(f"{part}.weight_zero_point").float()
            zeros = _per_output(stored, num_out, groups)
        return Weight8(weight, scales, size, zeros)


def _size(group_size: int, num_in: int) -> int:
    size = num_in if group_size == -1 else group_size
    if not size or num_in % size:
        raise ValueError(f"{num_in} inputs cannot be divided by {size}")
    return size


def _scales(fetch: Fetch, name: str, num_out: int, groups: int) -> Tensor:
    return _per_output(checked_scales(name, fetch(name)), num_out, groups)


def _per_output(values: Tensor, num_out: int, groups: int) -> Tensor:
    """Returns values: [out, groups], from one value for the tensor, too."""
    return values.reshape(-1, groups).expand(num_out, groups)


# -- config.json


def read_compressed_tensors(config: Config) -> CheckpointFormat:
    expect(config, "format", (*_FORMATS, "mixed-precision"))
    expect(config, "quantization_status", ("compressed", "frozen", None))
    if config.get("transform_config"):
        raise wrong("transform_config", config["transform_config"], "none")
    sparsity = config.get("sparsity_config") or {}
    if not isinstance(sparsity, dict) or sparsity.get("format", "dense") != "dense":
        raise wrong("sparsity_config", sparsity, "'dense'")
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ValueError("config_groups is missing")
    formats = [
        _group_format(f"config_groups.{str(name)[:80]}.", group, config["format"])
        for name, group in groups.items()
    ]
    return several(METHOD, formats, "config_groups")


def _group_format(at: str, group: object, whole: str) -> ProductFormat:
    """Returns the format of a group of products."""
    if not isinstance(group, dict):
        raise ValueError(f"{at[:-1]} must be an object")
    expect(group, "format", (*_FORMATS, None), at)
    if group.get("output_activations"):
        raise wrong(f"{at}output_activations", group["output_activations"], "none")
    form = group.get("format") or whole
    if form == "mixed-precision":
        raise wrong(f"{at}format", None, " or ".join(repr(name) for name in _FORMATS))
    weights, inside = expect_object(group, "weights", at), f"{at}weights."
    expect(weights, "dynamic", (False, None), inside)
    expect(weights, "type", ("int", "float") if form != "int-quantized" else ("int", None), inside)
    if weights.get("type", "int") == "int" and form in ("pack-quantized", *_INTEGERS):
        _check_activations(at, group, form)
        return _integers(inside, weights, form)
    expect(weights, "type", ("float",), inside)
    expect(weights, "symmetric", (True, None), inside)
    return _floats(inside, weights, form)


def _integers(at: str, weights: Config, form: str) -> ProductFormat:
    expect(weights, "symmetric", (True, False, None), at)
    is_symmetric = weights.get("symmetric") is not False
    expect(weights, "strategy", ("tensor", "channel", "group", None), at)
    size = -1
    if weights.get("strategy") == "group" or weights.get("group_size") not in (None, -1):
        size = _group_size(at, weights)
    if form != "pack-quantized":
        expect(weights, "num_bits", (8,), at)
        expect(weights, "actorder", ("weight", "static", False, None), at)
        return PlainInt(size, is_symmetric)
    expect(weights, "num_bits", (4, 8), at)
    expect(weights, "actorder", ("group", "dynamic", "weight", "static", True, False, None), at)
    has_order = weights.get("actorder") in ("group", "dynamic", True)
    return PackedInt(weights["num_bits"], size, is_symmetric, has_order)


def _group_size(at: str, weights: Config) -> int:
    size = weights.get("group_size")
    if type(size) is not int or not (size == -1 or (size % 16 == 0 and 0 < size <= MAX_GROUP)):
        raise wrong(f"{at}group_size", size, "multiples of 16")
    return size


def _check_activations(at: str, group: Config, form: str) -> None:
    """Checks that int8 rows with a scale of their own are no less than what is asked for."""
    scheme = group.get("input_activations")
    if scheme is None:
        return
    if not isinstance(scheme, dict):
        raise wrong(f"{at}input_activations", scheme, "an object")
    inside = f"{at}input_activations."
    expect(scheme, "num_bits", (8,), inside)
    if form == "pack-quantized" and scheme.get("type") == "float":
        return
    expect(scheme, "type", ("int", None), inside)
    expect(scheme, "symmetric", (True, None), inside)
    expect(scheme, "strategy", ("token",), inside)
    expect(scheme, "dynamic", (True,), inside)


def _floats(at: str, weights: Config, form: str) -> ProductFormat:
    if form == "nvfp4-pack-quantized":
        expect(weights, "num_bits", (4,), at)
        expect(weights, "group_size", (16,), at)
        return NvFp4()
    if form == "mxfp4-pack-quantized":
        expect(weights, "num_bits", (4,), at)
        expect(weights, "group_size", (32,), at)
        return MxFp4()
    if form not in ("mxfp8-quantized", *_FLOATS):
        raise wrong(f"{at}type", weights.get("type"), "'int'")
    expect(weights, "num_bits", (8,), at)
    if form == "mxfp8-quantized":
        expect(weights, "group_size", (32,), at)
        return Fp8(block=(1, 32), has_bytes=True)
    expect(weights, "strategy", ("tensor", "channel", "block", "group"), at)
    if weights["strategy"] == "block":
        return Fp8(block=read_block(f"{at}block_structure", weights.get("block_structure")))
    if weights["strategy"] == "group":
        return Fp8(block=(1, _group_size(at, weights)))
    return Fp8()
