"""The metrics of /metrics: their names, meanings and sources."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from serve.http.monitoring.metric_spec import MetricSources, MetricSpec, Sampled, by, shared
from serve.http.monitoring.metric_streaming import STREAMING
from serve.machine import heap_usage, memory_parts

if TYPE_CHECKING:
    from memory.prefix.peer_stats import CopyStats


def _usage(sources: MetricSources) -> float:
    return sources.stats.pages_in_use / max(1, sources.stats.pages_total)


def _reasons(sources: MetricSources) -> Sampled:
    ended = sources.view.requests.num_ended
    return [((reason.value,), count) for reason, count in ended.items()]


def _grammar_requests(sources: MetricSources) -> Sampled:
    cache = sources.view.grammars
    return [] if cache is None else by({"hit": cache.num_hits, "miss": cache.num_misses})


def _heap(sources: MetricSources) -> Sampled:
    usage = heap_usage()
    return [] if usage is None else by(usage._asdict())


def _coverage(sources: MetricSources) -> Sampled:
    found = (("0.5", sources.stats.coverage_p50), ("0.9", sources.stats.coverage_p90))
    return [((level,), share) for level, share in found if share is not None]


def _of_stage(sources: MetricSources, what: str) -> Sampled:
    group = sources.stats.group
    return [] if group is None else [((str(group.stage),), getattr(group.seconds, what))]


def _of_weights(sources: MetricSources, name: str) -> float | None:
    return None if sources.weights is None else float(getattr(sources.weights, name))


def _pulls(sources: MetricSources, what: str) -> Sampled:
    peers = sources.stats.kv_peers
    return by({url: float(getattr(it, what)) for url, it in peers.pulls.items()} if peers else {})


def _copies(sources: MetricSources) -> CopyStats | None:
    peers = sources.stats.kv_peers
    return None if peers is None else peers.copies


def _peer_names(sources: MetricSources) -> Sampled:
    peers = sources.stats.kv_peers
    return [
        ((url, kind), getattr(it, kind))
        for url, it in (peers.pulls.items() if peers else ())
        for kind in ("asked", "found", "missing")
    ]


REQUESTS = (
    shared("gauge", "num_requests_running", "Running sequences.", lambda r: r.stats.num_running),
    shared("gauge", "num_requests_waiting", "Waiting sequences.", lambda r: r.stats.num_waiting),
    shared("counter", "prompt_tokens", "Prompt tokens of requests that have a first token.",
            lambda r: r.view.requests.num_prompt_tokens),
    shared("counter", "generation_tokens", "Generated tokens.",
            lambda r: r.view.requests.num_generation_tokens),
    shared("counter", "request_success", "Finished answers, by finish reason.", _reasons,
            ("finished_reason",)),
    shared("histogram", "time_to_first_token_seconds", "From arrival to the first token.",
            lambda r: r.view.requests.ttft_s),
    shared("histogram", "inter_token_latency_seconds", "From one token to the next.",
            lambda r: r.view.requests.inter_token_s),
    shared("histogram", "request_time_per_output_token_seconds",
            "Mean time from token to token of an answer.",
            lambda r: r.view.requests.per_token_s),
    shared("histogram", "e2e_request_latency_seconds", "From arrival to the last token.",
            lambda r: r.view.requests.e2e_s),
    shared("histogram", "request_queue_time_seconds", "From arrival to the first step.",
            lambda r: r.view.requests.queue_s),
    shared("histogram", "request_prefill_time_seconds",
            "From the first step to the first token.", lambda r: r.view.requests.prefill_s),
    shared("histogram", "request_decode_time_seconds",
            "From the first token to the last one.", lambda r: r.view.requests.decode_s),
    shared("histogram", "request_inference_time_seconds",
            "From the first step to the last token.", lambda r: r.view.requests.inference_s),
    shared("histogram", "request_prompt_tokens", "Prompt tokens of a request.",
            lambda r: r.view.requests.prompt_tokens),
    shared("histogram", "request_generation_tokens", "Tokens of an answer.",
            lambda r: r.view.requests.generation_tokens),
    shared("histogram", "request_params_max_tokens", "max_tokens of a request.",
            lambda r: r.view.requests.max_tokens),
    shared("histogram", "request_params_n", "n of a request.",
            lambda r: r.view.requests.n),
    MetricSpec("gauge", "requests_unfinished",
               "Unfinished requests, including those being tokenized.",
               lambda r: r.stats.num_unfinished),
    MetricSpec("counter", "sequences_finished", "Finished sequences.",
               lambda r: r.stats.num_finished),
)  # fmt: skip

STEPS = (
    MetricSpec("counter", "steps", "Merged steps.", lambda r: r.stats.num_steps),
    MetricSpec("counter", "mixed_steps", "Steps with both prefill and decode rows.",
               lambda r: r.view.steps.num_mixed_steps),
    MetricSpec("counter", "step_rows", "Computed rows, by kind.",
               lambda r: by({"decode": r.stats.num_decode_rows,
                              "prefill": r.stats.num_prefill_rows}),
               ("kind",)),
    shared("histogram", "iteration_tokens_total", "Rows of a step.",
            lambda r: r.view.steps.rows),
    shared("counter", "spec_decode_num_drafts",
            "Drafts, each of one sequence in one step.", lambda r: r.view.steps.num_drafts),
    shared("counter", "spec_decode_num_draft_tokens", "Their tokens.",
            lambda r: r.view.steps.num_draft_tokens),
    shared("counter", "spec_decode_num_accepted_tokens", "Those of them that agreed.",
            lambda r: r.view.steps.num_accepted_tokens),
    MetricSpec("histogram", "step_time_seconds",
               "From the end of the previous step to the step's tokens.",
               lambda r: r.view.steps.seconds),
    MetricSpec("gauge", "last_step_age_seconds", "Seconds since the last step.",
               lambda r: r.stats.last_step_age_s),
    MetricSpec("gauge", "step_time_error_ratio",
               "Median of |predicted - real| / real over the last steps' times.",
               lambda r: r.stats.step_time_error),
)  # fmt: skip

MEMORY = (
    shared("gauge", "kv_cache_usage_perc", "K/V memory in use, 0 to 1.", _usage),
    MetricSpec("gauge", "kv_pages", "Pages of K/V memory, by state.",
               lambda r: by({state: getattr(r.stats, f"pages_{state}")
                              for state in ("in_use", "mapped", "cached", "total")}),
               ("state",)),
    MetricSpec("gauge", "kv_page_bytes", "Bytes of a page.", lambda r: r.stats.kv_page_bytes),
    MetricSpec("gauge", "kv_bytes_per_token", "Bytes of one token's K/V.",
               lambda r: r.stats.kv_bytes_per_token),
    MetricSpec("counter", "kv_dropped_tokens", "Tokens whose K/V was dropped by a kv_policy.",
               lambda r: r.stats.dropped_tokens),
    MetricSpec("gauge", "kv_held_tokens", "Tokens of running sequences whose K/V is held then.",
               lambda r: r.stats.held_tokens),
    shared("counter", "num_preemptions", "Preempted sequences.",
            lambda r: r.stats.num_preemptions),
    MetricSpec("counter", "sequences_given_way", "Sequences preempted for one of higher priority.",
               lambda r: r.stats.num_priority_preemptions),
    shared("counter", "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.",
            lambda r: r.stats.prefix_asked_tokens),
    shared("counter", "prefix_cache_hits", "Prompt tokens found in the prefix cache.",
            lambda r: r.stats.prefix_hit_tokens),
    MetricSpec("counter", "prefix_evicted_pages", "Cached pages evicted to free memory.",
               lambda r: r.stats.prefix_evicted_pages),
    MetricSpec("counter", "kv_tiles", "Tiles of K/V that decoded rows read, and all of them.",
               lambda r: by(r.selection.counts() if r.selection else {}), ("kind",)),
    MetricSpec("gauge", "predicted_peak_pages",
               "Predicted peak of the running sequences and the last candidate.",
               lambda r: r.stats.predicted_peak_pages),
    MetricSpec("gauge", "prediction_coverage_ratio",
               "Share of answers within the length predicted for this quantile on arrival.",
               _coverage, ("quantile",)),
)  # fmt: skip

ELSEWHERE = (
    MetricSpec("gauge", "memory_nodes", "Memory nodes, by state.",
               lambda r: by({"connected": r.stats.memory_nodes - r.stats.memory_nodes_missing,
                              "missing": r.stats.memory_nodes_missing}), ("state",)),
    MetricSpec("gauge", "kvp_holders", "Replicas and nodes that hold parts of sequences.",
               lambda r: r.stats.kvp_holders),
    MetricSpec("gauge", "kvp_lent_bytes", "K/V memory that other replicas use.",
               lambda r: r.stats.kvp_lent_bytes),
    MetricSpec("gauge", "kvp_borrowed_bytes", "K/V of this replica on others and on nodes.",
               lambda r: r.stats.kvp_borrowed_bytes),
    MetricSpec("gauge", "state_bytes_in_use",
               "States of sequences in this machine's memory, beside K/V on memory nodes.",
               lambda r: r.stats.state_bytes_in_use),
    MetricSpec("gauge", "state_bytes_capacity", "The memory for states beside memory nodes.",
               lambda r: r.stats.state_bytes_capacity),
    MetricSpec("gauge", "memory_node_state", "1 for the state of each memory node.",
               lambda r: [((url, state), 1) for url, state in r.stats.memory_node_states.items()],
               ("node", "state")),
    MetricSpec("gauge", "memory_node_rows",
               "1 for how rows travel to each memory node: by a lane or by its endpoint.",
               lambda r: [((url, by.partition(":")[0]), 1)
                          for url, by in r.stats.memory_node_rows.items()],
               ("node", "by")),
    MetricSpec("counter", "memory_nodes_lost", "Losses of memory nodes.",
               lambda r: r.stats.memory_nodes_lost),
    MetricSpec("counter", "sequences_recomputed",
               "Sequences recomputed after the loss of a memory node.",
               lambda r: r.stats.recomputed_sequences),
    MetricSpec("gauge", "disk_pages", "Pages on disk.", lambda r: r.stats.disk_pages),
    MetricSpec("gauge", "disk_bytes", "Bytes of the pages on disk.", lambda r: r.stats.disk_bytes),
    MetricSpec("counter", "disk_page_events", "Pages stored, loaded, lost and failed to store.",
               lambda r: by({"stored": r.stats.disk_stored_pages,
                              "loaded": r.stats.disk_loaded_pages,
                              "lost": r.stats.disk_lost_pages,
                              "failed": r.stats.disk_failed_pages}),
               ("event",)),
    MetricSpec("counter", "disk_errors", "Disk errors, by kind.",
               lambda r: by({"corrupt": r.stats.disk_corrupt_pages,
                              "read": r.stats.disk_read_errors,
                              "write": r.stats.disk_write_errors}), ("kind",)),
    MetricSpec("gauge", "kv_peer_connected", "1 for each peer that K/V can be pulled from now.",
               lambda r: _pulls(r, "is_connected"), ("peer",)),
    MetricSpec("counter", "kv_peer_names", "Names of pages that each peer was asked about, those"
               " that it had, and those that it had no more when they were pulled.",
               _peer_names, ("peer", "kind")),
    MetricSpec("counter", "kv_peer_pulled_pages", "Pages pulled from each peer.",
               lambda r: _pulls(r, "pulled"), ("peer",)),
    MetricSpec("counter", "kv_peer_pull_seconds", "Seconds of pulling from each peer.",
               lambda r: _pulls(r, "seconds"), ("peer",)),
    MetricSpec("counter", "kv_peer_lost", "Connections to each peer that ended, and late answers.",
               lambda r: _pulls(r, "lost"), ("peer",)),
    MetricSpec("counter", "kv_peer_refused",
               "Connections to each peer that were ended for what it sent or is.",
               lambda r: _pulls(r, "refused"), ("peer",)),
    MetricSpec("counter", "kv_served_pages", "Pages that peers asked for, by outcome.",
               lambda r: by({kind: getattr(r.stats.kv_peers.serves, kind)
                              for kind in ("served", "missing") if r.stats.kv_peers}),
               ("outcome",)),
    MetricSpec("counter", "kv_served_refused",
               "Connections of peers that were ended for what they sent, are or did not take.",
               lambda r: r.stats.kv_peers.serves.refused if r.stats.kv_peers else None),
    MetricSpec("gauge", "kv_copy_bytes", "Copies here of K/V of peers' running sequences.",
               lambda r: c.num_bytes if (c := _copies(r)) else None),
    MetricSpec("counter", "kv_copy_pages", "Pages copied from peers' running sequences, and how"
               " often copies were read, here or by a peer.",
               lambda r: by({"copied": c.copied, "used": c.used} if (c := _copies(r)) else {}),
               ("event",)),
    MetricSpec("counter", "kv_copy_declined",
               "Peers' sequences for whose copies there was no room, or whose pages did not come.",
               lambda r: c.declined if (c := _copies(r)) else None),
    MetricSpec("gauge", "weights_pull_seconds", "Seconds in which the weights came from peers.",
               lambda r: _of_weights(r, "pull_s")),
    MetricSpec("gauge", "weights_pulled_bytes", "Bytes of weights that came from peers.",
               lambda r: _of_weights(r, "pulled_bytes")),
    MetricSpec("gauge", "weights_repeated_chunks", "Chunks of them that came wrong, late or short.",
               lambda r: _of_weights(r, "repeated")),
    MetricSpec("gauge", "weights_shared_bytes", "Bytes of weights in the memory of a peer.",
               lambda r: _of_weights(r, "shared_bytes")),
    MetricSpec("gauge", "weights_peers", "Replicas that pull weights now.",
               lambda r: _of_weights(r, "peers")),
    MetricSpec("counter", "weights_served_bytes", "Bytes of weights given to other replicas.",
               lambda r: _of_weights(r, "served_bytes")),
    MetricSpec("counter", "weights_served_refused",
               "Connections for weights without the key, or ended for what the peer did.",
               lambda r: _of_weights(r, "refused")),
    *STREAMING,
    MetricSpec("gauge", "disk_paused", "1 while writing is paused after errors.",
               lambda r: float(r.stats.disk_is_paused)),
)  # fmt: skip

GROUP = (
    MetricSpec("gauge", "group_ranks", "1 for the state of each rank: up or lost.",
               lambda r: [((str(each.stage), str(each.tensor), each.host, each.state), 1)
                          for each in (r.stats.group.ranks if r.stats.group else ())],
               ("stage", "tp", "host", "state")),
    MetricSpec("counter", "stage_busy_seconds", "Seconds in which the engine's stage computed.",
               lambda r: _of_stage(r, "busy"), ("stage",)),
    MetricSpec("counter", "stage_wait_seconds",
               "Seconds in which the engine's stage waited for the stage before it.",
               lambda r: _of_stage(r, "wait"), ("stage",)),
    MetricSpec("counter", "exchange_seconds",
               "Seconds in which the engine's rank waited for other tensor ranks.",
               lambda r: r.stats.group.seconds.exchange if r.stats.group else None),
    MetricSpec("counter", "group_restarts", "How often the group was formed again after a loss.",
               lambda r: r.stats.group.num_restarts if r.stats.group else None),
    MetricSpec("gauge", "steps_in_flight", "Steps in the stages of the pipeline.",
               lambda r: r.stats.steps_in_flight if r.stats.group else None),
)  # fmt: skip

SERVER = (
    MetricSpec("counter", "http_requests", "Answers by route, method and status class.",
               lambda r: list(r.http.answers.items()), ("handler", "method", "status"),
               "http_requests"),
    MetricSpec("counter", "requests_refused", "Error answers, by code.",
               lambda r: by(dict(r.http.refused)), ("reason",)),
    MetricSpec("counter", "requests_over_slo",
               "Requests refused because the first token would have been too late.",
               lambda r: r.stats.num_refused),
    MetricSpec("gauge", "predicted_ttft_seconds",
               "Predicted time to first token of the last checked request.",
               lambda r: r.stats.predicted_ttft_s),
    MetricSpec("gauge", "predicted_queue_seconds",
               "Predicted wait of a short request that arrives now, before its own prefill.",
               lambda r: r.view.predicted_queue_s()),
    MetricSpec("gauge", "charged_bytes",
               "Expected memory of the calls in progress that take far more than their bodies.",
               lambda r: r.charged_bytes),
    MetricSpec("gauge", "connections", "Open connections.", lambda r: r.http.num_connections()),
    MetricSpec("gauge", "live_watchers", "Readers of /live.", lambda r: r.http.num_watchers),
    MetricSpec("histogram", "event_loop_lag_seconds", "Delay of the event loop's wake-ups.",
               lambda r: r.http.lag_s),
    MetricSpec("gauge", "pool_queue_length", "Waiting jobs, by pool.",
               lambda r: by({name: waiting for name, (waiting, _) in r.view.pools().items()}),
               ("pool",)),
    MetricSpec("counter", "pool_busy_seconds", "Busy seconds, by pool.",
               lambda r: by({name: busy_s for name, (_, busy_s) in r.view.pools().items()}),
               ("pool",)),
)  # fmt: skip

STRUCTURED = (
    MetricSpec("counter", "structured_output_requests", "Requests with a grammar, by hit or miss of"
               " the grammar cache.", _grammar_requests, ("cache",)),
    MetricSpec("gauge", "structured_output_cached_grammars", "Compiled grammars in the cache.",
               lambda r: len(r.view.grammars or ())),
    MetricSpec("gauge", "structured_output_cache_bytes", "Estimated bytes of the cached grammars.",
               lambda r: r.view.grammars.num_bytes if r.view.grammars else 0),
)  # fmt: skip

KEPT = (
    MetricSpec("gauge", "kept_bytes", "Bytes kept between requests, by what keeps them; estimates"
               " for tables of objects.",
               lambda r: by({name: kept.num_bytes for name, kept in r.kept.items()}), ("what",)),
    MetricSpec("gauge", "kept_entries", "Entries kept between requests, by what keeps them.",
               lambda r: by({name: kept.entries for name, kept in r.kept.items()}), ("what",)),
    MetricSpec("gauge", "memory_bytes", "Resident memory of the process by what backs it:"
               " anonymous, files, or shared memory, which is the mapped K/V pool.",
               lambda r: by(memory_parts()), ("part",)),
    MetricSpec("gauge", "heap_bytes", "The C heap: in use, free but kept, and large blocks with"
               " mappings of their own.", _heap, ("state",)),
    MetricSpec("gauge", "python_blocks", "Allocated blocks of Python objects.",
               lambda r: sys.getallocatedblocks()),
    MetricSpec("gauge", "worker_memory_bytes", "Resident memory of child processes, by worker.",
               lambda r: by(r.workers), ("worker",)),
)  # fmt: skip

CACHE_INFO = MetricSpec(
    "gauge", "cache_config_info", "Configuration of K/V memory.", lambda r: 1.0, (),
    "vllm:cache_config_info",
)  # fmt: skip

# Routers that were written for earlier versions of vLLM read it.
FORMER_USAGE = MetricSpec(
    "gauge", "gpu_cache_usage_perc", "The former name of vllm:kv_cache_usage_perc.", _usage
)

SECTIONS = {
    "Requests": REQUESTS,
    "Steps": STEPS,
    "Memory": MEMORY,
    "Disk and memory nodes": ELSEWHERE,
    "Ranks of a model": GROUP,
    "Structured output": STRUCTURED,
    "Server": SERVER,
    "What is kept": KEPT,
}
