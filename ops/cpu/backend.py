"""The CPU back end for bf16 and fp32: native kernels where they are faster, torch elsewhere.

Linear layers, attention and fp32 rotation run on native kernels (ops/cpu/native*.py) if the library
is built and supports the shape. Otherwise linear layers use oneDNN's packed weights (about twice
as fast as F.linear at small M) and attention uses torch's CPU flash kernel, which takes strided K/V
and returns the log-sum-exp. Operators internal to torch are tried at their first use; if they fail,
public operators replace them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import cast

import torch
import torch.nn.functional as F
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
from ops.cpu import (
    native_experts,
    native_heads,
    native_library,
    native_partials,
    native_plain_attention,
)
from ops.cpu.native_plain_linear import PlainLinear as NativePlainLinear
from ops.cpu.native_quantized_linear import NATIVE
from ops.cpu.native_rotation import rotate_
from ops.experts import ExpertsOneByOne, route
from ops.heads import HeadsOneByOne
from ops.linear import PlainLinear
from ops.reference import ReferenceBackend, with_sinks
from ops.states import StateOps

logger = logging.getLogger(__name__)

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square_(),
}
# Up to this many rows, the query heads of a K/V head's group become rows of one head. A larger
# causal block is cheaper with repeated K/V heads, because the kernel then skips half of it.
_FOLD_ROWS = 64


class CpuBackend:
    """The Backend contract on torch's CPU kernels."""

    name = "cpu"
    device = torch.device("cpu")

    def __init__(self) -> None:
        self._reference = ReferenceBackend()
        self._has_native = native_library.is_available()
        self.quantized: QuantizedLinears | None = NATIVE if self._has_native else None
        # without vector instructions torch's prefill attention is faster
        self._has_vectors = self._has_native and native_library.instruction_set() != "portable"

    @cached_property
    def states(self) -> StateOps:
        if not self._has_native:
            return self._reference.states
        from ops.cpu.native_states import NativeStates  # for models with states only

        return NativeStates()

    # Both are tried at their first use, which for most models never comes.

    @cached_property
    def _packed_types(self) -> set[torch.dtype]:
        return _types_that_pass("oneDNN packed linear", _check_packed_linear)

    @cached_property
    def _flash_types(self) -> set[torch.dtype]:
        return _types_that_pass("CPU flash attention", _check_flash)

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, fusion: Fusion = NO_FUSION
    ) -> LinearOp:
        if self._has_native and weight.dtype in native_library.TYPES:
            return NativePlainLinear(weight, bias, fusion)
        return PlainLinear(self, self._product(weight, bias), fusion)

    def pack_experts(
        self, ups: Sequence[LinearOp], downs: Sequence[LinearOp], *, scales_input: bool = False
    ) -> ExpertsOp:
        if self._has_native and native_experts.can_group(ups, downs):
            return native_experts.NativeExperts(ups, downs, scales_input)
        return ExpertsOneByOne(ups, downs, scales_input)

    def pack_heads(self, ops: Sequence[LinearOp]) -> HeadsOp:
        if self._has_native and native_heads.can_join(ops):
            return native_heads.NativeHeads(ops)
        return HeadsOneByOne(ops)

    def route(self, x: Tensor, router: Router) -> Routing:
        if self._has_native and native_experts.can_route(x, router):
            return native_experts.route(x, router)
        return route(x, router)

    def _product(self, weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
        bias = None if bias is None else bias.clone()
        if weight.dtype not in self._packed_types:
            weight = weight.clone(memory_format=torch.contiguous_format)
            return lambda x: F.linear(x, weight, bias)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
        run = torch.ops.mkldnn._linear_pointwise.default
        return lambda x: cast(Tensor, run(x, packed, bias, "none", [], ""))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        is_dense = x.stride()[1:] == (x.shape[2], 1) and cos.is_contiguous() and sin.is_contiguous()
        if x.dtype == torch.float32 and is_dense and self._has_native:
            return rotate_(x, cos, sin)
        half = cos.shape[-1]
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        first, second = x[..., :half], x[..., half : 2 * half]
        out = torch.empty_like(x)
        out[..., :half] = first * cos - second * sin
        out[..., half : 2 * half] = second * cos + first * sin
        if x.shape[-1] > 2 * half:
            out[..., 2 * half :] = x[..., 2 * half :]
        return out

    def activation(self, x: Tensor, kind: str) -> Tensor:
        return _ACTIVATIONS[kind](x)

    def gated_activation(self, gate_up: Tensor, kind: str) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if kind == "swiglu_oai":
            wide = gate.float().clamp(max=7.0)
            activated = torch.sigmoid(1.702 * wide).mul_(wide).to(gate.dtype)
            return activated.mul_(up.clamp(-7.0, 7.0).add_(1))
        return _ACTIVATIONS[kind](gate).mul_(up)

    def store_kv(self, k: Tensor, v: Tensor, cache: Tensor, rows: Tensor) -> None:
        cache.index_put_((rows,), torch.stack((k, v), dim=1))

    def _has_native_decode(self, q: Tensor, caches: Sequence[KeyValues]) -> bool:
        can_attend = native_plain_attention.can_attend
        return self._has_native and all(can_attend(q, cache) for cache in caches)

    def begin_decode(
        self, q: Tensor, caches: Sequence[KeyValues], scale: float, *, soft_cap: float = 0.0
    ) -> Tensor | None:
        if not self._has_native_decode(q, caches):
            return None
        return native_plain_attention.begin_decode(q, caches, scale, soft_cap=soft_cap)

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
        if self._has_native_decode(q, caches):
            return native_plain_attention.decode_attention(
                q, caches, scale, begun, soft_cap=soft_cap, sinks=sinks
            )
        has_empty = any(cache.k.shape[2] == 0 for cache in caches)
        if q.dtype not in self._flash_types or has_empty or soft_cap:
            return self._reference.decode_attention(
                q, caches, scale, soft_cap=soft_cap, sinks=sinks
            )
        part = _decode_by_flash(q, caches, scale)
        return part if sinks is None else with_sinks(part, sinks)

    def _has_native_prefill(self, q: Tensor, cache: KeyValues, soft_cap: float) -> bool:
        # torch's flash kernel has no soft cap
        can_run = self._has_native and (self._has_vectors or soft_cap > 0)
        return can_run and native_plain_attention.can_attend(q, cache)

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
        if self._has_native_prefill(q, cache, soft_cap):
            return native_plain_attention.prefill_attention(
                q, cache, scale, window, soft_cap=soft_cap, sinks=sinks
            )
        if q.dtype not in self._flash_types or soft_cap:
            return self._reference.prefill_attention(
                q, cache, scale, window, soft_cap=soft_cap, sinks=sinks
            )
        part = self._prefill_by_flash(q, cache, scale, window)
        return part if sinks is None else with_sinks(part, sinks)

    def _prefill_by_flash(
        self, q: Tensor, cache: KeyValues, scale: float, window: int | None
    ) -> Partial:
        n, length = q.shape[0], cache.k.shape[2]
        if window is not None and length > n + window - 1:  # no row sees earlier keys
            first = length - n - window + 1
            cache = KeyValues(cache.k[:, :, first:], cache.v[:, :, first:])
            length -= first
        num_prefix = length - n
        if n <= _FOLD_ROWS or (window is not None and window < length):
            return _masked(q, cache, scale, window)
        # The prefix needs no mask and the chunk is causal, so the kernel skips masked keys. The two
        # parts are merged by their log-sum-exp.
        own = _causal(q, KeyValues(cache.k[:, :, num_prefix:], cache.v[:, :, num_prefix:]), scale)
        if num_prefix == 0:
            return own
        prefix = _folded(q, cache.k[:, :, :num_prefix], cache.v[:, :, :num_prefix], scale, None)
        return self.merge_partials([prefix, own])

    def prefix_attention(
        self,
        q: Tensor,
        cache: KeyValues,
        scale: float,
        window: int | None,
        *,
        soft_cap: float = 0.0,
    ) -> Partial:
        if self._has_native_prefill(q, cache, soft_cap):
            return native_plain_attention.prefix_attention(
                q, cache, scale, window, soft_cap=soft_cap
            )
        if q.dtype not in self._flash_types or soft_cap:
            return self._reference.prefix_attention(q, cache, scale, window, soft_cap=soft_cap)
        n, length = q.shape[0], cache.k.shape[2]
        num_seeing = 0 if length == 0 else n if window is None else min(n, window - 1)
        out = torch.zeros(q.shape, dtype=q.dtype)
        lse = torch.full(q.shape[:2], float("-inf"))
        if num_seeing:
            mask = None
            if window is not None:
                hidden = torch.ones(num_seeing, length, dtype=torch.bool).tril_(length - window)
                mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden, float("-inf"))
            seen = _folded(q[:num_seeing], *cache, scale, mask)
            out[:num_seeing], lse[:num_seeing] = seen
        return Partial(out, lse)

    def merge_partials(self, parts: Sequence[Partial]) -> Partial:
        return self._reference.merge_partials(parts)

    def merge_into(self, total: Partial, part: Partial, rows: Tensor | None = None) -> None:
        if self._has_native and native_partials.can_merge(total, part):
            return native_partials.merge_into(*total, *part, rows)
        return self._reference.merge_into(total, part, rows)


def _flash(
    q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns out [1, Hq, n, D] and lse [1, Hq, n] for q: [1, Hq, n, D]; k, v: [1, Hq, L, D]."""
    run = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    return cast(tuple[Tensor, Tensor], run(q, k, v, 0.0, causal, attn_mask=mask, scale=scale))


def _decode_by_flash(q: Tensor, caches: Sequence[KeyValues], scale: float) -> Partial:
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads = caches[0].k.shape[1]
    # With one row per K/V head and group member, each K/V byte is read once per group.
    # The kernel reads head by head, so tokens far apart in memory are gathered first: one copy
    # in address order costs less than eight strided reads (1.5x at 512 tokens).
    folded = q.view(num_rows, 1, num_kv_heads, num_heads // num_kv_heads, head_dim)
    parts = [
        _flash(folded[s], cache.k.contiguous(), cache.v.contiguous(), scale)
        for s, cache in enumerate(caches)
    ]
    out = torch.cat([p[0] for p in parts]).view(num_rows, num_heads, head_dim)
    lse = torch.cat([p[1] for p in parts]).view(num_rows, num_heads)
    return Partial(out, lse)


def _folded(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None) -> Partial:
    """Computes attention with the rows of a group as rows of their K/V head.

    mask: [n, L] additive, in q's dtype.
    """
    n, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    rows = q.view(n, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    folded = rows.reshape(1, num_kv_heads, group * n, head_dim)
    if mask is not None:
        mask = mask.repeat(group, 1)[None, None]
    out, lse = _flash(folded, k, v, scale, mask)
    out = out.view(num_kv_heads, group, n, head_dim).permute(2, 0, 1, 3)
    lse = lse.view(num_kv_heads, group, n).permute(2, 0, 1)
    return Partial(out.reshape(n, num_heads, head_dim), lse.reshape(n, num_heads))


def _masked(q: Tensor, cache: KeyValues, scale: float, window: int | None) -> Partial:
    n, length = q.shape[0], cache.k.shape[2]
    visible = torch.ones(n, length, dtype=torch.bool).tril_(length - n)
    if window is not None:
        visible = visible.triu_(length - n - window + 1)
    mask = torch.zeros(n, length, dtype=q.dtype).masked_fill_(~visible, float("-inf"))
    return _folded(q, cache.k, cache.v, scale, mask)


def _causal(q: Tensor, cache: KeyValues, scale: float) -> Partial:
    _n, num_heads, _head_dim = q.shape
    group = num_heads // cache.k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) if group > 1 else x for x in cache)
    out, lse = _flash(q.transpose(0, 1)[None], k, v, scale, causal=True)
    return Partial(out[0].transpose(0, 1), lse[0].transpose(0, 1))


def _types_that_pass(what: str, check: Callable[[torch.dtype], bool]) -> set[torch.dtype]:
    """Returns the compute types for which an internal torch operator passes; logs failures."""
    passed: set[torch.dtype] = set()
    for dtype in (torch.float32, torch.bfloat16):
        reason = "gave a wrong result"
        try:
            works = check(dtype)
        except (RuntimeError, AttributeError, TypeError, NotImplementedError) as error:
            works, reason = False, f"is not usable ({error})"
        if works:
            passed.add(dtype)
        else:
            logger.warning("%s %s in %s; the slower public operators are used", what, reason, dtype)
    return passed


def _check_packed_linear(dtype: torch.dtype) -> bool:
    numbers = torch.Generator().manual_seed(0)  # the global one is its users'
    x, weight = (torch.randn(rows, 16, generator=numbers).to(dtype) for rows in (3, 8))
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    y = torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
    return _is_close(y, x.double() @ weight.double().T)


def _check_flash(dtype: torch.dtype) -> bool:
    """Checks both calls used here, causal and with a mask, on strided K/V."""
    numbers = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 5, 8, generator=numbers).to(dtype)
    k, v = (
        torch.randn(2, 5, 3, 2, 8, generator=numbers)
        .to(dtype)[:, :, 1]
        .permute(0, 2, 1, 3)[:, None]
    )
    hidden = torch.ones(5, 5).triu_(1).bool()
    mask = torch.zeros(5, 5, dtype=dtype).masked_fill_(hidden, float("-inf"))
    scores = (q.double() @ k.double().transpose(-1, -2) * 0.5).masked_fill(hidden, float("-inf"))
    expected, lse = torch.softmax(scores, -1) @ v.double(), torch.logsumexp(scores, -1)
    causal, masked = _flash(q, k, v, 0.5, causal=True), _flash(q, k, v, 0.5, mask[None, None])
    return all(_is_close(out, expected) and _is_close(part, lse) for out, part in (causal, masked))


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    bound = 1e-4 if actual.dtype == torch.float32 else 5e-2
    return torch.allclose(actual.double(), expected, atol=bound, rtol=bound)
