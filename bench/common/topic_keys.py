"""Random keys of K/V that is selected."""

from __future__ import annotations

import torch

_TOPIC = 48  # tokens


def topic_keys(rows: int, heads: int, dim: int) -> torch.Tensor:
    """Returns keys [rows, heads, dim] of topics, each of which lasts a while: the choice among
    tiles that are alike takes other times than that among different ones."""
    topics = torch.randn(-(-rows // _TOPIC), heads, dim)
    return topics.repeat_interleave(_TOPIC, 0)[:rows] + torch.randn(rows, heads, dim)
