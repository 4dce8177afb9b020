"""What is kept of a run. All times are seconds from the start of its schedule, on one monotonic
clock; everything turns into JSON and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """How a request ended. CANCELLED: by us, on purpose. INCOMPLETE: it had not ended when the
    run's grace was over."""

    OK = "ok"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INCOMPLETE = "incomplete"


@dataclass(slots=True)
class Record:
    """One request.

    scheduled_s: when it was due. dispatched_s: when the generator began with it (a connection may
    have to be made first). sent_s: when it was handed to the socket (or the engine).
    chunks_s: when each piece of text arrived; chunk_tokens: tokens in each, where that is known
    (an engine in this process), else empty. finished_s: when the answer's end was known.
    output_tokens, prompt_tokens, cached_tokens: the server's `usage`; None where it told none.
    queue_s: before it was first scheduled, where the server tells. process: who sent it.
    num_chunks: how many pieces there were, where chunks_s keeps only the first and the last.
    """

    index: int
    scheduled_s: float
    sent_s: float = math.nan
    finished_s: float = math.nan
    chunks_s: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    queue_s: float | None = None
    outcome: Outcome = Outcome.INCOMPLETE
    error: str | None = None
    finish_reason: str | None = None
    group: str | None = None
    process: int = 0
    dispatched_s: float = math.nan
    num_chunks: int | None = None


@dataclass(slots=True)
class StepRow:
    """One merged step of an engine in this process, or of a simulated one.

    num_context: tokens before the decode rows; num_pairs: products of prompt rows and tokens
    before them (serve.scheduler.step_time.StepWork). Sequences and pages: at end_s, with those
    that end with the step (serve.engine.step_trace.TracedStep).
    """

    start_s: float
    end_s: float
    num_decodes: int
    num_prefill_rows: int
    num_chunks: int
    num_context: int
    num_pairs: int
    num_running: int
    num_waiting: int
    pages_in_use: int


@dataclass(slots=True)
class ServerSample:
    """What the server told about itself at a time. kv_usage: 0 to 1."""

    at_s: float
    num_running: float
    num_waiting: float
    kv_usage: float | None = None


@dataclass(slots=True)
class ProcessHealth:
    """Whether a generating process could do its work. loop_lag: how late its event loop came
    back to a timer. cpu: share of one core during the run. core_wait: share of the run in which it
    could have worked but had no core (NaN: the system does not tell). num_resent: requests that
    met a kept connection just when the server closed it, and were sent again."""

    process: int
    num_requests: int
    cpu: float
    loop_lag_p50_s: float
    loop_lag_p99_s: float
    loop_lag_max_s: float
    num_collections: int
    max_connections: int
    core_wait: float = math.nan
    num_resent: int = 0


@dataclass(slots=True)
class Progress:
    """A run as it goes on. at_s: seconds from its start. num_done: however it ended, the failed
    among them. num_tokens: of ended answers what the server told, of others the chunks so far.
    ttfts_s: of answers that began since the last report, from when they were due. Probes are not
    in it."""

    at_s: float
    num_total: int
    num_sent: int = 0
    num_done: int = 0
    num_failed: int = 0
    num_running: int = 0
    num_tokens: int = 0
    ttfts_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class RunResult:
    """One schedule, offered once. window: the seconds whose requests count (by their due time).
    started: ISO 8601. notes: what the reader has to know (a limit reached, a clamp). gaps: times
    between two pieces of an answer, in seconds and how many of each, where records do not keep
    them (Record.num_chunks); within 1 %, ascending. was_interrupted: by Ctrl-C; records has what
    was due until then."""

    qps: float
    seed: int
    target: str
    records: list[Record]
    window: tuple[float, float]
    started: str = ""
    probes: list[Record] = field(default_factory=list)
    steps: list[StepRow] = field(default_factory=list)
    samples: list[ServerSample] = field(default_factory=list)
    health: list[ProcessHealth] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    gaps: list[tuple[float, int]] = field(default_factory=list)
    is_closed_loop: bool = False
    was_interrupted: bool = False


# (rate, seed, number of requests) -> result. A rate of None is the arrivals' own; a number of None
# is that of the options.
OfferOnce = Callable[[float | None, int, int | None], RunResult]
