"""Loads that have to preempt a sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from serve import LLM

Found = TypeVar("Found")


def until_preempted(llm: LLM, run: Callable[[], Found], most: int = 10) -> Found:
    """Repeats a load until one of the engine's sequences was preempted, and returns what the last
    run gave. Which sequences run at once depends on when each request arrives."""
    for _ in range(most):
        found = run()
        if llm.stats().num_preemptions > 0:
            return found
    raise AssertionError(f"no sequence was preempted in {most} runs")
