"""Drafts of known answers that are as long as they can be, whatever a row costs."""

from __future__ import annotations

from bench.common.scripted_drafts import Answers, ScriptedDrafter, scripted_speculation
from serve import LLM
from serve.scheduler.step_time import StepTimeModel, StepWork


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
