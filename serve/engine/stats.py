"""An engine's statistics: a snapshot of its counters, and the counters of its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from memory.evicting_kv import EvictingKV
from memory.kv_beside_states import KVBesideStates
from memory.kv_memory import KVMemory
from memory.prefix.peer_stats import PeersStats
from memory.segmented_kv import SegmentedKV
from serve.engine.counters import STEP_SECONDS, TOKENS
from serve.engine.early_rejection import EarlyRejection
from serve.engine.node_recovery import Recovery
from serve.group_stats import GroupStats
from serve.histogram import Histogram
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.step_plan import StepPlan

if TYPE_CHECKING:
    from memory.nodes.node_set import NodeSet


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of counters.

    num_draft_tokens, num_accepted_tokens: tokens of drafts, and those that agreed.
    memory_utilisation: pages in use over all pages, mean over the steps. predicted_peak_pages:
    of the running sequences and the last one that was considered for admission. coverage_p50,
    coverage_p90: share of answers within the quantile predicted on their arrival. These are None
    as long as there is no value, or if the policy does not predict. step_time_error:
    |predicted - real| / real, median of the last steps. chunk_limit_rows: prompt rows that the
    last step with a prompt had room for. pages_mapped: pages with memory behind them;
    pages_in_use belong to sequences, pages_cached only to the prefix cache. prefix_asked_tokens:
    tokens of admitted sequences; prefix_hit_tokens: those found in the cache;
    prefix_evicted_pages: pages evicted for lack of memory. predicted_ttft_s: of the last request
    checked against ttft_slo; num_refused: requests that exceeded it. num_priority_preemptions:
    preemptions for a request of a higher priority level, not for lack of memory.
    disk_stored_pages, _loaded_pages, _lost_pages: pages written, read back, and not readable any
    more. disk_failed_pages: pages not written, which are tried again. disk_pages, disk_bytes: what
    is on the disk now. disk_corrupt_pages, disk_read_errors: damaged pages and failed reads.
    disk_write_errors: failed writes. disk_refused_requests: write requests refused because there
    were too many, there was no room, or writing is paused after errors (disk_is_paused).
    kv_peers: K/V pulled from other engines and by them; None without kv_peers and kv_listen.
    kvp_holders: replicas and nodes that hold parts of sequences at present, with
    kvp_borrowed_bytes in all. kvp_lent_bytes: K/V memory that other replicas use. group: None on
    one rank. draft_pages_in_use: of the draft model's K/V memory. state_bytes_in_use: of the states
    that sequences have in this machine's memory while their K/V is on memory nodes, where
    state_bytes_capacity is the memory for them and for those of the prefix cache. dropped_tokens:
    tokens whose K/V was dropped by a kv_policy; held_tokens: those that its running sequences hold.
    """

    num_unfinished: int
    num_running: int
    num_waiting: int
    num_steps: int
    steps_in_flight: int
    num_prefill_rows: int
    num_decode_rows: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_finished: int
    num_preemptions: int
    num_priority_preemptions: int
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
    draft_pages_in_use: int
    prefix_asked_tokens: int
    prefix_hit_tokens: int
    prefix_evicted_pages: int
    disk_stored_pages: int
    disk_loaded_pages: int
    disk_lost_pages: int
    disk_failed_pages: int
    disk_declined_fetches: int
    disk_pages: int
    disk_bytes: int
    disk_corrupt_pages: int
    disk_read_errors: int
    disk_write_errors: int
    disk_refused_requests: int
    disk_is_paused: bool
    kv_bytes_per_token: int
    kv_page_bytes: int
    memory_nodes: int
    memory_nodes_missing: int
    memory_nodes_lost: int
    kvp_holders: int
    kv_peers: PeersStats | None
    kvp_lent_bytes: int
    kvp_borrowed_bytes: int
    state_bytes_in_use: int
    state_bytes_capacity: int
    dropped_tokens: int
    held_tokens: int
    memory_node_states: dict[str, str]  # by URL; healthy, late, lost or probation
    memory_node_rows: dict[str, str]  # by URL; "lane", or "endpoint: " and why there is none
    recomputed_sequences: int
    group: GroupStats | None
    last_step_age_s: float | None


@dataclass(frozen=True, slots=True)
class WeightStats:
    """What packed weights have come from peers and gone to them. peers: that pull now. pull_s:
    seconds of the pull. repeated: chunks that were asked for again. shared_bytes: that are in the
    memory of a peer. refused: connections without the key, or ended for what the peer sent or did
    not take."""

    pulled_bytes: int
    pull_s: float
    repeated: int
    shared_bytes: int
    served_bytes: int
    peers: int
    refused: int


@dataclass(slots=True)
class StepCounters:
    """Counts completed steps and their rows. num_mixed_steps: steps with prefill and decode rows.
    num_drafts: drafts of one sequence in one step. num_draft_tokens, num_accepted_tokens: their
    tokens, and those that agreed.
    last_s: the end of the last step. seconds: times of steps that did not fail."""

    num_steps: int = 0
    num_mixed_steps: int = 0
    num_prefill_rows: int = 0
    num_decode_rows: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    last_s: float | None = None
    rows: Histogram = field(default_factory=lambda: Histogram(TOKENS))
    seconds: Histogram = field(default_factory=lambda: Histogram(STEP_SECONDS))

    def add(self, plan: StepPlan, now_s: float, num_accepted: int = 0) -> None:
        num_prefill_rows = plan.num_prompt_rows
        self.num_steps += 1
        self.num_mixed_steps += bool(plan.num_decodes and num_prefill_rows)
        self.num_decode_rows += plan.num_decodes
        self.num_prefill_rows += num_prefill_rows
        if plan.num_drafted:
            self.num_drafts += sum([rows > 1 for rows in plan.num_rows[: plan.num_decodes]])
            self.num_draft_tokens += plan.num_drafted
            self.num_accepted_tokens += num_accepted
        self.rows.observe(plan.num_total_rows)
        self.last_s = now_s

    def last_age_s(self, clock: Callable[[], float]) -> float | None:
        """Seconds since the last step ended; None before the first one."""
        last_s = self.last_s
        return None if last_s is None else clock() - last_s


def engine_stats(
    scheduler: Scheduler,
    rejection: EarlyRejection | None,
    recovery: Recovery | None,
    steps: StepCounters,
    *,
    num_unfinished: int,
    clock: Callable[[], float],
) -> EngineStats:
    """Returns a snapshot of the statistics. Any thread may call it; values may be one step old."""
    kv = scheduler.kv
    prefixes, disk = kv.prefixes.stats, kv.prefixes.store_stats()
    coverage_p50, coverage_p90 = scheduler.policy.coverage()
    page_steps = max(1, scheduler.num_steps * kv.num_pages)  # 0 pages while nodes are lost
    return EngineStats(
        num_unfinished=num_unfinished,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_steps=steps.num_steps,
        steps_in_flight=len(scheduler.launched),
        num_prefill_rows=steps.num_prefill_rows,
        num_decode_rows=steps.num_decode_rows,
        num_draft_tokens=steps.num_draft_tokens,
        num_accepted_tokens=steps.num_accepted_tokens,
        num_finished=scheduler.num_finished,
        num_preemptions=scheduler.num_preemptions,
        num_priority_preemptions=scheduler.num_priority_preemptions,
        num_refused=rejection.num_refused if rejection else 0,
        predicted_ttft_s=rejection.predicted_s if rejection else None,
        preemptions_per_1000=1000 * scheduler.num_preemptions / max(1, scheduler.num_finished),
        memory_utilisation=scheduler.num_page_steps / page_steps,
        predicted_peak_pages=scheduler.policy.predicted_peak_pages,
        coverage_p50=coverage_p50,
        coverage_p90=coverage_p90,
        step_time_error=scheduler.chunks.model.median_error(),
        chunk_limit_rows=scheduler.chunks.limit,
        pages_in_use=kv.num_in_use,
        pages_mapped=kv.num_mapped,
        pages_total=kv.num_pages,
        pages_cached=kv.num_cached,
        draft_pages_in_use=scheduler.drafting.num_pages_in_use if scheduler.drafting else 0,
        prefix_asked_tokens=prefixes.num_asked_tokens,
        prefix_hit_tokens=prefixes.num_hit_tokens,
        prefix_evicted_pages=prefixes.num_evicted,
        disk_stored_pages=prefixes.num_stored,
        disk_loaded_pages=prefixes.num_loaded,
        disk_lost_pages=prefixes.num_lost,
        disk_failed_pages=prefixes.num_failed,
        disk_declined_fetches=prefixes.num_declined,
        disk_pages=disk.entries,
        disk_bytes=disk.bytes_used,
        disk_corrupt_pages=disk.corrupt,
        disk_read_errors=disk.read_errors,
        disk_write_errors=disk.write_errors,
        disk_refused_requests=disk.refused,
        disk_is_paused=disk.is_paused,
        kv_peers=disk.peers,
        kv_bytes_per_token=kv.token_bytes,
        kv_page_bytes=kv.page_bytes,
        **_node_stats(recovery.nodes if recovery else None),
        **_kvp_stats(kv),
        **_eviction_stats(scheduler),
        **_state_stats(kv),
        recomputed_sequences=recovery.num_recomputed if recovery else 0,
        group=recovery.group if recovery else None,
        last_step_age_s=steps.last_age_s(clock),
    )


def _kvp_stats(kv: KVMemory) -> dict[str, Any]:
    holders = kv if isinstance(kv, SegmentedKV) else None
    return {
        "kvp_holders": sum([it.num_pages > 0 for it in holders.partitions]) if holders else 0,
        "kvp_lent_bytes": kv.num_lent * kv.page_bytes,
        "kvp_borrowed_bytes": holders.num_borrowed_bytes if holders else 0,
    }


def _state_stats(kv: KVMemory) -> dict[str, Any]:
    records = kv.records if isinstance(kv, KVBesideStates) else None
    return {
        "state_bytes_in_use": records.num_in_use * records.page_bytes if records else 0,
        "state_bytes_capacity": records.num_pages * records.page_bytes if records else 0,
    }


def _node_stats(nodes: NodeSet | None) -> dict[str, Any]:
    states = nodes.states.by_url() if nodes else {}
    far = [it for it in nodes.partitions if not it.is_local] if nodes else []
    return {
        "memory_nodes": nodes.num_nodes if nodes else 0,
        "memory_nodes_missing": len(nodes.missing) if nodes else 0,
        "memory_nodes_lost": nodes.num_lost if nodes else 0,
        "memory_node_states": {url: state.value for url, state in states.items()},
        "memory_node_rows": {link.url: link.rows_by for it in far for link in [*it.links]},
    }


def _eviction_stats(scheduler: Scheduler) -> dict[str, Any]:
    kv, held = scheduler.kv, 0
    if not isinstance(kv, EvictingKV):
        return {"dropped_tokens": 0, "held_tokens": 0}
    for sequence in list(scheduler.running):
        target = sequence.kv_range
        held += 0 if target is None else max(0, sequence.num_computed_tokens - target.dropped)
    return {"dropped_tokens": kv.num_dropped_tokens, "held_tokens": held}
