"""int8 x int8 linear layers as a transform of the plain model: the loader packs with these.

Weights per output channel, symmetric, rounded to the nearest of 127 steps of the channel's
largest; activations per token at run time (LLM.int8 without its outliers, ZeroQuant's scheme).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ops import native
from ops.backend import PLAIN, Edges, LinearOp


def int8_linear(parts: Sequence[Tensor], bias: Tensor | None, edges: Edges = PLAIN) -> LinearOp:
    """parts: [out_i, in], one under the other, any float. What load_model takes as make_linear."""
    return native.Int8Linear(parts, bias, edges)
