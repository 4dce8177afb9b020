"""Attention whose results, like those of remote attention, exist only after a wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from memory.attention.seam import Attention, AttentionStep, PlannedAttention, Rotation, Ticket


class LateAttention:
    """PlannedAttention that computes in `wait`. events: (what, plan's number, layer)."""

    is_remote = True

    def __init__(self, inner: PlannedAttention, fails_at: tuple[int, int] | None = None) -> None:
        """fails_at: the (plan, layer) whose wait raises."""
        self.inner = inner
        self.fails_at = fails_at
        self.events: list[tuple[str, int, int]] = []
        self.steps: list[AttentionStep] = []

    def plan(self, step: AttentionStep) -> LatePlan:
        self.steps.append(step)
        return LatePlan(self, self.inner.plan(step), len(self.steps) - 1)


@dataclass
class LatePlan:
    parent: LateAttention
    inner: Attention
    number: int

    def begin(self, layer: int, q: Tensor) -> Ticket:
        self.parent.events.append(("begin", self.number, layer))
        return self.inner.begin(layer, q)

    def finish(
        self, ticket: Ticket, k: Tensor | None, v: Tensor | None, rotation: Rotation | None
    ) -> LateResult:
        return LateResult(self, (ticket, k, v, rotation))


@dataclass
class LateResult:
    plan: LatePlan
    arguments: tuple[Any, ...]

    def wait(self) -> Tensor:
        parent, layer = self.plan.parent, self.arguments[0].layer
        parent.events.append(("wait", self.plan.number, layer))
        if parent.fails_at == (self.plan.number, layer):
            raise ConnectionError("scripted")
        return self.plan.inner.finish(*self.arguments).wait()
