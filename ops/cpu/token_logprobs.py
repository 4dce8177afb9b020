"""Log-probabilities of given tokens in rows of logits, on the device that the logits are on.

The native kernel does the work where it reads such logits; the torch functions do the same
elsewhere, so that only what is asked for leaves the device.
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
"""To the host, perhaps when the device has got there."""


class Scores(NamedTuple):
    """Of R rows, on the host once the device has got there. logprobs: [R] fp32; ranks: [R], from
    1; top_tokens and top_logprobs: [R, num_top], the most likely first."""

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
            order = np.lexsort((ids, -values), axis=-1)  # equal ones by token id
            out["num_top"] = (values > -np.inf).sum(-1)
            out["top_tokens"][:, :num_top] = np.take_along_axis(ids, order, -1)
            out["top_logprobs"][:, :num_top] = np.take_along_axis(values, order, -1)
        return out


def describe(
    logits: Tensor, tokens: Tokens, num_top: int, fetch: Fetch = lambda x: x
) -> SampledRows | Scores:
    """logits: [R, V] fp32; row i with tokens[i], which are below V. Scores: `as_rows` of them, when
    what was fetched is there."""
    if sampling.is_available() and sampling.takes(logits):
        return sampling.describe(logits, tokens, num_top)
    return describe_with_torch(logits, tokens, num_top, fetch)


def describe_with_torch(
    logits: Tensor, tokens: Tokens, num_top: int, fetch: Fetch = lambda x: x
) -> Scores:
    """describe() for any device and element type."""
    logits = logits.float()
    # a copy that need not be waited for: CUDA reads pageable memory before it returns
    given = torch.from_numpy(tokens.astype(np.int64)).to(logits.device, non_blocking=True)[:, None]
    total = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, given)
    ranks = (logits > chosen).sum(-1) + 1
    values, ids = torch.topk(logits, min(num_top, logits.shape[1]), dim=-1)
    return Scores(
        tokens, fetch((chosen - total)[:, 0]), fetch(ranks), fetch(ids), fetch(values - total)
    )
