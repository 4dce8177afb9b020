"""Converts sequences to rows for sampling on the device, and its results back.

Every parameter means what it means in serve/runner/sampler.py. A sequence's newest token may
still be PENDING_TOKEN; the device has it.
"""

from __future__ import annotations

import collections.abc as abc

from ops.cuda.device_sampler import Fetched, SamplingPlan, described
from ops.cuda.sampling_inputs import DeviceSamplingInputs, Row
from serve.request import TokenLogprobs
from serve.runner.sampler import Sampled, sampling_settings
from serve.scheduler.sequence import Sequence


def rows_of(sequences: abc.Sequence[Sequence], slots: abc.Sequence[int]) -> list[Row]:
    """Returns the sequences' rows. slots[i] is where the device keeps the last token of
    sequences[i]. Masks are read when the plan is uploaded, not here."""
    masks = [None if s.mask is None else s.next_mask for s in sequences]
    return [
        Row(
            _inputs_of(s),
            slot,
            s.token_ids,
            mask is None and bool(s.stop_ids) and len(s.token_ids) < s.min_tokens_total,
            None if mask is None else mask.bits,
        )
        for s, slot, mask in zip(sequences, slots, masks, strict=True)
    ]


def _inputs_of(sequence: Sequence) -> DeviceSamplingInputs:
    """Returns the sequence's inputs, which are made at its first step and kept with it."""
    inputs = sequence.history
    if inputs is None:
        inputs = sequence.history = DeviceSamplingInputs(**sampling_settings(sequence))
    assert isinstance(inputs, DeviceSamplingInputs)
    return inputs


def sampled(plan: SamplingPlan, fetched: Fetched) -> Sampled:
    """Returns the tokens of a step. Call it after the copies that fetch() started have ended."""
    token_ids = fetched.tokens.tolist()
    if fetched.logprobs is None:
        return Sampled(token_ids, None)
    logprobs = [
        None if each is None else TokenLogprobs(each.token_id, each.logprob, each.top, each.rank)
        for each in described(fetched, plan.rows)
    ]
    return Sampled(token_ids, logprobs)
