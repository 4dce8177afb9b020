"""The records of a run. All times are seconds from the start of its schedule, on one monotonic
clock. Everything converts to JSON and back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum


class Outcome(StrEnum):
    """How a request ended. The client cancels CANCELLED requests on purpose. INCOMPLETE requests
    had not ended when the run's grace was over."""

    OK = "ok"
    FAILED = "failed"
    CANCELLED = "cancelled"
    INCOMPLETE = "incomplete"


@dataclass(slots=True)
class Record:
    """One request.

    scheduled_s: when it was due. dispatched_s: when the generator began with it, before it opened a
    connection. sent_s: when it was given to the socket or engine. chunks_s: when each piece of text
    arrived. chunk_tokens: the tokens of each piece; empty if unknown, as it is for a server.
    finished_s: when the answer ended. output_tokens, prompt_tokens, cached_tokens: the server's
    `usage`, or None. queue_s: the time before it was first scheduled, or None if unknown. process:
    the client process that sent it. num_chunks: the number of pieces, where chunks_s has only the
    first and the last.
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

    num_context: tokens before the decode rows. num_pairs: products of prompt rows and tokens before
    them (serve.scheduler.step_time.StepWork). Sequences and pages are those at end_s, with the
    sequences that end with the step (serve.engine.step_trace.TracedStep).
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
    """A server's own figures at one time. kv_usage is from 0 to 1."""

    at_s: float
    num_running: float
    num_waiting: float
    kv_usage: float | None = None


@dataclass(slots=True)
class ProcessHealth:
    """Whether a client process kept up with its work. loop_lag: how late its event loop returned to
    a timer. cpu: its share of one core during the run. core_wait: the share of the run in which it
    was ready to run but had no core (NaN if unknown). num_resent: requests that met a kept
    connection just when the server closed it, and were sent again."""

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
    """The progress of a run, without its probes. at_s: seconds from the start. num_done:
    requests that ended in any way, also failed ones. num_tokens: the server's counts of ended
    answers, and the chunks so far of others. ttfts_s: TTFT from schedule of the answers that
    began since the last report."""

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
    """One schedule, offered once. window: requests that were due within these seconds count.
    started: ISO 8601. notes: facts for the reader, such as a limit that was reached. gaps: seconds
    between two pieces of an answer with the number of such gaps, ascending and within 1 %, if the
    records do not have them (Record.num_chunks). was_interrupted: Ctrl-C ended the run; records has
    the requests that were due until then."""

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
