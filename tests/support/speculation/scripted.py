"""Drafts of known answers that are as long as they can be, whatever a row costs."""

from __future__ import annotations

import collections.abc as abc
from typing import Any

from bench.common.scripted_drafts import Answers, ScriptedDrafter, scripted_speculation
from serve import LLM, SamplingParams
from serve.scheduler.sequence import Sequence
from serve.scheduler.step_time import StepTimeModel, StepWork
from serve.speculation.drafter import Draft
from serve.speculation.speculation import Speculation
from tests.support.speculation.mixed_requests import answers_of, results


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


def check_drafted(
    llm: LLM, prompts: list[Any], params: list[SamplingParams], outputs: list[Any]
) -> None:
    """Computes requests with drafts; outputs: what they must give."""
    answers = answers_of(prompts, outputs)
    for rate in (1.0, 0.7):
        draft_by_script(llm, answers, rate)
        before = num_accepted(llm)
        assert results(llm.generate(prompts, params, use_tqdm=False)) == results(outputs)
        assert num_accepted(llm) > before + 10
    assert llm.stats().pages_in_use == 0


class NoLookup:
    """A drafter without drafts."""

    first_guesses = (0.5,)
    kept_bytes = 0, 0

    def propose(self, sequences: abc.Sequence[Sequence], most: int) -> list[Draft | None]:
        return [None] * len(sequences)

    def ended(self, sequence: Sequence) -> None:
        """Keeps nothing for a sequence."""


class Costs(FreeRows):
    """Predicts that all steps take so many seconds, and that prompts take hardly any."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.rows_per_step = seconds, 64

    def predict(self, work: StepWork) -> float:
        return self.seconds

    def prefill_seconds(self, num_tokens: int, num_cached: int = 0) -> float:
        return 1e-9 * num_tokens


def always_draft(llm: LLM) -> Any:
    """From now on the engine's draft model, or head, drafts whatever it costs, nothing else does,
    and its drafts are computed. Returns it."""
    drafting = llm._loaded.core._scheduler.drafting
    assert isinstance(drafting, Speculation) and drafting._by_model is not None
    drafting._model = drafting._by_model._target = Costs(1.0)
    drafting._most_rows, drafting.drafter, drafting._ledger = 64, NoLookup(), None
    drafting._by_model.model.time = Costs(1e-5)
    return drafting._by_model.model
