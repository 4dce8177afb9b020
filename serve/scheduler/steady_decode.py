"""Sequences that only decode, which most of them do in most steps. Integers only: no torch, no
asyncio.

Such a sequence is steady until it needs a page, has one complete, or comes to its length
(Sequence.recheck_at): until then all that is to be known of it is that it still is. While
nobody waits and all who run are steady, the scheduler's next decisions are known: who simulates
need not ask for each of them.
"""

from __future__ import annotations

from collections.abc import Callable

from serve.scheduler.sequence import Sequence


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
