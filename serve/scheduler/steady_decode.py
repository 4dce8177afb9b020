"""Selects a step's decode rows. Integers only: no torch, no asyncio.

Most sequences only decode in most steps. Such a sequence needs no check until it needs a page,
completes one, or reaches its length limit; Sequence.recheck_at is that number of computed tokens.

In a pipeline of several stages a sequence decodes once in a pass through all of them, because its
token is known only at the end. So a step takes an equal share of the decodes: if it took all that
are ready, they would stay together in one step, and the other stages would have nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from serve.scheduler.sequence import PENDING_TOKEN, Sequence


def decode_rows(
    running: list[Sequence],
    rows: int,
    grow: Callable[[Sequence, int], bool],
    has_cache: bool,
    num_stages: int = 1,
) -> tuple[list[Sequence], list[Sequence]]:
    """Returns the sequences with one decode row, at most `rows`, and those with prompt rows left.

    grow(sequence, num_tokens) allocates pages or returns False; it may remove sequences from
    `running`. It is called for all sequences that need it, also beyond `rows`. has_cache: whether
    there is a prefix cache, which completed pages are inserted into. num_stages: those of a
    pipeline, where a sequence whose last token is pending is in neither list; if a step's share of
    the decodes is less than all, those that have waited longest come first.
    """
    if num_stages > 1:
        known = [s for s in running if s.token_ids[-1] != PENDING_TOKEN]
    else:
        known = running
    num_pending = len(running) - len(known)
    prefilling: list[Sequence] = []
    for sequence in [s for s in known if s.num_computed_tokens >= s.recheck_at]:
        num_tokens, num_computed = len(sequence.token_ids), sequence.num_computed_tokens
        num_missing = num_tokens - num_computed
        if num_missing > 1 or (num_missing and sequence.is_prompt_only):
            prefilling.append(sequence)
        elif num_tokens == sequence.max_tokens_total:
            continue  # its last token, or the end of its prompt, is in flight
        elif grow(sequence, num_computed + 1):
            target = sequence.kv_range
            assert target is not None, "it has just grown"
            steady = min(target.capacity + target.dropped, sequence.max_tokens_total - 1)
            if has_cache:
                steady = min(steady, sequence.next_cacheable_at)
            # a page that the next token completes is cached after that step
            sequence.recheck_at = max(steady, num_computed + 1)
    decodes = [s for s in known if s.num_computed_tokens < s.recheck_at]
    if num_stages > 1:
        rows = min(rows, -(-(len(decodes) + num_pending) // num_stages))
        if rows < len(decodes):
            decodes.sort(key=attrgetter("last_step"))
    return decodes[:rows] if len(decodes) > rows else decodes, prefilling


def streams_beside(
    running: list[Sequence], decodes: list[Sequence], num_stages: int
) -> list[Sequence]:
    """Returns a step's share of the sequences that decode in the steps in flight of a pipeline, if
    the step itself has no decodes: it delays their next tokens as if they were its own."""
    if decodes or num_stages == 1:
        return []
    pending = [s for s in running if s.token_ids[-1] == PENDING_TOKEN and s.num_output_tokens > 1]
    return pending[: -(-len(pending) // num_stages)]
