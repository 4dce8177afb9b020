"""The records of one run as arrays, which every figure and picture uses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.load.client.record import Outcome, Record, RunResult

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

NUM_SPREAD = 8
MIN_LENGTHS = 2.0


@dataclass(frozen=True, slots=True)
class Columns:
    """Arrays of seconds (NaN if unknown) with one item per request [R], chunk [C] or gap [G].

    The generator began with a request at `began`: dispatched_s, or sent_s if that is unknown.
    tokens are the output tokens by the server's count. A thin record (is_thin) has only its first
    and last chunk times, so it has no gaps, and its tokens are spread over NUM_SPREAD chunks. A
    counted request was due in the window; an answered one succeeded, with text. chunk_tokens are
    the known tokens, else the answer's tokens spread evenly, else 1 each. gap_tokens are the tokens
    of the chunk at the gap's end, NaN if there are no counts and not as many chunks as tokens.
    """

    due: Floats
    began: Floats
    sent: Floats
    first: Floats
    last: Floats
    finished: Floats
    tokens: Floats
    prompt_tokens: Floats
    queue: Floats
    num_chunks: Ints
    is_thin: Bools
    is_counted: Bools
    is_ok: Bools
    is_answered: Bools
    is_failed: Bools
    is_cancelled: Bools
    chunk_at: Floats
    chunk_tokens: Floats
    chunk_owner: Ints
    gap: Floats
    gap_tokens: Floats
    gap_owner: Ints
    window: tuple[float, float]

    @staticmethod
    def of(result: RunResult) -> Columns:
        return _columns(result.records, result.window)

    @staticmethod
    def of_probes(result: RunResult) -> Columns:
        return _columns(result.probes, result.window)

    @property
    def is_used(self) -> Bools:
        """A mask of the requests whose latencies count."""
        return self.is_counted & self.is_answered

    @property
    def end_s(self) -> float:
        """The time of the last known event."""
        times = [a[np.isfinite(a)] for a in (self.due, self.sent, self.finished, self.chunk_at)]
        return max((float(a.max()) for a in times if a.size), default=0.0)

    @property
    def due_span(self) -> tuple[float, float]:
        """The time in which the load was offered: the window up to the last arrival."""
        last_s = float(self.due.max(initial=0.0))
        low, high = max(self.window[0], 0.0), min(self.window[1], last_s)
        return (low, max(low, high))

    @property
    def is_short(self) -> bool:
        """Whether the time after the last arrival is a large part of the run: the load lasted less
        than MIN_LENGTHS times the fastest tenth of answers (a growing queue slows other
        answers)."""
        low, high = self.due_span
        taken_s = (self.last - self.due)[self.is_used]
        soon_s = float(np.percentile(taken_s, 10)) if len(taken_s) else 0.0
        return high - low < MIN_LENGTHS * soon_s

    @property
    def steady_s(self) -> tuple[float, float]:
        """The time over which rates are taken: the time in which the load was offered, or the
        window up to the last event in short runs and if all requests came at once."""
        low, high = self.due_span
        if self.is_short or high <= low:
            high = min(self.window[1], self.end_s)
        return (low, high) if high > low else (0.0, self.end_s)


def _floats(values: Iterable[Any], count: int) -> Floats:
    return np.fromiter((np.nan if v is None else v for v in values), np.float64, count)


def _columns(records: Sequence[Record], window: tuple[float, float]) -> Columns:
    n = len(records)
    num_kept = np.fromiter((len(r.chunks_s) for r in records), np.int64, n)
    num_chunks = np.fromiter((r.num_chunks or 0 for r in records), np.int64, n)
    num_chunks = np.maximum(num_chunks, num_kept)
    is_thin = num_chunks > num_kept
    total = int(num_kept.sum())
    chunk_at = np.fromiter(chain.from_iterable(r.chunks_s for r in records), np.float64, total)
    owner = np.repeat(np.arange(n), num_kept)
    tokens = _floats((r.output_tokens for r in records), n)
    chunk_tokens, known = _chunk_tokens(records, num_chunks, tokens, owner)
    ends = np.cumsum(num_kept)
    first, last = np.full(n, np.nan), np.full(n, np.nan)
    some = num_kept > 0
    first[some], last[some] = chunk_at[(ends - num_kept)[some]], chunk_at[ends[some] - 1]
    is_gap = (owner[1:] == owner[:-1]) & ~is_thin[owner[1:]]
    gap, gap_owner = np.diff(chunk_at)[is_gap], owner[1:][is_gap]
    gap_tokens = np.where(known, chunk_tokens, np.nan)[1:][is_gap]
    if is_thin.any():
        whole = np.where(np.isnan(tokens), num_chunks, tokens)
        chunk_at, chunk_tokens, owner = _spread(
            is_thin, first, last, whole, (chunk_at, chunk_tokens, owner)
        )
    due = _floats((r.scheduled_s for r in records), n)
    sent = _floats((r.sent_s for r in records), n)
    dispatched = _floats((r.dispatched_s for r in records), n)
    is_ok = _is(records, Outcome.OK)
    return Columns(
        due=due,
        began=np.where(np.isfinite(dispatched), dispatched, sent),
        sent=sent,
        first=first,
        last=last,
        finished=_floats((r.finished_s for r in records), n),
        tokens=tokens,
        prompt_tokens=_floats((r.prompt_tokens for r in records), n),
        queue=_floats((r.queue_s for r in records), n),
        num_chunks=num_chunks,
        is_thin=is_thin,
        is_counted=(due >= window[0]) & (due <= window[1]),
        is_ok=is_ok,
        is_answered=is_ok & some,
        is_failed=_is(records, Outcome.FAILED),
        is_cancelled=_is(records, Outcome.CANCELLED),
        chunk_at=chunk_at,
        chunk_tokens=chunk_tokens,
        chunk_owner=owner,
        gap=gap,
        gap_tokens=gap_tokens,
        gap_owner=gap_owner,
        window=window,
    )


def _is(records: Sequence[Record], outcome: Outcome) -> Bools:
    return np.fromiter((r.outcome is outcome for r in records), np.bool_, len(records))


def _chunk_tokens(
    records: Sequence[Record], num_chunks: Ints, tokens: Floats, owner: Ints
) -> tuple[Floats, Bools]:
    """Returns the tokens in each chunk [C], and whether they are known: from the record, or because
    there are as many chunks as tokens, so that each has one."""
    has_counts = [len(r.chunk_tokens) == len(r.chunks_s) for r in records]
    even = np.where(np.isnan(tokens), 1.0, tokens / np.maximum(num_chunks, 1))[owner]
    known = np.array(has_counts, np.bool_)[owner] if has_counts else np.zeros(0, np.bool_)
    is_single = (tokens == num_chunks)[owner]
    counts = (r.chunk_tokens for r, has in zip(records, has_counts, strict=True) if has)
    even[known] = np.fromiter(chain.from_iterable(counts), np.float64, int(known.sum()))
    return even, known | is_single


def _spread(
    is_thin: Bools,
    first: Floats,
    last: Floats,
    tokens: Floats,
    kept: tuple[Floats, Floats, Ints],
) -> tuple[Floats, Floats, Ints]:
    """Returns times, tokens and owners of chunks, where NUM_SPREAD chunks replace those of each
    thin record."""
    thin = np.flatnonzero(is_thin & np.isfinite(first))
    parts = np.linspace(0, 1, NUM_SPREAD)
    at_s = first[thin, None] + (last - first)[thin, None] * parts
    counts = np.repeat((tokens[thin] / NUM_SPREAD)[:, None], NUM_SPREAD, axis=1)
    is_left = ~is_thin[kept[2]]
    added = (at_s.ravel(), counts.ravel(), np.repeat(thin, NUM_SPREAD))
    at_s, counts, owners = (
        np.concatenate([old[is_left], new]) for old, new in zip(kept, added, strict=True)
    )
    return at_s, counts, owners
