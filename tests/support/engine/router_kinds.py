"""The kinds of routers that all back ends are tested with."""

from __future__ import annotations

from ops.backend import RouterKind

ROUTER_KINDS = {
    "softmax": RouterKind(top_k=8),
    "normalized": RouterKind(top_k=4, is_normalized=True),
    "sigmoid": RouterKind(top_k=3, score="sigmoid", is_normalized=True, sum_eps=1e-20, scale=2.5),
    "after": RouterKind(top_k=4, is_after_top_k=True),
    "sigmoid after": RouterKind(top_k=1, score="sigmoid", is_after_top_k=True),
    "groups": RouterKind(
        top_k=5, score="sigmoid", num_groups=4, num_top_groups=2, group_best=2, is_normalized=True
    ),
    "best of groups": RouterKind(top_k=3, num_groups=8, num_top_groups=3, scale=16.0),
}
