"""Log-probabilities of given tokens in rows of logits, computed on the logits' device.

The native kernel computes them if it supports the logits, torch functions otherwise. Only the
results leave the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ops.cpu import sampling
from ops.cpu.sampling import SAMPLED_ROW, SampledRows

Tokens = npt.NDArray[np.int32]
Fetch = Callable[[Tensor], Tensor]
"""Copies a tensor to the host, perhaps asynchronously."""


class Scores(NamedTuple):
    """Results for R rows, complete when the copies to the host are.

    logprobs: [R] fp32; ranks: [R], from 1; top_tokens, top_logprobs: [R, num_top], most likely
    first.
    """

    tokens: Tokens
    logprobs: Tensor
    ranks: Tensor
    top_tokens: Tensor
    top_logprobs: Tensor

    def as_rows(self) -> SampledRows:
        out = np.zeros(len(self.tokens), dtype=SAMPLED_ROW)
        out["token"], out["rank"] = self.tokens, self.ranks.numpy()
        out["logprob"] = self.logprobs.numpy()
        num_top = self.top_tokens.shape[1]
        if num_top:
            values, ids = self.top_logprobs.numpy(), self.top_tokens.numpy()
            order = np.lexsort((ids, -values), axis=-1)  # ties by token id
            out["num_top"] = (values > -np.inf).sum(-1)
            out["top_tokens"][:, :num_top] = np.take_along_axis(ids, order, -1)
            out["top_logprobs"][:, :num_top] = np.take_along_axis(values, order, -1)
        return out


def describe(
    logits: Tensor, tokens: Tokens, num_top: int, fetch: Fetch = lambda x: x
) -> SampledRows | Scores:
    """Returns the log-probability of tokens[i] (below V) in row i of logits: [R, V] fp32.

    Call `as_rows` of Scores when the fetched tensors are complete.
    """
    if sampling.is_available() and sampling.takes(logits):
        return sampling.describe(logits, tokens, num_top)
    return describe_with_torch(logits, tokens, num_top, fetch)


def describe_with_torch(
    logits: Tensor, tokens: Tokens, num_top: int, fetch: Fetch = lambda x: x
) -> Scores:
    """Does the same as describe for any device and element type."""
    logits = logits.float()
    # the copy needs no wait, because CUDA reads pageable memory before the call returns
    given = torch.from_numpy(tokens.astype(np.int64)).to(logits.device, non_blocking=True)[:, None]
    total = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, given)
    ranks = (logits > chosen).sum(-1) + 1
    values, ids = torch.topk(logits, min(num_top, logits.shape[1]), dim=-1)
    return Scores(
        tokens, fetch((chosen - total)[:, 0]), fetch(ranks), fetch(ids), fetch(values - total)
    )
