"""Pool 2's work: one step on the device, from a plan to sampled tokens. Synchronous.

Owns the model, the K/V tensors and the attention seam. It decides nothing: the plan says which
rows run, the KV manager which pages are mapped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from memory.attention import PlannedAttention
from memory.kv_range import Range
from memory.split_kv import Books
from serve.batch import make_batch
from serve.models import Decoder
from serve.plan import StepPlan
from serve.request import TokenLogprobs
from serve.sampler import sample
from serve.sequence import Sequence

# Decoding, pages are mapped ahead for so many steps, and so often: waking the thread costs more
# than what it does.
_STEPS_AHEAD = 12
_LOOK_EVERY = 6


class StepResult(NamedTuple):
    """tokens[i] for sampled[i], in the plan's order."""

    sampled: list[Sequence]
    tokens: list[int]
    logprobs: list[TokenLogprobs | None] | None


def next_needs(plan: StepPlan) -> list[tuple[Range, int]]:
    """Tokens that the plan's sequences will need places for in the next steps: a prompt its next
    chunk, everyone a few more."""
    needs: list[tuple[Range, int]] = []
    for sequence, rows in zip(plan.sequences, plan.num_rows, strict=True):
        target = sequence.kv_range
        assert target is not None
        end = sequence.num_computed_tokens + rows
        need = max(end + _STEPS_AHEAD, min(len(sequence.token_ids), end + rows))
        if need > target.capacity:
            needs.append((target, min(need, sequence.max_tokens_total)))
    return needs


class Closes(Protocol):
    def close(self) -> None:
        """Give memory back."""


class Runner(Protocol):
    """What the engine's loop needs of the device."""

    def run(self, plan: StepPlan, launched: Callable[[], None]) -> StepResult:
        """Compute the plan's rows and sample. May raise; then nothing of the plan counts.

        Calls launched() when the host's part is done and the device is about to work.
        """

    def close(self) -> None:
        """Give the device's memory back."""


class ModelRunner:
    """A model on this machine."""

    def __init__(
        self,
        model: Decoder,
        kv: Books,
        attention: PlannedAttention,
        *,
        memory: Closes | None = None,
    ) -> None:
        self._model = model
        self._kv = kv
        self._attention = attention
        self._memory = memory
        self._num_steps = 0

    @torch.inference_mode()
    def run(self, plan: StepPlan, launched: Callable[[], None]) -> StepResult:
        self._kv.commit(s.kv_range for s in plan.sequences if s.kv_range is not None)
        self._num_steps += 1
        has_prompts = len(plan.num_rows) > plan.num_decodes
        if self._kv.space.maps_ahead and (has_prompts or self._num_steps % _LOOK_EVERY == 0):
            self._kv.look_ahead(next_needs(plan))
        batch = make_batch(plan)
        attention = self._attention.plan(batch.attention)
        launched()
        hidden = self._model.forward(batch.input_ids, batch.positions, attention)
        if not batch.sampled:
            return StepResult([], [], None)
        if len(batch.sampled) < hidden.shape[0]:
            hidden = hidden[batch.sample_rows]
        result = sample(self._model.logits(hidden), batch.sampled)
        return StepResult(batch.sampled, result.token_ids, result.logprobs)

    def close(self) -> None:
        del self._model, self._attention  # views of the reservation go before it does
        if self._memory is not None:
            self._memory.close()
