"""From sequences to rows of the device's sampler, and back to tokens for pool 3."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from ops.cuda_sampling import DeviceChoice, DeviceSampler, Fetched, Kind, Plan, Row, described
from serve.request import TokenLogprobs
from serve.sequence import PENDING_TOKEN, Sequence


def plan_sampling(sampler: DeviceSampler, sequences: SequenceOf[Sequence]) -> Plan:
    """The sequences that get a token, in the order of their rows of logits."""
    return sampler.plan([_row(sequence) for sequence in sequences])


def _row(sequence: Sequence) -> Row:
    choice, token_ids = _choice(sequence), sequence.token_ids
    num_tokens = len(token_ids)
    if choice.has_penalties and num_tokens and token_ids[-1] == PENDING_TOKEN:
        token_ids = token_ids[:-1]
    assert sequence.kv_range is not None
    is_held = bool(sequence.stop_ids) and num_tokens < sequence.min_tokens_total
    return Row(choice, sequence.kv_range.index, token_ids, num_tokens, is_held)


def _choice(sequence: Sequence) -> DeviceChoice:
    """Made at a sequence's first step, then kept with it."""
    choice = sequence.history
    if choice is None:
        params = sequence.request.params
        choice = sequence.history = DeviceChoice(
            seed=sequence.seed,
            temperature=0.0 if params.is_greedy else params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            num_prompt=sequence.num_prompt_tokens,
            biases=params.logit_bias,
            forbidden=sequence.stop_ids,
            num_logprobs=params.logprobs,
        )
    assert isinstance(choice, DeviceChoice)
    return choice


def tokens_and_logprobs(
    fetched: Fetched, plan: Plan
) -> tuple[list[int], list[TokenLogprobs | None] | None]:
    """As serve.sampler.sample returns them, once the copies have ended."""
    tokens: list[int] = fetched.tokens.tolist()
    if plan.kind is not Kind.DESCRIBED:
        return tokens, None
    found = described(fetched, plan.rows)
    return tokens, [
        None if item is None else TokenLogprobs(item.token_id, item.logprob, item.top, item.rank)
        for item in found
    ]
