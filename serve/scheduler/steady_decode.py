"""Selects a step's decode rows. Integers only: no torch, no asyncio.

Most sequences only decode in most steps. Such a sequence needs no check until it needs a page,
completes one, or reaches its length limit; Sequence.recheck_at is that number of computed tokens.
"""

from __future__ import annotations

from collections.abc import Callable

from serve.scheduler.sequence import Sequence


def decode_rows(
    running: list[Sequence], rows: int, grow: Callable[[Sequence, int], bool], has_cache: bool
) -> tuple[list[Sequence], list[Sequence]]:
    """Returns the sequences with one decode row, at most `rows`, and those with prompt rows left.

    grow(sequence, num_tokens) allocates pages or returns False; it may remove sequences from
    `running`. It is called for all sequences that need it, also beyond `rows`. has_cache: whether
    there is a prefix cache, which completed pages are inserted into.
    """
    prefilling: list[Sequence] = []
    for sequence in [s for s in running if s.num_computed_tokens >= s.recheck_at]:
        num_tokens, num_computed = len(sequence.token_ids), sequence.num_computed_tokens
        num_missing = num_tokens - num_computed
        if num_missing > 1 or (num_missing and sequence.is_prompt_only):
            prefilling.append(sequence)
        elif num_tokens == sequence.max_tokens_total:
            continue  # its last token, or the end of its prompt, is in flight
        elif grow(sequence, num_computed + 1):
            assert sequence.kv_range is not None, "it has just grown"
            steady = min(sequence.kv_range.capacity, sequence.max_tokens_total - 1)
            if has_cache:
                steady = min(steady, sequence.next_cacheable_at)
            # a page that the next token completes is cached after that step
            sequence.recheck_at = max(steady, num_computed + 1)
    decodes = [s for s in running if s.num_computed_tokens < s.recheck_at]
    return decodes[:rows] if len(decodes) > rows else decodes, prefilling
