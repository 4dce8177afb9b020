"""The records of one run as arrays, made once for everything that is computed or drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.load.record import Outcome, Record, RunResult

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Columns:
    """Seconds; NaN where there is nothing. One row per request [R], chunk [C] or gap [G].

    tokens: output tokens, as the server told. is_counted: due in the window. is_answered: ended
    well, with text. chunk_tokens: the known ones, else the answer's tokens spread evenly, else
    1 each. gap_tokens: tokens that came at the gap's end; NaN where that is not known.
    """

    due: Floats
    sent: Floats
    first: Floats
    last: Floats
    finished: Floats
    tokens: Floats
    prompt_tokens: Floats
    queue: Floats
    num_chunks: Ints
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
        """Whose latencies count."""
        return self.is_counted & self.is_answered

    @property
    def end_s(self) -> float:
        """When the last known thing happened."""
        seen = [a[np.isfinite(a)] for a in (self.due, self.sent, self.finished, self.chunk_at)]
        return max((float(a.max()) for a in seen if a.size), default=0.0)

    @property
    def steady_s(self) -> tuple[float, float]:
        """The window, ended at the last thing that happened; all of the run if nothing is left
        (all requests at once)."""
        low, high = max(self.window[0], 0.0), min(self.window[1], self.end_s)
        return (low, high) if high > low else (0.0, self.end_s)


def _floats(values: Iterable[Any], count: int) -> Floats:
    return np.fromiter((np.nan if v is None else v for v in values), np.float64, count)


def _columns(records: Sequence[Record], window: tuple[float, float]) -> Columns:
    n = len(records)
    num_chunks = np.fromiter((len(r.chunks_s) for r in records), np.int64, n)
    total = int(num_chunks.sum())
    chunk_at = np.fromiter(chain.from_iterable(r.chunks_s for r in records), np.float64, total)
    owner = np.repeat(np.arange(n), num_chunks)
    tokens = _floats((r.output_tokens for r in records), n)
    chunk_tokens, known = _chunk_tokens(records, num_chunks, tokens, owner)
    ends = np.cumsum(num_chunks)
    first, last = np.full(n, np.nan), np.full(n, np.nan)
    some = num_chunks > 0
    first[some], last[some] = chunk_at[(ends - num_chunks)[some]], chunk_at[ends[some] - 1]
    same = owner[1:] == owner[:-1]
    due = _floats((r.scheduled_s for r in records), n)
    is_ok = np.fromiter((r.outcome is Outcome.OK for r in records), np.bool_, n)
    return Columns(
        due=due,
        sent=_floats((r.sent_s for r in records), n),
        first=first,
        last=last,
        finished=_floats((r.finished_s for r in records), n),
        tokens=tokens,
        prompt_tokens=_floats((r.prompt_tokens for r in records), n),
        queue=_floats((r.queue_s for r in records), n),
        num_chunks=num_chunks,
        is_counted=(due >= window[0]) & (due <= window[1]),
        is_ok=is_ok,
        is_answered=is_ok & some,
        is_failed=np.fromiter((r.outcome is Outcome.FAILED for r in records), np.bool_, n),
        is_cancelled=np.fromiter((r.outcome is Outcome.CANCELLED for r in records), np.bool_, n),
        chunk_at=chunk_at,
        chunk_tokens=chunk_tokens,
        chunk_owner=owner,
        gap=np.diff(chunk_at)[same],
        gap_tokens=np.where(known, chunk_tokens, np.nan)[1:][same],
        gap_owner=owner[1:][same],
        window=window,
    )


def _chunk_tokens(
    records: Sequence[Record], num_chunks: Ints, tokens: Floats, owner: Ints
) -> tuple[Floats, Bools]:
    """Tokens in each chunk [C], and whether that was told."""
    told = [len(r.chunk_tokens) == len(r.chunks_s) for r in records]
    spread = np.where(np.isnan(tokens), 1.0, tokens / np.maximum(num_chunks, 1))[owner]
    known = np.array(told, np.bool_)[owner] if told else np.zeros(0, np.bool_)
    spread[known] = np.fromiter(
        chain.from_iterable(
            r.chunk_tokens for r, is_told in zip(records, told, strict=True) if is_told
        ),
        np.float64,
        int(known.sum()),
    )
    return spread, known
