"""Every figure of /metrics: its name, what it means, and where it comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from serve.engine.counters import Histogram
from serve.engine.stats import EngineStats
from serve.http.edge.counters import HttpCounters

if TYPE_CHECKING:
    from serve.engine.core_view import CoreView

Sampled = Iterable[tuple[tuple[str, ...], float]]
Value = float | None | Histogram | Sampled


@dataclass(frozen=True, slots=True)
class Reading:
    """What is told at one moment. cache: labels that say how K/V memory is set up."""

    stats: EngineStats
    view: CoreView
    http: HttpCounters
    cache: dict[str, str]


@dataclass(frozen=True, slots=True)
class Figure:
    """name: without a prefix; a counter's gets _total behind it. value: a number, None (nothing
    to tell yet), a histogram, or numbers by the values of `labels`. alias: vLLM's name for it."""

    kind: str
    name: str
    about: str
    value: Callable[[Reading], Value]
    labels: tuple[str, ...] = ()
    alias: str | None = None


def _shared(
    kind: str,
    name: str,
    about: str,
    value: Callable[[Reading], Value],
    labels: tuple[str, ...] = (),
) -> Figure:
    """One that vLLM has under the same name."""
    return Figure(kind, name, about, value, labels, f"vllm:{name}")


def _usage(reading: Reading) -> float:
    return reading.stats.pages_in_use / max(1, reading.stats.pages_total)


def _by(label_values: dict[str, float]) -> Sampled:
    return [((name,), value) for name, value in label_values.items()]


def _reasons(reading: Reading) -> Sampled:
    ended = reading.view.requests.num_ended
    return [((reason.value,), count) for reason, count in ended.items()]


def _grammar_requests(reading: Reading) -> Sampled:
    cache = reading.view.grammars
    return [] if cache is None else _by({"hit": cache.num_hits, "miss": cache.num_misses})


def _coverage(reading: Reading) -> Sampled:
    found = (("0.5", reading.stats.coverage_p50), ("0.9", reading.stats.coverage_p90))
    return [((level,), share) for level, share in found if share is not None]


REQUESTS = (
    _shared("gauge", "num_requests_running", "Sequences that run.", lambda r: r.stats.num_running),
    _shared("gauge", "num_requests_waiting", "Sequences that wait.", lambda r: r.stats.num_waiting),
    _shared("counter", "prompt_tokens", "Prompt tokens of requests that got a first token.",
            lambda r: r.view.requests.num_prompt_tokens),
    _shared("counter", "generation_tokens", "Tokens generated.",
            lambda r: r.view.requests.num_generation_tokens),
    _shared("counter", "request_success", "Answers that ended, by why.", _reasons,
            ("finished_reason",)),
    _shared("histogram", "time_to_first_token_seconds", "From arrival to the first token.",
            lambda r: r.view.requests.ttft_s),
    _shared("histogram", "inter_token_latency_seconds", "From one token to the next.",
            lambda r: r.view.requests.inter_token_s),
    _shared("histogram", "request_time_per_output_token_seconds",
            "Of a whole answer: mean time from token to token.",
            lambda r: r.view.requests.per_token_s),
    _shared("histogram", "e2e_request_latency_seconds", "From arrival to the last token.",
            lambda r: r.view.requests.e2e_s),
    _shared("histogram", "request_queue_time_seconds", "From arrival to the first step.",
            lambda r: r.view.requests.queue_s),
    _shared("histogram", "request_prefill_time_seconds",
            "From the first step to the first token.", lambda r: r.view.requests.prefill_s),
    _shared("histogram", "request_decode_time_seconds",
            "From the first token to the last one.", lambda r: r.view.requests.decode_s),
    _shared("histogram", "request_inference_time_seconds",
            "From the first step to the last token.", lambda r: r.view.requests.inference_s),
    _shared("histogram", "request_prompt_tokens", "Prompt tokens of a request.",
            lambda r: r.view.requests.prompt_tokens),
    _shared("histogram", "request_generation_tokens", "Tokens of an answer.",
            lambda r: r.view.requests.generation_tokens),
    _shared("histogram", "request_params_max_tokens", "Tokens that a request allowed.",
            lambda r: r.view.requests.max_tokens),
    _shared("histogram", "request_params_n", "Answers that a request asked for.",
            lambda r: r.view.requests.n),
    Figure("gauge", "requests_unfinished", "Requests inside, those that are being tokenized too.",
           lambda r: r.stats.num_unfinished),
    Figure("counter", "sequences_finished", "Sequences that ended.",
           lambda r: r.stats.num_finished),
)  # fmt: skip

STEPS = (
    Figure("counter", "steps", "Merged steps.", lambda r: r.stats.num_steps),
    Figure("counter", "mixed_steps", "Of those, with prompt rows and decode rows.",
           lambda r: r.view.steps.num_mixed_steps),
    Figure("counter", "step_rows", "Rows computed, by kind.",
           lambda r: _by({"decode": r.stats.num_decode_rows, "prefill": r.stats.num_prefill_rows}),
           ("kind",)),
    _shared("histogram", "iteration_tokens_total", "Rows of a step.",
            lambda r: r.view.steps.rows),
    Figure("histogram", "step_time_seconds", "From the end of the step before to its tokens.",
           lambda r: r.view.steps.seconds),
    Figure("gauge", "last_step_age_seconds", "Since the last step.",
           lambda r: r.stats.last_step_age_s),
    Figure("gauge", "step_time_error_ratio",
           "|predicted - real| / real of the last steps' times, median.",
           lambda r: r.stats.step_time_error),
)  # fmt: skip

MEMORY = (
    _shared("gauge", "kv_cache_usage_perc", "K/V memory in use, 0 to 1.", _usage),
    Figure("gauge", "kv_pages", "Pages of K/V memory, by state.",
           lambda r: _by({state: getattr(r.stats, f"pages_{state}")
                          for state in ("in_use", "mapped", "cached", "total")}),
           ("state",)),
    Figure("gauge", "kv_page_bytes", "Bytes of a page.", lambda r: r.stats.kv_page_bytes),
    Figure("gauge", "kv_bytes_per_token", "Bytes of one token's K/V.",
           lambda r: r.stats.kv_bytes_per_token),
    _shared("counter", "num_preemptions", "Sequences that gave their memory back and waited.",
            lambda r: r.stats.num_preemptions),
    Figure("counter", "sequences_given_way", "Of those, for one that goes first.",
           lambda r: r.stats.num_given_way),
    _shared("counter", "prefix_cache_queries", "Prompt tokens that were looked for.",
            lambda r: r.stats.prefix_asked_tokens),
    _shared("counter", "prefix_cache_hits", "Of those, found.",
            lambda r: r.stats.prefix_hit_tokens),
    Figure("counter", "prefix_evicted_pages", "Cached pages forgotten for want of memory.",
           lambda r: r.stats.prefix_evicted_pages),
    Figure("gauge", "predicted_peak_pages", "Of running sequences and the last that asked.",
           lambda r: r.stats.predicted_peak_pages),
    Figure("gauge", "prediction_coverage_ratio",
           "Answers within the length that was predicted for this quantile on arrival.",
           _coverage, ("quantile",)),
)  # fmt: skip

ELSEWHERE = (
    Figure("gauge", "memory_nodes", "Memory nodes, by state.",
           lambda r: _by({"connected": r.stats.memory_nodes - r.stats.memory_nodes_missing,
                          "missing": r.stats.memory_nodes_missing}), ("state",)),
    Figure("counter", "memory_nodes_lost", "Times that a memory node was lost.",
           lambda r: r.stats.memory_nodes_lost),
    Figure("counter", "sequences_recomputed", "Sequences whose memory node was lost.",
           lambda r: r.stats.recomputed_sequences),
    Figure("gauge", "disk_pages", "Pages on the disk.", lambda r: r.stats.disk_pages),
    Figure("gauge", "disk_bytes", "Bytes of them.", lambda r: r.stats.disk_bytes),
    Figure("counter", "disk_page_events", "Pages written, read back, lost, and not written.",
           lambda r: _by({"stored": r.stats.disk_stored_pages, "loaded": r.stats.disk_loaded_pages,
                          "lost": r.stats.disk_lost_pages, "failed": r.stats.disk_failed_pages}),
           ("event",)),
    Figure("counter", "disk_errors", "Errors of the disk, by kind.",
           lambda r: _by({"corrupt": r.stats.disk_corrupt_pages, "read": r.stats.disk_read_errors,
                          "write": r.stats.disk_write_errors}), ("kind",)),
    Figure("gauge", "disk_paused", "1: writing is paused after errors.",
           lambda r: float(r.stats.disk_is_paused)),
)  # fmt: skip

SERVER = (
    Figure("counter", "http_requests", "Answers by route, method and kind of status.",
           lambda r: list(r.http.answers.items()), ("handler", "method", "status"),
           "http_requests"),
    Figure("counter", "requests_refused", "Error answers, by code.",
           lambda r: _by(dict(r.http.refused)), ("reason",)),
    Figure("counter", "requests_over_slo", "Refused: the first token would have come too late.",
           lambda r: r.stats.num_refused),
    Figure("gauge", "predicted_ttft_seconds", "Of the last request that was asked for it.",
           lambda r: r.stats.predicted_ttft_s),
    Figure("gauge", "connections", "Open connections.", lambda r: r.http.num_connections()),
    Figure("gauge", "live_watchers", "Readers of /live.", lambda r: r.http.num_watchers),
    Figure("histogram", "event_loop_lag_seconds", "How late the event loop wakes up.",
           lambda r: r.http.lag_s),
    Figure("gauge", "pool_queue_length", "Jobs that wait, by pool.",
           lambda r: _by({name: waiting for name, (waiting, _) in r.view.pools().items()}),
           ("pool",)),
    Figure("counter", "pool_busy_seconds", "Seconds of work, by pool.",
           lambda r: _by({name: busy_s for name, (_, busy_s) in r.view.pools().items()}),
           ("pool",)),
)  # fmt: skip

STRUCTURED = (
    Figure("counter", "structured_output_requests", "Requests with a grammar, by whether it was"
           " compiled already.", _grammar_requests, ("cache",)),
    Figure("gauge", "structured_output_cached_grammars", "Compiled grammars that are kept.",
           lambda r: len(r.view.grammars or ())),
    Figure("gauge", "structured_output_cache_bytes", "Bytes of them, estimated.",
           lambda r: r.view.grammars.num_bytes if r.view.grammars else 0),
)  # fmt: skip

CACHE_INFO = Figure(
    "gauge", "cache_config_info", "How K/V memory is set up.", lambda r: 1.0, (),
    "vllm:cache_config_info",
)  # fmt: skip

SECTIONS = {
    "Requests": REQUESTS,
    "Steps": STEPS,
    "Memory": MEMORY,
    "Disk and memory nodes": ELSEWHERE,
    "Structured output": STRUCTURED,
    "Server": SERVER,
}
