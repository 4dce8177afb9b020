"""When a sequence drops K/V and how much it holds: integers that follow from the sequence alone.

The prompt is computed in full; when its last row is, tokens are dropped down to the budget. Some
policies do it again whenever an answer has grown SLACK tokens beyond the budget of its length. So
the same request drops the same tokens at the same places, whatever runs beside it, however its
prompt is cut, and when it is computed again after a preemption.
"""

from __future__ import annotations

import math
import sys

from memory.policies.setting import KVPolicy

SLACK = 64
"""The tokens beyond the budget at which tokens are dropped while a sequence decodes."""
NEVER = sys.maxsize
REPEATED = ("window", "h2o", "keyformer")
"""The policies that also drop tokens of answers; the others keep all of these."""


def layer_budgets(policy: KVPolicy, budget: int, num_layers: int) -> list[int]:
    """Returns the tokens that each layer keeps for a budget: their mean is the budget. "pyramid"
    gives the first layer half more and the last one half less, and the others what is between."""
    if policy.name != "pyramid" or num_layers == 1:
        return [budget] * num_layers
    last = num_layers - 1
    return [max(1, (budget * (3 * last - 2 * layer)) // (2 * last)) for layer in range(num_layers)]


class DropSchedule:
    """The schedule of one sequence of num_prompt prompt tokens. A token counts as held if any
    layer holds it."""

    def __init__(self, policy: KVPolicy, num_prompt: int, num_layers: int) -> None:
        self.policy = policy
        self.num_prompt = num_prompt
        self._repeats = policy.name in REPEATED
        budget = policy.budget(num_prompt)
        self.drops_prompt = budget < num_prompt
        most = max(layer_budgets(policy, budget, num_layers))
        self._first = min(num_prompt, most) if self.drops_prompt else num_prompt

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

    def most_held(self, num_tokens: int) -> int:
        """Returns the most tokens that are held behind the prompt until there are num_tokens."""
        if num_tokens <= self.num_prompt:
            return num_tokens
        if not self._repeats:
            return self._first + num_tokens - self.num_prompt
        return min(num_tokens, max(self._first, self.policy.budget(num_tokens)) + SLACK)

    def peak(self, num_tokens: int) -> int:
        """Returns the most tokens that are held until there are num_tokens, in the prompt too."""
        return max(min(self.num_prompt, num_tokens), self.most_held(num_tokens))
