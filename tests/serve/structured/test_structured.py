"""Structured output of the engine matches its grammar, whatever the model."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from serve import LLM, SamplingParams
from serve.config import default_model_path
from serve.errors import GenerationError, RequestError
from serve.http.calls.generation import checked
from serve.request import FinishReason, TokenDelta
from serve.structured.token_mask import REQUEST_FAULTS
from serve.structured_output import StructuredOutput
from tests.support.engine.checkpoints import checkpoint
from tests.support.engine.child import output_of

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["random", "embedded"])
def llm(request):
    path = checkpoint("llama") if request.param == "random" else default_model_path()
    with LLM(str(path), max_num_seqs=16) as llm:
        yield llm


def structured(kind, source="", **kwargs):
    source = source if isinstance(source, str) else json.dumps(source)
    return SamplingParams(
        **({"max_tokens": 200, "seed": 1} | kwargs), structured=StructuredOutput(kind, source)
    )


def answers(llm, params, prompts=("Once", "b")):
    return [o for r in llm.generate(list(prompts), params, use_tqdm=False) for o in r.outputs]


def test_a_schema_is_followed(llm):
    for params in (
        structured("json_schema", SCHEMA, temperature=0.0),
        structured("json_schema", SCHEMA, temperature=1.0, n=4, logprobs=2),
        structured("json_schema", SCHEMA, temperature=1.5, top_p=0.9, top_k=20),
    ):
        for output in answers(llm, params):
            assert output.finish_reason == "stop"
            jsonschema.validate(json.loads(output.text), SCHEMA)


@pytest.mark.parametrize("ending", [{}, {"ignore_eos": True}, {"min_tokens": 150}])
def test_the_grammar_ends_the_text(llm, ending):
    """A text ends with its grammar despite ignore_eos or min_tokens."""
    for output in answers(llm, structured("json_schema", SCHEMA, **ending)):
        assert output.finish_reason == "stop"
        jsonschema.validate(json.loads(output.text), SCHEMA)
    for output in answers(llm, structured("choice", ["yes", "no"], **ending)):
        assert (output.text in ("yes", "no")) and output.finish_reason == "stop"
    for output in answers(llm, structured("regex", "[a-c]{2,4}x", **ending)):
        assert re.fullmatch("[a-c]{2,4}x", output.text)
        assert output.finish_reason == "stop"


def test_other_endings_still_work(llm):
    for output in answers(llm, structured("regex", "a{60}", max_tokens=2)):
        assert output.finish_reason == "length"
    for output in answers(llm, structured("choice", ["abcdef"], stop=["d"])):
        assert (output.text, output.finish_reason, output.stop_reason) == ("abc", "stop", "d")
    stop = llm.tokenizer.encode_plain("b")[-1:]
    for output in answers(llm, structured("regex", "a+", stop_token_ids=stop)):
        assert set(output.text) == {"a"}  # the stop token is not text, but ends "a+"


def test_a_grammar(llm):
    source = 'start: "(" expr ")"\nexpr: /[0-9]{1,2}/ | /[0-9]/ "+" /[0-9]/'
    for output in answers(llm, structured("grammar", source)):
        assert re.fullmatch(r"\(([0-9]{1,2}|[0-9]\+[0-9])\)", output.text)
        assert output.finish_reason == "stop"


def test_any_object(llm):
    bias = dict.fromkeys(llm.tokenizer.encode_plain("}")[-1:], 30.0)
    for output in answers(llm, structured("json_object", logit_bias=bias, temperature=0.0)):
        assert isinstance(json.loads(output.text), dict)


def test_faults_of_a_grammar_are_request_errors():
    """A client's grammar never causes a 5xx."""
    for fault in REQUEST_FAULTS:
        delta = TokenDelta(0, "", [], None, FinishReason.ERROR, None, fault)
        with pytest.raises(RequestError) as caught:
            checked(delta)
        assert caught.value.code == "invalid_schema"
    with pytest.raises(GenerationError):
        checked(TokenDelta(0, "", [], None, FinishReason.ERROR, None, "ValueError in the engine"))


def test_plain_requests_do_not_import_the_grammar_library():
    code = (
        "import sys; from serve import LLM, SamplingParams; llm = LLM(); "
        "llm.generate('a', SamplingParams(max_tokens=2, bad_words=['x'])); "
        "print('llguidance' in sys.modules)"
    )
    assert output_of("-c", code).split()[-1] == "False"


@pytest.mark.row("G1")
def test_unsupported_grammars_are_refused(llm):
    for kind, source, word in [
        ("json_schema", {"type": "strnig"}, "strnig"),
        ("json_schema", {"not": {}}, "not"),
        ("regex", "(?=a)b", "look"),
        ("grammar", "start: nothing", "nothing"),
    ]:
        with pytest.raises(RequestError, match=word) as caught:
            answers(llm, structured(kind, source))
        assert caught.value.code == "invalid_schema"
        assert caught.value.param == "structured"
    assert answers(llm, SamplingParams(max_tokens=3, ignore_eos=True))[0].finish_reason == "length"
