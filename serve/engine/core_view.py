"""Values that other threads may read while the core works. They may be one step old."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple

from memory.prefix.sequence_names import Copied
from serve.engine.counters import PoolCounters, RequestCounters
from serve.engine.early_rejection import (
    EarlyRejection,
    LoadForecast,
    TtftForecast,
    forecast_load,
    forecast_ttft,
)
from serve.engine.pools import OutputThread
from serve.engine.step_executor import StepExecutor
from serve.kept import Kept, size_of
from serve.request import Request
from serve.sampling_params import SamplingParams
from serve.scheduler.admission import PredictedPolicy
from serve.scheduler.fair_queue import FairQueue
from serve.scheduler.memory_policy import MemoryPolicy
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.sequence import Sequence
from serve.structured.masks import MaskMaker

if TYPE_CHECKING:
    from serve.structured.compiler import GrammarCache

_DISK_ENTRY_BYTES = 400  # the index entry of a page on disk, with its key


class SequenceView(NamedTuple):
    """The sizes of a running sequence. key: the same object in each view of the same sequence."""

    key: object
    num_pages: int
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int


class CoreView:
    """Counters of the three pools, the running sequences and the traces of the steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        steps: StepExecutor,
        requests: RequestCounters,
        tokenize: PoolCounters,
        num_messages: Callable[[], int],
        output: OutputThread,
        masks: MaskMaker,
        rejection: EarlyRejection | None = None,
    ) -> None:
        self.requests = requests
        self.steps = steps.counts
        self.traces = steps.traces
        self._scheduler = scheduler
        self._tokenize = tokenize
        self._num_messages = num_messages
        self._output = output
        self._masks = masks
        self._rejection = rejection

    def sequences(self, max_sequences: int) -> list[SequenceView]:
        """Returns the first max_sequences of the running sequences, the oldest first."""
        running = self._scheduler.running[:max_sequences]
        num_groups = len(self._scheduler.kv.layout.groups)
        return [_view_of(sequence, num_groups) for sequence in running]

    def num_cached_tokens(self, request: Request) -> int:
        """Returns how many of a prompt's tokens a sequence would find in the prefix cache."""
        prefixes = self._scheduler.prefixes
        missing = prefixes.num_missing_rows(request, prefixes.page_keys(request))
        return len(request.prompt_token_ids) - missing

    def copied(self, request_id: str) -> Copied | None:
        """Returns at which engine the K/V of a running request is copied, if at any."""
        names = self._scheduler.prefixes.names
        return None if names is None else names.copied(request_id)

    def forecast(self, request: Request, num_cached: int) -> TtftForecast:
        """Predicts the time to the first token of a request that arrives now."""
        num_tokens = len(request.prompt_token_ids)
        num_rows = max(num_tokens - num_cached, min(1, num_tokens))
        return forecast_ttft(self._scheduler, request, num_rows, self._rejection)

    def predicted_queue_s(self) -> float:
        """Returns the predicted wait of the shortest request that arrives now."""
        return self.forecast(any_request(1), 0).queue_s

    def forecast_load(self) -> LoadForecast:
        """Predicts what prompts and streams would take here."""
        return forecast_load(self._scheduler, self.predicted_queue_s())

    @property
    def has_prefix_cache(self) -> bool:
        """Whether pages have names."""
        return self._scheduler.prefixes.is_on

    def kept(self) -> dict[str, Kept]:
        """Returns what the core keeps between requests, by name: exact sizes of what is counted in
        pages, estimates for tables. It takes about a millisecond."""
        scheduler, prefixes = self._scheduler, self._scheduler.kv.prefixes
        store, queue, drafting = prefixes.store_stats(), scheduler.waiting, scheduler.drafting
        num_mapped, page_bytes = scheduler.kv.num_mapped, scheduler.kv.page_bytes
        sizes = {
            "kv_pages": Kept(num_mapped, num_mapped * page_bytes),
            "prefix_index": size_of(*scheduler.kv.index_tables()),
            "host_tier": Kept(store.host_bytes // page_bytes, store.host_bytes),
            "disk_index": Kept(store.entries, store.entries * _DISK_ENTRY_BYTES),
            "length_predictor": size_of(*_histories(scheduler.policy)),
            "prompt_lookup": Kept(*(drafting.kept_bytes if drafting else (0, 0))),
            "fair_queue": size_of(queue.counters if isinstance(queue, FairQueue) else ()),
            "step_time_model": size_of((scheduler.chunks.model,)),
            "step_traces": size_of(*[trace.steps for trace in self.traces.open]),
        }
        return sizes | self._masks.kept()

    def grammar_worker_bytes(self) -> int:
        """Returns the resident memory of the process that tries grammars."""
        return self._masks.worker_bytes()

    @property
    def grammars(self) -> GrammarCache | None:
        """Compiled grammars of structured output; None before the first request with one."""
        return self._masks.grammars

    def pools(self) -> dict[str, tuple[int, float]]:
        """Returns the number of waiting items and the seconds of work of each pool. Pool 1 is
        "tokenize", pool 2 "compute" and pool 3 "output"."""
        return {
            "tokenize": (self._tokenize.num_waiting, self._tokenize.busy_s),
            "compute": (self._num_messages(), self.steps.seconds.sum),
            "output": (self._output.num_waiting, self._output.busy_s),
        }


def any_request(num_tokens: int, params: SamplingParams | None = None) -> Request:
    """Returns a request of which only the number of tokens matters."""
    return Request("", None, (0,) * num_tokens, params or SamplingParams(), 0.0)


def _histories(policy: MemoryPolicy) -> tuple[Collection[object], ...]:
    """Returns what a policy predicts lengths from, the past ones first; those are empty for a
    user's own predictor."""
    return policy.lengths.tables if isinstance(policy, PredictedPolicy) else ((),)


def _view_of(sequence: Sequence, num_groups: int) -> SequenceView:
    """num_groups: layer groups of the K/V; further parts of a range are records in other memory."""
    target = sequence.kv_range  # the compute thread may take it away
    parts = () if target is None else target.parts[:num_groups]
    pages = sum(len(p.pages) - p.num_released for p in parts)
    return SequenceView(
        sequence,
        pages,
        sequence.num_tokens,
        sequence.num_prompt_tokens,
        sequence.num_computed_tokens,
    )
