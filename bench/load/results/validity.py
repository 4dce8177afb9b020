"""Judges whether a run's figures may be used: the generator must keep its schedule, and the server
should reach a steady state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from bench.common.percentiles import tail
from bench.load.client.record import ProcessHealth, RunResult
from bench.load.results.columns import Columns, Floats
from bench.load.results.confidence import t_quantile
from bench.load.results.metrics import concurrency, plural
from bench.load.results.slo import Slo

MAX_LAG_S = 0.005
MAX_LAG_SHARE = 0.01  # share of the TTFT limit
MAX_RATE_ERROR = 0.005
MAX_CPU = 0.9
MAX_CORE_WAIT = 0.1
MIN_REQUESTS = 50  # fewer requests show no trend
MAX_FAILED = 0.1  # above this share, the figures describe only the answers that succeeded
NUM_PARTS = 10
MIN_RISE = 1.0  # relative to the mean; linear growth from zero is 2


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a run. reasons say why the figures must not be used; a valid run has none.
    warnings are facts that the reader must know. is_rising means that one of them reports that
    there was no steady state. is_kept means that the generator offered the load as planned,
    whatever the answers. num_lost of num_asked requests failed or did not end in time; neither
    includes requests cancelled on purpose."""

    reasons: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    is_rising: bool = False
    is_kept: bool = True
    num_lost: int = 0
    num_asked: int = 0

    @property
    def is_valid(self) -> bool:
        return not self.reasons


def check(result: RunResult, columns: Columns, slo: Slo | None) -> Verdict:
    """Returns the verdict on a run."""
    reasons: list[str] = []
    warnings: list[str] = []
    rising: list[str] = []
    if not columns.is_counted.any():
        reasons.append("no request was due in the window that counts")
    if result.was_interrupted:
        warnings.append(
            "the run was interrupted, so that its figures cover the requests due until then"
        )
    if result.is_closed_loop:
        warnings.append(
            "CLOSED LOOP: the number of requests at once is limited, so that a slow server gets"
            " fewer requests than the offered rate"
        )
    elif math.isfinite(result.qps):
        reasons += _lag_reasons(columns, slo) + _rate_reasons(result, columns)
        rising = _steady_warnings(columns)
    warnings += rising + _health_warnings(result.health, bool(reasons))
    is_kept = not reasons
    lost, total = _lost(result, columns)
    failed = f"{lost} of {total} {plural('request', total)} failed"
    if lost > MAX_FAILED * total:
        reasons.append(f"{failed}: latencies are those of the other requests")
    elif lost:
        warnings.insert(0, failed)
    return Verdict(reasons, warnings, bool(rising), is_kept, lost, total)


def _lost(result: RunResult, columns: Columns) -> tuple[int, int]:
    """Returns (requests that failed or did not end in time, all requests). Neither includes
    requests that an interruption cut off or that were cancelled on purpose."""
    relevant = columns.is_counted & ~columns.is_cancelled
    if result.was_interrupted:
        relevant &= columns.is_ok | columns.is_failed
    return int((relevant & ~columns.is_ok).sum()), int(relevant.sum())


def max_lag_s(slo: Slo | None) -> float:
    """Returns the bound on the dispatch lag's p99, or on its maximum in a short run."""
    limit_s = slo.ttft_s if slo is not None else None
    return max(MAX_LAG_S, MAX_LAG_SHARE * (limit_s or 0.0))


def _lag_reasons(columns: Columns, slo: Slo | None) -> list[str]:
    lag_s = (columns.began - columns.due)[columns.is_counted & np.isfinite(columns.began)]
    if not len(lag_s):
        return []
    high, bound_s = tail(lag_s), max_lag_s(slo)
    if high.value <= bound_s:
        return []
    return [
        f"the generator fell behind its schedule: dispatch lag {high.label} {1000 * high.value:.1f}"
        f" ms, over {1000 * bound_s:g} ms"
    ]


def achieved_qps(result: RunResult, columns: Columns) -> float:
    """Returns the requests sent per second; in an interrupted run, over the time in which they were
    due."""
    if not result.was_interrupted or not math.isfinite(result.qps):
        return _kept_qps(result, columns)
    due_s = float(columns.due.max(initial=0.0))
    return float(np.isfinite(columns.began).sum()) / due_s if due_s > 0 else math.nan


def _kept_qps(result: RunResult, columns: Columns) -> float:
    """Returns the offered rate, reduced by the requests that were not sent and by the delay of the
    last one. A delay of at most MAX_LAG_S does not count."""
    sent = columns.began[np.isfinite(columns.began)]
    if not len(sent) or not math.isfinite(result.qps):
        return math.nan
    planned_s, taken_s = float(columns.due.max()), float(sent.max())
    share = len(sent) / len(columns.due)
    if taken_s - planned_s <= MAX_LAG_S or planned_s <= 0:
        return result.qps * share
    return result.qps * share * planned_s / taken_s


def _rate_reasons(result: RunResult, columns: Columns) -> list[str]:
    qps = _kept_qps(result, columns)
    if math.isnan(qps):
        return ["no request was sent"]
    if abs(qps / result.qps - 1) <= MAX_RATE_ERROR:
        return []
    unsent = int((~np.isfinite(columns.began)).sum())
    why = f" ({unsent} {plural('request', unsent)} never sent)" if unsent else ""
    return [f"sent {qps:.4g} requests/s of {result.qps:.4g} offered, more than 0.5 % off{why}"]


def _health_warnings(health: Sequence[ProcessHealth], is_late: bool) -> list[str]:
    warnings = []
    waited = max((h.core_wait for h in health if h.core_wait == h.core_wait), default=0.0)
    busy = [h.process for h in health if h.cpu > MAX_CPU]
    if busy:
        shown = max(h.cpu for h in health)
        warnings.append(
            f"{len(busy)} of {len(health)} client processes used {100 * shown:.0f} % of a core:"
            " use more client processes, or another machine for the client"
        )
    is_short = any(math.isnan(h.loop_lag_p99_s) for h in health)
    lags_s = [h.loop_lag_max_s if is_short else h.loop_lag_p99_s for h in health]
    lag_s = max(lags_s, default=0.0)
    if lag_s > MAX_LAG_S:
        label = "at most" if is_short else "p99"
        warnings.append(
            f"a client's event loop came back {1000 * lag_s:.1f} ms late ({label}), so that the"
            " times of what it received are too late"
        )
    if is_late and health and not busy and waited < MAX_CORE_WAIT:
        warnings.append("the clients had CPU time to spare, so that something else delayed them")
    return warnings


def _steady_warnings(columns: Columns) -> list[str]:
    """Returns a warning if concurrency and TTFT both rise, GuideLLM's sign of a rate above the
    capacity. The test takes means over parts of the window, which are nearly independent, as single
    requests are not."""
    used, (low, high) = columns.is_used, columns.due_span
    if used.sum() < MIN_REQUESTS or high <= low:
        return []
    due, ttft = columns.due[used], (columns.first - columns.due)[used]
    edges = np.linspace(low, high, NUM_PARTS + 1)
    part = np.clip(np.searchsorted(edges, due, side="right") - 1, 0, NUM_PARTS - 1)
    size = np.bincount(part, minlength=NUM_PARTS)
    if not size.all():
        return []
    ttft_s = np.bincount(part, ttft, minlength=NUM_PARTS) / size
    times, levels = concurrency(columns.due, columns.finished, columns.end_s)
    running = np.array([_mean_between(times, levels, a, b) for a, b in pairwise(edges)])
    if not (_rises(ttft_s) and _rises(running)):
        return []
    return [
        f"not a steady state: requests in progress grew from {running[0]:.1f} to {running[-1]:.1f}"
        f" and mean TTFT from {1000 * ttft_s[0]:.0f} to {1000 * ttft_s[-1]:.0f} ms over the"
        " window: the rate is above what the target can serve, and a longer run would be slower"
    ]


def _mean_between(times: Floats, levels: np.ndarray, low: float, high: float) -> float:
    inside = (times >= low) & (times < high)
    return float(levels[inside].mean()) if inside.any() else 0.0


def _rises(values: Floats) -> bool:
    """Returns whether the slope is above zero with 95 % confidence and adds at least the mean."""
    count = len(values)
    at = np.arange(count) - (count - 1) / 2
    slope = float(at @ values) / float(at @ at)
    left = values - values.mean() - slope * at
    error = math.sqrt(float(left @ left) / (count - 2) / float(at @ at))
    return slope > t_quantile(count - 2) * error and slope * count > MIN_RISE * values.mean()
