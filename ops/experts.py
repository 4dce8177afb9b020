"""Mixtures of experts in plain torch: the router, and experts that run one after the other.

Back ends without a grouped product use these; grouped kernels must equal them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ops.backend import LinearOp, Router, RouterKind, Routing

Pairs = tuple[int, Tensor, Tensor]
"""An expert, the rows that use it, and their k."""


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
    """An ExpertsOp that calls each expert's products with its rows; it can run in two phases
    (`PhasedExperts` in ops/sharded.py)."""

    def __init__(
        self, ups: Sequence[LinearOp], downs: Sequence[LinearOp], scales_input: bool
    ) -> None:
        assert len(ups) == len(downs) > 0
        self._ups, self._downs = list(ups), list(downs)
        self._scales_input = scales_input
        self.between_dtype: torch.dtype | None = getattr(ups[0], "out_dtype", None)

    def __call__(self, x: Tensor, routing: Routing, residual: Tensor | None = None) -> Tensor:
        if not routing.experts.numel():
            return x if residual is None else residual
        pairs = _pairs(routing)
        total = self._summed((self._up(x, routing, *each) for each in pairs), pairs, routing)
        return total.to(x.dtype) if residual is None else residual + total.to(residual.dtype)

    def up(self, x: Tensor, routing: Routing, out: Tensor) -> None:
        """Computes `PhasedExperts.up`."""
        for part, pairs in zip(_split(out, routing), _pairs(routing), strict=True):
            part.copy_(self._up(x, routing, *pairs))

    def down(self, between: Tensor, routing: Routing, out: Tensor, *, add: bool) -> None:
        """Computes `PhasedExperts.down`."""
        if len(out):
            parts = _split(between, routing)
            total = self._summed(parts, _pairs(routing), routing).to(out.dtype)
            out.copy_(out + total if add else total)

    def _up(self, x: Tensor, routing: Routing, expert: int, row: Tensor, k: Tensor) -> Tensor:
        rows = x[row]
        if self._scales_input:
            rows = rows * routing.weights[row, k, None].to(x.dtype)
        return self._ups[expert](rows)

    def _summed(
        self, between: Iterable[Tensor], pairs: Sequence[Pairs], routing: Routing
    ) -> Tensor:
        """Returns the weighted sums in the order of k, for the rows of each used expert."""
        parts: Tensor | None = None
        for rows, (expert, row, k) in zip(between, pairs, strict=True):
            out = self._downs[expert](rows).float()
            if parts is None:
                parts = out.new_zeros((*routing.experts.shape, out.shape[1]))
            parts[row, k] = out if self._scales_input else out * routing.weights[row, k, None]
        assert parts is not None, "some rows"
        total = parts[:, 0]
        for place in range(1, parts.shape[1]):
            total = total + parts[:, place]
        return total


def _pairs(routing: Routing) -> list[Pairs]:
    """Returns each used expert with the rows that use it and their k."""
    found = []
    for expert in sorted(set(routing.experts.flatten().tolist())):
        row, k = (routing.experts == expert).nonzero(as_tuple=True)
        found.append((expert, row, k))
    return found


def _split(rows: Tensor, routing: Routing) -> Sequence[Tensor]:
    """Returns the rows of each used expert, for those of all pairs."""
    counts = torch.bincount(routing.experts.flatten().long()).tolist()
    return torch.split(rows, [count for count in counts if count])
