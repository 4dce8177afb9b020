"""Speculative decoding: what proposes tokens, and how many of them a step computes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from serve.config import EngineConfig
from serve.errors import ConfigError
from serve.loading.draft_model import LoadedDraft
from serve.loading.runtime import Runtime
from serve.runner.runner import FollowedRunner
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.step_results import Drafting
from serve.setting_checks import DRAFT_HEADS

if TYPE_CHECKING:
    from serve.speculation.drafter import DraftSource
    from serve.speculation.head_drafts import HeadDrafts

_TILED = ("int8", "int4")


def make_head_drafts(config: EngineConfig, runtime: Runtime) -> HeadDrafts | None:
    """Returns what drafts with the head beside the model; None if there is none."""
    if config.speculation not in DRAFT_HEADS:
        return None
    from serve.speculation.head_drafts import HeadDrafts

    head, size, rows = runtime.model.draft_head, runtime.spec.vocab_size, config.batched_tokens
    assert head is not None, "it is loaded with the model"
    runner, parts = runtime.runner, (head, runtime.attention, runtime.kv, size, rows)
    if not isinstance(runner, FollowedRunner):
        return HeadDrafts(*parts)
    runner.follower = drafts = HeadDrafts(*parts, use_pages=runner.use_pages)
    return drafts


def make_drafting(
    config: EngineConfig,
    scheduler: Scheduler,
    runtime: Runtime,
    draft: LoadedDraft | None = None,
    head: HeadDrafts | None = None,
) -> Drafting | None:
    """Returns what gives drafts to the engine's steps; None if they are off, or if the rows of a
    draft would not have the bits of single rows where this engine computes attention. draft: a
    draft model. ConfigError if there is one, or a head, and it would never be used."""
    evicts = config.policy is not None and config.policy.evicts
    if config.speculation == "off" or evicts:  # rows of drafts would give scores, too
        return None
    is_asked = draft is not None or head is not None
    if not _is_exact(config, runtime):
        if is_asked:
            raise ConfigError(
                f"speculation {config.speculation} needs K/V in tiles if sequences are longer than"
                " kvp_segment_tokens: use kv_dtype int8"
            )
        return None
    is_cuda = runtime.precision.backend == "cuda"
    if is_cuda and (config.num_ranks > 1 or config.memory_nodes or runtime.spec.state_layers):
        return None  # a draft model or a head was refused when the model was loaded
    from serve.speculation import prompt_lookup
    from serve.speculation.draft_ledger import DraftLedger
    from serve.speculation.speculation import Speculation

    if not prompt_lookup.is_available():
        if is_asked:
            name = f"speculation {config.speculation}"
            raise ConfigError(f"{name} needs the native kernels, which are not built")
        return None
    model: DraftSource | None = head
    if draft is not None:
        from serve.speculation.draft_model import DraftModel

        size, has_prefixes = runtime.spec.vocab_size, config.prefix_cache
        rows = config.batched_tokens
        model = DraftModel(draft.runtime, draft.compute, size, rows, has_prefixes=has_prefixes)
    drafter = prompt_lookup.PromptLookup()
    most = config.max_draft_tokens
    device_rows = min(config.max_num_seqs, config.batched_tokens) if is_cuda else None
    overlaps = is_cuda or config.pipeline_parallel_size > 1
    ledger = None if overlaps else DraftLedger()
    return Speculation(
        drafter, scheduler.chunks.model, runtime.kv, most, device_rows, model, ledger
    )


def use_drafting(scheduler: Scheduler, drafting: Drafting | None) -> None:
    """Makes the scheduler give its steps drafts, and count the steps of answers by them."""
    scheduler.drafting = drafting
    if drafting is not None:
        scheduler.waiting.tokens_per_step = drafting.tokens_per_step
        scheduler.policy.tokens_per_step = drafting.tokens_per_step


def _is_exact(config: EngineConfig, runtime: Runtime) -> bool:
    """Returns whether several rows of a sequence have the bits of single ones. K/V in tiles is
    attended to by one kernel; plain K/V by two, of which only local memory takes the right one."""
    if config.memory_nodes:
        assert runtime.nodes is not None
        return runtime.precision.kv in _TILED and not runtime.nodes.prefix_only
    has_segments = config.holders or runtime.kv.max_model_len > config.kvp_segment_tokens
    return not has_segments or runtime.precision.kv in _TILED
