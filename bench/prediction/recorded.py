"""Answers of the embedded model, recorded with the sketches of hidden states that were read while
they were computed, and a simulated engine that shows them to the predictor at the same moments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.load.workload.work import Work
from bench.prediction.requests import GREEDY
from bench.simulate.engine import SimulatedEngine, Step
from serve.prediction.learned import LearnedPredictor
from serve.prediction.regression import Floats
from serve.scheduler.admission import PredictedPolicy
from serve.scheduler.sequence import Sequence as ServedSequence


@dataclass(slots=True)
class Recorded:
    """A request and its answer's length. sketches: by the number of output tokens before."""

    prompt: tuple[int, ...]
    num_output: int
    sketches: dict[int, Floats] = field(default_factory=dict)


class _Recorder(LearnedPredictor):
    """Records the sketches of each sequence's states."""

    def __init__(self) -> None:
        super().__init__()
        self.sketches: dict[tuple[int, ...], dict[int, Floats]] = {}

    def saw_state(self, sequence: ServedSequence, num_output: int, sketch: Floats) -> None:
        of_prompt = self.sketches.setdefault(sequence.request.prompt_token_ids, {})
        of_prompt[num_output] = sketch
        super().saw_state(sequence, num_output, sketch)


def record(works: Sequence[Work]) -> list[Recorded]:
    """Returns the requests with the embedded model's greedy answers, in their order."""
    from serve import LLM

    conversations = [work.messages for work in works if work.messages is not None]
    recorder = _Recorder()
    with LLM(length_predictor="learned") as llm:
        policy = llm._loaded.core._scheduler.policy
        assert isinstance(policy, PredictedPolicy), "the default"
        policy.lengths = recorder
        outputs = llm.chat(conversations, GREEDY, use_tqdm=False)
    found = []
    for output in outputs:
        prompt = tuple(output.prompt_token_ids)
        length = len(output.outputs[0].token_ids)
        found.append(Recorded(prompt, length, recorder.sketches[prompt]))
    return found


class RecordedEngine(SimulatedEngine):
    """A simulated engine that shows recorded states to the memory policy when they are computed."""

    states: dict[ServedSequence, dict[int, Floats]]

    def watch(self, step: Step) -> None:
        """Shows the states of a step; `step` calls it before the scheduler gets the tokens."""
        for sequence in step.sampled:
            sketches = self.states[sequence]
            num_output = sequence.num_output_tokens
            if num_output in sketches:
                self.scheduler.policy.saw_state(sequence, num_output, sketches[num_output])
