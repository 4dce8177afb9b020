"""FP8 (e4m3): one byte a weight, with a scale per tensor, per output or per block.

    weight                            e4m3 [out, in]
    weight_scale_inv, weight_scale    the factor of a weight (not its inverse, for all the name):
                                      one number, [out, 1], or one per block, [out / 128, in / 128]
    fused experts                     NAME e4m3 [experts, out, in], NAME_scale_inv with a scale of
                                      the same kinds for each expert; or, where the model's own
                                      are so, [experts, in, out] with NAME_weight_scale (ModelOpt,
                                      of one or all experts) or NAME_scale (fbgemm, per output)

Scales are fp32, fp16 or bf16, or powers of two in e8m0. Devices with fp8 products take weights with
one scale per output or per block of 128 inputs as they are; all others are rounded to int8.
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
    TensorRule,
    checked_scales,
    expect,
    power_scales,
    rows_of,
    several,
    words_of,
    wrong,
)
from quant.formats.weights import FP8_GROUP, ROUNDED, Weight8, joined_8

NATIVE_SCALE = "weight_scale_inv"
MAX_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class Fp8:
    """e4m3 weights. block: (outputs, inputs) that share a scale, None for tensors or outputs.
    has_bytes: scales may be exponents stored as bytes. expert_scale: the ending of fused experts'
    scales."""

    scale: str = "weight_scale"
    block: tuple[int, int] | None = None
    has_bytes: bool = False
    ignored: tuple[str, ...] = RUN_TIME_SCALES
    bits: int = 8
    expert_scale: str = "_weight_scale"

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.scale,)

    @property
    def expert_markers(self) -> tuple[str, ...]:
        return (self._expert_scale,)

    @property
    def _expert_scale(self) -> str:
        return "_scale_inv" if self.scale == NATIVE_SCALE else self.expert_scale

    @property
    def loss(self) -> str | None:
        if self.block is not None and self.block[1] != FP8_GROUP:
            return f"FP8 weights in blocks {ROUNDED}"
        return f"FP8 weights {ROUNDED}, unless the device has fp8 products"

    def tensors(self, num_in: int, num_out: int) -> dict[str, TensorRule]:
        scale = self._scale_rule(num_in, num_out)
        return {"weight": TensorRule(((num_out, num_in),), ("F8_E4M3",)), self.scale: scale}

    def load(self, fetch: Fetch, parts: Sequence[str]) -> Weight8:
        names = [(f"{part}.weight", f"{part}.{self.scale}") for part in parts]
        return joined_8([self._weight(fetch(w), read_scales(s, fetch(s))) for w, s in names])

    def expert_tensors(
        self, num_experts: int, num_in: int, num_out: int, *, is_transposed: bool = False
    ) -> dict[str, TensorRule]:
        one, shape = self._scale_rule(num_in, num_out), (num_out, num_in)
        shapes = [(num_experts, *each) for each in one.shapes]
        if self.block is None:
            shapes += [(num_experts, 1, num_out), ()]
        if is_transposed and self.scale != NATIVE_SCALE:
            shape = shape[::-1]
        weight = TensorRule(((num_experts, *shape),), ("F8_E4M3",))
        return {"": weight, self._expert_scale: one._replace(shapes=tuple(shapes))}

    def load_expert(
        self, fetch: Fetch, name: str, expert: int, *, is_transposed: bool = False
    ) -> Weight8:
        scale, stored = name + self._expert_scale, fetch(name, expert)
        if is_transposed and self.scale != NATIVE_SCALE:
            stored = stored.view(torch.uint8).t().contiguous().view(stored.dtype)
        return self._weight(stored, read_scales(scale, fetch(scale, expert)))

    @property
    def unit(self) -> int:
        return 1 if self.block is None else self.block[0]

    def cut(self, ending: str, stored: Tensor, outputs: slice) -> Tensor:
        if ending in ("weight", ""):
            return stored[outputs]
        if self.block is None:
            return rows_of(stored.reshape(-1), outputs)
        return stored[words_of(outputs, self.block[0])]

    def _scale_rule(self, num_in: int, num_out: int) -> TensorRule:
        dtypes = (*FLOATS, "F8_E8M0", *(("U8",) if self.has_bytes else ()))
        if self.block is None:
            return TensorRule(((num_out, 1), (num_out,), (1,), (), (1, 1)), dtypes)
        rows, columns = -(-num_out // self.block[0]), -(-num_in // self.block[1])
        return TensorRule(((rows, columns), (rows, 1, columns, 1)), dtypes)

    def _weight(self, weight: Tensor, scales: Tensor) -> Weight8:
        num_out, num_in = weight.shape
        if self.block is None:
            scales = scales.reshape(-1, 1).expand(num_out, 1)
            return Weight8(weight, scales, num_in)
        rows, columns = self.block
        scales = scales.reshape(-(-num_out // rows), -(-num_in // columns))
        return Weight8(weight, scales.repeat_interleave(rows, 0)[:num_out], columns)


def read_scales(name: str, scales: Tensor) -> Tensor:
    """Returns scales in fp32, from any of their types."""
    is_power = scales.dtype in (torch.uint8, torch.float8_e8m0fnu)
    return power_scales(name, scales) if is_power else checked_scales(name, scales)


def read_block(key: str, value: object) -> tuple[int, int]:
    """Reads a block's [outputs, inputs]."""
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(size) is int and 0 < size <= MAX_BLOCK for size in value)
    ):
        raise wrong(key, value, "two sizes such as [128, 128]")
    return value[0], value[1]


def read_fp8(config: Config) -> CheckpointFormat:
    """Reads quant_method fp8, as DeepSeek, Qwen, Mistral and MiniMax publish it."""
    expect(config, "activation_scheme", ("dynamic", "static", None))
    expect(config, "fmt", ("e4m3", "float8_e4m3fn", None))
    expect(config, "scale_fmt", ("float", "ue8m0", None))
    expect(config, "expert_dtype", ("fp8", None))
    has_bytes = config.get("scale_fmt") == "ue8m0"
    value = config.get("weight_block_size")
    block = None if value is None else read_block("weight_block_size", value)
    # some writers call scales of tensors and outputs weight_scale
    scales = (NATIVE_SCALE,) if block else (NATIVE_SCALE, "weight_scale")
    return several("fp8", [Fp8(scale, block, has_bytes) for scale in scales], "fp8")


def read_fbgemm_fp8(config: Config) -> CheckpointFormat:
    """Reads quant_method fbgemm_fp8: a scale per output."""
    return several("fbgemm_fp8", [Fp8(expert_scale="_scale")], "fbgemm_fp8")
