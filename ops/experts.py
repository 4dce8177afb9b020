"""Mixtures of experts in plain torch: the router, and experts that run one after the other.

Back ends without a grouped product use these; grouped kernels must equal them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ops.backend import LinearOp, Router, RouterKind, Routing


def route(x: Tensor, router: Router) -> Routing:
    """Computes Backend.route."""
    kind = router.kind
    logits = x.float() @ router.weight.float().T
    if router.bias is not None:
        logits = logits + router.bias
    scores = logits if kind.is_after_top_k else _score(logits, kind.score)
    choice = scores if router.correction is None else scores + router.correction
    if kind.num_groups > 1:
        choice = _only_best_groups(choice, kind)
    # a stable sort, so that of equal scores the lower expert comes first
    experts = choice.argsort(dim=-1, descending=True, stable=True)[:, : kind.top_k]
    weights = scores.gather(1, experts)
    if kind.is_after_top_k:
        weights = _score(weights, kind.score)
    if kind.is_normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + kind.sum_eps)
    weights = weights * kind.scale
    if router.expert_scales is not None:
        weights = weights * router.expert_scales[experts]
    return Routing(experts.int(), weights)


def _score(logits: Tensor, score: str) -> Tensor:
    return logits.softmax(-1) if score == "softmax" else logits.sigmoid()


def _only_best_groups(choice: Tensor, kind: RouterKind) -> Tensor:
    """Returns scores with -inf for experts of all but the best groups."""
    grouped = choice.view(len(choice), kind.num_groups, -1)
    best = grouped.topk(kind.group_best, dim=-1).values.sum(-1)
    top = best.argsort(dim=-1, descending=True, stable=True)[:, : kind.num_top_groups]
    is_top = torch.zeros_like(best, dtype=torch.bool).scatter_(1, top, True)
    return grouped.masked_fill(~is_top[..., None], float("-inf")).flatten(1)


class ExpertsOneByOne:
    """An ExpertsOp that calls each expert's products with its rows."""

    def __init__(
        self, ups: Sequence[LinearOp], downs: Sequence[LinearOp], scales_input: bool
    ) -> None:
        assert len(ups) == len(downs) > 0
        self._ups, self._downs = list(ups), list(downs)
        self._scales_input = scales_input

    def __call__(self, x: Tensor, routing: Routing, residual: Tensor | None = None) -> Tensor:
        experts, weights = routing
        parts: Tensor | None = None
        for expert in sorted(set(experts.flatten().tolist())):
            row, k = (experts == expert).nonzero(as_tuple=True)
            weight = weights[row, k, None]
            rows = x[row] * weight.to(x.dtype) if self._scales_input else x[row]
            out = self._downs[expert](self._ups[expert](rows))
            if parts is None:
                parts = out.new_zeros((*experts.shape, out.shape[1]), dtype=torch.float32)
            parts[row, k] = out.float() if self._scales_input else out.float() * weight
        if parts is None:
            return x if residual is None else residual
        total = parts[:, 0]
        for k in range(1, experts.shape[1]):
            total = total + parts[:, k]
        return total.to(x.dtype) if residual is None else residual + total.to(residual.dtype)
