"""Texts of two models, greedy and sampled, end and validate against each of a hundred schemas,
also where the context is nearly too short for them."""

from __future__ import annotations

import json

import jsonschema
import pytest

from serve import LLM, SamplingParams
from serve.config import default_model_path
from serve.structured_output import StructuredOutput
from tests.support.engine.checkpoints import checkpoint
from tests.support.http.json_schemas import SCHEMAS

# The checker's "time" has no offset, and its "date" has no year 0.
FORMATS = jsonschema.FormatChecker(["ipv4", "uuid"])


@pytest.fixture(scope="module", params=["random", "embedded"])
def llm(request):
    path = checkpoint("llama") if request.param == "random" else default_model_path()
    with LLM(str(path), max_num_seqs=64) as llm:
        yield llm


def test_there_are_a_hundred():
    assert len({json.dumps(schema) for schema in SCHEMAS}) == 100
    for schema in SCHEMAS:
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.covering(1)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_text_validates_against_its_schema(llm, temperature):
    params = [
        SamplingParams(
            max_tokens=None,
            temperature=temperature,
            seed=i,
            structured=StructuredOutput("json_schema", json.dumps(schema)),
        )
        for i, schema in enumerate(SCHEMAS)
    ]
    prompts = [f"Say {i}:" for i in range(len(SCHEMAS))]
    for schema, result in zip(SCHEMAS, llm.generate(prompts, params, use_tqdm=False), strict=True):
        output = result.outputs[0]
        assert output.finish_reason in ("stop", "length"), f"{schema} {output}"
        validator = jsonschema.Draft202012Validator(schema, format_checker=FORMATS)
        validator.validate(json.loads(output.text))
