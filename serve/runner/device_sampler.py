"""Sequences -> rows for sampling on the device (ops/cuda/sampling.py), and its results back.

What serve/runner/sampler.py does on the CPU, with the same meaning of every parameter. A
sequence's newest token may still be PENDING_TOKEN: the device knows it.
"""

from __future__ import annotations

import collections.abc as abc

from ops.cuda.sampling import Fetched, SamplingPlan, described
from ops.cuda.sampling_inputs import DeviceSamplingInputs, Row
from serve.request import TokenLogprobs
from serve.runner.sampler import Sampled, choice_settings
from serve.scheduler.sequence import Sequence


def rows_of(sequences: abc.Sequence[Sequence], slots: abc.Sequence[int]) -> list[Row]:
    """slots[i]: where the device keeps the last token of sequences[i]. A mask is read when the plan
    is uploaded."""
    return [
        Row(
            _choice(s),
            slot,
            s.token_ids,
            s.mask is None and bool(s.stop_ids) and len(s.token_ids) < s.min_tokens_total,
            None if s.mask is None else s.mask.bits,
        )
        for s, slot in zip(sequences, slots, strict=True)
    ]


def _choice(sequence: Sequence) -> DeviceSamplingInputs:
    """Made at a sequence's first step, then kept with it."""
    choice = sequence.history
    if choice is None:
        choice = sequence.history = DeviceSamplingInputs(**choice_settings(sequence))
    assert isinstance(choice, DeviceSamplingInputs)
    return choice


def sampled(plan: SamplingPlan, fetched: Fetched) -> Sampled:
    """The tokens of a step, once the copies that fetch() started have ended."""
    token_ids = fetched.tokens.tolist()
    if fetched.logprobs is None:
        return Sampled(token_ids, None)
    logprobs = [
        None if each is None else TokenLogprobs(each.token_id, each.logprob, each.top, each.rank)
        for each in described(fetched, plan.rows)
    ]
    return Sampled(token_ids, logprobs)
