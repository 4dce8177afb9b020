"""Drafts of known answers that are as long as they can be, whatever a row costs."""

from __future__ import annotations

import collections.abc as abc

from bench.common.scripted_drafts import Answers, ScriptedDrafter, scripted_speculation
from serve import LLM
from serve.scheduler.sequence import Sequence
from serve.scheduler.step_time import StepTimeModel, StepWork
from serve.speculation.draft_model import DraftModel
from serve.speculation.drafter import Draft
from serve.speculation.speculation import Speculation


class FreeRows(StepTimeModel):
    """Predicts that all steps take as long, so that every draft is worth its rows."""

    def __init__(self) -> None:
        super().__init__(1)

    def predict(self, work: StepWork) -> float:
        return 1.0


def draft_by_script(llm: LLM, answers: Answers, rate: float) -> None:
    """From now on the engine's steps have drafts whose tokens are right at this rate."""
    drafter = ScriptedDrafter(answers, rate)
    drafting = scripted_speculation(llm, drafter, most=7, model=FreeRows())
    llm._loaded.core._scheduler.drafting = drafting


def num_accepted(llm: LLM) -> int:
    """Returns how many draft tokens have agreed so far."""
    return llm._loaded.core._executor.counts.num_accepted_tokens


class NoLookup:
    """A drafter without drafts."""

    first_guesses = (0.5,)

    def propose(self, sequences: abc.Sequence[Sequence], most: int) -> list[Draft | None]:
        return [None] * len(sequences)

    def ended(self, sequence: Sequence) -> None:
        """Keeps nothing for a sequence."""

    def close(self) -> None:
        """Keeps nothing."""


class Costs(FreeRows):
    """Predicts that all steps take so many seconds, and that prompts take hardly any."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.rows_per_step = seconds, 64

    def predict(self, work: StepWork) -> float:
        return self.seconds

    def prefill_seconds(self, num_tokens: int, num_cached: int = 0) -> float:
        return 1e-9 * num_tokens


def always_draft(llm: LLM) -> DraftModel:
    """From now on the engine's draft model drafts whatever it costs, nothing else does, and its
    drafts are computed. Returns it."""
    drafting = llm._loaded.core._scheduler.drafting
    assert isinstance(drafting, Speculation) and drafting._by_model is not None
    drafting._model = drafting._by_model._target = Costs(1.0)
    drafting._most_rows, drafting.drafter = 64, NoLookup()
    drafting._by_model.model.time = Costs(1e-5)
    return drafting._by_model.model
