"""A drafter that knows the answers and is right at a given rate, for measurements and tests."""

from __future__ import annotations

import random
from collections.abc import Sequence as List

from serve import LLM
from serve.engine.core import EngineCore
from serve.scheduler.sequence import Sequence
from serve.scheduler.step_time import StepTimeModel
from serve.speculation.draft_ledger import DraftLedger
from serve.speculation.drafter import Draft
from serve.speculation.speculation import Speculation

Answers = dict[tuple[int, ...], list[list[int]]]
"""From a prompt to the tokens of its outputs."""


class ScriptedDrafter:
    """Proposes the tokens of known answers, each with the probability `rate` of being right."""

    first_guesses = (0.5,)
    kept_bytes = 0, 0

    def __init__(self, answers: Answers, rate: float, seed: int = 0) -> None:
        """answers: may be exchanged later."""
        self.answers, self._rate = answers, rate
        self._rng = random.Random(seed)

    def propose(self, sequences: List[Sequence], most: int) -> list[Draft | None]:
        return [self._propose(sequence, most) for sequence in sequences]

    def _propose(self, sequence: Sequence, most: int) -> Draft | None:
        outputs = self.answers.get(tuple(sequence.request.prompt_token_ids))
        if outputs is None:
            return None
        begin = sequence.num_output_tokens
        rest = outputs[sequence.index][begin : begin + most]
        tokens = [t if self._rng.random() < self._rate else t ^ 1 for t in rest]
        return Draft(tokens, 0) if tokens else None

    def ended(self, sequence: Sequence) -> None:
        """Keeps nothing for a sequence."""


def scripted_speculation(
    llm: LLM, drafter: ScriptedDrafter, *, most: int = 15, model: StepTimeModel | None = None
) -> Speculation:
    """Returns what gives these drafts to the steps of an engine. model: predicts the time of steps,
    the engine's own by default."""
    return speculation_of(llm._loaded.core, drafter, most=most, model=model)


def speculation_of(
    core: EngineCore,
    drafter: ScriptedDrafter,
    *,
    most: int = 15,
    model: StepTimeModel | None = None,
) -> Speculation:
    """Does the same for an engine's core."""
    ledger = DraftLedger() if model is None else None
    steps = model or core._scheduler.chunks.model
    return Speculation(drafter, steps, core.kv, most, ledger=ledger)
