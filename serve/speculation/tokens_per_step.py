"""Learns how many tokens a step gives sequences, of which drafts give them more than one.

A sequence's own steps count most; its first ones are taken to be like those of past answers, of
which old ones fade.
"""

from __future__ import annotations

_PAST_STEPS = 16.0  # what past answers weigh beside a sequence's own steps
_FIRST_STEPS = 256.0  # what a token a step weighs beside past answers
_KEPT = 0.98  # of past answers, at each end of one


class TokensPerStep:
    """The tokens and the steps of past answers."""

    def __init__(self) -> None:
        self._num_tokens = self._num_steps = 0.0

    def of(self, num_output: int, num_accepted: int) -> float:
        """Returns what is expected of a sequence with num_output tokens, num_accepted of which came
        from drafts."""
        past = (self._num_tokens + _FIRST_STEPS) / (self._num_steps + _FIRST_STEPS)
        num_steps = num_output - num_accepted
        return (num_output + _PAST_STEPS * past) / (num_steps + _PAST_STEPS)

    def learn(self, num_output: int, num_accepted: int) -> None:
        """Takes note of an answer that has ended."""
        self._num_tokens = _KEPT * self._num_tokens + num_output
        self._num_steps = _KEPT * self._num_steps + num_output - num_accepted
