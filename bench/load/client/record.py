"""The records of a run. All times are seconds from the start of its schedule, on one monotonic
clock. Everything converts to JSON and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """How a request ended. The client cancels CANCELLED requests on purpose. INCOMPLETE requests
    had not ended at the end of the run's grace time."""

    OK = "ok"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INCOMPLETE = "incomplete"


@dataclass(slots=True)
class Record:
    """One request.

    The request was due at scheduled_s. The generator began with it at dispatched_s, before it
    opened a connection, and gave it to the socket or engine at sent_s. A piece of text arrived at
    each of chunks_s and has chunk_tokens tokens; chunk_tokens is empty if unknown, as for a server.
    The answer ended at finished_s. output_tokens, prompt_tokens and cached_tokens are the server's
    `usage`, or None. queue_s is the time before the request was first scheduled, None if unknown.
    process is the number of the client process. num_chunks is the number of pieces if chunks_s has
    only the first and the last.
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

    num_context counts the tokens before the decode rows, and num_pairs the pairs of a prompt row
    and a token before it (serve.scheduler.step_time.StepWork). Sequences and pages are those at
    end_s, including sequences that finish with the step (serve.engine.step_trace.TracedStep).
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
    """Figures that a server reports about itself at one time. kv_usage is from 0 to 1."""

    at_s: float
    num_running: float
    num_waiting: float
    kv_usage: float | None = None


@dataclass(slots=True)
class ProcessHealth:
    """Figures that show whether a client process kept up with its work. loop_lag is the delay with
    which its event loop returns to a timer; its p99 is NaN if there were fewer than 100. cpu is its
    share of one core during the run. core_wait is the share of the run in which it was ready to run
    but had no core, NaN if unknown. num_resent counts the requests that were sent again, because
    the server closed a kept connection at that moment."""

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
    """The progress of a run, without its probes, at_s seconds after the start. num_done counts the
    requests that ended in any way, including failed ones. num_tokens adds the server's counts of
    finished answers and the chunks of unfinished ones. ttfts_s are the TTFT from schedule of the
    answers that began since the last report."""

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
    """The result of offering a schedule once. The requests that were due within window (seconds)
    count. started is an ISO 8601 time. notes are facts for the reader, such as a limit that was
    reached. gaps are pairs (seconds between two pieces of an answer, number of such gaps),
    ascending and exact to 1 %, if the records do not have the gaps (Record.num_chunks). If
    was_interrupted, Ctrl-C ended the run, and records has the requests that were due until then."""

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


# A function (rate, seed, number of requests) -> result. A rate of None is that of the arrivals, and
# a number of None is that of the options.
OfferOnce = Callable[[float | None, int, int | None], RunResult]
