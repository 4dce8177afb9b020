"""int8 x int8 linear layers as a transform of the plain model: the loader packs with these.

Weights per output channel, symmetric, rounded to the nearest of 127 steps of the channel's
largest; activations per token at run time (LLM.int8 without its outliers, ZeroQuant's scheme).
"""

from __future__ import annotations

from torch import Tensor

from ops import native
from ops.backend import PLAIN, Edges, LinearOp


def int8_linear(weight: Tensor, bias: Tensor | None, edges: Edges = PLAIN) -> LinearOp:
    """weight: [out, in] in any float type. What load_model takes as make_linear."""
    return native.Int8Linear(weight, bias, edges)
