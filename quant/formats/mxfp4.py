"""MXFP4: FP4 (e2m1) weights with a power of two for each 32 inputs.

    gpt-oss             all experts in one tensor: NAME_blocks uint8 [experts, out, in / 32, 16],
                        the lower bits first, NAME_scales uint8 [experts, out, in / 32];
                        a scale is 2^(byte - 127)
    compressed-tensors  weight_packed uint8 [out, in / 2], weight_scale uint8 [out, in / 32]

Codes and scales are computed as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from quant.formats.base import (
    RUN_TIME_SCALES,
    CheckpointFormat,
    Config,
    Fetch,
    TensorRule,
    power_scales,
    several,
)
from quant.formats.weights import Weight4, byte_nibbles, joined_int4
from quant.int4 import Int4Weight

GROUP = 32
_POWERS = ("U8", "F8_E8M0")


@dataclass(frozen=True, slots=True)
class MxFp4:
    """MXFP4 of single products, with the names of compressed-tensors."""

    markers: tuple[str, ...] = ("weight_packed",)
    ignored: tuple[str, ...] = RUN_TIME_SCALES
    loss: str | None = None
    bits: int = 4

    def tensors(self, num_in: int, num_out: int) -> dict[str, TensorRule]:
        groups = _groups(num_in)
        return {
            "weight_packed": TensorRule(((num_out, num_in // 2),), ("U8",)),
            "weight_scale": TensorRule(((num_out, groups),), _POWERS),
        }

    def load(self, fetch: Fetch, parts: Sequence[str]) -> Weight4:
        names = [(f"{part}.weight_packed", f"{part}.weight_scale") for part in parts]
        return Weight4(
            joined_int4([_weight(fetch(packed), scales, fetch(scales)) for packed, scales in names])
        )

    @property
    def unit(self) -> int:
        return 1

    def cut(self, ending: str, stored: Tensor, outputs: slice) -> Tensor:
        return stored[outputs]


@dataclass(frozen=True, slots=True)
class MxFp4Experts:
    """MXFP4 of fused experts. There are no other quantized products."""

    markers: tuple[str, ...] = ()
    expert_markers: tuple[str, ...] = ("_blocks",)
    ignored: tuple[str, ...] = ()
    loss: str | None = None
    bits: int = 4

    def tensors(self, num_in: int, num_out: int) -> dict[str, TensorRule]:
        raise ValueError("only experts are stored in mxfp4")

    def load(self, fetch: Fetch, parts: Sequence[str]) -> Weight4:
        raise ValueError("only experts are stored in mxfp4")

    def expert_tensors(
        self, num_experts: int, num_in: int, num_out: int, *, is_transposed: bool = False
    ) -> dict[str, TensorRule]:
        groups = _groups(num_in)
        return {
            "_blocks": TensorRule(((num_experts, num_out, groups, GROUP // 2),), ("U8",)),
            "_scales": TensorRule(((num_experts, num_out, groups),), ("U8",)),
        }

    def load_expert(
        self, fetch: Fetch, name: str, expert: int, *, is_transposed: bool = False
    ) -> Weight4:
        blocks, scales = fetch(f"{name}_blocks", expert), fetch(f"{name}_scales", expert)
        return Weight4(_weight(blocks.flatten(1), f"{name}_scales", scales))

    @property
    def unit(self) -> int:
        return 1

    def cut(self, ending: str, stored: Tensor, outputs: slice) -> Tensor:
        return stored[outputs]


def _groups(num_in: int) -> int:
    if num_in % GROUP:
        raise ValueError(f"{num_in} inputs cannot be divided by {GROUP}")
    return num_in // GROUP


def _weight(packed: Tensor, name: str, scales: Tensor) -> Int4Weight:
    codes = byte_nibbles(packed, is_low_first=True)
    return Int4Weight(codes, power_scales(name, scales), None, GROUP, "fp4")


def read_mxfp4(config: Config) -> CheckpointFormat:
    """Reads quant_method mxfp4."""
    return several("mxfp4", [MxFp4Experts()], "mxfp4")
