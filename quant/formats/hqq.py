"""HQQ as Transformers saves it: codes with a scale and a zero point, of any value, per group.

    W_q     uint8: of 4 bits [groups x out / 2, group], in which a byte's higher bits are a row of
            the first half of all groups and its lower bits one of the second; of 8 bits
            [groups x out, group]
    scale, zero     [groups x out, 1]: a weight is (code - zero) x scale
    beside  nbits, group_size, axis, shape and others: tensors of one number each

4 bits are computed as they are but for rounding of scales to 11 bits; 8 bits become int8 with a
scale per output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quant.formats.base import (
    FLOATS,
    CheckpointFormat,
    Config,
    Fetch,
    ProductFormat,
    TensorRule,
    checked_scales,
    expect,
    expect_object,
    optional,
    several,
    wrong,
)
from quant.formats.weights import ROUNDED, Weight4, Weight8, joined_8, joined_int4, kernel_group
from quant.int4 import Int4Weight

METHOD = "hqq"
MAX_GROUP = 1 << 16
ROUNDED_4 = (
    "scales times zero points are rounded to 11 bits, which changes weights by about 0.05 % (root "
    "mean square, of normal weights)"
)
_SETTINGS = (
    "nbits",
    "group_size",
    "axis",
    "packing",
    "unpack_view_dtype",
    "view_as_float",
    "quant_scale",
    "quant_zero",
    "compute_dtype",
    "offload_meta",
    "encoded_state_dict",
    "stores_quant_config",
    "channel_wise",
    "optimize",
    "round_zero",
)


@dataclass(frozen=True, slots=True)
class Hqq:
    """HQQ along the inputs. group_size: inputs that share a scale."""

    bits: int
    group_size: int
    markers: tuple[str, ...] = ("W_q",)
    ignored: tuple[str, ...] = _SETTINGS

    @property
    def loss(self) -> str | None:
        return ROUNDED_4 if self.bits == 4 else f"8-bit weights in groups {ROUNDED}"

    def tensors(self, num_in: int, num_out: int) -> dict[str, TensorRule]:
        if num_in % self.group_size:
            raise ValueError(f"{num_in} inputs cannot be divided by {self.group_size}")
        rows, to_byte = num_out * num_in // self.group_size, 8 // self.bits
        if rows % to_byte:
            raise ValueError(f"{num_out} x {num_in} weights make an odd number of groups")
        scales = TensorRule(((rows, 1), (rows,)), FLOATS)
        return {
            "W_q": TensorRule(((rows // to_byte, self.group_size),), ("U8",)),
            "scale": scales,
            "zero": scales,
            "shape": TensorRule(((2,),), ("I64", "I32")),
        }

    def load(self, fetch: Fetch, parts: Sequence[str]) -> Weight4 | Weight8:
        if self.bits == 8:
            return joined_8([self._read8(fetch, part) for part in parts])
        return Weight4(joined_int4([self._read4(fetch, part) for part in parts]))

    def _read4(self, fetch: Fetch, part: str) -> Int4Weight:
        packed = fetch(f"{part}.W_q")
        num_out, num_in, scales, zeros = self._offsets(fetch, part, packed)
        codes = torch.empty(2, *packed.shape, dtype=torch.uint8)
        torch.bitwise_right_shift(packed, 4, out=codes[0])
        torch.bitwise_and(packed, 15, out=codes[1])
        group, times = kernel_group(self.group_size, num_in)
        if times > 1:
            scales, zeros = scales.repeat_interleave(times, 1), zeros.repeat_interleave(times, 1)
        codes = codes.view(num_out, num_in)
        return Int4Weight(codes, scales, None, group, minimums=zeros * scales)

    def _read8(self, fetch: Fetch, part: str) -> Weight8:
        codes = fetch(f"{part}.W_q")
        num_out, num_in, scales, zeros = self._offsets(fetch, part, codes)
        return Weight8(codes.reshape(num_out, num_in), scales, self.group_size, zeros)

    def _offsets(self, fetch: Fetch, part: str, packed: Tensor) -> tuple[int, int, Tensor, Tensor]:
        """Returns out, in, and the scales and zero points [out, groups]."""
        num_out, num_in = (int(size) for size in fetch(f"{part}.shape"))
        size = packed.numel() * 8 // self.bits
        if num_out < 1 or num_in < 1 or num_out * num_in != size or num_in % self.group_size:
            raise ValueError(
                f"tensor {part}.shape says {[num_out, num_in]}, which does not fit W_q of "
                f"{list(packed.shape)}"
            )
        for setting, value in (("nbits", self.bits), ("axis", 1)):
            stored = optional(fetch, f"{part}.{setting}")
            if stored is not None and (stored.numel() != 1 or int(stored) != value):
                raise ValueError(f"tensor {part}.{setting} is not {value}, as config.json says")
        scales = checked_scales(f"{part}.scale", fetch(f"{part}.scale"))
        zeros = fetch(f"{part}.zero").float()
        return num_out, num_in, scales.reshape(num_out, -1), zeros.reshape(num_out, -1)


def read_hqq(config: Config) -> CheckpointFormat:
    """Reads quant_method hqq: one setting for all products, or one for each kind of them."""
    settings = expect_object(config, "quant_config")
    if "weight_quant_params" in settings:
        return several(METHOD, [_read_settings("quant_config.", settings)], "quant_config")
    formats: list[ProductFormat] = []
    for kind in settings:
        if settings[kind] is not None:
            at = f"quant_config.{str(kind)[:80]}"
            each = expect_object(settings, kind, "quant_config.")
            formats.append(_read_settings(f"{at}.", each))
    return several(METHOD, formats, "quant_config")


def _read_settings(at: str, settings: Config) -> Hqq:
    for key in ("scale_quant_params", "zero_quant_params"):
        if settings.get(key):
            raise wrong(f"{at}{key}", settings[key], "none")
    weights = expect_object(settings, "weight_quant_params", at)
    inside = f"{at}weight_quant_params."
    expect(weights, "nbits", (4, 8), inside)
    expect(weights, "axis", (1,), inside)
    expect(weights, "channel_wise", (True, None), inside)
    expect(weights, "view_as_float", (False, None), inside)
    size = weights.get("group_size")
    if type(size) is not int or size % 16 or not 0 < size <= MAX_GROUP:
        raise wrong(f"{inside}group_size", size, "multiples of 16")
    return Hqq(weights["nbits"], size)
