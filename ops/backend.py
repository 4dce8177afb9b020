"""The contract of a device's operators; the docstrings define shapes and dtypes.

A backend is a set of pure tensor functions. `ops/reference.py` computes them slowly and obviously.
Letters in shapes: T rows of the step, S sequences, H query heads, Hk K/V heads, D head dim, L
tokens of K/V. Nothing here knows requests, ranges or pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ops.states import StateOps
from ops.superblocks import Superblocks

INT4_GROUPS = (16, 32, 64, 128)
# A sum of products of int8 fits 32 bits up to this many inputs: 2^31 / (127 * 128).
MAX_INT8_INPUTS = 132_104
# The values of QLoRA (arXiv 2305.14314), rounded to 127ths as the kernels do.
NF4_VALUES = tuple(
    n / 127 for n in (-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127)
)
# The values of FP4 e2m1 by code, as the Open Compute Project's microscaling formats define it.
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
# The values of GGUF's IQ4_NL and IQ4_XS by code.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
TABLE_VALUES: dict[str, tuple[float, ...]] = {
    "nf4": NF4_VALUES,
    "fp4": FP4_VALUES,
    "iq4": IQ4_VALUES,
}
# The meanings of 4-bit codes: whole numbers, or indexes into one of TABLE_VALUES.
TABLES = ("int4", *TABLE_VALUES)


class Norm(NamedTuple):
    """A normalization. kind: "rms" or "layer"; weight: [N]; bias: [N] or None."""

    kind: str
    weight: Tensor
    bias: Tensor | None
    eps: float


class Fusion(NamedTuple):
    """The operations fused with a product: a norm before it, an activation after it.

    With is_gated the weight is gate stacked on up, [2F, in], and the result is act(gate) * up:
    [T, F].
    """

    norm: Norm | None = None
    activation: str | None = None
    is_gated: bool = False


NO_FUSION = Fusion()


class LinearOp(Protocol):
    """A packed linear layer with its fused operations."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Returns act(norm(x) @ weight.T + bias) (+ residual): [T, out], for x: [T, in].

        The residual, [T, out], may be overwritten.
        """


class Routing(NamedTuple):
    """The experts of each row. experts: [T, K] int32, distinct in a row; weights: [T, K] fp32."""

    experts: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterKind:
    """How a router turns logits into experts and weights.

    score: "softmax" or "sigmoid", over all logits, or over the chosen ones with is_after_top_k.
    The chosen experts are those with the largest score plus correction; weights are scores without
    it. With num_groups above 1 only experts of the num_top_groups best groups can be chosen; a
    group's score is the sum of its best group_best (corrected) scores. is_normalized: weights of a
    row are divided by their sum plus sum_eps. scale multiplies the weights in the end.
    """

    top_k: int
    score: str = "softmax"
    is_after_top_k: bool = False
    is_normalized: bool = False
    sum_eps: float = 0.0
    scale: float = 1.0
    num_groups: int = 1
    num_top_groups: int = 1
    group_best: int = 1


class Router(NamedTuple):
    """A router.

    weight: [E, in] fp32 or bf16. bias of the logits, correction and expert_scales: [E] fp32 or
    None. correction is added to scores for the choice only; expert_scales multiply the weights in
    the end.
    """

    kind: RouterKind
    weight: Tensor
    bias: Tensor | None = None
    correction: Tensor | None = None
    expert_scales: Tensor | None = None


class ExpertsOp(Protocol):
    """The packed experts of a mixture: gate, up, activation, down, and the weighted sum."""

    def __call__(self, x: Tensor, routing: Routing, residual: Tensor | None = None) -> Tensor:
        """Returns sum over k of weights[t, k] * expert[experts[t, k]](x[t]) (+ residual): [T, out].

        x: [T, in]. A row's sum is in the order of its k, so its bits do not depend on other rows.
        The residual, [T, out], may be overwritten.
        """


class HeadsOp(Protocol):
    """The packed products of heads, one for each."""

    def __call__(self, x: Tensor) -> Tensor:
        """Returns [T, H, out] for x: [T, H, in], any dense last dimension.

        A row's bits do not depend on other rows.
        """


class Partial(NamedTuple):
    """Attention over a subset of the keys. out: [T, H, D]; lse: [T, H] fp32, natural log."""

    out: Tensor
    lse: Tensor


class KeyValues(NamedTuple):
    """K and V of one sequence in one layer, strided views of its range: each [1, Hk, L, D].

    Only the last dimension must be dense: a range is contiguous in virtual memory, and the K/V
    layout sets the token stride.
    """

    k: Tensor
    v: Tensor


class QuantizedLinears(Protocol):
    """Linear layers of one device with quantized weights and rows in int8 (for fp8, in fp8).

    int8: weights are symmetric per output channel, rounded to the nearest of 127 steps of the
    channel's largest; activations are quantized per token at run time (LLM.int8 without its
    outliers, ZeroQuant's scheme). has_superblocks: whether there are products of that name.
    """

    @property
    def has_superblocks(self) -> bool: ...

    def int8(
        self,
        parts: Sequence[Tensor],
        bias: Tensor | None,
        fusion: Fusion = NO_FUSION,
        *,
        scales: Tensor | None = None,
        is_head: bool = False,
    ) -> LinearOp:
        """Packs parts, each [out_i, in] in any float type, concatenated along the output.

        With scales, [out], the parts are int8 already and used as they are. is_head: the results
        are logits, which stay in fp32. ValueError for more than MAX_INT8_INPUTS inputs.
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
        table: str = "int4",
        minimums: Tensor | None = None,
        channel_scales: Tensor | None = None,
    ) -> LinearOp:
        """Packs values(codes) * scales * channel_scales.

        codes: [out, in] uint8 below 16; scales: [out, groups] fp32; channel_scales: [out] fp32,
        ones if missing. group: inputs that share a scale, one of INT4_GROUPS; the last group may
        be shorter. The values by table:

            int4    codes - zeros, with zeros: [out, groups] uint8 of at most 16, or codes - 8
                    without; with minimums: [out, groups] fp32, codes * scales - minimums
            nf4     NF4_VALUES[codes]
            fp4     FP4_VALUES[codes]
            iq4     IQ4_VALUES[codes]

        Scales and minimums are stored as fp16 times a power of two per channel. For fp16 and bf16
        scales of int4, nf4 and iq4 that is exact within 1 : 2^14 of the channel's largest; with
        minimums, both have 11 bits within 1 : 2^28 of the larger. The scales of fp4 are stored
        exactly: e8m0 scales within 1 : 2^38 and all of e4m3 are. ValueError that names the output
        for others. A scale whose group has only zeros does not matter.
        """

    def rounded4(
        self,
        parts: Sequence[Tensor],
        bias: Tensor | None,
        fusion: Fusion = NO_FUSION,
        *,
        group: int,
        is_nf4: bool,
        is_searched: bool = False,
    ) -> LinearOp:
        """Rounds parts, each [out_i, in] in any float type, as `round_to_4_bits` in ops/linear.py
        does, and packs them as int4 does, concatenated along the output."""

    def superblocks(
        self,
        weight: Superblocks,
        bias: Tensor | None,
        fusion: Fusion = NO_FUSION,
        *,
        factor: float = 1.0,
    ) -> LinearOp:
        """Packs the weight times factor; nothing of it is rounded. ValueError without
        has_superblocks."""

    def fp8(
        self,
        parts: Sequence[Tensor],
        bias: Tensor | None,
        fusion: Fusion = NO_FUSION,
        *,
        scales: Tensor | None = None,
    ) -> LinearOp:
        """Packs as int8 does, in e4m3; with scales, [out], the parts are e4m3 already.

        With scales: [out, in / 128, rounded up], each for 128 inputs, rows have scales for 128
        inputs too. ValueError, before anything is packed, if the device has no fp8 products.
        """


class Backend(Protocol):
    """Operators of one device. quantized is None if the device has no quantized products."""

    name: str
    device: torch.device
    quantized: QuantizedLinears | None

    @property
    def states(self) -> StateOps:
        """The operators of layers with a state."""

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = NO_FUSION
    ) -> LinearOp:
        """Copies weight: [out, in] and bias: [out], both in the compute dtype."""

    def pack_experts(
        self, ups: Sequence[LinearOp], downs: Sequence[LinearOp], *, scales_input: bool = False
    ) -> ExpertsOp:
        """Combines the products of E experts, which were packed by this back end with one shape.

        ups include the activation and no norm. scales_input: a weight multiplies the expert's input
        instead of its output (Llama 4).
        """

    def pack_heads(self, ops: Sequence[LinearOp]) -> HeadsOp:
        """Combines the products of H heads, which were packed by this back end with one shape and
        no norm. The combination computes what each computes alone."""

    def route(self, x: Tensor, router: Router) -> Routing:
        """Returns the experts of x: [T, in], computed in fp32. Of equal scores the lower expert
        comes first."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalizes x: [..., N]; weight: [N]. The mean square is fp32, the result in x's dtype."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Normalizes x: [T, N]; weight, bias: [N]."""

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotates pairs (i, i + R/2) of the first R dimensions of x: [T, H, D].

        cos, sin: [T, R/2] fp32. x may be overwritten.
        """

    def activation(self, x: Tensor, kind: str) -> Tensor:
        """Applies silu, gelu, gelu_tanh, relu or relu2 (the square of relu) to x: [T, F]."""

    def gated_activation(self, gate_up: Tensor, kind: str) -> Tensor:
        """Returns act(gate) * up: [T, F], for gate_up: [T, 2F].

        The kind swiglu_oai exists only here: gate and up are clamped to 7, up also to -7 from
        below, and the result is gate * sigmoid(1.702 * gate) * (up + 1) (gpt-oss).
        """

    def store_kv(self, k: Tensor, v: Tensor, cache: Tensor, rows: Tensor) -> None:
        """Writes k, v: [T, Hk, D] into cache: [N, 2, Hk, D], one layer of all ranges.

        rows: [T] int64, the index of each row in the cache: start of its range plus position.
        """

    def decode_attention(
        self,
        q: Tensor,
        caches: Sequence[KeyValues],
        scale: float,
        begun: Tensor | None = None,
        *,
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Partial:
        """Computes attention for q: [S, H, D], one row per sequence.

        caches[s] holds all keys that row s sees. A row without keys gets 0 and an lse of -inf.
        begun is the result of begin_decode for the same arguments, and is overwritten. soft_cap:
        scores become cap * tanh(score / cap); 0: none. sinks: [H] fp32, logits that take part in
        the softmax, and in lse, and have no value.
        """

    def begin_decode(
        self, q: Tensor, caches: Sequence[KeyValues], scale: float, *, soft_cap: float = 0.0
    ) -> Tensor | None:
        """Begins decode_attention while the last key of each cache is not yet written.

        decode_attention then gives the same bits. Returns None if the backend cannot begin.
        """

    def prefill_attention(
        self,
        q: Tensor,
        cache: KeyValues,
        scale: float,
        window: int | None,
        *,
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Partial:
        """Computes causal attention for q: [n, H, D], the last n positions of one sequence.

        cache holds the last L positions of the sequence, so that L - n keys precede the first row.
        Row i sees keys j <= L - n + i and, with a window w, only j > L - n + i - w. soft_cap and
        sinks: as in decode_attention.
        """

    def prefix_attention(
        self,
        q: Tensor,
        cache: KeyValues,
        scale: float,
        window: int | None,
        *,
        soft_cap: float = 0.0,
    ) -> Partial:
        """Computes prefix attention for q: [n, H, D], the n positions that follow the L of cache.

        Every row sees all L keys, or with a window w keys j > L + i - w. A row that sees no key
        gets 0 and an lse of -inf. Merged with prefill_attention of the rows over their own keys,
        the result is attention over all keys. Sinks belong to that other part.
        """

    def merge_partials(self, parts: Sequence[Partial]) -> Partial:
        """Returns attention over the union of disjoint key sets."""

    def merge_into(self, total: Partial, part: Partial, rows: Tensor | None = None) -> None:
        """Merges part into total. part's row i belongs to row rows[i] of total, or to row i.

        rows: [R] int64 without repeats. A row and head with an lse of -inf is ignored, whatever
        its values are.
        """
