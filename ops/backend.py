"""The contract of a device's operators. Shapes and dtypes in the docstrings are the law.

A backend is a set of pure tensor functions; `ops/reference.py` says slowly and obviously what
each must compute. T rows in the step, S sequences, H query heads, Hk KV heads, D head dim,
L tokens of K/V in reach. Nothing here knows requests, ranges or pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

INT4_GROUPS = (32, 64, 128)
# A sum of products of int8 fits 32 bits up to this many inputs: 2^31 / (127 * 128).
MAX_INT8_INPUTS = 132_104
# The values of QLoRA (arXiv 2305.14314), rounded to 127ths as the kernels do.
NF4_VALUES = tuple(
    n / 127 for n in (-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127)
)


class Norm(NamedTuple):
    """kind: "rms" or "layer". weight: [N]; bias: [N] or None."""

    kind: str
    weight: Tensor
    bias: Tensor | None
    eps: float


class Fusion(NamedTuple):
    """What is fused around a product: norm before it, activation after it.

    With is_gated the weight holds gate and up one under the other, [2F, in], and the result is
    act(gate) * up: [T, F].
    """

    norm: Norm | None = None
    activation: str | None = None
    is_gated: bool = False


NO_FUSION = Fusion()


class LinearOp(Protocol):
    """A packed product and what is fused around it."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x: [T, in] -> act(norm(x) @ weight.T + bias) (+ residual): [T, out].

        A residual may be overwritten; only the result counts afterwards.
        """


class Partial(NamedTuple):
    """Attention over a part of the keys. out: [T, H, D]; lse: [T, H] fp32, natural log."""

    out: Tensor
    lse: Tensor


class KeyValues(NamedTuple):
    """K and V of one sequence in one layer, strided views of its range: each [1, Hk, L, D].

    Only the last dimension must be dense: a range is contiguous in virtual memory and the
    token stride is whatever the K/V layout says.
    """

    k: Tensor
    v: Tensor


class QuantizedLinears(Protocol):
    """Products of weights in few bits with rows in int8 (fp8: in fp8), of one device."""

    def int8(
        self,
        parts: Sequence[Tensor],
        bias: Tensor | None,
        fusion: Fusion = NO_FUSION,
        *,
        scales: Tensor | None = None,
        is_head: bool = False,
    ) -> LinearOp:
        """parts: [out_i, in], any float, one under the other; with scales, [out], int8 already.

        is_head: what it gives are logits, which stay in fp32.
        """

    def int4(
        self,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        bias: Tensor | None,
        fusion: Fusion = NO_FUSION,
        *,
        group: int,
        is_nf4: bool = False,
    ) -> LinearOp:
        """(codes - zeros) * scales, codes - 8 without zeros, or NF4 values times scales.

        codes: [out, in] uint8 below 16; scales: [out, groups]; zeros: [out, groups] uint8.
        """

    def fp8(
        self, parts: Sequence[Tensor], bias: Tensor | None, fusion: Fusion = NO_FUSION
    ) -> LinearOp:
        """As int8, weights and rows in e4m3. ValueError where the device has no fp8 products."""


class Backend(Protocol):
    """Operators of one device. quantized: None if it has no such products."""

    name: str
    device: torch.device
    quantized: QuantizedLinears | None

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = NO_FUSION
    ) -> LinearOp:
        """weight: [out, in], bias: [out]; both in the compute dtype. Takes its own copy."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [..., N], weight: [N]. The mean square is taken in fp32; result in x's dtype."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """x: [T, N]; weight, bias: [N]."""

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x: [T, H, D]; cos, sin: [T, R/2] fp32. Rotates pairs (i, i + R/2) of the first R.

        x may be overwritten.
        """

    def activation(self, x: Tensor, kind: str) -> Tensor:
        """kind: silu, gelu, gelu_tanh, relu; elementwise on [T, F]."""

    def gated_activation(self, gate_up: Tensor, kind: str) -> Tensor:
        """gate_up: [T, 2F] -> act(gate) * up: [T, F]."""

    def store_kv(self, k: Tensor, v: Tensor, cache: Tensor, rows: Tensor) -> None:
        """Write k, v: [T, Hk, D] into cache: [N, 2, Hk, D], one layer of all ranges.

        rows: [T] int64, where each row belongs: start of its range plus position, in tokens.
        """

    def decode_attention(self, q: Tensor, caches: Sequence[KeyValues], scale: float) -> Partial:
        """q: [S, H, D], one row per sequence; caches[s]: all keys that row s may see.

        Without keys a row gives 0 and an lse of -inf.
        """

    def prefill_attention(
        self, q: Tensor, cache: KeyValues, scale: float, window: int | None
    ) -> Partial:
        """q: [n, H, D], the last n positions of one sequence; cache: its last L positions.

        L - n keys come before the first row. Row i sees keys j <= L - n + i and, with a
        window w, only j > L - n + i - w.
        """

    def past_attention(
        self, q: Tensor, cache: KeyValues, scale: float, window: int | None
    ) -> Partial:
        """q: [n, H, D], the n positions after the last one of cache, which holds L, maybe none.

        Every row sees all keys; with a window w row i sees keys j > L + i - w, which may be none:
        0 and an lse of -inf. With prefill_attention of the rows over their own keys, merged, it
        is attention over all.
        """

    def merge_partials(self, parts: Sequence[Partial]) -> Partial:
        """Attention over the union of disjoint key sets, from attention over each."""

    def merge_into(self, total: Partial, part: Partial, rows: Tensor | None = None) -> None:
        """The same of two, written to total. part's row i belongs to row rows[i], [R] int64
        without repeats, or to row i. What has an lse of -inf counts for nothing, whatever it is.
        """
