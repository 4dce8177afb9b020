"""Computes rows of a model that drafts, one step at a time, and waits for what they give."""

from __future__ import annotations

import collections.abc as abc
from typing import Protocol

import torch
from torch import Tensor

from memory.attention.seam import AttentionStep, PlannedAttention
from serve.models import StepModel


class Forward(Protocol):
    """Computes a step whose pages are mapped."""

    def __call__(
        self,
        input_ids: list[int],
        positions: list[int],
        step: AttentionStep,
        ends: abc.Sequence[int],
    ) -> Tensor | None:
        """Computes the rows, and waits until they are. Returns the logits, [len(ends), vocab] fp32
        in the host's memory, of the rows `ends`; None if there are none of these."""


class HostForward:
    """Implements Forward on this machine's processors."""

    def __init__(self, model: StepModel, attention: PlannedAttention) -> None:
        self._model, self._attention = model, attention

    @torch.inference_mode()
    def __call__(
        self,
        input_ids: list[int],
        positions: list[int],
        step: AttentionStep,
        ends: abc.Sequence[int],
    ) -> Tensor | None:
        rows = torch.tensor(input_ids), torch.tensor(positions)
        hidden = self._model.forward(*rows, self._attention.plan(step))
        if not ends:
            return None
        is_all = list(ends) == list(range(len(input_ids)))
        return self._model.logits(hidden if is_all else hidden[list(ends)])
