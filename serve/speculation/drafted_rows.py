"""What all that compute drafts have in common: how a token is drawn, and the steps of a draft.

A draft grows by a token a step, all drafts together. Tokens are drawn as the sampler does for the
target, with the random number of the same seed and position: two distributions that are alike then
mostly give the same token. (Leviathan, Kalman, Matias, Speculative Decoding, 2023, draws them
independently.)
"""

from __future__ import annotations

import collections.abc as abc
from typing import Any, Protocol, TypeVar

import torch

from ops.cpu.sampling import SamplingInputs
from serve.runner.draft_rows import DraftedTokens
from serve.runner.sampler import sample, sampling_settings
from serve.scheduler.sequence import Sequence
from serve.scheduler.step_time import StepTimeModel, StepWork
from serve.speculation.drafter import MOST_MISSING


class DraftPart(Protocol):
    """What a step computes of one sequence. draft: the tokens so far; depth: the most of them."""

    @property
    def sequence(self) -> Sequence: ...

    @property
    def draft(self) -> list[int]: ...

    @property
    def depth(self) -> int: ...

    @property
    def num_rows(self) -> int:
        """The rows of the next step."""

    @property
    def num_computed(self) -> int:
        """The tokens whose K/V is written."""

    @property
    def inputs(self) -> SamplingInputs: ...


Part = TypeVar("Part", bound=DraftPart)


class DraftedRow:
    """Takes the place of a sequence in the sampler, after the tokens of its draft. Masks are left
    out: the target's sampler ends a draft where its mask forbids it."""

    mask = next_mask = None

    def __init__(self, part: DraftPart) -> None:
        sequence = part.sequence
        self.request, self.seed = sequence.request, sequence.seed
        self.token_ids = DraftedTokens(sequence.token_ids, part.draft)
        self.num_prompt_tokens = sequence.num_prompt_tokens
        self.stop_ids, self.min_tokens_total = sequence.stop_ids, sequence.min_tokens_total
        self.history = part.inputs


def drafting_inputs(sequence: Sequence, vocab_size: int) -> SamplingInputs:
    """Returns a sequence's inputs of the sampler, as far as a vocabulary has its tokens."""
    settings: dict[str, Any] = sampling_settings(sequence) | {"num_logprobs": None}
    if settings["biases"]:
        settings["biases"] = {t: b for t, b in settings["biases"].items() if t < vocab_size}
    settings["forbidden"] = [token for token in settings["forbidden"] if token < vocab_size]
    return SamplingInputs(**settings)


def draw(logits: torch.Tensor, parts: abc.Sequence[DraftPart]) -> list[int]:
    """Returns the token that follows each draft. logits: [len(parts), vocab] fp32."""
    return sample(logits, [DraftedRow(part) for part in parts]).token_ids  # type: ignore[misc]


def draft_in_steps(
    parts: list[Part],
    extend: abc.Callable[[list[Part]], None],
    vocab_size: int,
    time: StepTimeModel,
    clock: abc.Callable[[], float],
) -> None:
    """Lets drafts grow until each is as long as it may be, and learns the steps' times. extend:
    adds a token to each draft. vocab_size: the target's."""
    work, began_s = work_of(parts), clock()
    extend(parts)
    now_s = clock()
    time.learn(work, now_s - began_s)
    began_s, num_rows, num_steps, work = now_s, 0, 0, StepWork(samples=True)
    while parts := [part for part in parts if _goes_on(part, vocab_size)]:
        extend(parts)
        num_steps, num_rows = num_steps + 1, num_rows + len(parts)
        work.num_context += sum([part.num_computed for part in parts])
    if num_steps:  # the steps are learned as one
        work.num_decodes = work.num_rows = -(-num_rows // num_steps)
        work.num_context //= num_steps
        time.learn(work, (clock() - began_s) / num_steps)


def _goes_on(part: DraftPart, vocab_size: int) -> bool:
    """Returns whether a draft gets another token."""
    draft, sequence = part.draft, part.sequence
    if draft[-1] >= vocab_size:
        draft.pop()
        return False
    length = len(sequence.token_ids) + len(draft)
    is_end = draft[-1] in sequence.stop_ids and length > sequence.min_tokens_total
    return len(draft) < part.depth and not is_end


def work_of(parts: abc.Sequence[DraftPart]) -> StepWork:
    """Returns the work of a step before it is computed. A few rows of a sequence, which come before
    the first token of a draft, count as decode rows."""
    work = StepWork(samples=True)
    for part in parts:
        rows, context = part.num_rows, part.num_computed
        if rows > MOST_MISSING:
            work.add(rows, context)
            continue
        work.num_decodes += rows
        work.num_rows += rows
        work.num_context += context
    return work
