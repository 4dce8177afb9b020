"""Sequences that only decode, which most of them do in most steps. Integers only: no torch, no
asyncio.

Such a sequence is steady until it needs a page, has one complete, or comes to its length
(Sequence.recheck_at): until then all that is to be known of it is that it still is. While
nobody waits and all who run are steady, the scheduler's next decisions are known: who simulates
need not ask for each of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from serve.scheduler.sequence import Sequence
from serve.scheduler.step_plan import StepPlan

if TYPE_CHECKING:
    from serve.scheduler.scheduler import Scheduler


def decode_rows(
    running: list[Sequence], rows: int, grow: Callable[[Sequence, int], bool], has_cache: bool
) -> tuple[list[Sequence], list[Sequence]]:
    """Who gets its one row (at most so many), and who has more to compute. grow: pages for so many
    tokens of a sequence, or False; it may take others from `running`. All of them grow, also those
    that the rows do not suffice for. has_cache: of prefixes."""
    prefilling: list[Sequence] = []
    for sequence in [s for s in running if s.num_computed_tokens >= s.recheck_at]:
        num_tokens, num_computed = len(sequence.token_ids), sequence.num_computed_tokens
        num_missing = num_tokens - num_computed
        if num_missing > 1 or (num_missing and sequence.is_prompt_only):
            prefilling.append(sequence)
        elif num_tokens == sequence.max_tokens_total:
            continue  # its last token, or what there is of its prompt, is in flight
        elif grow(sequence, num_computed + 1):
            assert sequence.kv_range is not None, "it has just grown"
            steady = min(sequence.kv_range.capacity, sequence.max_tokens_total - 1)
            if has_cache:
                steady = min(steady, sequence.next_cacheable_at)
            # with the next token a page may be due to be remembered: that comes after the step
            sequence.recheck_at = max(steady, num_computed + 1)
    decodes = [s for s in running if s.num_computed_tokens < s.recheck_at]
    return decodes[:rows] if len(decodes) > rows else decodes, prefilling


def num_alike(scheduler: Scheduler, plan: StepPlan) -> int:
    """After the plan's update: how many of the next steps have its very rows and change nothing
    but the numbers of tokens, as long as nothing arrives and no stop token comes."""
    running = scheduler.running
    # who has ended with the plan is not running any more
    if scheduler.waiting or not plan.num_decodes == len(plan.sequences) == len(running):
        return 0
    # with the last of them nothing is due yet
    return max(0, min([s.recheck_at - s.num_computed_tokens for s in running], default=0) - 1)


def begin_alike(scheduler: Scheduler, now_s: float) -> None:
    """One of them begins: what schedule() counts."""
    scheduler.waiting.tick(now_s)
    scheduler.num_steps += 1
    scheduler.num_page_steps += scheduler.kv.num_in_use


def end_alike(plan: StepPlan, num_steps: int, token: int) -> None:
    """So many of them ran: each sequence has that many more tokens."""
    tokens = [token] * num_steps
    for sequence in plan.sequences:
        sequence.num_computed_tokens += num_steps
        sequence.token_ids += tokens
