"""Computes prompt outputs (serve/scheduler/prompt_outputs.py) from a step's hidden states.

The rows of all sequences with prompt log-probabilities go through the head together, in pieces
whose logits stay within LOGITS_BYTES, so that the head's weights are read as seldom as memory
allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.cpu.sampling import SampledRows
from ops.cpu.token_logprobs import Scores, describe
from serve.models import StepModel
from serve.scheduler.prompt_outputs import Pooled, PromptOutputs, PromptPart, PromptScores
from serve.scheduler.step_plan import StepPlan

LOGITS_BYTES = 32 << 20  # of fp32 logits at once


class PromptRowRequest(NamedTuple):
    """The rows of a prompt at positions first .. end, which begin at `row` of the step."""

    outputs: PromptOutputs
    first: int
    end: int
    row: int

    def of(self, hidden: Tensor) -> Tensor:
        """Returns the prompt's rows of the step's hidden states."""
        return hidden[self.row : self.row + self.end - self.first]


def prompt_row_requests(
    plan: StepPlan, rows_at: Sequence[int] | None = None
) -> list[PromptRowRequest]:
    """Returns the prompt rows of the plan whose results are needed, each once.

    rows_at has each sequence's first row; None means the plan's order. Call it before the plan's
    rows count as computed.
    """
    requests: list[PromptRowRequest] = []
    ends: dict[int, int] = {}  # several sequences of one request may compute the same prompt
    row = 0
    for index, (sequence, num_rows) in enumerate(zip(plan.sequences, plan.num_rows, strict=True)):
        outputs = sequence.prompt_outputs
        if outputs is not None and not outputs.is_complete:
            start = sequence.num_computed_tokens
            first = max(start, outputs.num_done, ends.get(id(outputs), 0))
            end = min(start + num_rows, outputs.end)
            if first < end:
                at = row if rows_at is None else rows_at[index]
                requests.append(PromptRowRequest(outputs, first, end, at + first - start))
                ends[id(outputs)] = end
        row += num_rows
    return requests


class PromptReader:
    """Computes the results of prompt rows, which are on the host when the device has finished."""

    def __init__(
        self,
        model: StepModel,
        hidden: Tensor,
        requests: Sequence[PromptRowRequest],
        fetch: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        """hidden: [T, hidden], as the model returns it. fetch starts a copy to the host."""
        self._scored = [r for r in requests if isinstance(r.outputs, PromptScores)]
        self._pooled = [r for r in requests if isinstance(r.outputs, Pooled)]
        self._scores = _scores(model, hidden, self._scored, fetch) if self._scored else []
        self._sums = [
            fetch(model.normed(r.of(hidden)).sum(0, dtype=torch.float64)) for r in self._pooled
        ]

    def parts(self) -> list[PromptPart]:
        """Returns the results. Call it after the copies that `fetch` started have ended."""
        parts = [
            PromptPart(request.outputs, request.first, request.end, total.numpy())
            for request, total in zip(self._pooled, self._sums, strict=True)
        ]
        if self._scored:
            scores = [each.as_rows() if isinstance(each, Scores) else each for each in self._scores]
            rows = np.concatenate(scores)
            row = 0
            for outputs, first, end, _ in self._scored:
                parts.append(PromptPart(outputs, first, end, rows[row : row + end - first]))
                row += end - first
        return parts


def _scores(
    model: StepModel,
    hidden: Tensor,
    requests: Sequence[PromptRowRequest],
    fetch: Callable[[Tensor], Tensor],
) -> list[SampledRows | Scores]:
    pieces = [request.of(hidden) for request in requests]
    rows = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    tokens = np.array([token for r in requests for token in _next_tokens(r)], dtype=np.int32)
    num_top = max(_scores_of(request).num_top for request in requests)
    count = max(1, LOGITS_BYTES // (4 * model.spec.vocab_size))
    return [
        describe(model.logits(rows[i : i + count]), tokens[i : i + count], num_top, fetch)
        for i in range(0, len(tokens), count)
    ]


def _scores_of(request: PromptRowRequest) -> PromptScores:
    assert isinstance(request.outputs, PromptScores)
    return request.outputs


def _next_tokens(request: PromptRowRequest) -> Sequence[int]:
    return _scores_of(request).token_ids[request.first + 1 : request.end + 1]
