"""Slow, obvious torch versions of the operators; tests compare the other back ends with them.

`ReferenceBackend` computes in fp32 (fp64 for fp64 inputs) without fused calls, one sequence and one
formula at a time. Results have the dtype of the inputs. The functions for int8 compute in fp64:
`int8_linear` rounds rows and weights, `round_kv` rounds K/V as int8 pages store them, and
`attention_fp64` has every option of the attention over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from ops.backend import (
    NO_FUSION,
    ExpertsOp,
    Fusion,
    HeadsOp,
    KeyValues,
    LinearOp,
    Partial,
    QuantizedLinears,
    Router,
    Routing,
)
from ops.experts import ExpertsOneByOne, route
from ops.heads import HeadsOneByOne
from ops.linear import PlainLinear
from ops.states import StateOps


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def gate(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """Returns Backend.gated_activation of the two halves."""
    if kind == "swiglu_oai":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return _activate(gate, kind) * up


def _activate(x: Tensor, kind: str) -> Tensor:
    if kind == "silu":
        return x * torch.sigmoid(x)
    if kind == "relu":
        return x.clamp(min=0)
    if kind == "relu2":
        return x.clamp(min=0).square()
    if kind == "gelu":
        return 0.5 * x * (1 + torch.erf(x / 2**0.5))
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    raise ValueError(f"unknown activation {kind!r}")


class ReferenceBackend:
    """The Backend contract, written to be read."""

    name = "reference"
    device = torch.device("cpu")
    quantized: QuantizedLinears | None = None

    @cached_property
    def states(self) -> StateOps:
        from ops.reference_states import ReferenceStates  # for models with states only

        return ReferenceStates()

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = NO_FUSION
    ) -> LinearOp:
        weight = weight.clone()
        bias = None if bias is None else bias.clone()

        def product(x: Tensor) -> Tensor:
            y = _wide(x) @ _wide(weight).T
            return (y if bias is None else y + _wide(bias)).to(x.dtype)

        return PlainLinear(self, product, fusion)

    def pack_experts(
        self, ups: Sequence[LinearOp], downs: Sequence[LinearOp], *, scales_input: bool = False
    ) -> ExpertsOp:
        return ExpertsOneByOne(ups, downs, scales_input)

    def pack_heads(self, ops: Sequence[LinearOp]) -> HeadsOp:
        return HeadsOneByOne(ops)

    def route(self, x: Tensor, router: Router) -> Routing:
        return route(x, router)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = _wide(x)
        mean_square = (wide * wide).mean(-1, keepdim=True)
        return (wide * torch.rsqrt(mean_square + eps) * _wide(weight)).to(x.dtype)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        wide = _wide(x)
        centred = wide - wide.mean(-1, keepdim=True)
        variance = (centred * centred).mean(-1, keepdim=True)
        y = centred * torch.rsqrt(variance + eps) * _wide(weight)
        return (y if bias is None else y + _wide(bias)).to(x.dtype)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = cos.shape[-1]
        wide = _wide(x)
        first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
        cos, sin = cos[:, None], sin[:, None]
        turned = [first * cos - second * sin, second * cos + first * sin, rest]
        return torch.cat(turned, dim=-1).to(x.dtype)

    def activation(self, x: Tensor, kind: str) -> Tensor:
        return _activate(_wide(x), kind).to(x.dtype)

    def gated_activation(self, gate_up: Tensor, kind: str) -> Tensor:
        first, second = _wide(gate_up).chunk(2, dim=-1)
        return gate(first, second, kind).to(gate_up.dtype)

    def store_kv(self, k: Tensor, v: Tensor, cache: Tensor, rows: Tensor) -> None:
        for i, row in enumerate(rows.tolist()):
            cache[row, 0] = k[i]
            cache[row, 1] = v[i]

    def begin_decode(
        self, q: Tensor, caches: Sequence[KeyValues], scale: float, *, soft_cap: float = 0.0
    ) -> Tensor | None:
        return None

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
        parts = [
            self.prefill_attention(q[s : s + 1], cache, scale, None, soft_cap=soft_cap, sinks=sinks)
            for s, cache in enumerate(caches)
        ]
        return Partial(torch.cat([p.out for p in parts]), torch.cat([p.lse for p in parts]))

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
        part = _attend(q, cache, scale, window, cache.k.shape[2] - len(q), soft_cap)
        return part if sinks is None else with_sinks(part, sinks)

    def prefix_attention(
        self,
        q: Tensor,
        cache: KeyValues,
        scale: float,
        window: int | None,
        *,
        soft_cap: float = 0.0,
    ) -> Partial:
        return _attend(q, cache, scale, window, cache.k.shape[2], soft_cap)

    def merge_partials(self, parts: Sequence[Partial]) -> Partial:
        # the softmax over a union weighs each part by exp(lse_part - lse_union)
        lse = torch.logsumexp(torch.stack([p.lse for p in parts]), dim=0)
        weights = [torch.exp(p.lse - lse)[..., None] for p in parts]
        nothing = [torch.isneginf(p.lse)[..., None] for p in parts]
        out = sum(
            (_wide(p.out) * weight).masked_fill(is_nothing, 0.0)
            for p, weight, is_nothing in zip(parts, weights, nothing, strict=True)
        )
        assert isinstance(out, Tensor)
        return Partial(out.to(parts[0].out.dtype), lse)

    def merge_into(self, total: Partial, part: Partial, rows: Tensor | None = None) -> None:
        where = slice(None) if rows is None else rows
        merged = self.merge_partials([Partial(total.out[where], total.lse[where]), part])
        total.out[where], total.lse[where] = merged.out, merged.lse


def with_sinks(part: Partial, sinks: Tensor) -> Partial:
    """Returns attention with the sinks, [H], in the denominator."""
    # in fp64, so that the bits of a row do not depend on its place in the tensor
    lse, sinks = part.lse.double(), sinks.double()
    out = _wide(part.out) * torch.sigmoid(lse - sinks).to(_wide(part.out).dtype)[..., None]
    return Partial(out.to(part.out.dtype), torch.logaddexp(lse, sinks).to(part.lse.dtype))


def _attend(
    q: Tensor,
    cache: KeyValues,
    scale: float,
    window: int | None,
    first_position: int,
    soft_cap: float,
) -> Partial:
    """Computes attention of rows from first_position on; the cache begins at position 0."""
    n, num_heads, _ = q.shape
    k, v = _wide(cache.k[0]), _wide(cache.v[0])
    num_kv_heads, length, _ = k.shape
    group = num_heads // num_kv_heads
    row = torch.arange(first_position, first_position + n, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)[None]
    visible = key <= row
    if window is not None:
        visible &= key > row - window
    out = torch.empty_like(q)
    lse = torch.empty(n, num_heads, dtype=k.dtype, device=q.device)
    for head in range(num_heads):
        scores = (_wide(q[:, head]) @ k[head // group].T) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        scores = scores.masked_fill(~visible, float("-inf"))
        lse[:, head] = torch.logsumexp(scores, dim=-1)
        weights = torch.softmax(scores, dim=-1).masked_fill(~visible, 0.0)  # NaN without keys
        out[:, head] = (weights @ v[head // group]).to(q.dtype)
    return Partial(out, lse)


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x: [M, K] as whole numbers from -127 to 127, and the step of each row: [M, 1]."""
    largest = x.float().abs().amax(-1, keepdim=True)
    per_step = torch.where(largest > 0, 127.0 / largest, 0.0)
    return (x.float() * per_step).round(), largest / 127.0


def int8_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Computes the product of QuantizedLinears.int8 in fp64: [M, K] times [N, K] to [M, N]."""
    (codes, steps), (weights, scales) = quantize_int8(x), quantize_int8(weight)
    return (codes.double() @ weights.double().T) * steps.double() * scales.double().T


def round_kv(x: Tensor, group: int) -> Tensor:
    """Returns K or V: [..., D] as int8 pages store it, with a scale for each group of values.

    Scales are fp16 and rounded up, so that no value exceeds 127 steps.
    """
    parts = x.reshape(*x.shape[:-1], x.shape[-1] // group, group)
    scale = _scale_above(parts.abs().amax(-1, keepdim=True) / 127.0)
    return ((parts / scale).round().clamp(-127, 127) * scale).reshape(x.shape)


# of int4 K/V: its levels, and the scales that are tried, in shares of a group's largest magnitude
_LEVELS4 = (3.0, 9.0, 16.0, 23.0, 30.0, 39.0, 50.0, 64.0)
_TOPS4 = (0.98, 0.89, 0.93, 1.02, 1.06, 1.26)


def hadamard(x: Tensor) -> Tensor:
    """Returns x: [..., D] fp32 with H applied to blocks of D, of which each has as many numbers as
    the largest power of two that divides D. H is not normalized: H H is that power times I."""
    dim = x.shape[-1]
    block = dim & -dim
    size = 1
    while size < block:
        pairs = x.reshape(*x.shape[:-1], dim // (2 * size), 2, size)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((a + b, a - b), dim=-2).reshape(x.shape)
        size *= 2
    return x


def round_kv4(x: Tensor, group: int) -> Tensor:
    """Returns K or V: [..., D] fp32 as int4 pages store it, with a scale for each group of values.

    The values are rounded after `hadamard` and transformed back. Scales are fp16, rounded up. All
    operations and their order are the kernel's, so that it chooses the same codes.
    """
    dim = x.shape[-1]
    parts = hadamard(x).reshape(*x.shape[:-1], dim // group, group)
    shares = torch.tensor(_TOPS4) * (1.0 / 64.0)
    scales = _scale_above(parts.abs().amax(-1, keepdim=True) * shares)
    best, least = torch.zeros_like(parts), torch.full_like(parts[..., :1], torch.inf)
    for i in range(scales.shape[-1]):
        scale = scales[..., i : i + 1]
        inverse = torch.where(scale > 0, 1.0 / scale, 0.0)
        levels = _nearest_level(parts.abs() * inverse)
        rest = (parts.abs() * inverse - levels).square().reshape(*parts.shape[:-1], -1, 16)
        error = _folded_sum(rest)[..., None] * (scale * scale)
        best = torch.where(error < least, levels * scale, best)
        least = torch.minimum(error, least)
    values = torch.where(parts < 0, -best, best).reshape(x.shape)
    return hadamard(values) / (dim & -dim)


def _scale_above(wanted: Tensor) -> Tensor:
    """Returns fp16 numbers rounded up, as fp32."""
    scale = wanted.half()
    above = (scale.view(torch.int16) + 1).view(torch.float16)
    return torch.where(scale.float() < wanted, above, scale).float()


def _nearest_level(magnitude: Tensor) -> Tensor:
    levels = torch.tensor(_LEVELS4)
    return levels[torch.bucketize(magnitude, (levels[1:] + levels[:-1]) / 2)]


def _folded_sum(x: Tensor) -> Tensor:
    """Returns the sums of x: [..., N, 16] over both, in the order of a register of 16 numbers."""
    total = x[..., 0, :]
    for i in range(1, x.shape[-2]):
        total = total + x[..., i, :]
    for half in (8, 4, 2, 1):
        total = total[..., :half] + total[..., half : 2 * half]
    return total[..., 0]


def round_latent(x: Tensor, value_dim: int, group: int, rope_group: int) -> Tensor:
    """Returns latents: [..., D] as int8 pages store them: the first value_dim values and the rest
    have scale groups of their own."""
    parts = round_kv(x[..., :value_dim], group), round_kv(x[..., value_dim:], rope_group)
    return torch.cat(parts, dim=-1)


def attention_fp64(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float = 0.0,
    slopes: Sequence[float] | None = None,
    sinks: Sequence[float] | None = None,
    first_position: int | None = None,
) -> Partial:
    """Computes attention of q: [T, H, D] over k, v: [L, Hk, D] of one sequence in fp64.

    The rows are at first_position and after it, by default at the end of the keys. The options are
    those of `Int8Attention`.
    """
    rows, heads, _ = q.shape
    length = len(k)
    first = length - rows if first_position is None else first_position
    k, v = (x.double().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * scale
    if soft_cap:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    row = torch.arange(first, first + rows, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)[None]
    if slopes is not None:
        per_head = torch.tensor(slopes, device=q.device).double()[:, None, None]
        scores = scores + per_head * (key - row)
    seen = key <= row if window is None else (key <= row) & (key > row - window)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        logits = torch.tensor(sinks, device=q.device).double()[:, None, None]
        scores = torch.cat((scores, logits.expand(heads, rows, 1)), -1)
    weights = scores.softmax(-1)[..., :length].masked_fill(~seen, 0.0)
    return Partial(torch.einsum("hnl,lhd->nhd", weights, v), scores.logsumexp(-1).T)
