"""Applies the tokens of a step to its sequences, those of drafts included.

A draft has tokens that a sequence will perhaps get, computed before it has them. A decoding
sequence whose plan has d draft tokens has d + 1 rows. The sampler keeps the tokens of the first
rows, as long as they agree with the draft (serve/runner/draft_rows.py), so a step gives it 1 to
d + 1 tokens, which are those of as many steps without a draft. The K/V of the other rows is beyond
its computed tokens, where the next step writes. Integers only: no torch, no asyncio.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

from serve.scheduler.sequence import PENDING_TOKEN, Sequence, SequenceStatus
from serve.scheduler.step_plan import StepPlan


class Drafting(Protocol):
    """Decides which sequences of a step have drafts, and how long they are."""

    def reserve(self, num_rows: int) -> int:
        """Returns for how many rows of drafts the prompts of a step leave room; together they have
        num_rows."""

    def extend(
        self, plan: StepPlan, num_certain: int, num_rows: int, limit_s: float = math.inf
    ) -> None:
        """Gives drafts to some of the plan's first num_certain sequences, which decode: at most
        num_rows rows. Beside prompts, the step's predicted time stays within limit_s."""

    def wants_tokens(self, plan: StepPlan) -> bool:
        """Returns whether the tokens of this plan, which a device with tokens of its own computes,
        have to be known before the next step is planned."""

    def learn(self, sequence: Sequence, num_drafted: int, num_accepted: int) -> None:
        """Takes note of how many tokens of a draft agreed."""

    def tokens_per_step(self, sequence: Sequence) -> float:
        """Returns how many tokens a step is expected to give a sequence, at least about 1. Any
        thread may ask."""

    def ended(self, sequence: Sequence) -> None:
        """Takes note of a sequence that has ended, for whatever reason."""

    def trim(self) -> None:
        """Returns unused memory to the system, while nothing runs."""

    def close(self) -> None:
        """Frees memory of its own, after the runner's."""

    @property
    def kept_bytes(self) -> tuple[int, int]:
        """The texts that are kept to look for drafts in, and their bytes. Any thread may ask."""

    @property
    def num_pages_in_use(self) -> int:
        """The pages of K/V memory of its own that sequences hold. Any thread may ask."""


class Updated(Protocol):
    """The scheduler, as far as tokens change it."""

    launched: deque[StepPlan]
    drafting: Drafting | None

    def apply_token(
        self, sequence: Sequence, end: int, token: int, ended: list[Sequence]
    ) -> None: ...


def apply_tokens(
    scheduler: Updated,
    plan: StepPlan,
    tokens: list[int],
    counts: list[int] | None,
    finished: list[Sequence],
) -> None:
    """Does the work of Scheduler.update for any plan. finished: gets the sequences that end."""
    contexts, place, first = plan.contexts, 0, 0
    if contexts is not None:
        scheduler.launched.popleft()
    for index, sequence in enumerate(plan.sequences):
        rows, is_running = plan.num_rows[index], sequence.status is SequenceStatus.RUNNING
        context = sequence.num_computed_tokens if contexts is None else contexts[index]
        num_drafted = rows - 1 if index < plan.num_decodes else 0
        known = context + rows - num_drafted
        own: list[int] = []
        if plan.samples[index]:
            count = 1 if counts is None else counts[place]
            own, first = tokens[first : first + count], first + count
        if num_drafted and scheduler.drafting is not None:
            scheduler.drafting.learn(sequence, num_drafted, len(own) - 1)
        if not is_running:
            del own[1:]  # the memory that it needs to run again is counted already
        num_rejected = num_drafted - max(0, len(own) - 1)
        if contexts is None:
            sequence.num_computed_tokens = context + rows - num_rejected
        else:
            sequence.rows_in_flight -= rows
            sequence.num_computed_tokens -= num_rejected if is_running else 0
        if own:
            num_got = _give(scheduler, sequence, known, own, finished)
            if counts is not None:
                counts[place] = num_got
            place += 1
        else:
            scheduler.apply_token(sequence, known, PENDING_TOKEN, finished)


def _give(
    scheduler: Updated, sequence: Sequence, known: int, own: list[int], ended: list[Sequence]
) -> int:
    """Gives a sequence with `known` tokens its new ones, until it ends; returns how many it has
    got."""
    for number, token in enumerate(own):
        end = known + number
        sequence.token_ids[end : end + 1] = [token]  # appends, or replaces PENDING_TOKEN
        scheduler.apply_token(sequence, end, token, ended)
        if sequence.status is SequenceStatus.FINISHED:
            return number + 1
    return len(own)
