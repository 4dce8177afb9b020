"""Answers in the format of each family, recorded and made up, give the same parts however they are
cut, and texts that only look like calls survive as text."""

from __future__ import annotations

import itertools
import json
import random
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
from serve.text.chat_parser.syntax.literals import MAX_DEPTH
from tests.support.profile import examples
from tests.support.text.transcripts import CASES, REASONED, Wanted, call

TOOLS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "exact": {"type": "boolean"},
            "unit": {"anyOf": [{"enum": ["c", "f"]}, {"type": "null"}]},
            "tags": {"$ref": "#/$defs/tags"},
            "where": {"type": "object"},
            "share": {"type": "number"},
        },
        "$defs": {"tags": {"type": "array", "items": {"type": "string"}}},
    },
    "now": {},
}


def chat(tools: str | None, reasoning: str | None = None) -> ChatFormat:
    return ChatFormat(
        tools=TOOL_FORMATS[tools] if tools else None,
        reasoning=REASONING_FORMATS[reasoning] if reasoning else None,
    )


def parts_of(style: ChatFormat, pieces: list[str], *, is_open: bool = False) -> list[Any]:
    """Returns the answer's parts, joined: texts, reasoning, names and the text of arguments."""
    parser = make_parser(style, TOOLS, reasons=style.reasoning is not None, is_open=is_open)
    found: list[Part] = []
    for piece in pieces:
        found += parser.push(piece)
    found += parser.finish()
    joined: list[Any] = []
    for part in found:
        match part:
            case Text(text):
                kind = "text"
            case Reasoning(text):
                kind = "reasoning"
            case ToolCallStart(number, call_id, name):
                assert (call_id and number == parser.num_calls - 1) or number < parser.num_calls
                joined.append([f"call {name}", ""])
                continue
            case ToolCallArguments(_, text):
                assert joined[-1][0].startswith("call ")
                kind = joined[-1][0]
        assert text, "a part is empty"
        if joined and joined[-1][0] == kind:
            joined[-1][1] += text
        else:
            joined.append([kind, text])
    return joined


def read(style: ChatFormat, text: str, **options: Any) -> Wanted:
    """Parses a text whole and cut in every way, and returns the parts with arguments as values."""
    whole = parts_of(style, [text], **options)
    assert parts_of(style, list(text), **options) == whole
    for at in range(1, len(text)):
        assert parts_of(style, [text[:at], text[at:]], **options) == whole, (text[:at], text[at:])
    return [
        (kind[5:], json.loads(value)) if kind.startswith("call ") else (kind, value)
        for kind, value in whole
    ]


@pytest.mark.parametrize(("style", "text", "wanted"), CASES)
def test_calls_are_read(style: str, text: str, wanted: Wanted) -> None:
    reasoning = "openai_gptoss" if style == "openai" else None
    assert read(chat(style, reasoning), text) == wanted


def test_every_format_has_a_transcript() -> None:
    assert {style for style, *_ in CASES} == set(TOOL_FORMATS)


@pytest.mark.parametrize("style", TOOL_FORMATS)
def test_the_example_of_the_docs_is_a_call(style: str) -> None:
    text = TOOL_FORMATS[style].example.replace("\\n", "\n").replace("f", "now", 1)
    row = TOOL_FORMATS[style]
    example = row.example.replace("\\n", "\n")
    parser = make_parser(chat(style), {"f": {}, "g": {}}, reasons=False)
    parts = parser.push(example) + parser.finish()
    assert text and not [part for part in parts if isinstance(part, Text)]
    names = [part.name for part in parts if isinstance(part, ToolCallStart)]
    assert names[0] == "f"
    made = "".join(p.text for p in parts if isinstance(p, ToolCallArguments) and p.number == 0)
    assert json.loads(made)["x"] == 1


@pytest.mark.parametrize(("style", "text", "reasoning", "content"), REASONED)
def test_reasoning_is_read(style: str, text: str, reasoning: str, content: str) -> None:
    wanted = [item for item in (("reasoning", reasoning), ("text", content)) if item[1]]
    assert read(chat(None, style), text) == wanted


def test_every_format_of_reasoning_has_a_transcript() -> None:
    assert {style for style, *_ in REASONED} == set(REASONING_FORMATS)


def test_calls_follow_the_reasoning_inside_an_answer() -> None:
    text = '<think>a</think>\n<answer>\n<tool_calls>[{"name": "now", "arguments": {}}]</tool_calls>'
    wanted = [("reasoning", "a"), call("now")]
    assert read(chat("hunyuan_a13b", "hunyuan_a13b"), f"{text}\n</answer>") == wanted


@pytest.mark.parametrize(
    ("style", "pieces"),
    [
        ("qwen3_coder", ["<tool_call>\n<function=get_weather>\n<parameter=city>\n", "Par", "is"]),
        ("glm45", ["<tool_call>get_weather<arg_key>city</arg_key><arg_value>", "Par", "is"]),
        ("pythonic", ['[get_weather(city="', "Par", "is"]),
        ("gemma4", ['<|tool_call>call:get_weather{city:<|"|>', "Par", "is"]),
        ("mistral_args", ['[TOOL_CALLS]get_weather[ARGS]{"city": "', "Par", "is"]),
        ("openai", ['<|channel|>commentary to=functions.get_weather<|message|>{"city": "', "Par",
                    "is"]),
    ],
)  # fmt: skip
def test_strings_stream(style: str, pieces: list[str]) -> None:
    parser = make_parser(chat(style), TOOLS, reasons=False)
    first, *others = pieces
    assert isinstance(parser.push(first)[0], ToolCallStart)
    for piece in others:
        assert parser.push(piece) == [ToolCallArguments(0, piece)]


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("qwen3_coder", "<function=get_weather><parameter=city>\nPar"),
        ("qwen3_coder", "<function=get_weather><parameter=city>\nParis\n</parameter>\n"),
        ("glm45", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Pa"),
        ("pythonic", '[get_weather(city="Par'),
        ("pythonic", "[get_weather(city=1+2)]"),
        ("pythonic", "[get_weather(city=" + "[" * (MAX_DEPTH + 1)),
        ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Par'),
    ],
)
def test_arguments_that_are_cut_off_or_malformed_are_no_json(style: str, text: str) -> None:
    """The arguments of a malformed call that has begun cannot be parsed as JSON."""
    first, *others = parts_of(chat(style), [text])
    assert first[0] == "call get_weather"
    assert parts_of(chat(style), list(text)) == [first, *others]
    with pytest.raises(json.JSONDecodeError):
        json.loads(first[1])


@pytest.mark.parametrize(
    ("style", "text", "rest"),
    [
        ("lfm2", "<|tool_call_start|>[get_weather(days=0x1F)]<|tool_call_end|>", ""),
        ("lfm2", "<|tool_call_start|>[get_weather(days=12", ""),
        ("lfm2", "<|tool_call_start|>[get_weather(days=1 2)] so.", "2)] so."),
        ("olmo3", "<function_calls>\nget_weather(days=Tr", ""),
        ("gemma4", "<|tool_call>call:get_weather{days:12", ""),
        ("gemma4", "<|tool_call>call:get_weather{days:1,ci", ""),
        ("gemma4", '<|tool_call>call:get_weather{days:1,<|"', ""),
        ("gemma4", "<|tool_call>call:get_weather{city:a, b and c}<tool_call|>x", "x"),
        ("glm45", "<tool_call>get_weather<arg_key>ci", ""),
        ("glm45", "<tool_call>get_weather<arg_key>days</arg_key>3</tool_call>x", "x"),
        ("mistral_args", "[TOOL_CALLS]now{", ""),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"x": 1<2}}\n</tool_call>x', "x"),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"x": 1<2}} so', "<2}} so"),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"x": {}<tool_call>a</tool_call>',
         "<tool_call>a</tool_call>"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>now<|tool_call_argument_begin|>"
         '{"x": 1<2}<|tool_call_end|><|tool_calls_section_end|>', ""),
        ("openai", "<|channel|>commentary to=functions.now<|message|>"
         '{"x": 1<2}<|call|><|start|>assistant<|channel|>final<|message|>x', "x"),
    ],
)  # fmt: skip
def test_what_a_malformed_call_leaves_is_dropped_up_to_its_end(
    style: str, text: str, rest: str
) -> None:
    whole = parts_of(chat(style), [text])
    for at in range(1, len(text)):
        assert parts_of(chat(style), [text[:at], text[at:]]) == whole
    assert parts_of(chat(style), list(text)) == whole
    (kind, arguments), *others = whole
    assert kind.startswith("call ") and others == ([["text", rest]] if rest else [])
    with pytest.raises(json.JSONDecodeError):
        json.loads(arguments)


FRAGMENTS = sorted(
    {marker for row in TOOL_FORMATS.values() for marker in row.markers}
    | {marker for row in REASONING_FORMATS.values() for marker in row.markers}
    | {row.example.replace("f", "now", 1) for row in TOOL_FORMATS.values()}
    | set("{}[]()<>,:;=\"'\\ \nx1.")
    | {"now", "call:now{", "now(", "<function=now>", "<parameter=a>", "</parameter>", "</function>"}
    | {'<invoke name="now">', "</invoke>", '"name"', '{"name": "now", "arguments": {', "é", "a="}
    | {"functions.now:0", "```json", "True", "None", "-1e5", "\\u00e9", "\\ud83d", "analysis"}
    | {" to=functions.now", "[now(a=", "True)]", "a:"}
)


@examples(600, derandomize=True, database=None)
@given(
    fragments=st.lists(st.sampled_from(FRAGMENTS), max_size=14),
    style=st.sampled_from(sorted(TOOL_FORMATS)),
    reasoning=st.sampled_from([None, *sorted(REASONING_FORMATS)]),
    is_open=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_the_parts_do_not_depend_on_the_pieces(
    fragments: list[str], style: str, reasoning: str | None, is_open: bool, seed: int
) -> None:
    text = "".join(fragments)
    rng = random.Random(seed)
    cuts = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(0, 8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]
    chosen = chat(style, reasoning)
    whole = parts_of(chosen, [text], is_open=is_open)
    assert parts_of(chosen, pieces, is_open=is_open) == whole
    assert parts_of(chosen, list(text), is_open=is_open) == whole
    is_plain = reasoning is None and style != "openai"
    if is_plain and not any(kind.startswith("call") for kind, _ in whole):
        assert "".join(value for _, value in whole) == text, "text without a call is complete"


@pytest.mark.parametrize("style", TOOL_FORMATS)
def test_malformed_text_takes_linear_time(style: str) -> None:
    row = TOOL_FORMATS[style]
    example = row.example.replace("\\n", "\n")
    at = example.index("f") + 1
    for text in (row.begin * 3000, "[" * 30_000, f"{example[:at]}{'(a=[' * 8000}", " \n" * 9000):
        pieces = [text[i : i + 4] for i in range(0, len(text), 4)]
        assert parts_of(chat(style), pieces) == parts_of(chat(style), [text])


def test_white_space_in_small_pieces_takes_linear_time() -> None:
    def seconds(count: int, text: str) -> float:
        began = time.process_time()
        parts_of(chat("llama3_json"), [*text, *(" " * count), "x"])
        return time.process_time() - began

    for text in ("", "a", "<|python_tag|>"):
        short = min(seconds(4_000, text) for _ in range(3))
        assert seconds(64_000, text) < 40 * short + 0.05


@pytest.mark.parametrize(
    ("style", "repeated"), [("openai", "<|end|>"), ("qwen3_coder", "<function=")]
)
def test_a_large_piece_of_markers_is_read_in_linear_time(style: str, repeated: str) -> None:
    """The time of eight times the text would be 64 times as long if it grew with the square."""
    chat_format = chat(style)

    def seconds(count: int) -> float:
        began = time.process_time()
        parts_of(chat_format, [repeated * count])
        return time.process_time() - began

    short, long = (min(seconds(count) for _ in range(3)) for count in (5_000, 40_000))
    assert long < 24 * short + 0.05
