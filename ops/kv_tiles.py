"""The K/V layout of one layer on a CUDA device, in numbers; it needs neither Triton nor a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

TILE_TOKENS = 16
MAX_HEAD_DIM = 512
_SIZES = {torch.int8: 1, torch.bfloat16: 2, torch.float32: 4}


def layer_bytes(num_kv_heads: int, head_dim: int, dtype: torch.dtype, group: int | None) -> int:
    """Returns the bytes of one layer's part of a tile.

    group: elements of a head that share an fp16 scale, for int8 only. ValueError for a layout that
    the kernels do not support.
    """
    if dtype not in _SIZES:
        raise ValueError(f"K/V in {dtype}; known: {', '.join(map(str, _SIZES))}")
    if (dtype == torch.int8) != (group is not None):
        raise ValueError(f"{dtype} K/V with scale group {group}")
    if head_dim % 16 or not 16 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim {head_dim} is not a multiple of 16 up to {MAX_HEAD_DIM}")
    if group is not None and (group < 8 or head_dim % group):
        raise ValueError(f"scale group {group} does not divide head_dim {head_dim}")
    of_head = head_dim * _SIZES[dtype] + (head_dim // group * 2 if group else 0)
    return 2 * num_kv_heads * TILE_TOKENS * of_head


def key_bounds_bytes(num_kv_heads: int, head_dim: int) -> int:
    """Returns the bytes of the bounds of a layer's keys, which follow its part of a tile where K/V
    is selected: for each K/V head the largest and then the smallest value of every dimension, in
    signed bytes, and after all heads a scale of each, fp32."""
    return -(-num_kv_heads * (2 * head_dim + 4) // 16) * 16


def architecture(device: torch.device) -> int:
    """Returns the architecture whose kernel configurations fit the device's shared memory.

    It is 90 (227 KiB per program), 80 (163 KiB) or 89 (99 KiB); 90 for the interpreter.
    """
    if device.type != "cuda":
        return 90
    capability = torch.cuda.get_device_capability(device)
    if capability[0] in (9, 10):
        return 90
    return 80 if capability in ((8, 0), (8, 7)) else 89


@dataclass(frozen=True, slots=True)
class KVTiles:
    """The layout of one layer. Its part of the tile of token n is at
    base + n // 16 * tile_stride + offset (bytes).

    The part holds K values [Hk, 16, D], V values [Hk, 16, D] (int8: [Hk, D, 16]) and for int8
    scales [Hk, 16, 2, D / group], for each token those of K before those of V. The product with V
    sums over tokens, and int8 tensor cores read four summed values side by side; bf16 can be
    transposed while it is loaded. window: number of keys a row sees, itself included; None: all.
    soft_cap: scores become cap * tanh(score / cap); 0: none.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None
    dtype: torch.dtype
    group: int | None
    tile_stride: int
    offset: int
    soft_cap: float = 0.0

    def __post_init__(self) -> None:
        size = layer_bytes(self.num_kv_heads, self.head_dim, self.dtype, self.group)
        assert self.num_heads % self.num_kv_heads == 0, f"{self}"
        assert self.tile_stride % 16 == 0 and self.offset % 16 == 0, f"{self}"
        assert 0 <= self.offset <= self.tile_stride - size, f"{self}"
        assert self.window is None or self.window > 0, f"{self}"
        assert self.scale > 0 and self.soft_cap >= 0, f"{self}"

    @property
    def heads_per_kv(self) -> int:
        """Query heads that share a K/V head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_groups(self) -> int:
        """Scales of a head's vector; 0: not quantized."""
        return self.head_dim // self.group if self.group else 0
