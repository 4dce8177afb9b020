"""When a sequence drops K/V and how much it holds: integers that follow from the sequence alone.

The prompt is computed in full; when its last row is, tokens are dropped down to the budget. Some
policies do it again whenever an answer has grown SLACK tokens beyond the budget of its length. So
the same request drops the same tokens at the same places, whatever runs beside it, however its
prompt is cut, and when it is computed again after a preemption.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import pairwise

from memory.policies.setting import KVPolicy

SLACK = 64
"""The tokens beyond the budget at which tokens are dropped while a sequence decodes."""
NEVER = sys.maxsize
REPEATED = ("window", "h2o", "keyformer")
"""The policies that also drop tokens of answers; the others keep all of these."""


def layer_budgets(policy: KVPolicy, budget: int, num_layers: int) -> list[int]:
    """Returns the tokens that each layer keeps for a budget: their mean is the budget. "pyramid"
    gives the first layer half more and the last one half less, and the others what is between."""
    if not policy.shrinks or num_layers == 1:
        return [budget] * num_layers
    last = num_layers - 1
    return [max(1, (budget * (3 * last - 2 * layer)) // (2 * last)) for layer in range(num_layers)]


class DropSchedule:
    """The schedule of one sequence of num_prompt prompt tokens. A layer group holds a token if any
    of its layers does."""

    def __init__(
        self, policy: KVPolicy, num_prompt: int, num_layers: int, firsts: Sequence[int] = (0,)
    ) -> None:
        """firsts: the first layer of each group of layers that follow one another."""
        self.policy = policy
        self.num_prompt = num_prompt
        self._repeats = policy.name in REPEATED
        budget = policy.budget(num_prompt)
        self.drops_prompt = budget < num_prompt
        self._num_layers = num_layers
        self._sizes = [end - first for first, end in pairwise([*firsts, num_layers])]
        # what each group holds when the prompt is computed; its first layer keeps the most
        self._firsts = [num_prompt] * len(firsts)
        if self.drops_prompt:
            budgets = layer_budgets(policy, budget, num_layers)
            self._firsts = [min(num_prompt, budgets[first]) for first in firsts]

    def next_drop(self, num_tokens: int, num_dropped: int) -> int:
        """Returns at how many computed tokens tokens are dropped next, more than num_tokens, of
        which num_dropped are dropped; NEVER if they are not."""
        if num_tokens < self.num_prompt and self.drops_prompt:
            return self.num_prompt
        share = self.policy.share
        if not self._repeats or share == 1.0:
            return NEVER
        if share is None:
            found = num_dropped + self.policy.budget(0) + SLACK
        else:
            found = max(0, math.floor((num_dropped + SLACK) / (1.0 - share)) - 2)
            while found - num_dropped < self.policy.budget(found) + SLACK:
                found += 1
        return max(found, num_tokens + 1, self.num_prompt + 1)

    def most_by_group(self, num_tokens: int) -> list[int]:
        """Returns the most tokens that each group holds behind the prompt until there are
        num_tokens."""
        if num_tokens <= self.num_prompt:
            return [num_tokens] * len(self._firsts)
        if not self._repeats:
            return [first + num_tokens - self.num_prompt for first in self._firsts]
        budget = self.policy.budget(num_tokens)
        return [min(num_tokens, max(first, budget) + SLACK) for first in self._firsts]

    def most_held(self, num_tokens: int) -> int:
        """Returns how many tokens of all layers take as much as `most_by_group`."""
        held = zip(self._sizes, self.most_by_group(num_tokens), strict=True)
        return -(-sum([size * count for size, count in held]) // self._num_layers)
