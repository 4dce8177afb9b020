"""The text that a request predicts: drafts come from it, and no token changes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serve import LLM, SamplingParams
from serve.errors import RequestError
from serve.request import Prediction, Request
from serve.scheduler.sequence import Sequence, make_sequences
from serve.speculation import prompt_lookup, speculation
from serve.speculation.prompt_lookup import PromptLookup
from serve.structured_output import StructuredOutput
from tests.support.engine.checkpoints import checkpoint
from tests.support.speculation.mixed_requests import results

TEXT = "def forward(self, positions):\n    return self.norm(positions) + self.scale * 12\n" * 2
EDITED = TEXT.replace("self.scale * 12", "self.other * 34", 1)


def params(prediction: str | None, **more: Any) -> SamplingParams:
    choice = StructuredOutput("choice", json.dumps([EDITED]))
    return SamplingParams(
        max_tokens=200, temperature=0.0, structured=choice, prediction=prediction, **more
    )


def test_an_edited_text(monkeypatch: pytest.MonkeyPatch):
    """All but the edit is drafted from the prediction; without one there is little to go by."""
    monkeypatch.setattr(speculation, "_DEAR_MASK_S", 1.0)
    prompt = {"prompt_token_ids": [9, 8, 7]}
    with LLM(str(checkpoint("llama")), dtype="int8") as llm:
        [plain] = llm.generate([prompt], params(None), use_tqdm=False)
        assert plain.accepted_prediction_tokens == plain.rejected_prediction_tokens == 0
        num_tokens = len(plain.outputs[0].token_ids)
        drafting = llm._loaded.core._scheduler.drafting
        drafting._ledger = None  # type: ignore[union-attr]
        # how long drafts are does not depend on what else the machine does
        drafting._seconds = lambda rows, context: 1.0 + 0.01 * rows  # type: ignore[union-attr]
        for n in (1, 2):
            for _ in range(50):  # masks that come late end drafts
                [output] = llm.generate([prompt], params(TEXT, n=n), use_tqdm=False)
                assert results([output])[0] == results([plain])[0]
                accepted = output.accepted_prediction_tokens
                if output.rejected_prediction_tokens and accepted > 0.25 * n * num_tokens:
                    break
            else:
                pytest.fail(f"{accepted} of {n * num_tokens} tokens were accepted")
        stats = llm.stats()
        assert stats.num_accepted_tokens > accepted
        assert stats.pages_in_use == 0


def test_a_wrong_prediction():
    with LLM(str(checkpoint("llama")), dtype="int8") as llm:
        asked = SamplingParams(max_tokens=40, temperature=0.8, seed=3, ignore_eos=True)
        [plain] = llm.generate(["pack my box"], asked, use_tqdm=False)
        wrong = asked.changed(prediction=TEXT)
        assert results(llm.generate(["pack my box"], wrong, use_tqdm=False)) == results([plain])


def test_off():
    with LLM(str(checkpoint("llama")), dtype="int8", speculation="off") as llm:
        [output] = llm.generate([[9, 8, 7]], params(TEXT), use_tqdm=False)
        assert output.outputs[0].text == EDITED
        assert output.accepted_prediction_tokens == output.rejected_prediction_tokens == 0


def test_refused():
    for wrong in ("", 3, ["a"]):
        with pytest.raises(RequestError, match="prediction must be a text") as caught:
            SamplingParams(prediction=wrong)  # type: ignore[arg-type]
        assert caught.value.param == "prediction"
    with LLM(str(checkpoint("llama")), max_model_len=64, dtype="int8") as llm:
        for size in (90, 1 << 20):
            asked = SamplingParams(prediction="the " * size)
            with pytest.raises(RequestError, match="longer than the model's context") as caught:
                llm.generate(["a"], asked, use_tqdm=False)
            assert caught.value.param == "prediction"


def sequence_of(answer: list[int], predicted: list[int]) -> Sequence:
    sampling = SamplingParams(max_tokens=900, seed=0)
    prediction = Prediction(tuple(predicted))
    request = Request("r", None, (1, 2, 3), sampling, 0.0, prediction=prediction)
    [sequence] = make_sequences(request, frozenset())
    sequence.token_ids.extend(answer)
    return sequence


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        ([50], [51, 52, 53]),
        ([51], []),
        ([50, 51, 52], [53, 54, 55]),
        ([50, 51, 99], []),
        ([50, 51, 99, 53, 54], [55, 56, 57]),
        ([50, 51, 99, 58, 59], []),
    ],
)
def test_where_the_answer_is(answer, found):
    lookup, sequence = PromptLookup(), sequence_of(answer, list(range(50, 60)))
    [draft] = lookup.propose([sequence], 3)
    assert ([] if draft is None else draft.token_ids) == found
    assert draft is None or draft.is_predicted
    assert lookup.kept_bytes[0] == 2
    lookup.ended(sequence)
    assert lookup.kept_bytes == (0, 0)


def test_a_long_prediction_takes_several_steps(monkeypatch):
    monkeypatch.setattr(prompt_lookup, "_TOKENS_A_STEP", 5)
    lookup, sequence = PromptLookup(), sequence_of([50], list(range(50, 70)))
    lookup.propose([sequence], 3)
    sequence.token_ids += [7, 60, 61]
    assert lookup.propose([sequence], 3) == [None]
    sequence.token_ids += [62]
    assert lookup.propose([sequence], 3) == [None], "60 was not known when it came"
    sequence.token_ids += [63]
    [draft] = lookup.propose([sequence], 3)
    assert draft is not None
    assert draft.token_ids == [64, 65, 66]
