"""Random texts of the tool call grammars are parsed back to calls that fit their schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer

from serve.errors import RequestError
from serve.structured.grammar_source import grammar_of
from serve.structured_output import StructuredOutput
from serve.text.chat_parser import (
    ChatFormat,
    Part,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallStart,
    make_parser,
)
from serve.text.chat_parser.formats import REASONING_FORMATS, TOOL_FORMATS
from serve.text.chat_parser.grammar import (
    MAX_CALLS,
    calls_or_content,
    content_after_reasoning,
    forced_calls,
)

BYTES = LLTokenizer("byte")
THINK = REASONING_FORMATS["deepseek_r1"]
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "unit": {"enum": ["c", "f"]},
        "near": {"type": "array", "items": {"$ref": "#/$defs/place"}, "maxItems": 2},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "integer", "minimum": 0, "maximum": 99}},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS: dict[str, Any] = {"weather": WEATHER, "now": {}}


def matcher(form: StructuredOutput) -> LLMatcher:
    assert form.kind == "grammar"
    made = LLMatcher(BYTES, LLMatcher.grammar_from_lark(form.source))
    assert not made.get_error(), (made.get_error(), form.source)
    return made


def random_text(form: StructuredOutput, rng: random.Random, max_bytes: int = 4000) -> str:
    """Returns a random text of the grammar, up to where the grammar ends."""
    made = matcher(form)
    text = bytearray()
    while not made.is_stopped():
        mask = np.frombuffer(made.compute_bitmask(), dtype=np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")).tolist()
        plain = [token for token in allowed if 32 <= token < 127 or token in (10, 256)]
        token = rng.choice(plain or allowed)  # markers may have other characters
        if token == 256:
            break
        assert made.consume_token(token)
        text.append(token)
        assert len(text) < max_bytes
    return text.decode()


def accepts(form: StructuredOutput, text: str) -> bool:
    made = matcher(form)
    return bool(made.try_consume_tokens(list(text.encode())) == len(text.encode())) and bool(
        made.is_accepting()
    )


def read(chat: ChatFormat, text: str, *, is_open: bool = False) -> list[Part]:
    parser = make_parser(chat, SCHEMAS, reasons=chat.reasoning is not None, is_open=is_open)
    return parser.push(text) + parser.finish()


@pytest.mark.covering(1)
@pytest.mark.parametrize("style", TOOL_FORMATS)
@pytest.mark.parametrize("seed", range(8))
def test_forced_calls_are_parsed_back(style: str, seed: int) -> None:
    chat = ChatFormat(tools=TOOL_FORMATS[style])
    text = random_text(forced_calls(chat, TOOLS, parallel=True, is_open=False), random.Random(seed))
    parts = read(chat, text)
    assert not any(isinstance(part, Text) for part in parts), text
    names = {part.number: part.name for part in parts if isinstance(part, ToolCallStart)}
    assert 1 <= len(names) <= MAX_CALLS
    for number, name in names.items():
        arguments = json.loads(
            "".join(
                part.text
                for part in parts
                if isinstance(part, ToolCallArguments) and part.number == number
            )
        )
        if name == "weather":
            jsonschema.validate(arguments, WEATHER)
        else:
            assert arguments == {}


ORDER = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "maxLength": 9},
        "code": {"type": "string", "pattern": "^[a-z]{2}/[0-9]$"},
        "short": {"type": "string", "minLength": 2, "maxLength": 5},
        "day": {"type": "string", "format": "date"},
        "size": {"enum": ["s", "l", 5, None]},
        "kind": {"const": "a b"},
        "count": {"type": "integer", "minimum": 3, "maximum": 120},
        "share": {"type": ["number", "null"], "minimum": -1, "maximum": 1},
        "is_new": {"type": "boolean"},
        "either": {"anyOf": [{"type": "boolean"}, {"type": "string", "enum": ["x", "y"]}]},
        "items": {
            "type": "array",
            "minItems": 1,
            "maxItems": 2,
            "items": {"$ref": "#/$defs/item"},
        },
        "copy": {"$ref": "#/properties/count"},
    },
    "required": ["code", "size", "share", "items"],
    "additionalProperties": False,
    "$defs": {
        "item": {
            "type": "object",
            "properties": {
                "id": {"type": "integer", "minimum": 0, "maximum": 9},
                "label": {"type": "string", "maxLength": 4},
                "ok": {"type": "boolean"},
            },
            "required": ["id", "ok"],
            "additionalProperties": False,
        }
    },
}
ORDER_TOOL = {"type": "function", "function": {"name": "order", "parameters": ORDER}}


@pytest.mark.covering(1)
@pytest.mark.parametrize("style", TOOL_FORMATS)
@pytest.mark.parametrize("seed", range(5))
def test_typed_values_fit_their_schemas(style: str, seed: int) -> None:
    """What a schema says of strings, numbers, choices, lists and objects holds in every format."""
    chat = ChatFormat(tools=TOOL_FORMATS[style])
    form = forced_calls(chat, [ORDER_TOOL], parallel=False, is_open=False)
    assert grammar_of(form, closed=True)
    text = random_text(form, random.Random(seed))
    parser = make_parser(chat, {"order": ORDER}, reasons=False)
    parts = parser.push(text) + parser.finish()
    assert not any(isinstance(part, Text) for part in parts), text
    made = "".join(part.text for part in parts if isinstance(part, ToolCallArguments))
    jsonschema.validate(json.loads(made), ORDER)


@pytest.mark.parametrize("style", TOOL_FORMATS)
def test_strict_tools_are_held_beside_text(style: str) -> None:
    chat = ChatFormat(tools=TOOL_FORMATS[style])
    form = calls_or_content(chat, TOOLS, None, parallel=True, is_open=False)
    assert grammar_of(form, closed=True)
    lead = "<|channel|>final<|message|>" if chat.has_channels else ""
    assert accepts(form, f"{lead}Hello, {{}} and [] < x")
    forced = forced_calls(chat, TOOLS, parallel=True, is_open=False)
    for seed in range(3):
        text = random_text(forced, random.Random(seed))
        assert accepts(form, text)
        broken = text.replace("city", "town").replace("unit", "town")
        assert broken == text or not accepts(form, broken), broken


@pytest.mark.parametrize("style", TOOL_FORMATS)
def test_tools_without_a_schema_take_any_arguments(style: str) -> None:
    chat = ChatFormat(tools=TOOL_FORMATS[style])
    tool = {"type": "function", "function": {"name": "any", "parameters": {"type": "object"}}}
    for form in (
        forced_calls(chat, [tool], parallel=False, is_open=False),
        calls_or_content(
            chat, [tool], StructuredOutput("json_object"), parallel=False, is_open=False
        ),
    ):
        assert grammar_of(form, closed=True)
        assert not matcher(form).get_error()


def test_a_strict_schema_that_is_no_list_of_parameters_is_refused() -> None:
    """JSON takes any schema of an object; the other formats have parameters one by one."""
    either = {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
    function = {"name": "f", "parameters": either, "strict": True}
    tool = {"type": "function", "function": function}
    for style in ("qwen3_coder", "pythonic", "gemma4"):
        with pytest.raises(RequestError) as caught:
            forced_calls(
                ChatFormat(tools=TOOL_FORMATS[style]), [tool], parallel=False, is_open=False
            )
        assert caught.value.param == "tools"
        lax = {"type": "function", "function": {**function, "strict": False}}
        assert forced_calls(
            ChatFormat(tools=TOOL_FORMATS[style]), [lax], parallel=False, is_open=False
        )


def test_harmony_answers_have_channels() -> None:
    chat = ChatFormat(TOOL_FORMATS["openai"], REASONING_FORMATS["openai_gptoss"])
    made = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}"
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    final = "<|channel|>final<|message|>"
    forced = forced_calls(chat, TOOLS, parallel=True, is_open=False)
    assert accepts(forced, made) and accepts(forced, thought + made)
    assert not accepts(forced, f"{final}no") and not accepts(forced, made + made)
    free = calls_or_content(chat, TOOLS, None, parallel=True, is_open=False)
    assert accepts(free, thought + made) and accepts(free, f"{thought}{final}yes")
    content = content_after_reasoning(chat, StructuredOutput("json_object"), is_open=False)
    assert accepts(content, f'{thought}{final}{{"a": 1}}')
    assert not accepts(content, '{"a": 1}')


def test_kimis_calls_have_any_number() -> None:
    """The model counts the calls of the conversation."""
    chat = ChatFormat(tools=TOOL_FORMATS["kimi_k2"])
    form = forced_calls(chat, TOOLS[1:], parallel=True, is_open=False)
    begin, end = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    one = "<|tool_call_begin|>functions.now:{}<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    assert accepts(form, f"{begin}{one.format(3)}{one.format(14)}{end}")
    assert not accepts(form, f"{begin}{one.format('03')}{end}")
    assert not accepts(form, f"{begin}{one.format('')}{end}")


def test_glms_calls_may_have_no_newlines() -> None:
    chat = ChatFormat(tools=TOOL_FORMATS["glm45"])
    form = forced_calls(chat, TOOLS, parallel=False, is_open=False)
    city = "<arg_key>city</arg_key>{0}<arg_value>Rome</arg_value>{0}"
    unit = "<arg_key>unit</arg_key>{0}<arg_value>c</arg_value>{0}"
    for gap in ("", "\n"):
        assert accepts(form, f"<tool_call>weather{gap}{(city + unit).format(gap)}</tool_call>")
        assert accepts(form, f"<tool_call>now{gap}</tool_call>")


def test_a_text_of_tags_cannot_hold_their_end() -> None:
    chat = ChatFormat(tools=TOOL_FORMATS["minimax_m2"])
    form = forced_calls(chat, TOOLS[:1], parallel=False, is_open=False)
    begin = '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">'
    end = '<parameter name="unit">c</parameter>\n</invoke>\n</minimax:tool_call>'
    assert accepts(form, f"{begin}Rome</parameter>\n{end}")
    assert not accepts(form, f"{begin}Rome</parameter>x</parameter>\n{end}")
    assert not accepts(form, f"{begin}longer than eight</parameter>\n{end}")


@pytest.mark.parametrize("style", TOOL_FORMATS)
def test_only_one_call_without_parallel_calls(style: str) -> None:
    chat = ChatFormat(tools=TOOL_FORMATS[style])
    form = forced_calls(chat, TOOLS[1:], parallel=False, is_open=False)
    for seed in range(4):
        parts = read(chat, random_text(form, random.Random(seed)))
        assert [type(part) for part in parts] == [ToolCallStart, ToolCallArguments]


CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def test_reasoning_may_come_first() -> None:
    chat = ChatFormat(reasoning=THINK)
    free = forced_calls(chat, TOOLS, parallel=True, is_open=False)
    assert accepts(free, CALL)
    assert accepts(free, f"<think>\nwell, {CALL}?\n</think>\n\n{CALL}")
    assert not accepts(free, f"well</think>{CALL}")
    is_open = forced_calls(chat, TOOLS, parallel=True, is_open=True)
    assert accepts(is_open, f"well\n</think>\n\n{CALL}")
    assert not accepts(is_open, CALL)
    form = content_after_reasoning(chat, StructuredOutput("json_object"), is_open=True)
    assert accepts(form, 'well\n</think>\n\n{"a": 1}')
    assert not accepts(form, '{"a": 1}')


def test_arguments_of_strict_tools_fit_in_optional_calls() -> None:
    form = calls_or_content(ChatFormat(), TOOLS, None, parallel=True, is_open=False)
    good = '{"name": "weather", "arguments": {"city": "Rome", "unit": "c"}}'
    bad = good.replace('"c"', '"k"')
    for text, is_accepted in (
        ("Hello {} <tool", True),
        (f"I look.\n<tool_call>\n{good}\n</tool_call>", True),
        (f"<tool_call>\n{good}\n</tool_call>\n{CALL} and", True),
        (f"I look.\n<tool_call>\n{bad}\n</tool_call>", False),
        ('<tool_call>\n{"name": "now", "arguments": {"any": [1]}}\n</tool_call>', True),
    ):
        assert accepts(form, text) is is_accepted, text
    once = calls_or_content(ChatFormat(), TOOLS, None, parallel=False, is_open=False)
    assert accepts(once, f"{CALL} and")


@pytest.mark.parametrize("style", ["llama3_json", "mistral"])
def test_strict_tools_of_other_formats(style: str) -> None:
    chat = ChatFormat(tools=TOOL_FORMATS[style])
    form = calls_or_content(chat, TOOLS, None, parallel=True, is_open=False)
    calls = random_text(forced_calls(chat, TOOLS, parallel=True, is_open=False), random.Random(3))
    assert accepts(form, calls)
    assert accepts(form, "Hello, {}")


@pytest.mark.parametrize(
    ("content", "good", "bad"),
    [
        (StructuredOutput("json_object"), '{"a": 1}', "yes"),
        (StructuredOutput("json_schema", '{"type": "boolean"}'), "true", "1"),
        (StructuredOutput("regex", "a/[b/]+\\/\n\\."), "a/b//\n.", "a/b//\nx"),
        (StructuredOutput("choice", '["yes", "n\\"o"]'), 'n"o', "no"),
    ],
)
def test_calls_or_structured_content(content: StructuredOutput, good: str, bad: str) -> None:
    form = calls_or_content(ChatFormat(), TOOLS, content, parallel=True, is_open=False)
    assert accepts(form, CALL)
    assert accepts(form, good)
    assert not accepts(form, bad)


def test_calls_beside_a_clients_grammar_are_refused() -> None:
    with pytest.raises(RequestError) as caught:
        calls_or_content(
            ChatFormat(), TOOLS, StructuredOutput("grammar", "x"), parallel=True, is_open=False
        )
    assert caught.value.param == "tools"


def test_special_tokens_are_named_by_their_ids() -> None:
    ids = {"<tool_call>": 7, "</tool_call>": 8, "<think>": 9, "</think>": 10}
    chat = ChatFormat(reasoning=THINK, special_ids=ids)
    for form in (
        forced_calls(chat, TOOLS, parallel=True, is_open=False),
        calls_or_content(chat, TOOLS, None, parallel=True, is_open=False),
    ):
        assert all(f"<[{token}]>" in form.source for token in ids.values())
        assert "think" not in form.source
        assert not any(isinstance(part, Reasoning) for part in read(chat, CALL))
