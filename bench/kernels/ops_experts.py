"""The cases of `serve bench ops` for mixtures of experts.

The work of a case is the bytes of the experts that its rows' routing draws, and of the router.
Layers rotate through more memory than the caches hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from bench.kernels.ops_linear import Case, Timed
from ops.backend import NO_FUSION, Fusion, LinearOp, Router, RouterKind, Routing
from ops.cpu import native_experts
from ops.cpu.native_experts import NativeExperts
from ops.cpu.native_quantized_linear import NATIVE

EXPERTS_FAR = 1 << 30  # bytes of experts that are drawn before one is drawn again
ROWS = (1, 8, 32)


class MixtureShape(NamedTuple):
    """The experts of a published model."""

    name: str
    num_experts: int
    top_k: int
    size: int
    inner: int
    fusion: Fusion


QWEN3 = MixtureShape("qwen3-30b-a3b", 128, 8, 2048, 768, Fusion(None, "silu", True))
GPT_OSS = MixtureShape("gpt-oss-20b", 32, 4, 2880, 2880, Fusion(None, "swiglu_oai", True))
SMALL = MixtureShape("small", 8, 2, 256, 128, Fusion(None, "silu", True))


def expert_cases(quick: bool) -> Iterator[Case]:
    """Yields mixtures with weights in no cache; the bytes of the drawn experts bind them."""
    for shape in [SMALL] if quick else [QWEN3, GPT_OSS]:
        for kind in ("int8", "int4"):
            mixture = _Mixture(shape, kind, layers=2 if quick else 0)
            for rows in ROWS:
                yield mixture.case(rows)
    yield from router_cases(quick)


def router_cases(quick: bool) -> Iterator[Case]:
    shape = SMALL if quick else QWEN3
    weights = [torch.randn(shape.num_experts, shape.size) for _ in range(2 if quick else 700)]
    kind = RouterKind(top_k=shape.top_k, is_normalized=True)
    routers = [Router(kind, weight) for weight in weights]
    size_bytes = sum(weight.numel() * 4 for weight in weights)
    for rows in ROWS:
        x, none = torch.randn(rows, shape.size), torch.empty(0, shape.size)
        yield Case(
            "router",
            f"M={rows} {shape.name}",
            "read",
            size_bytes,
            0.5,
            Timed(partial(_route_all, routers, x), partial(_route_all, routers, none)),
        )


def _route_all(routers: list[Router], x: Tensor) -> None:
    for router in routers:
        native_experts.route(x, router)


class _Mixture:
    """Layers of one shape, with a routing for each number of rows."""

    def __init__(self, shape: MixtureShape, kind: str, layers: int) -> None:
        """layers: their number, or 0 for as many as keep each of them out of the caches."""
        self.shape, self.kind = shape, kind
        first = self._layer()
        self.bytes_per_expert = first.size_bytes / shape.num_experts
        count = layers or max(2, int(EXPERTS_FAR / first.size_bytes) + 1)
        self.layers = [first, *(self._layer() for _ in range(count - 1))]

    def _layer(self) -> NativeExperts:
        _, num_experts, _, size, inner, fusion = self.shape
        up, down = torch.randn(2 * inner, size), torch.randn(size, inner)
        ups = [self._packed(up, fusion) for _ in range(num_experts)]
        downs = [self._packed(down, NO_FUSION) for _ in range(num_experts)]
        return NativeExperts(ups, downs, scales_input=False)

    def _packed(self, weight: Tensor, fusion: Fusion) -> LinearOp:
        if self.kind == "int8":
            return NATIVE.int8([weight], None, fusion)
        return NATIVE.rounded4([weight], None, fusion, group=64, is_nf4=False)

    def case(self, rows: int) -> Case:
        """Returns calls of all layers until EXPERTS_FAR bytes of experts were drawn."""
        shape, calls, drawn = self.shape, list[tuple[NativeExperts, Routing]](), 0
        generator = torch.Generator().manual_seed(rows)
        per_call = min(shape.num_experts, rows * shape.top_k) * self.bytes_per_expert
        rounds = max(1, round(EXPERTS_FAR / (per_call * len(self.layers))))
        for layer in self.layers * rounds:
            order = torch.rand(rows, shape.num_experts, generator=generator).argsort(1)
            experts = order[:, : shape.top_k].int()
            drawn += len(set(experts.flatten().tolist()))
            weights = torch.full((rows, shape.top_k), 1 / shape.top_k)
            calls.append((layer, Routing(experts, weights)))
        x = torch.randn(rows, shape.size)
        return Case(
            f"{self.kind} experts",
            f"M={rows} {shape.name}",
            "read",
            drawn * self.bytes_per_expert,
            0.7,
            Timed(partial(_mix_all, calls, x)),
        )


def _mix_all(calls: list[tuple[NativeExperts, Routing]], x: Tensor) -> None:
    for experts, routing in calls:
        experts(x, routing)
