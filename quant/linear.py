"""8-bit linear layers as transforms of the plain model: the loader packs with these.

int8: weights per output channel, symmetric, rounded to the nearest of 127 steps of the channel's
largest; activations per token at run time (LLM.int8 without its outliers, ZeroQuant's scheme).
fp8: the same with e4m3 numbers, on devices that multiply them.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ops.backend import NO_FUSION, Fusion, LinearOp, QuantizedLinears
from ops.cpu.native_linears import NATIVE


def int8_linear(
    parts: Sequence[Tensor],
    bias: Tensor | None,
    edges: Fusion = NO_FUSION,
    *,
    linears: QuantizedLinears = NATIVE,
    is_head: bool = False,
) -> LinearOp:
    """parts: [out_i, in], one under the other, any float. What load_model takes as make_linear."""
    return linears.int8(parts, bias, edges, is_head=is_head)


def fp8_linear(
    parts: Sequence[Tensor],
    bias: Tensor | None,
    edges: Fusion = NO_FUSION,
    *,
    linears: QuantizedLinears,
) -> LinearOp:
    """As int8_linear, in e4m3."""
    return linears.fp8(parts, bias, edges)
