"""K/V policies in plain torch, slow and obvious: what an engine's policies are compared with.

A policy sees one layer at a time: its keys, which of them each K/V head still holds, and the
attention's probabilities. It says which keys are dropped after the prompt and after a decoded
token, and which are read. Tokens are counted for each K/V head; a group of query heads decides
together. Keys keep the rotation of their original position.

- window: the first tokens and the newest ones (StreamingLLM, arXiv 2309.17453).
- h2o: half of the budget for the newest tokens, half for those with the largest sum of
  probabilities over all queries so far (H2O, arXiv 2306.14048).
- snapkv: the prompt's last queries vote once, at the prompt's end; a vote counts for neighbours,
  too; the answer's tokens are kept (SnapKV, arXiv 2404.14469).
- keyformer: as h2o with 30 % newest tokens and with the probabilities of logits with Gumbel noise
  at a temperature that rises during the answer (Keyformer, arXiv 2403.09054).
- pyramid: as snapkv; lower layers hold more than the budget and upper layers less, on average the
  budget (PyramidInfer, arXiv 2405.12532, which also leaves out the dropped tokens' rows in the
  prompt's upper layers; here the prompt is computed in full).
- quest: nothing is dropped; of the pages of 16 tokens those are read whose keys could have the
  largest product with the query, by their minima and maxima (Quest, arXiv 2406.10774).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SINKS = 4  # the first tokens, which window never drops
WINDOW = 32  # most queries at the prompt's end that vote in snapkv and pyramid, and stay
POOLING = 7  # neighbours for which a vote of snapkv counts
PAGE = 16  # tokens that quest reads together
SLACK = 64  # decoded tokens by which the budget may be exceeded before some are dropped
KEYFORMER_RECENT = 0.3
TEMPERATURES = (1.0, 2.0)  # of keyformer, at the prompt and at the answer's most tokens
NOISE_BLOCK = 64  # keys whose noise is drawn together


@dataclass(frozen=True)
class Budget:
    """tokens: a number of tokens. share: a share of the sequence's tokens, rounded up, at least
    `least` tokens."""

    tokens: int | None = None
    share: float | None = None
    least: int = 128

    @classmethod
    def parse(cls, text: str) -> Budget:
        """Parses "1024", "32,least=1", "12%" or "12%,least=32"."""
        amount, _, least = text.partition(",least=")
        if not amount.endswith("%"):
            return cls(tokens=int(amount))
        share = float(amount[:-1]) / 100
        return cls(share=share, least=int(least)) if least else cls(share=share)

    def of(self, num_tokens: int) -> int:
        """Returns the budget of a sequence."""
        if self.tokens is not None:
            return self.tokens
        assert self.share is not None
        return max(self.least, math.ceil(num_tokens * self.share))


@dataclass
class LayerState:
    """A layer's K/V of a sequence: k and v [Hk, capacity, D], rotated; held [Hk, capacity].

    all_rows, noisy_rows: for each key the sum of probabilities over the queries so far, plain and
    of keyformer's noisy logits [Hk, capacity]. last_rows: the probabilities of the prompt's last
    WINDOW queries, summed over the heads of a group [Hk, WINDOW, capacity].
    """

    index: int
    k: Tensor
    v: Tensor
    length: int
    held: Tensor
    all_rows: Tensor
    noisy_rows: Tensor
    last_rows: Tensor

    def copy(self) -> LayerState:
        """Returns a state that can go on by itself."""
        parts = (self.k, self.v, self.held, self.all_rows, self.noisy_rows)
        k, v, held, rows, noisy = (part.clone() for part in parts)
        return LayerState(self.index, k, v, self.length, held, rows, noisy, self.last_rows)


class Policy:
    """Full attention: everything is held and read. num_layers: of the model."""

    name = "full"
    uses_noise = False

    def __init__(self, budget: Budget, num_layers: int) -> None:
        self.budget = budget
        self.num_layers = num_layers

    def end_prompt(self, layer: LayerState) -> None:
        """Drops tokens after the prompt's last row."""

    def end_step(self, layer: LayerState) -> None:
        """Drops tokens after a decoded token's row."""

    def read(self, layer: LayerState, q: Tensor) -> Tensor:
        """Returns the keys [Hk, length] that a decoded row q [H, D] reads."""
        return layer.held[:, : layer.length]


class Evicting(Policy):
    """Drops the keys with the lowest scores outside the newest ones."""

    def end_prompt(self, layer: LayerState) -> None:
        self._drop(layer, self.budget.of(layer.length))

    def end_step(self, layer: LayerState) -> None:
        budget = self.budget.of(layer.length)
        if int(layer.held[0].sum()) >= budget + SLACK:
            self._drop(layer, budget)

    def _drop(self, layer: LayerState, budget: int) -> None:
        held = layer.held[:, : layer.length]
        if int(held[0].sum()) <= budget:
            return
        newest = self._newest(budget)
        scores = self._scores(layer)[:, : layer.length].clone()
        scores[:, layer.length - newest :] = math.inf
        scores[~held] = -math.inf
        order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :budget]
        held.zero_().scatter_(1, order, True)

    def _newest(self, budget: int) -> int:
        raise NotImplementedError

    def _scores(self, layer: LayerState) -> Tensor:
        raise NotImplementedError


class Window(Evicting):
    name = "window"

    def _newest(self, budget: int) -> int:
        return budget - min(SINKS, budget // 2)

    def _scores(self, layer: LayerState) -> Tensor:
        """Returns scores by which the first tokens come before all others."""
        positions = torch.arange(layer.held.shape[1], dtype=torch.float32)
        return -positions.expand(layer.held.shape)


class H2O(Evicting):
    name = "h2o"

    def _newest(self, budget: int) -> int:
        return budget - budget // 2

    def _scores(self, layer: LayerState) -> Tensor:
        return layer.all_rows


class Keyformer(Evicting):
    name = "keyformer"
    uses_noise = True

    def _newest(self, budget: int) -> int:
        return max(1, round(budget * KEYFORMER_RECENT))

    def _scores(self, layer: LayerState) -> Tensor:
        return layer.noisy_rows


class SnapKV(Evicting):
    name = "snapkv"

    def end_step(self, layer: LayerState) -> None:
        """Keeps the answer."""

    def _newest(self, budget: int) -> int:
        return min(WINDOW, max(1, budget // 2))

    def _scores(self, layer: LayerState) -> Tensor:
        voters = self._newest(self.budget.of(layer.length))
        votes = layer.last_rows[:, WINDOW - voters :].sum(1)
        newest = self._newest(self.layer_budget(layer.index, layer.length))
        votes[:, layer.length - newest :] = -math.inf
        return F.max_pool1d(votes[None], POOLING, 1, POOLING // 2)[0]

    def layer_budget(self, index: int, num_tokens: int) -> int:
        """Returns the budget of a layer."""
        return self.budget.of(num_tokens)


class Pyramid(SnapKV):
    name = "pyramid"

    def end_prompt(self, layer: LayerState) -> None:
        if self.budget.of(layer.length) < layer.length:
            self._drop(layer, self.layer_budget(layer.index, layer.length))

    def layer_budget(self, index: int, num_tokens: int) -> int:
        """Returns a layer's budget: from 1.5 times the budget in equal steps down to half of it."""
        budget, last = self.budget.of(num_tokens), self.num_layers - 1
        if last == 0:
            return budget
        return max(1, budget * (3 * last - 2 * index) // (2 * last))


class Quest(Policy):
    name = "quest"

    def read(self, layer: LayerState, q: Tensor) -> Tensor:
        length, kv_heads = layer.length, layer.k.shape[0]
        num_pages = -(-length // PAGE)
        budget = -(-self.budget.of(length) // PAGE)
        if budget >= num_pages:
            return layer.held[:, :length]
        padding = num_pages * PAGE - length
        low = F.pad(layer.k[:, :length], (0, 0, 0, padding), value=math.inf)
        high = F.pad(layer.k[:, :length], (0, 0, 0, padding), value=-math.inf)
        low = low.view(kv_heads, num_pages, PAGE, -1).amin(2)
        high = high.view(kv_heads, num_pages, PAGE, -1).amax(2)
        of_group = q.view(kv_heads, -1, 1, q.shape[-1])
        bounds = torch.maximum(of_group * low[:, None], of_group * high[:, None]).sum(-1)
        scores = bounds.sum(1)  # over the group, whose heads read the same pages
        scores[:, -1] = math.inf  # the newest page
        pages = scores.topk(budget, -1).indices
        chosen = torch.zeros(kv_heads, num_pages, dtype=torch.bool).scatter_(1, pages, True)
        return chosen.repeat_interleave(PAGE, 1)[:, :length]


POLICIES: dict[str, type[Policy]] = {
    one.name: one for one in (Policy, Window, H2O, SnapKV, Keyformer, Pyramid, Quest)
}


def make_policy(text: str, num_layers: int) -> Policy:
    """Makes the policy of "NAME:budget=AMOUNT", or of "full" or "off"."""
    name, _, rest = text.partition(":budget=")
    if name == "off":
        name = "full"
    return POLICIES[name](Budget.parse(rest or "100%"), num_layers)


def gumbel_noise(seed: int, layers: int, kv_heads: int, count: int) -> Tensor:
    """Returns keyformer's noise of the first `count` keys [layers, Hk, count]. Each block of
    NOISE_BLOCK keys has a Philox generator of its own, whose key is the seed and the block."""
    blocks = [
        np.random.Generator(
            np.random.Philox(key=np.array([seed % 2**64, block], dtype=np.uint64))
        ).gumbel(size=(layers, kv_heads, NOISE_BLOCK))
        for block in range(-(-count // NOISE_BLOCK))
    ]
    return torch.from_numpy(np.concatenate(blocks, 2)[:, :, :count]).float()
