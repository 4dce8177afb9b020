"""Computes latencies and rates from the records of a run, without a clock, network or files."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from bench.common.percentiles import is_supported
from bench.load.client.record import Outcome, Record, RunResult
from bench.load.results.columns import Bools, Columns, Floats, Ints
from bench.load.results.slo import tpot

PERCENTS = (50, 90, 95, 99)
STATS = ("mean", *(f"p{percent}" for percent in PERCENTS), "max")

NUM_PICTURED = 100_001
MIN_PEAK_S = 2.0  # a shorter time has no meaningful best second

# The metrics in the order of the report. Summaries have them in milliseconds.
LABELS = {
    "ttft_schedule": "TTFT from schedule",
    "ttft_send": "TTFT from send",
    "tpot": "TPOT",
    "itl": "ITL (per token)",
    "icl": "ICL (per chunk)",
    "e2e_schedule": "E2E from schedule",
    "e2e_send": "E2E from send",
    "client_queue": "queue, client",
    "server_queue": "queue, server",
    "probe_ttft": "probes, TTFT",
    "probe_e2e": "probes, E2E",
}
RATES = {
    "requests_per_s": "answers/s",
    "output_tokens_per_s": "output tokens/s",
    "input_tokens_per_s": "input tokens/s",
    "peak_output_tokens_per_s": "output tokens/s, best second",
    "tokens_per_s_per_user": "tokens/s per user (1 / median TPOT)",
    "mean_concurrency": "mean concurrency",
    "peak_concurrency": "peak concurrency",
}


class Samples(NamedTuple):
    """Values in seconds, each with the index of its request. total is the number of values that
    they represent, or None if they represent themselves."""

    values: Floats
    owners: Ints
    total: int | None = None


def percentile(values: Sequence[float], percent: float) -> float:
    """Returns the percentile, linear between the closest ranks; NaN for no values."""
    return float(np.percentile(values, percent)) if len(values) else math.nan


def latencies(result: RunResult, columns: Columns) -> dict[str, Samples]:
    """Returns the samples of each metric in LABELS over the requests that were due in the window
    and succeeded. Metrics that are unknown are missing."""
    used, sent = columns.is_used, columns.is_counted & np.isfinite(columns.sent)
    by_metric = {
        "ttft_schedule": _of(columns.first - columns.due, used),
        "ttft_send": _of(columns.first - columns.sent, used),
        "tpot": _of(tpot(columns), used),
        "itl": _per_token(columns),
        "icl": _counted_gaps(result)
        if result.gaps
        else _of(columns.gap, used[columns.gap_owner], columns.gap_owner),
        "e2e_schedule": _of(columns.last - columns.due, used),
        "e2e_send": _of(columns.last - columns.sent, used),
        "client_queue": _of(columns.sent - columns.due, sent),
        "server_queue": _of(columns.queue, used),
    }
    if result.probes:
        probes = Columns.of_probes(result)
        by_metric["probe_ttft"] = _of(probes.first - probes.sent, probes.is_used)
        by_metric["probe_e2e"] = _of(probes.last - probes.sent, probes.is_used)
    return {name: samples for name, samples in by_metric.items() if len(samples.values)}


def _of(values: Floats, keep: np.ndarray, owners: Ints | None = None) -> Samples:
    keep = keep & np.isfinite(values)
    return Samples(values[keep], np.flatnonzero(keep) if owners is None else owners[keep])


def _per_token(columns: Columns) -> Samples:
    """Returns the gap before each token: the tokens of a chunk share the gap before it equally."""
    keep = columns.is_used[columns.gap_owner] & (columns.gap_tokens >= 1)
    count = columns.gap_tokens[keep].astype(np.int64)
    gap, owner = columns.gap[keep] / count, columns.gap_owner[keep]
    return Samples(np.repeat(gap, count), np.repeat(owner, count))


def _counted_gaps(result: RunResult) -> Samples:
    """Returns values with the distribution of gaps that were counted and not recorded."""
    gap, count = (np.array(column) for column in zip(*result.gaps, strict=True))
    total = int(count.sum())
    indices = np.searchsorted(np.cumsum(count), np.linspace(0, total, NUM_PICTURED), side="left")
    values = gap[np.minimum(indices, len(gap) - 1)].astype(np.float64)
    return Samples(values, np.zeros(len(values), np.int64), total)


def describe(samples: Samples) -> dict[str, float]:
    """Returns the count, and STATS in milliseconds. A percentile for which there are too few values
    is NaN."""
    values = samples.values
    count = len(values) if samples.total is None else samples.total
    points = np.percentile(values, PERCENTS) * 1000
    known = [
        float(point) if is_supported(percent, count) else math.nan
        for percent, point in zip(PERCENTS, points, strict=True)
    ]
    stats = [float(values.mean()) * 1000, *known, float(values.max()) * 1000]
    return {"count": float(count), **dict(zip(STATS, stats, strict=True))}


def rates(columns: Columns) -> dict[str, float]:
    """Returns RATES: the events per second of the steady window."""
    low, high = columns.steady_s
    span_s = high - low
    if span_s <= 0:
        return {}
    running_s, running = concurrency(columns.sent, columns.finished, columns.end_s)
    inside = _within(columns.chunk_at, low, high)
    prefilled = _within(columns.first, low, high)
    by_name = {
        "requests_per_s": answers_per_s(columns, columns.is_answered),
        "output_tokens_per_s": float(columns.chunk_tokens[inside].sum()) / span_s,
        "input_tokens_per_s": float(np.nansum(columns.prompt_tokens[prefilled])) / span_s,
        "mean_concurrency": _mean_level(running_s, running, low, high),
        "peak_concurrency": float(running.max(initial=0)),
    }
    if inside.any() and span_s >= MIN_PEAK_S:
        by_name["peak_output_tokens_per_s"] = _best_second(
            columns.chunk_at[inside], columns.chunk_tokens[inside]
        )
    tpots = tpot(columns)[columns.is_used]
    tpots = tpots[tpots > 0]
    if len(tpots):
        by_name["tokens_per_s_per_user"] = 1 / float(np.median(tpots))
    return {name: by_name[name] for name in RATES if name in by_name}


def answers_per_s(columns: Columns, keep: Bools) -> float:
    """Returns the answers among `keep` that ended in the steady window, per second of it; NaN for
    an empty window."""
    low, high = columns.steady_s
    done = keep & columns.is_answered & _within(columns.last, low, high)
    return float(done.sum()) / (high - low) if high > low else math.nan


def _best_second(at_s: Floats, tokens: Floats) -> float:
    """Returns the most tokens within any second, which may begin at any time."""
    order = np.argsort(at_s, kind="stable")
    at_s = at_s[order]
    sums = np.concatenate([[0.0], np.cumsum(tokens[order])])
    return float((sums[np.searchsorted(at_s, at_s + 1.0)] - sums[:-1]).max())


def _within(at_s: Floats, low: float, high: float) -> np.ndarray:
    return (at_s >= low) & (at_s <= high)


def concurrency(start_s: Floats, end_s: Floats, run_end_s: float) -> tuple[Floats, Ints]:
    """Returns (times ascending, how many requests run from each time on). A request without a start
    never runs; one without an end runs until the run's end. At one time, ends precede starts."""
    started = np.isfinite(start_s)
    begins = start_s[started]
    ends = np.where(np.isfinite(end_s), end_s, max(run_end_s, 0.0))[started]
    at_s = np.concatenate([ends, begins])
    change = np.repeat([-1, 1], [len(ends), len(begins)])
    order = np.argsort(at_s, kind="stable")
    return at_s[order], np.cumsum(change[order])


def level_at(times: Floats, at_s: Floats, levels: Ints) -> Floats:
    """Returns the level at each of times."""
    if not len(at_s):
        return np.zeros(len(times))
    indices = np.searchsorted(at_s, times, side="right") - 1
    return np.where(indices >= 0, levels[indices], 0).astype(np.float64)


def _mean_level(at_s: Floats, levels: Ints, low: float, high: float) -> float:
    edges = np.concatenate([[low], at_s[(at_s > low) & (at_s < high)], [high]])
    return float(level_at(edges[:-1], at_s, levels) @ np.diff(edges)) / (high - low)


def peak_concurrency(records: Sequence[Record]) -> int:
    """Returns the most requests that were in progress at once."""
    whole = RunResult(0.0, 0, "", list(records), (-math.inf, math.inf))
    columns = Columns.of(whole)
    return int(concurrency(columns.sent, columns.finished, columns.end_s)[1].max(initial=0))


def counts(columns: Columns) -> dict[str, int]:
    """Counts the requests due in the window by outcome, and the tokens of those that succeeded.
    "untold" answers have no token count; "in_one_piece" answers have several tokens in one
    chunk."""
    counted = columns.is_counted
    left = counted & ~columns.is_ok & ~columns.is_cancelled
    failed = left & columns.is_failed
    one_piece = (columns.num_chunks == 1) & (columns.tokens > 1)
    return {
        "scheduled": len(columns.due),
        "counted": int(counted.sum()),
        "answered": int(columns.is_used.sum()),
        "empty": int((counted & columns.is_ok & ~columns.is_answered).sum()),
        "failed": int(failed.sum()),
        "cancelled": int((counted & columns.is_cancelled).sum()),
        "incomplete": int((left & ~failed).sum()),
        "untold": int((columns.is_used & np.isnan(columns.tokens)).sum()),
        "in_one_piece": int((columns.is_used & one_piece).sum()),
        "output_tokens": int(np.nansum(columns.tokens[columns.is_used])),
        "input_tokens": int(np.nansum(columns.prompt_tokens[columns.is_used])),
    }


def errors(result: RunResult, columns: Columns) -> dict[str, int]:
    """Returns the errors with their counts, the most frequent first."""
    messages: Counter[str] = Counter()
    for record, is_counted in zip(result.records, columns.is_counted, strict=True):
        if not is_counted:
            continue
        if record.outcome is Outcome.FAILED:
            messages[record.error or "failed without a reason"] += 1
        elif record.outcome is Outcome.OK and not record.chunks_s:
            messages["succeeded, but without text"] += 1
    return dict(messages.most_common())


def plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"


def count_notes(counts: dict[str, int]) -> list[str]:
    """Returns notes on answers without a token count or in one piece."""
    notes = []
    if counts["untold"]:
        notes.append(
            f"{counts['untold']:,} of {counts['answered']:,}"
            f" {plural('answer', counts['answered'])} came without a token count, so that"
            " TPOT and tokens/s count their chunks as tokens"
        )
    if counts["in_one_piece"]:
        notes.append(
            f"{counts['in_one_piece']:,} {plural('answer', counts['in_one_piece'])} of several"
            " tokens came in one piece and have no TPOT"
        )
    return notes
