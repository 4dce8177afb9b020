"""Computes what requests ask of their prompts' own rows from a step's hidden states
(serve/scheduler/prompt_outputs.py).

Rows of all sequences that want log-probabilities go through the head together, so many at once
that their logits stay within a bound: weights are read as seldom as memory allows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ops.cpu.sampling import SampledRows
from ops.cpu.token_logprobs import Scores, describe
from serve.models import Decoder
from serve.scheduler.prompt_outputs import Pooled, PromptOutputs, PromptPart, PromptScores
from serve.scheduler.step_plan import StepPlan

_LOGITS_BYTES = 32 << 20  # of fp32 logits at once


class PromptRowRequest(NamedTuple):
    """Rows at positions first .. end of a prompt; row: of the first, in the step's."""

    outputs: PromptOutputs
    first: int
    end: int
    row: int

    def of(self, hidden: Tensor) -> Tensor:
        return hidden[self.row : self.row + self.end - self.first]


def prompt_row_requests(
    plan: StepPlan, rows_at: Sequence[int] | None = None
) -> list[PromptRowRequest]:
    """What the plan's rows are to bring, each once. rows_at: each sequence's first row; None: they
    follow each other. Before the plan counts."""
    found: list[PromptRowRequest] = []
    taken: dict[int, int] = {}  # several outputs of one prompt may compute it side by side
    row = 0
    for index, (sequence, num_rows) in enumerate(zip(plan.sequences, plan.num_rows, strict=True)):
        outputs = sequence.prompt_outputs
        if outputs is not None and not outputs.is_complete:
            start = sequence.num_computed_tokens
            first = max(start, outputs.num_done, taken.get(id(outputs), 0))
            end = min(start + num_rows, outputs.end)
            if first < end:
                at = row if rows_at is None else rows_at[index]
                found.append(PromptRowRequest(outputs, first, end, at + first - start))
                taken[id(outputs)] = end
        row += num_rows
    return found


class PromptReader:
    """Computes the results of prompt rows; they are on the host once the device is done."""

    def __init__(
        self,
        model: Decoder,
        hidden: Tensor,
        wanted: Sequence[PromptRowRequest],
        fetch: Callable[[Tensor], Tensor] = lambda x: x,
    ) -> None:
        """hidden: [T, hidden], as the model returns it. fetch: starts a copy to the host."""
        self._scored = [w for w in wanted if isinstance(w.outputs, PromptScores)]
        self._pooled = [w for w in wanted if isinstance(w.outputs, Pooled)]
        self._scores = _scores(model, hidden, self._scored, fetch) if self._scored else []
        self._sums = [
            fetch(model.normed(w.of(hidden)).sum(0, dtype=torch.float64)) for w in self._pooled
        ]

    def parts(self) -> list[PromptPart]:
        found = [
            PromptPart(w.outputs, w.first, w.end, total.numpy())
            for w, total in zip(self._pooled, self._sums, strict=True)
        ]
        if self._scored:
            parts = [each.as_rows() if isinstance(each, Scores) else each for each in self._scores]
            rows = np.concatenate(parts)
            row = 0
            for w in self._scored:
                count = w.end - w.first
                found.append(PromptPart(w.outputs, w.first, w.end, rows[row : row + count]))
                row += count
        return found


def _scores(
    model: Decoder,
    hidden: Tensor,
    wanted: Sequence[PromptRowRequest],
    fetch: Callable[[Tensor], Tensor],
) -> list[SampledRows | Scores]:
    rows = torch.cat([w.of(hidden) for w in wanted]) if len(wanted) > 1 else wanted[0].of(hidden)
    tokens = np.array([token for w in wanted for token in _next_tokens(w)], dtype=np.int32)
    num_top = max(_asked(w).num_top for w in wanted)
    at_once = max(1, _LOGITS_BYTES // (4 * model.spec.vocab_size))
    return [
        describe(model.logits(rows[i : i + at_once]), tokens[i : i + at_once], num_top, fetch)
        for i in range(0, len(tokens), at_once)
    ]


def _asked(wanted: PromptRowRequest) -> PromptScores:
    assert isinstance(wanted.outputs, PromptScores)
    return wanted.outputs


def _next_tokens(wanted: PromptRowRequest) -> Sequence[int]:
    return _asked(wanted).token_ids[wanted.first + 1 : wanted.end + 1]
