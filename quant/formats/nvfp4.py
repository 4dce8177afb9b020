"""NVFP4: FP4 (e2m1) weights with an e4m3 scale of 16 inputs and one factor of a tensor.

    compressed-tensors  weight_packed uint8 [out, in / 2], the lower bits first,
                        weight_scale e4m3 [out, in / 16], weight_global_scale fp32 [1]:
                        code x weight_scale / weight_global_scale
    ModelOpt            weight, weight_scale alike, weight_scale_2 fp32 []:
                        code x weight_scale x weight_scale_2

Codes and scales are computed as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from quant.formats.base import RUN_TIME_SCALES, Fetch, TensorRule, checked_scales
from quant.formats.weights import Weight4, byte_nibbles, joined_int4
from quant.int4 import Int4Weight

GROUP = 16
_LARGEST = 1e30  # far from fp32's largest: sums of products stay finite


@dataclass(frozen=True, slots=True)
class NvFp4:
    """NVFP4 with the names of compressed-tensors. is_divisor: the tensor's factor divides."""

    packed: str = "weight_packed"
    factor: str = "weight_global_scale"
    is_divisor: bool = True
    ignored: tuple[str, ...] = RUN_TIME_SCALES
    loss: str | None = None
    bits: int = 4

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.factor,)

    def tensors(self, num_in: int, num_out: int) -> dict[str, TensorRule]:
        if num_in % GROUP:
            raise ValueError(f"{num_in} inputs cannot be divided by {GROUP}")
        return {
            self.packed: TensorRule(((num_out, num_in // 2),), ("U8",)),
            "weight_scale": TensorRule(((num_out, num_in // GROUP),), ("F8_E4M3",)),
            self.factor: TensorRule(((), (1,)), ("F32",)),
        }

    def load(self, fetch: Fetch, parts: Sequence[str]) -> Weight4:
        return Weight4(joined_int4([self._read(fetch, part) for part in parts]))

    @property
    def unit(self) -> int:
        return 1

    def cut(self, ending: str, stored: Tensor, outputs: slice) -> Tensor:
        return stored if ending == self.factor else stored[outputs]

    def _read(self, fetch: Fetch, part: str) -> Int4Weight:
        codes = byte_nibbles(fetch(f"{part}.{self.packed}"), is_low_first=True)
        name = f"{part}.weight_scale"
        scales = checked_scales(name, fetch(name))
        factor = self._factor(f"{part}.{self.factor}", fetch(f"{part}.{self.factor}"))
        channels = factor.expand(len(codes)).contiguous()
        return Int4Weight(codes, scales, None, GROUP, "fp4", channel_scales=channels)

    def _factor(self, name: str, stored: Tensor) -> Tensor:
        factor = stored.reshape(1).float()
        value = float(factor)
        if not 1 / _LARGEST <= value <= _LARGEST:  # NaN is not, nor is zero
            raise ValueError(f"tensor {name} holds {value:.4g}, which is no factor of scales")
        return 1 / factor if self.is_divisor else factor


MODELOPT_NVFP4 = NvFp4("weight", "weight_scale_2", is_divisor=False)
