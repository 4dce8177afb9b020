"""Speculative decoding: what proposes tokens, and how many of them a step computes."""

from __future__ import annotations

from memory.kv_memory import KVMemory
from serve.config import EngineConfig
from serve.runner.runner import OverlappingRunner, Runner
from serve.scheduler.scheduler import Scheduler
from serve.scheduler.step_results import Drafting


def make_drafting(
    config: EngineConfig, scheduler: Scheduler, kv: KVMemory, runner: Runner
) -> Drafting | None:
    """Returns what gives drafts to the engine's steps; None if they are off, or if the runner does
    not take them."""
    if config.speculation == "off" or config.memory_nodes:
        return None
    if isinstance(runner, OverlappingRunner) and runner.tokens_on_device:
        return None
    from serve.speculation import prompt_lookup
    from serve.speculation.speculation import Speculation

    if not prompt_lookup.is_available():
        return None
    drafter = prompt_lookup.PromptLookup()
    return Speculation(drafter, scheduler.chunks.model, kv, config.max_draft_tokens)
