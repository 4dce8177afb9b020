"""The contract of operators whose layers keep a state of fixed size instead of keys and values.

A state is in a record; what a layer keeps in the records of all sequences is one tensor with a
stride from record to record. One recurrence covers the gated delta rule (Gated
DeltaNet, arXiv 2412.06464), Kimi Delta Attention (arXiv 2510.26692) and Mamba-2's state-space
duality (arXiv 2405.21060). Letters in shapes: T rows of the step, S sequences, G segments, R
records, C channels, W the convolution's width, H heads, Hk heads of queries and keys, Dk and Dv
their dims and those of values.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

NO_RECORD = -1
"""Stands for the record of a segment that begins with a state of zeros, or whose state is not
kept."""


class StateSegments(NamedTuple):
    """The rows of a step, cut into segments: at the ends of sequences, and where the state after a
    row is kept beside the last one.

    firsts: [G + 1] int64, the first row of each segment, and T. sources, targets: [G] int64, the
    records that a segment reads its state from, and writes it to; NO_RECORD for none. They may be
    the same. sequences: [S + 1] int64, the first segment of each sequence, and G; the segments of
    a sequence are computed in order. On the device of the states. Where a device computes steps of
    fixed sizes, the rows, segments and sequences of a step may be fewer: rows from the last one of
    firsts on have undefined results, and segments from the last one of sequences on do nothing.
    """

    firsts: Tensor
    sources: Tensor
    targets: Tensor
    sequences: Tensor


class Recurrence(NamedTuple):
    """How a layer's heads turn rows into states and outputs, all in fp32.

    With dt = clamp(softplus(a + bias), dt_min, dt_max) and decay = exp(-rates * dt), a row changes
    the state S, [Dk, Dv], of a head to

        decay S + k (sigmoid(b) beta_scale (v - k^T decay S))^T      with is_delta
        decay S + k (dt v)^T                                         otherwise

    and gives scale * q^T S of the new state, plus skip * v. decay multiplies rows of S if bias is
    [H, Dk]. has_unit_keys: q and k are divided by sqrt(sum of squares + 1e-6) first.

    rates: [H] fp32; bias: [H] or [H, Dk] fp32; skip: [H] fp32 or None.
    """

    rates: Tensor
    bias: Tensor
    is_delta: bool
    scale: float
    has_unit_keys: bool = False
    beta_scale: float = 1.0
    dt_min: float = 0.0
    dt_max: float = float("inf")
    skip: Tensor | None = None


class StateOps(Protocol):
    """Operators with a state. A row's bits depend neither on other rows nor on how the rows of its
    sequence are cut into segments and steps: rows are applied to the state one after another. The
    prompts of a CUDA device are an exception (ops/cuda/states.py)."""

    def causal_conv(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str | None,
        states: Tensor,
        segments: StateSegments,
    ) -> Tensor:
        """Returns act(sum over i < W of weight[c, i] * x[t - W + 1 + i, c] + bias[c]): [T, C].

        x: [T, C], rows may be strided. weight: [C, W] fp32, W from 2 to 8; bias: [C] fp32.
        activation: "silu" or None. states: [R, W - 1, C] fp32, the last W - 1 inputs of a
        sequence, the latest last. Sums are fp32, the result has x's dtype.
        """

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
        """Returns the recurrence's outputs: [T, H, Dv] in v's dtype.

        q, k: [T, Hk, Dk], of which head h reads head h // (H / Hk); v: [T, H, Dv]; a: [T, H], or
        [T, H, Dk] where rule.bias has that shape; b: [T, H], only with is_delta. Rows may be
        strided, all in one dtype. states: [R, H, Dk, Dv] fp32.
        """

    def gated_norm(
        self,
        x: Tensor,
        gate: Tensor,
        weight: Tensor | None,
        eps: float,
        *,
        group: int,
        activation: str,
        gates_first: bool = False,
    ) -> Tensor:
        """Returns rms_norm(x) * weight * act(gate): [T, N] for x, gate: [T, N], rows may be
        strided.

        Each `group` values of a row are normalized by themselves; weight: [N] fp32, or None for
        the product with act(gate) alone. gates_first: rms_norm(x * act(gate)) * weight.
        activation: "silu" or "sigmoid". Computed in fp32, the result has x's dtype.
        """
