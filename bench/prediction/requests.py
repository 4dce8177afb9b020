"""The embedded model's mixed requests in two halves, one to learn from and one to measure, and an
oracle that knows the lengths of their greedy answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.load.workload.mixed import mixed_requests, num_mixed
from bench.load.workload.work import Work
from serve.engine.outputs import RequestOutput
from serve.request import Request
from serve.sampling_params import SamplingParams
from serve.scheduler.length_predictor import HistoryPredictor

GREEDY = SamplingParams(max_tokens=None, temperature=0.0)


def halves() -> tuple[list[Work], list[Work]]:
    """Returns the conversations to learn from and those to measure with."""
    works = [Work(messages=messages) for messages in mixed_requests(0, num_mixed())]
    return works[::2], works[1::2]


class Oracle:
    """A LengthPredictor that knows every answer's length, by its prompt."""

    def __init__(self, lengths: Mapping[tuple[int, ...], int]) -> None:
        self._lengths = lengths

    def quantile(self, request: Request, num_output: int, level: float) -> int:
        assert request.params.max_tokens is not None, "resolved by the engine"
        known = self._lengths.get(request.prompt_token_ids, request.params.max_tokens)
        return max(num_output + 1, known)

    def observe(self, request: Request, num_output: int) -> None:
        """Learns nothing."""

    def observe_cut(self, request: Request, num_output: int) -> None:
        """Learns nothing."""


def known_lengths(works: Sequence[Work]) -> dict[tuple[int, ...], int]:
    """Returns the lengths of the greedy answers by prompt; the embedded model computes them."""
    from serve import LLM

    conversations = [work.messages for work in works if work.messages is not None]
    with LLM() as llm:
        outputs: list[RequestOutput] = llm.chat(conversations, GREEDY, use_tqdm=False)
    return {tuple(output.prompt_token_ids): len(output.outputs[0].token_ids) for output in outputs}


def taught_history(lengths: Mapping[tuple[int, ...], int]) -> HistoryPredictor:
    """Returns a predictor that has seen these answers, by prompt."""
    predictor = HistoryPredictor()
    for prompt, length in lengths.items():
        params = SamplingParams(max_tokens=length)
        predictor.observe(Request("", None, prompt, params, 0.0), length)
    return predictor
