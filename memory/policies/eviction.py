"""Which tokens of a sequence stay: scores of a layer in, tokens for each K/V head out.

    window      the first tokens and the newest (sinks and a window: StreamingLLM, arXiv 2309.17453)
    h2o         half of the budget the newest, half those with the largest sums of weights over all
                rows so far (heavy hitters: H2O, arXiv 2306.14048)
    keyformer   the newest three tenths, and those with the largest sums of weights with Gumbel
                noise and a rising temperature (Keyformer, arXiv 2403.09054)
    snapkv      the prompt's last rows, and what these look at, smoothed over neighbouring keys
                (SnapKV, arXiv 2404.14469)
    pyramid     the same with a budget that shrinks from layer to layer (PyramidInfer, arXiv
                2405.12532, and PyramidKV, arXiv 2406.02069)

A key's score is a sum over rows and over the query heads that share its K/V head. Equal scores: the
earlier token stays. Arrays only, no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memory.policies.setting import KVPolicy

Scores = npt.NDArray[np.float32]
Kept = npt.NDArray[np.int32]

NUM_SINKS = 4
OBSERVED_ROWS = 32
POOLED_KEYS = 7
RECENT_SHARE = 0.3  # of keyformer's budget
FIRST_TEMPERATURE, LAST_TEMPERATURE = 1.0, 2.0
_NOISE_BLOCK = 64


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    """How a policy chooses.

    keep: (scores [Hk, tokens], budget) -> the tokens that stay, [Hk, budget], rising; called only
    with fewer than all tokens as the budget. observed: (budget) -> how many of a prompt's last rows
    give scores; None: all. scores_answer: whether rows of the answer give scores, too. is_noisy:
    whether scores have noise and a temperature.
    """

    keep: Callable[[Scores, int], Kept]
    observed: Callable[[int], int] | None
    scores_answer: bool = False
    is_noisy: bool = False

    def first_scored(self, num_prompt: int, budget: int) -> int:
        """Returns the position of the first row of a prompt that gives scores."""
        return 0 if self.observed is None else max(0, num_prompt - self.observed(budget))

    @property
    def has_scores(self) -> bool:
        return self.observed is None or self.observed(NUM_SINKS) > 0


def observed_rows(budget: int) -> int:
    """Returns how many of a prompt's last rows are observed, and stay: at most half the budget."""
    return min(OBSERVED_ROWS, max(1, budget // 2))


def keep_ends(scores: Scores, budget: int) -> Kept:
    """Keeps sinks and the newest tokens."""
    heads, num_tokens = scores.shape
    sinks = min(NUM_SINKS, budget // 2)
    recent = np.arange(num_tokens - (budget - sinks), num_tokens, dtype=np.int32)
    kept = np.concatenate([np.arange(sinks, dtype=np.int32), recent])
    return np.ascontiguousarray(np.broadcast_to(kept, (heads, budget)))


def keep_heavy(scores: Scores, budget: int) -> Kept:
    """Keeps the newest half of the budget and, of the others, those with the largest scores."""
    return _keep_best(scores, budget, budget - budget // 2, scores.shape[1])


def keep_keys(scores: Scores, budget: int) -> Kept:
    recent = max(1, round(budget * RECENT_SHARE))
    return _keep_best(scores, budget, recent, scores.shape[1])


def keep_observed(scores: Scores, budget: int) -> Kept:
    """Keeps the observed rows' own tokens and, of the others, those whose neighbourhood has the
    largest score."""
    recent, num_tokens = observed_rows(budget), scores.shape[1]
    return _keep_best(_pooled(scores[:, : num_tokens - recent]), budget, recent, num_tokens)


def _keep_best(scores: Scores, budget: int, recent: int, num_tokens: int) -> Kept:
    """Keeps the last `recent` of num_tokens tokens and, for each head, the best of the others.
    scores: at least those of the others."""
    num_best = budget - recent
    kept = np.empty((len(scores), budget), dtype=np.int32)
    kept[:, num_best:] = np.arange(num_tokens - recent, num_tokens)
    for head, row in enumerate(scores):
        kept[head, :num_best] = best_of(row[: num_tokens - recent], num_best)
    return kept


def best_of(scores: npt.NDArray[np.float32], count: int) -> npt.NDArray[np.int32]:
    """Returns the `count` tokens with the largest scores, rising; of equal ones the earlier."""
    if count == 0:
        return np.empty(0, dtype=np.int32)
    bound = np.partition(scores, len(scores) - count)[len(scores) - count]
    above = np.flatnonzero(scores > bound)
    equal = np.flatnonzero(scores == bound)[: count - len(above)]
    return np.sort(np.concatenate([above, equal])).astype(np.int32)


def _pooled(scores: Scores) -> Scores:
    """Returns the largest score among the POOLED_KEYS keys around each key."""
    reach = POOLED_KEYS // 2
    padded = np.pad(scores, ((0, 0), (reach, reach)), constant_values=-np.inf)
    windows = [padded[:, i : i + scores.shape[1]] for i in range(POOLED_KEYS)]
    pooled: Scores = np.maximum.reduce(windows)
    return pooled


EVICTION_POLICIES = {
    "window": EvictionPolicy(keep_ends, observed=lambda budget: 0),
    "h2o": EvictionPolicy(keep_heavy, observed=None, scores_answer=True),
    "keyformer": EvictionPolicy(keep_keys, observed=None, scores_answer=True, is_noisy=True),
    "snapkv": EvictionPolicy(keep_observed, observed=observed_rows),
    "pyramid": EvictionPolicy(keep_observed, observed=observed_rows),
}


def policy_of(setting: KVPolicy) -> EvictionPolicy:
    return EVICTION_POLICIES[setting.name]


def temperature(position: int, num_prompt: int, num_answer: int) -> float:
    """Returns keyformer's temperature of the row at a position: it rises with the answer, of which
    num_answer tokens are expected."""
    step = max(0, position + 1 - num_prompt) / max(1, num_answer)
    return FIRST_TEMPERATURE + (LAST_TEMPERATURE - FIRST_TEMPERATURE) * min(1.0, step)


def gumbel_noise(seed: int, layers: int, heads: int, first: int, end: int) -> Scores:
    """Returns keyformer's noise of the keys at positions [first, end), [layers, heads, keys]. It
    depends on the seed and the position alone."""
    begin = first // _NOISE_BLOCK
    blocks = [
        np.random.Generator(
            np.random.Philox(key=np.array([seed % 2**64, number], dtype=np.uint64))
        ).gumbel(size=(layers, heads, _NOISE_BLOCK))
        for number in range(begin, -(-end // _NOISE_BLOCK))
    ]
    if not blocks:
        return np.empty((layers, heads, 0), dtype=np.float32)
    noise = np.concatenate(blocks, axis=2).astype(np.float32)
    return noise[:, :, first - begin * _NOISE_BLOCK : end - begin * _NOISE_BLOCK]
