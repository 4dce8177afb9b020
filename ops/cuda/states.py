"""Operators of layers with a state on a CUDA device."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.states import Recurrence, StateSegments
from ops.triton_kernels import state_rows
from ops.triton_kernels.state_chunks import LONG_ROWS, MAX_KEY_DIM, apply_chunks
from ops.triton_kernels.state_rule import apply_rows, dense

_NEVER = 1 << 30  # rows, whatever the step: a kernel is compiled for one number


class CudaStates:
    """Implements StateOps. No call waits for the device: what a launch depends on are shapes, so
    that steps can be captured in graphs. A layer's states begin at a multiple of 16 bytes.

    A sequence with long_rows rows or more in a step is computed in chunks if rows are bf16 and a
    head has one decay for all dims. Its bits depend on where its segments begin, as
    ops/triton_kernels/state_chunks.py says. With None every row is computed by itself, and no bit
    depends on cuts.
    """

    def __init__(self, long_rows: int | None = LONG_ROWS) -> None:
        self._long_rows = long_rows

    causal_conv = staticmethod(state_rows.causal_conv)
    gated_norm = staticmethod(state_rows.gated_norm)

    def linear_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor | None,
        rule: Recurrence,
        states: Tensor,
        segments: StateSegments,
    ) -> Tensor:
        rows, heads, value_dim = v.shape
        assert states[0].is_contiguous(), f"records of strides {states.stride()}"
        assert states.data_ptr() % 16 == 0, "kernels are compiled for such addresses"
        assert (b is not None) == rule.is_delta, "b belongs to the delta rule"
        assert rule.is_delta or rule.bias.dim() == 1, "dt of a value has one number for a head"
        out = torch.empty(rows, heads, value_dim, dtype=v.dtype, device=v.device)
        q, k, v, a = (dense(x) for x in (q, k, v, a))
        b = None if b is None else dense(b)
        long_rows = self._long_rows
        has_chunks = rule.bias.dim() == 1 and q.shape[2] <= MAX_KEY_DIM
        if long_rows is None or not has_chunks or not q.dtype == k.dtype == torch.bfloat16:
            long_rows = _NEVER
        apply_rows(q, k, v, a, b, rule, states, segments, out, long_rows)
        if rows >= long_rows:  # or no sequence has so many
            apply_chunks(q, k, v, a, b, rule, states, segments, out, long_rows)
        return out
