"""What the core keeps of a request while it is inside, and what it tells about itself."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from serve.output import RequestTimes, Sink
from serve.request import SamplingParams
from serve.sequence import Sequence

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of counters.

    memory_utilisation: pages in use over all pages, mean over the steps. predicted_peak_pages:
    of running sequences and the one that asked, at the last time one did. coverage_p50, _p90:
    share of answers within the quantile predicted when they arrived. None: nothing to tell yet,
    or the policy does not predict. step_time_error: |predicted - real| / real, median of the
    last steps. chunk_limit_rows: prompt rows for which the last step with a prompt had room.
    pages_mapped have memory behind them; pages_in_use belong to sequences, pages_cached only to
    the prefix cache. prefix_*: tokens of admitted sequences, those of them that were found, pages
    forgotten for want of memory.
    predicted_ttft_s: of the last request that was asked whether it meets ttft_slo; num_refused:
    those that did not. num_given_way: preemptions for one that goes first, not for want of memory.
    disk_*: pages written there, read back, lost (they could not be read back), and not
    written (they are tried again); then what lies there now. Of what was lost: pages whose
    content was damaged, reads with an error. Of what failed: writes with an error, requests that
    were too many, had no room or came while writing is paused after errors.
    """

    num_unfinished: int
    num_running: int
    num_waiting: int
    num_steps: int
    num_prefill_rows: int
    num_decode_rows: int
    num_finished: int
    num_preemptions: int
    num_given_way: int
    num_refused: int
    predicted_ttft_s: float | None
    preemptions_per_1000: float
    memory_utilisation: float
    predicted_peak_pages: int | None
    coverage_p50: float | None
    coverage_p90: float | None
    step_time_error: float | None
    chunk_limit_rows: int | None
    pages_in_use: int
    pages_mapped: int
    pages_total: int
    pages_cached: int
    prefix_asked_tokens: int
    prefix_hit_tokens: int
    prefix_evicted_pages: int
    disk_stored_pages: int
    disk_loaded_pages: int
    disk_lost_pages: int
    disk_failed_pages: int
    disk_pages: int
    disk_bytes: int
    disk_corrupt_pages: int
    disk_read_errors: int
    disk_write_errors: int
    disk_refused_requests: int
    disk_is_paused: bool
    kv_bytes_per_token: int
    last_step_age_s: float | None


class RequestState:
    """One submitted request inside the core. `sequences` is filled once it is tokenized."""

    __slots__ = (
        "client",
        "is_aborted",
        "params",
        "prompt",
        "request_id",
        "sequences",
        "sink",
        "times",
    )

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        params: SamplingParams,
        sink: Sink,
        now_s: float,
        client: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.client = client
        self.params = params
        self.sink = sink
        self.times = RequestTimes(now_s)
        self.sequences: list[Sequence] = []
        self.is_aborted = False

    def tell(self, act: Callable[[], None]) -> None:
        """A consumer's own fault is logged and harms nobody else."""
        try:
            act()
            self.sink.wake()
        except Exception:
            logger.exception("the consumer of %s cannot be told", self.request_id)
