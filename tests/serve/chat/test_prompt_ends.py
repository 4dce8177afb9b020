"""Whether a prompt ends inside the reasoning is read from the prompt, however its template says it.

The templates end as published ones do. The answers are those of a real engine with a random model,
which writes whatever the grammar allows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from serve import LLM, SamplingParams
from serve.structured_output import StructuredOutput
from serve.text.chat_parser import ChatFormat
from serve.text.chat_parser.formats import REASONING_FORMATS
from serve.text.chat_parser.grammar import forced_calls
from tests.support.engine.thinking import thinking_checkpoint

TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}<think></think>{% endif %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>END{% endif %}"
)
# The end of the prompt, whether it is inside the reasoning by default, and if asked to reason.
ENDS = {
    "glm-4.7": (
        "{{ '</think>' if (enable_thinking is defined and not enable_thinking) else '<think>' }}",
        True,
        True,
    ),
    "deepseek-v3.1": (
        "{% if not thinking is defined %}{% set thinking = false %}{% endif %}"
        "{% if not thinking %}{{ '</think>' }}{% else %}{{ '<think>' }}{% endif %}",
        False,
        True,
    ),
    "qwen3.5": (
        "{% if enable_thinking is defined and enable_thinking is true %}{{ '<think>\\n' }}"
        "{% else %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}",
        False,
        True,
    ),
    "qwen3": (
        "{% if enable_thinking is defined and enable_thinking is false %}"
        "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}",
        False,
        False,
    ),
    "r1": ("{{ '<think>\\n' }}", True, True),
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
USER = [{"role": "user", "content": "hello"}]
PARAMS = SamplingParams(max_tokens=200, seed=3, thinking_token_budget=12)
STRUCTURED = StructuredOutput("json_schema", json.dumps(SCHEMA))


@pytest.fixture(scope="module", params=ENDS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[LLM, bool, bool]]:
    end, is_open, is_open_if_asked = ENDS[request.param]
    template = TEMPLATE.replace("END", end)
    path = thinking_checkpoint(tmp_path_factory.mktemp("model"), template)
    with LLM(str(path), dtype="float32", max_num_seqs=4) as llm:
        yield llm, is_open, is_open_if_asked


def ask(llm: LLM, enable_thinking: bool | None, **options: Any) -> Any:
    if enable_thinking is not None:
        options["chat_template_kwargs"] = {"enable_thinking": enable_thinking}
        if "if not thinking" in (llm.tokenizer.chat_template or ""):
            options["chat_template_kwargs"]["thinking"] = enable_thinking
    params = options.pop("params", PARAMS)
    return llm.chat(USER, params, use_tqdm=False, **options)[0]


def test_thoughts_of_a_grammar_hold_no_call() -> None:
    """Where a call ends the reasoning, its marker cannot stand in the thoughts of a grammar, since
    the arguments would be any."""
    style = ChatFormat(reasoning=REASONING_FORMATS["deepseek_r1"], call_begins=("<tool_call>",))
    form = forced_calls(style, [TOOL], parallel=False)
    opened = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(form.opened))
    assert not opened.get_error()
    for text, num_taken in ((b"a <tool_cal </think>\n<tool_call>", None), (b"a <tool_call>", 12)):
        taken = opened.deep_copy().try_consume_tokens(list(text))
        assert taken == (len(text) if num_taken is None else num_taken)


@pytest.mark.covering(1)
@pytest.mark.parametrize("enable_thinking", [None, True, False])
def test_structured_content_and_forced_calls(
    model: tuple[LLM, bool, bool], enable_thinking: bool | None
) -> None:
    llm, is_open, is_open_if_asked = model
    for_json = ask(llm, enable_thinking, params=PARAMS.changed(structured=STRUCTURED))
    answer = for_json.outputs[0]
    jsonschema.validate(json.loads(answer.content), SCHEMA)
    prompt = llm.tokenizer.decode(for_json.prompt_token_ids, skip_special_tokens=False)
    expected = {None: is_open, True: is_open_if_asked, False: prompt.rstrip().endswith("<think>")}
    assert prompt.rstrip().endswith("<think>") is expected[enable_thinking]
    assert ("</think>" in answer.text) or not expected[enable_thinking]
    answer = ask(llm, enable_thinking, tools=[TOOL], tool_choice="required").outputs[0]
    assert answer.finish_reason == "tool_calls"
    for call in answer.tool_calls:
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    assert answer.content is None
